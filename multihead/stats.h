// SPDX-License-Identifier: MIT
//
// Which way the calls of this process went: to see that a program runs on the
// fused kernels, and why a part of it does not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace [[gnu::visibility("default")]] multihead {

/// Calls of attention that came from one place and went one way; and matrix
/// products, while install({.linear = true}) holds.
struct CallCount {
  /// "installed"  PyTorch's own functions, taken over by multihead::install
  /// "function"   multihead::scaled_dot_product_attention and its relatives
  /// "module"     multi_head_attention_forward and the modules
  /// "operator"   a graph of torch.compile or torch.export, or torch.ops
  /// "linear"     a matrix product: its ways are "onednn" and "blas"
  std::string source;
  std::string way;     ///< as name_of(Way) says it
  std::string reason;  ///< why not "fused" or "onednn", without shapes
  int64_t calls = 0;
};

/// Of all threads, since the process began or the last reset. A call that
/// raised counts as well. Backward passes are not counted: they go the way of
/// their forward.
std::vector<CallCount> stats();

/// Begins to count anew.
void reset_stats();

}  // namespace multihead
