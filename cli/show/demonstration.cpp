// SPDX-License-Identifier: MIT
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include "cli/show/input.h"

namespace cli {
namespace {

constexpr int64_t kLength = 12, kWidth = 16;

// Positions as angles at eight frequencies: two of them are the more alike the
// nearer they are.
at::Tensor angles(double shift) {
  const at::Tensor positions = at::arange(kLength, at::kFloat) - shift;
  const at::Tensor frequencies =
      (at::arange(kWidth / 2, at::kFloat) * -0.35).exp() * 2;
  const at::Tensor x = positions.unsqueeze(1) * frequencies;
  return at::cat({x.cos(), x.sin()}, -1);
}

}  // namespace

AttentionSource demonstration() {
  AttentionSource source{.title =
                             "an example: causal heads that look back 0, 1, 2 "
                             "and 4 tokens"};
  const at::Tensor key = angles(0);
  source.query = at::stack({angles(0), angles(1), angles(2), angles(4)})
                     .mul(3)
                     .unsqueeze(0);
  source.key = at::stack({key, key}).unsqueeze(0);
  source.num_kv_heads = 2;
  source.options = {.is_causal = true, .enable_gqa = true};
  source.stages = stages_of({}, source.query, source.key);
  source.keys = source.queries =
      parse_tokens("The cat sat on the mat because it was warm there .", "");
  return source;
}

}  // namespace cli
