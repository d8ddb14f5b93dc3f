// SPDX-License-Identifier: MIT
//
// Keys and values in one byte a number, which attention reads as they are.
#pragma once

#include <ATen/core/Tensor.h>

namespace [[gnu::visibility("default")]] multihead {

/// x (..., D), floating point, as rows of MXINT8 ("OCP Microscaling Formats
/// (MX) Specification", 1.0): int8 (..., D + ⌈D/32⌉), the numbers of a row and
/// then a scale, a power of two, for each 32 of them. Rounded to nearest even:
/// no number is off by more than 2^-7 of the largest magnitude among its 32 (or
/// 2^-25, if that is more). Where one of the 32 is not finite, all become NaN.
/// On the CPU. Throws c10::ValueError where x has another dtype or no
/// dimension.
///
/// scaled_dot_product_attention and varlen_attention take such rows as key and
/// value, beside a query of float32, bfloat16 or float16; the result has the
/// bits of the same call on from_mxint8(key, query's dtype) and
/// from_mxint8(value, query's dtype), where those are exact.
at::Tensor to_mxint8(const at::Tensor& x);

/// The numbers of such rows: (..., D) of `dtype`. Exact in float32 and
/// bfloat16, and in float16 below 65536, beyond which it overflows.
at::Tensor from_mxint8(const at::Tensor& rows,
                       at::ScalarType dtype = at::kFloat);

}  // namespace multihead
