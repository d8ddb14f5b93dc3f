// SPDX-License-Identifier: MIT
//
// What `multihead bench` measures: cases are data, listed in case.cpp.
#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cli/cases/calls.h"

namespace cli {

/// Implementation computes a case.
enum class Implementation {
  kOurs,
  kSdpa,        ///< torch.nn.functional.scaled_dot_product_attention
  kByHand,      ///< matmul, softmax, matmul; with linear layers around it
  kNnModule,    ///< torch.nn.MultiheadAttention: Python's order of operations
  kTorchNn,     ///< torch::nn::MultiheadAttention: C++'s
  kFastPath,    ///< what torch.nn.MultiheadAttention runs in eval mode
  kSdpaByHand,  ///< linear layers around SDPA
  // Ours in other ways than the one that is timed as kOurs:
  kSeparate,    ///< a call for each sequence, or for each query
  kPadded,      ///< sequences padded to the longest, with key_lengths
  kContiguous,  ///< keys in contiguous tensors, not in pages or a KVCache
  kCache,       ///< keys in a KVCache
  kWide,        ///< keys in a KVCache of query's dtype, not of a narrower one
};
/// "ours", "SDPA", "by hand", "nn.MHA", "torch::nn", "fast path", "SDPA layer",
/// "one by one", "padded", "rows", "KVCache", "wide"
std::string name(Implementation who);
/// This library, in one way or another.
bool is_ours(Implementation who);

/// Which part of a case is timed. kBackward times autograd's backward, not the
/// forward pass that comes before it.
enum class Pass { kForward, kBackward, kBoth };
/// "forward", "backward", "forward + backward"
std::string name(Pass pass);

/// What one thread shall reach; 0 and empty: nothing is demanded.
struct Target {
  double share = 0;         ///< of the peak
  double share_of_two = 0;  ///< of the peak of two threads, by two
  std::vector<std::pair<Implementation, double>> ratios =
      {};              ///< their time over ours
  double scaling = 0;  ///< of one thread's time over that of two
  double memory = 0;   ///< of SDPA's extra memory over ours
};

struct BenchCase {
  std::string group, name;  ///< the name is unique
  std::variant<AttentionCall, LayerCall, BlockCall, RaggedCall, PagedCall,
               CachedCall>
      call;
  Pass pass = Pass::kForward;
  Target target = {};
  bool full_only = false;     ///< left out of the standard grid
  bool one_thread = false;    ///< in the standard grid at one thread only
  bool cold = false;          ///< inputs come from memory, not from a cache
  bool memory_bound = false;  ///< shares are of the bandwidth of reading
  bool headline = false;      ///< a row of README's table
};

/// Processors that share their targets (targets.h). The AMD of those with
/// AVX-512 are apart because MKL runs other code there.
enum class Family { kAmx, kAvx512, kAvx512Amd, kAvx2, kOther };

/// All cases, with the targets of that family.
std::vector<BenchCase> bench_cases(Family family);

/// "B1 H8 L512 Lk512 D64 f32"
std::string shapes(const BenchCase& test);
at::ScalarType dtype_of(const BenchCase& test);

/// What a benchmark has to know of an instruction set of our kernels.
struct IsaFacts {
  const char* name;     ///< as multihead::kernel_isa says it
  bool bfloat16_pairs;  ///< kernels are made of dot products of pairs
  Family family;        ///< kAvx512 also on AMD
  /// What holds PyTorch to the same registers: values of ATEN_CPU_CAPABILITY,
  /// MKL_ENABLE_INSTRUCTIONS and ONEDNN_MAX_CPU_ISA; nullptr: nothing has to.
  const char* held[3];
};

/// An instruction set without facts is of kOther, and PyTorch is not held.
const IsaFacts& facts_of(const std::string& isa);

/// The width of its registers.
int vector_bits(const std::string& isa);

}  // namespace cli
