// SPDX-License-Identifier: MIT
//
// The sub-commands of `multihead`. Each returns the exit status.
#pragma once

#include <cstdint>
#include <string>

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

}  // namespace cli
