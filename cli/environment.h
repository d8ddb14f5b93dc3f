// SPDX-License-Identifier: MIT
//
// Where a run happened: versions, processor, threads.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace cli {

struct Environment {
  std::string version;        ///< of this library
  std::string commit;         ///< of its sources, "b25ce6d"; empty: unknown
  std::string torch_built;    ///< the torch it was built against
  std::string torch_running;  ///< the torch it runs with
  std::string torch_isa;      ///< what torch's own kernels use, "AVX512"
  std::string blas;           ///< name and version, empty: none
  std::string onednn;         ///< version, empty: not there
  std::string cpu;            ///< model name
  std::string cpu_id;  ///< "AuthenticAMD, family 25, model 17", empty: unknown
  std::vector<std::string> isa;  ///< those flags that matter, present ones
  int threads = 0;               ///< of torch
  unsigned processors = 0;       ///< logical, of the machine
  std::string kernels;           ///< instruction set of the fused kernels
  std::vector<std::string> kernels_available;  ///< what MULTIHEAD_ISA may name
  std::string fused;   ///< why the fused kernels cannot run; empty: can
  std::string linear;  ///< why install(linear=True) changes nothing; empty: it
                       ///< makes matrix products faster
  /// What attention loses by a cache of int8: relative, of normal numbers.
  double int8_error = 0;
  /// "MKL_CBWR=AVX2": variables that are set and change speed or last bits.
  std::vector<std::string> settings;
};

Environment detect_environment();
/// Environment::cpu_id alone.
std::string cpu_id();
nlohmann::ordered_json to_json(const Environment& environment);

}  // namespace cli
