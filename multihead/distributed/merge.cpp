// SPDX-License-Identifier: MIT
//
// Two softmaxes over different keys make one: with their sums of exponentials
// eˡ and eᵏ, the outputs are weighed by eˡ/(eˡ + eᵏ) and eᵏ/(eˡ + eᵏ). Written
// as a step from one output towards the other, a weight of 0 or 1 changes no
// bit of what it keeps.
// Source: Dao et al., "FlashAttention", section 3.1; Milakov and Gimelshein,
// "Online normalizer calculation for softmax".
#include "multihead/distributed/merge.h"

#include <ATen/ops/lerp.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/sigmoid.h>

#include <limits>

#include "multihead/distributed.h"

namespace multihead {
namespace {

// Of the other part, (…, L, 1). Where that has seen nothing it is 0, also where
// neither has.
at::Tensor weight_of_other(const at::Tensor& lse, const at::Tensor& other_lse) {
  const auto nothing = other_lse.eq(-std::numeric_limits<double>::infinity());
  return at::sigmoid(other_lse - lse).masked_fill(nothing, 0).unsqueeze(-1);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> merge_attention(
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& other_out,
    const at::Tensor& other_lse) {
  TORCH_CHECK(
      out.sizes() == other_out.sizes() && lse.sizes() == other_lse.sizes() &&
          out.sizes().slice(0, std::max<int64_t>(out.dim() - 1, 0)) ==
              lse.sizes(),
      "merge_attention: out and other_out must be (..., L, Dv), lse and "
      "other_lse (..., L), got ",
      out.sizes(), ", ", other_out.sizes(), ", ", lse.sizes(), ", ",
      other_lse.sizes());
  const at::Tensor weight = weight_of_other(lse, other_lse).to(out.dtype());
  return {at::lerp(out, other_out.to(out.dtype()), weight),
          at::logaddexp(lse, other_lse)};
}

namespace distributed {

void merge_into(const at::Tensor& out, const at::Tensor& lse,
                const at::Tensor& other_out, const at::Tensor& other_lse) {
  out.lerp_(other_out.to(out.dtype()), weight_of_other(lse, other_lse));
  lse.copy_(at::logaddexp(lse, other_lse));
}

}  // namespace distributed
}  // namespace multihead
