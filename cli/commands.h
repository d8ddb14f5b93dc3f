// SPDX-License-Identifier: MIT
//
// The sub-commands of `multihead`. Each returns the exit status.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cli {

struct VerifyOptions {
  bool json = false;
  uint64_t seed = 0;
  std::string filter;  ///< part of "group: case"; empty = all
};
/// Compares this library with PyTorch; 0 if every case agrees, 1 if
/// one does not, 2 if the filter leaves none.
int verify(const VerifyOptions& options);

struct InfoOptions {
  bool json = false;
};
/// Says what this build is and where it runs.
int info(const InfoOptions& options);

struct BenchOptions {
  std::string filter;        ///< part of "group: case sizes"; empty = all
  bool full = false;         ///< every case, not the standard grid
  bool list = false;         ///< name the cases instead of running them
  std::vector<int> threads;  ///< empty: 1, and all
  int rounds = 10;           ///< at least so many, except of slow calls
  double seconds = 1;        ///< for the calls of one case, roughly
  bool quick = false;        ///< few rounds, for a look
  bool same_isa = false;     ///< PyTorch uses what our kernels do: no AMX
  uint64_t seed = 0;
  /// Files that get the result, "-" for standard output; empty: none.
  std::string json, csv, markdown, svg;
};
/// Times this library beside PyTorch; 0 if all that ours returned is right, 1
/// if not, 2 if the filter leaves no case.
int bench(const BenchOptions& options);

}  // namespace cli
