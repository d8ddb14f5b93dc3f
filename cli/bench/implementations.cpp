// SPDX-License-Identifier: MIT
#include "cli/bench/implementations.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

#include <cmath>
#include <limits>

#include "cli/cases/ours.h"
#include "cli/cases/pytorch.h"

namespace cli {
namespace {

// --- Attention ---------------------------------------------------------------

at::Tensor ours_attention(const AttentionInputs& x) {
  return multihead::scaled_dot_product_attention(x.query, x.key, x.value,
                                                 x.options);
}

bool needs_mask_tensor(const multihead::AttentionOptions& options) {
  return options.window || options.key_lengths.defined() ||
         options.query_offset.defined() || options.key_mask.defined() ||
         options.causal_alignment != multihead::CausalAlignment::kTopLeft;
}

// PyTorch's function, with the mask that stands for the rules it lacks.
AttentionForm sdpa(const AttentionInputs& inputs) {
  multihead::AttentionOptions options = inputs.options;
  if (needs_mask_tensor(options)) {
    options = {
        .attn_mask = pytorch::keep_mask(inputs.query, inputs.key, options),
        .dropout_p = options.dropout_p,
        .scale = options.scale,
        .enable_gqa = options.enable_gqa};
  }
  return [options](const AttentionInputs& x) {
    multihead::AttentionOptions given = options;
    given.dropout_p = x.options.dropout_p;
    return pytorch::attention(x.query, x.key, x.value, given);
  };
}

// softmax(scale·q·kᵀ + bias)·v as people write it; blocked and bias may be
// undefined.
at::Tensor attend_by_hand(const AttentionInputs& x, const at::Tensor& blocked,
                          const at::Tensor& bias = {},
                          at::Tensor* weights = nullptr) {
  const int64_t group = x.query.size(1) / x.key.size(1);
  const auto expanded = [&](const at::Tensor& heads) {
    return group == 1 ? heads : heads.repeat_interleave(group, 1);
  };
  const double scale = 1 / std::sqrt(x.query.size(3));
  at::Tensor scores =
      at::matmul(x.query, expanded(x.key).transpose(-2, -1)) * scale;
  if (bias.defined()) scores = scores + bias;
  if (blocked.defined())
    scores =
        scores.masked_fill(blocked, -std::numeric_limits<double>::infinity());
  at::Tensor w = scores.softmax(-1);
  if (x.options.dropout_p > 0)
    w = at::dropout(w, x.options.dropout_p, /*train=*/true);
  if (weights) *weights = w;
  return at::matmul(w, expanded(x.value));
}

AttentionForm attention_by_hand(const AttentionInputs& inputs) {
  const at::Tensor keep =
      pytorch::keep_mask(inputs.query, inputs.key, inputs.options);
  at::Tensor blocked, bias;
  if (!keep.all().item<bool>()) blocked = keep.logical_not();
  if (pytorch::has_bias(inputs.options)) bias = inputs.options.attn_mask;
  return [blocked, bias](const AttentionInputs& x) {
    return attend_by_hand(x, blocked, bias);
  };
}

// --- Layers ------------------------------------------------------------------

Outputs outputs(std::tuple<at::Tensor, at::Tensor> result) {
  auto [out, weights] = std::move(result);
  return weights.defined() ? Outputs{out, weights} : Outputs{out};
}

LayerForm forward(const Module& module,
                  const multihead::ForwardOptions& options) {
  return [=](const LayerInputs& x) {
    return outputs(module(x.query, x.key, x.value, options));
  };
}

// Four linear layers and attention between them. Self-attention, batch first.
Outputs layer_by_hand(const LayerInputs& x, const at::Tensor& blocked) {
  const multihead::AttentionLayer& layer = x.layer;
  const at::Tensor packed =
      at::linear(x.query, layer.in_proj_weight, layer.in_proj_bias)
          .unflatten(-1, {3, layer.num_heads, -1})
          .permute({2, 0, 3, 1, 4});
  at::Tensor weights;
  const at::Tensor out = attend_by_hand({packed[0], packed[1], packed[2], {}},
                                        blocked, {}, &weights);
  return outputs({at::linear(out.transpose(1, 2).flatten(2),
                             layer.out_proj_weight, layer.out_proj_bias),
                  x.options.need_weights() ? weights.mean(1) : at::Tensor()});
}

void check_fused(const multihead::Route& route) {
  TORCH_CHECK(route.way == multihead::Way::kFused,
              "the fused kernels did not run: ", route.reason);
}

}  // namespace

std::vector<std::pair<Implementation, AttentionForm>> attention_forms(
    const AttentionInputs& inputs, bool by_hand) {
  std::vector<std::pair<Implementation, AttentionForm>> forms = {
      {Implementation::kOurs, ours_attention},
      {Implementation::kSdpa, sdpa(inputs)}};
  if (by_hand)
    forms.emplace_back(Implementation::kByHand, attention_by_hand(inputs));
  return forms;
}

std::vector<std::pair<Implementation, LayerForm>> layer_forms(
    const LayerInputs& inputs) {
  const auto& [query, key, value, layer, options] = inputs;
  const Module module = ours::make_module(layer);
  multihead::ForwardOptions ordinary = options, additive = options;
  ordinary.fast_path(false);
  additive.attn_mask(
      pytorch::additive(options.attn_mask(), query.scalar_type()));
  const LayerForm exact = forward(module, ordinary);
  std::vector<std::pair<Implementation, LayerForm>> forms = {
      {Implementation::kOurs, forward(module, options)},
      {Implementation::kNnModule,
       [exact](const LayerInputs& x) {
         const multihead::BackendGuard guard(multihead::Backend::kExact);
         return exact(x);
       }},
      {Implementation::kTorchNn,
       forward(pytorch::make_nn_module(layer), additive)},
  };
  if (!layer.batch_first) return forms;
  forms.emplace_back(Implementation::kFastPath, [](const LayerInputs& x) {
    return outputs(pytorch::native(x.query, x.layer, x.options));
  });
  forms.emplace_back(Implementation::kByHand,
                     [blocked = options.attn_mask()](const LayerInputs& x) {
                       return layer_by_hand(x, blocked);
                     });
  // SDPA takes a mask or the word causal, and returns no weights.
  if (options.need_weights()) return forms;
  if (options.is_causal()) ordinary.attn_mask({});
  forms.emplace_back(
      Implementation::kSdpaByHand, [ordinary](const LayerInputs& x) {
        return outputs(
            pytorch::python_module(x.query, x.key, x.value, x.layer, ordinary));
      });
  return forms;
}

void expect_fused(const AttentionInputs& x) {
  check_fused(multihead::route(x.query, x.key, x.value, x.options));
}

void expect_fused(const LayerInputs& x) {
  check_fused(multihead::route(x.query, x.key, x.value, x.layer, x.options));
}

}  // namespace cli
