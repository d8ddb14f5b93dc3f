// SPDX-License-Identifier: MIT
#include "cli/bench_contenders.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "cli/bench_golden.h"
#include "cli/golden.h"
#include "cli/ours.h"
#include "cli/peak.h"
#include "cli/pytorch.h"

namespace cli {
namespace {

// --- Attention ---------------------------------------------------------------

// What the hand-written form may take for its scores.
constexpr int64_t kScoreBytes = int64_t{1} << 28;

// Copies of the inputs by turns, so many that none is still in a cache.
class Turns {
 public:
  Turns(const AttentionInputs& inputs, bool cold) : sets_{inputs} {
    if (!cold) return;
    int64_t bytes = 0;
    for (const auto& x : {inputs.query, inputs.key, inputs.value})
      bytes += x.nbytes();
    const int64_t copies =
        std::min(2 * last_level_cache(), int64_t{1} << 30) / bytes;
    for (int64_t i = 0; i < copies; ++i)
      sets_.push_back({inputs.query.clone(), inputs.key.clone(),
                       inputs.value.clone(), inputs.options});
  }
  const AttentionInputs& next() {
    turn_ = (turn_ + 1) % sets_.size();
    return sets_[turn_];
  }

 private:
  std::vector<AttentionInputs> sets_;
  size_t turn_ = 0;
};

using AttentionForm = std::function<at::Tensor(const AttentionInputs&)>;

bool needs_mask_tensor(const multihead::AttentionOptions& options) {
  return options.window || options.key_lengths.defined() ||
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

AttentionForm by_hand(const at::Tensor& keep, const at::Tensor& bias) {
  at::Tensor blocked;
  if (!keep.all().item<bool>()) blocked = keep.logical_not();
  return [blocked, bias](const AttentionInputs& x) {
    return attend_by_hand(x, blocked, bias);
  };
}

at::Tensor ours_attention(const AttentionInputs& x) {
  return multihead::scaled_dot_product_attention(x.query, x.key, x.value,
                                                 x.options);
}

Contender attention_contender(Who who, const AttentionForm& form,
                              const AttentionInputs& inputs,
                              const std::shared_ptr<Turns>& turns,
                              const std::shared_ptr<Reference>& reference) {
  const at::ScalarType dtype = inputs.query.scalar_type();
  // Others store scores in the dtype wherever they leave their fused path.
  const naive::Precision precision =
      who == Who::kOurs ? attention_precision(dtype) : layer_precision(dtype);
  AttentionInputs exact = inputs, ones = inputs;
  exact.options.dropout_p = 0;
  ones.value = at::ones_like(inputs.value);
  Contender contender{
      .who = who,
      .timed = [=] { return Outputs{form(turns->next()), {}}; },
      .verified = [=] { return Outputs{form(exact), {}}; },
      .sums = {},
      .fault = [=](const Outputs& out) -> std::string {
        const double share =
            budget_share(std::get<0>(out), reference->out, reference->out_scale,
                         reference->lambda, precision);
        return share <= 1 ? ""
                          : c10::str("the output differs from float64 by ",
                                     share, " times what rounding allows");
      }};
  if (inputs.options.dropout_p > 0)
    contender.sums = [=] { return Outputs{form(ones), {}}; };
  return contender;
}

Problem attention_problem(const BenchCase& test, const AttentionCall& call,
                          Random& random) {
  const AttentionInputs inputs = draw(call, random);
  const at::Tensor keep =
      pytorch::keep_mask(inputs.query, inputs.key, inputs.options);
  const auto turns = std::make_shared<Turns>(inputs, test.cold);
  const auto reference = std::make_shared<Reference>(reference_of(inputs));
  Problem problem{.contenders = {}, .flop = attention_flop(inputs)};
  const auto add = [&](Who who, const AttentionForm& form) {
    problem.contenders.push_back(
        attention_contender(who, form, inputs, turns, reference));
  };
  add(Who::kOurs, ours_attention);
  add(Who::kSdpa, sdpa(inputs));
  const int64_t element = inputs.query.element_size();
  if (call.B * call.H * call.Lq * call.Lk * element <= kScoreBytes)
    add(Who::kByHand, by_hand(keep, pytorch::has_bias(inputs.options)
                                        ? inputs.options.attn_mask
                                        : at::Tensor()));
  for (const at::Tensor& x : {inputs.query, inputs.key, inputs.value})
    problem.bytes += x.nbytes();
  problem.bytes += reference->out.numel() * element;
  return problem;
}

// --- Layers ------------------------------------------------------------------

using LayerForm = std::function<Outputs(const LayerInputs&)>;

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
  return {at::linear(out.transpose(1, 2).flatten(2), layer.out_proj_weight,
                     layer.out_proj_bias),
          x.options.need_weights() ? weights.mean(1) : at::Tensor()};
}

std::vector<std::pair<Who, LayerForm>> layer_forms(const LayerInputs& inputs) {
  const auto forward = [](const Module& module,
                          const multihead::ForwardOptions& options) {
    return [=](const LayerInputs& x) {
      return module(x.query, x.key, x.value, options);
    };
  };
  const auto& [query, key, value, layer, options] = inputs;
  const Module module = ours::make_module(layer);
  multihead::ForwardOptions ordinary = options, additive = options;
  ordinary.fast_path(false);
  additive.attn_mask(
      pytorch::additive(options.attn_mask(), query.scalar_type()));
  const LayerForm exact = forward(module, ordinary);
  std::vector<std::pair<Who, LayerForm>> forms = {
      {Who::kOurs, forward(module, options)},
      {Who::kNnModule,
       [exact](const LayerInputs& x) {
         const multihead::BackendGuard guard(multihead::Backend::kExact);
         return exact(x);
       }},
      {Who::kTorchNn, forward(pytorch::make_nn_module(layer), additive)},
  };
  if (!layer.batch_first) return forms;
  forms.emplace_back(Who::kFastPath, [](const LayerInputs& x) {
    return pytorch::native(x.query, x.layer, x.options);
  });
  forms.emplace_back(Who::kByHand,
                     [blocked = options.attn_mask()](const LayerInputs& x) {
                       return layer_by_hand(x, blocked);
                     });
  // SDPA takes a mask or the word causal, and returns no weights.
  if (options.need_weights()) return forms;
  if (options.is_causal()) ordinary.attn_mask({});
  forms.emplace_back(Who::kSdpaByHand, [ordinary](const LayerInputs& x) {
    return Outputs{pytorch::by_hand(x.query, x.key, x.value, x.layer, ordinary),
                   {}};
  });
  return forms;
}

std::string layer_fault(const Outputs& out, const Reference& reference,
                        const LayerInputs& inputs) {
  const naive::Precision precision =
      layer_precision(inputs.query.scalar_type());
  const auto fault = [&](const char* what, const at::Tensor& x,
                         const at::Tensor& value, const at::Tensor& scale) {
    const double share =
        budget_share(x, value, scale, reference.lambda, precision);
    return share <= 1 ? std::string()
                      : c10::str("the ", what, " differ from float64 by ",
                                 share, " times what rounding allows");
  };
  const std::string first =
      fault("outputs", std::get<0>(out), reference.out, reference.out_scale);
  if (!first.empty() || !inputs.options.need_weights()) return first;
  return fault("weights", std::get<1>(out), reference.weights,
               reference.weights);
}

Problem layer_problem(const LayerCall& call, Random& random) {
  const auto inputs = std::make_shared<LayerInputs>(draw(call, random));
  const auto reference = std::make_shared<Reference>(reference_of(*inputs));
  const double rows = call.N * call.Lq, E = call.E;
  AttentionInputs heads;  // for its sizes
  const int64_t D = call.E / call.H;
  heads.query = at::empty({call.N, call.H, call.Lq, D}, call.dtype);
  heads.key = heads.value = heads.query;
  heads.options.is_causal = inputs->options.is_causal();
  Problem problem{.contenders = {},
                  .flop = attention_flop(heads) + 2 * rows * E * 4 * E,
                  .bytes = 2.0 * inputs->query.nbytes()};
  for (const auto& [who, form] : layer_forms(*inputs)) {
    const Call run = [form, inputs] { return form(*inputs); };
    problem.contenders.push_back({.who = who,
                                  .timed = run,
                                  .verified = run,
                                  .sums = {},
                                  .fault = [=](const Outputs& out) {
                                    return layer_fault(out, *reference,
                                                       *inputs);
                                  }});
  }
  return problem;
}

}  // namespace

Problem make_problem(const BenchCase& test, Random& random) {
  if (const auto* call = std::get_if<AttentionCall>(&test.call))
    return attention_problem(test, *call, random);
  return layer_problem(std::get<LayerCall>(test.call), random);
}

double attention_flop(const AttentionInputs& x) {
  const at::Tensor keep = pytorch::keep_mask(x.query, x.key, x.options);
  const double rows = x.query.size(0) * x.query.size(1) * x.query.size(2);
  const double pairs =
      keep.sum().item<double>() * rows * x.key.size(2) / keep.numel();
  return 2 * pairs * (x.query.size(3) + x.value.size(3));
}

std::string implausible_dropout(const at::Tensor& sums) {
  const at::Tensor rows = sums.select(-1, 0).to(at::kDouble);
  const double mean = rows.mean().item<double>();
  const double deviation = rows.std(/*unbiased=*/false).item<double>();
  if (!(deviation > 0)) return "with dropout, nothing was dropped";
  // A 16-bit result adds its own rounding to the mean.
  const double allowed = 6 * deviation / std::sqrt(rows.numel()) +
                         attention_precision(sums.scalar_type()).unit(0);
  if (std::abs(mean - 1) <= allowed) return "";
  return c10::str("with dropout, weights sum to ", mean, " on average");
}

}  // namespace cli
