// SPDX-License-Identifier: MIT
//
// Products of float32 matrices by the oneDNN inside PyTorch. PyTorch gives them
// to MKL, which runs code for AVX2 on processors of other makers than Intel.
//
// Tried and left out: a cache of weights that oneDNN has packed once. On a
// Zen 4, beside packing in each call, they make a product 1.4 to 1.9 times as
// fast with 4 to 16 rows, 1.1 to 1.2 with 32 to 64, 1.05 with 128 to 512. But
// whether a weight has changed cannot be known: `weight.data += …`, with which
// LoRA is merged, a NumPy array or another process on the same memory do not
// raise its version.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "multihead/attention/count.h"

namespace multihead::onednn {

/// Why no product of this process is better off here; empty: those of way_of
/// are. A rule of the processor and of MULTIHEAD_LINEAR in the environment, so
/// that a machine has the same bits run after run (install.h, why_not_linear).
std::string_view why_not();

/// The fewest multiply-adds, measured on a Zen 4, on which least is gained:
/// oneDNN has a fixed cost of about 15 µs, and of 0.5 to 0.8 ms when the three
/// sizes come for the first time, for which it writes machine code.
constexpr int64_t kSmallestProduct = int64_t{1} << 25;

/// Where a·b goes, of matrices of any dtype.
Product way_of(const at::Tensor& a, const at::Tensor& b);

/// float32, dense, on the CPU.
bool is_plain_float(const at::Tensor& x);

/// Whether `addend` may be added to the product of a (M, K) and b (K, N).
bool is_addend(const at::Tensor& addend, const at::Tensor& a,
               const at::Tensor& b);

/// a·b (M, N).
at::Tensor multiply(const at::Tensor& a, const at::Tensor& b);
at::Tensor& multiply_into(const at::Tensor& a, const at::Tensor& b,
                          at::Tensor& out);

/// addend + a·b; addend (N) or what expands to (M, N).
at::Tensor multiply_and_add(const at::Tensor& a, const at::Tensor& b,
                            const at::Tensor& addend);

}  // namespace multihead::onednn
