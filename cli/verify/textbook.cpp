// SPDX-License-Identifier: MIT
//
// The textbook forms on the exercises' own cases, weights shared with the
// reference, against the operations of Python's torch.nn.MultiheadAttention.
#include "multihead/textbook.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>

#include <cmath>

#include "cli/cases/answers.h"
#include "cli/verify/verify.h"

namespace cli {
namespace {

namespace textbook = multihead::textbook;
using textbook::AttentionWeights;

// Batch first, as many keys as queries.
LayerCall sizes(int64_t N, int64_t L, int64_t E, int64_t H,
                at::ScalarType dtype = at::kFloat, int64_t G = 0) {
  return {.N = N, .Lq = L, .Lk = L, .E = E, .H = H, .G = G, .dtype = dtype};
}

AttentionWeights draw_weights(Random& random, const LayerCall& s, bool bias) {
  const int64_t rows = s.G ? s.G * (s.E / s.H) : s.E;
  AttentionWeights w;
  w.query = random.weight(s.E, s.E, s.dtype);
  w.key = random.weight(rows, s.E, s.dtype);
  w.value = random.weight(rows, s.E, s.dtype);
  w.output = random.weight(s.E, s.E, s.dtype);
  if (!bias) return w;
  w.query_bias = random.normal({s.E}, s.dtype);
  w.key_bias = random.normal({rows}, s.dtype);
  w.value_bias = random.normal({rows}, s.dtype);
  w.output_bias = random.normal({s.E}, s.dtype);
  return w;
}

// The layer with which nn.MultiheadAttention computes the same: grouped key and
// value heads are repeated.
AttentionLayer reference_layer(const AttentionWeights& w, const LayerCall& s) {
  const auto repeated = [&](const at::Tensor& rows) {
    if (!s.G) return rows;
    return rows.view({s.G, s.E / s.H, s.E})
        .repeat_interleave(s.H / s.G, 0)
        .reshape({s.E, s.E});
  };
  AttentionLayer layer;
  layer.embed_dim = s.E;
  layer.num_heads = s.H;
  layer.in_proj_weight = at::cat({w.query, repeated(w.key), repeated(w.value)});
  if (w.query_bias.defined())
    layer.in_proj_bias = at::cat({w.query_bias, w.key_bias, w.value_bias});
  layer.out_proj_weight = w.output;
  layer.out_proj_bias = w.output_bias;
  layer.batch_first = true;
  return layer;
}

AttentionInputs draw_inputs(Random& random, const LayerCall& s) {
  return {random.uniform({s.N, s.Lq, s.E}, s.dtype),
          random.uniform({s.N, s.Lk, s.E}, s.dtype),
          random.uniform({s.N, s.Lk, s.E}, s.dtype)};
}

// `ours` against Python's module and the float64 loops.
Comparison compare(const at::Tensor& ours, const AttentionInputs& x,
                   const AttentionLayer& layer, const ForwardOptions& options) {
  const LayerInputs inputs{x.query, x.key, x.value, layer, options};
  const auto [pytorch, weights] = pytorch::python_module(inputs);
  return {.parts = {make_part("out", ours, pytorch, golden_layer(inputs).out)},
          .pytorch = Agreement::kBits};
}

// A mask as the exercise passes it, and what it means to the reference.
struct ExerciseMask {
  at::Tensor given;
  ForwardOptions meaning;
};

// Sequences of length L − 2, L − 1 and L.
at::Tensor padding(const LayerCall& s) {
  const at::Tensor lengths = at::arange(s.N) + (s.Lq - s.N + 1);
  return at::arange(s.Lq).ge(lengths.unsqueeze(-1));
}

Comparison multi_head(const LayerCall& s, const ExerciseMask& mask,
                      Random& random) {
  const at::NoGradGuard no_grad;
  const AttentionInputs x = draw_inputs(random, s);
  const AttentionWeights w = draw_weights(random, s, /*bias=*/false);
  const at::Tensor ours = textbook::multi_head_attention(
      x.query, x.key, x.value, s.H, s.E, mask.given, w);
  return compare(ours, x, reference_layer(w, s), mask.meaning);
}

void add_multi_head(std::vector<Case>& cases, const LayerCall& s) {
  const auto add = [&](const char* name, const ExerciseMask& mask,
                       const LayerCall& call) {
    cases.push_back({"textbook::multi_head_attention", name, shapes(call),
                     [call, mask](Random& random) {
                       return multi_head(call, mask, random);
                     }});
  };
  const at::Tensor later = later_keys(s.Lq, s.Lq), padded = padding(s);
  const auto causal = [&](const at::Tensor& given) {
    return ExerciseMask{given, ForwardOptions().attn_mask(later)};
  };
  const auto padding = [&](const at::Tensor& given) {
    return ExerciseMask{given, ForwardOptions().key_padding_mask(padded)};
  };
  const auto per_head = [&](const at::Tensor& mask) {
    return mask.expand({s.N, s.Lq, s.Lq}).repeat_interleave(s.H, 0);
  };
  const at::Tensor rows = padded.unsqueeze(1);
  add("no mask", {}, s);
  add("causal", causal(later), s);
  add("causal as 0 and 1", causal(later.to(s.dtype)), s);
  add("causal per head (N*H, L, L)", causal(per_head(later)), s);
  add("padding (N, 1, 1, L)", padding(padded.view({s.N, 1, 1, s.Lq})), s);
  add("padding (N, L, L)", padding(rows.expand({s.N, s.Lq, s.Lq})), s);
  add("padding per head (N*H, L, L)", padding(per_head(rows)), s);
  LayerCall longer = s;
  longer.Lk = 7;
  add("Lq ≠ Lk", {}, longer);
}

// The layer that the form draws is the one torch::nn draws.
Comparison same_seed(const LayerCall& s, Random& random) {
  const at::NoGradGuard no_grad;
  const AttentionInputs x = draw_inputs(random, s);
  at::manual_seed(random.seed());
  const at::Tensor ours =
      textbook::multi_head_attention(x.query, x.key, x.value, s.H, s.E);
  at::manual_seed(random.seed());
  return compare(ours, x, pytorch::draw_layer(s.E, s.H), {});
}

// What the modules MultiHeadAttention and MultiHeadSelfAttention hold.
void copy(const AttentionWeights& from, torch::nn::Linear& query,
          torch::nn::Linear& key, torch::nn::Linear& value,
          torch::nn::Linear& output) {
  query->weight = from.query;
  key->weight = from.key;
  value->weight = from.value;
  output->weight = from.output;
  query->bias = from.query_bias;
  key->bias = from.key_bias;
  value->bias = from.value_bias;
  output->bias = from.output_bias;
}

// `keep`: 0 = blocked, or undefined. A row that sees nothing is NaN in PyTorch
// with weights; the exercise wants its weights 0, so its output is the bias.
Comparison module_with_keep_mask(const LayerCall& s, const at::Tensor& keep,
                                 Random& random) {
  const at::NoGradGuard no_grad;
  const auto sequence = [&] {
    return random.normal({s.N, s.Lq, s.E}, s.dtype);
  };
  const AttentionInputs x{sequence(), sequence(), sequence()};
  const AttentionWeights w = draw_weights(random, s, /*bias=*/true);
  textbook::MultiHeadAttention module(s.E, s.H);
  copy(w, module->W_q, module->W_k, module->W_v, module->W_o);
  ForwardOptions options;
  if (keep.defined()) options.attn_mask(keep.eq(0));
  Comparison result = compare(module->forward(x.query, x.key, x.value, keep), x,
                              reference_layer(w, s), options);
  Values& pytorch = *result.parts[0].pytorch;
  const at::Tensor bias = w.output_bias.to(at::kDouble);
  for (size_t i = 0; i < pytorch.size(); ++i)
    if (std::isnan(pytorch[i])) pytorch[i] = bias[i % s.E].item<double>();
  return result;
}

void add_modules(std::vector<Case>& cases) {
  constexpr const char* kGroup = "textbook::MultiHeadAttention, 0 = blocked";
  const LayerCall s = sizes(2, 10, 512, 8);
  const auto add = [&](const char* name, const at::Tensor& keep) {
    cases.push_back({kGroup, name, shapes(s), [s, keep](Random& random) {
                       return module_with_keep_mask(s, keep, random);
                     }});
  };
  const at::Tensor causal = later_keys(s.Lq, s.Lq).logical_not();
  at::Tensor blocked = causal.clone();
  blocked.select(0, 3).fill_(false);
  add("no mask", {});
  add("causal", causal);
  add("causal, one row fully blocked", blocked);
  add("causal, blocked row, integers", blocked.to(at::kInt));
}

Comparison grouped(const LayerCall& s, const ExerciseMask& mask,
                   Random& random) {
  const at::NoGradGuard no_grad;
  const AttentionInputs x = draw_inputs(random, s);
  const AttentionWeights w = draw_weights(random, s, /*bias=*/false);
  const at::Tensor ours = textbook::grouped_query_attention(
      x.query, x.key, x.value, s.G, s.E, mask.given, s.H, w);
  Comparison result = compare(ours, x, reference_layer(w, s), mask.meaning);
  // Repeated heads make another product than grouped ones.
  if (s.G != s.H) result.pytorch = Agreement::kClose;
  return result;
}

void add_grouped(std::vector<Case>& cases) {
  constexpr const char* kGroup = "textbook::grouped_query_attention";
  const auto add = [&](const char* name, const LayerCall& s,
                       ExerciseMask mask) {
    cases.push_back({kGroup, name, shapes(s), [s, mask](Random& random) {
                       return grouped(s, mask, random);
                     }});
  };
  const ExerciseMask causal{later_keys(4, 4),
                            ForwardOptions().attn_mask(later_keys(4, 4))};
  for (auto dtype : {at::kFloat, at::kDouble}) {
    add("as many groups as heads", sizes(3, 4, 8, 2, dtype, 2), {});
    add("groups of 1, width 1", sizes(3, 4, 8, 8, dtype, 8), {});
    add("groups of 4", sizes(3, 4, 64, 8, dtype, 2), {});
    add("one group", sizes(3, 4, 64, 8, dtype, 1), {});
    add("groups of 2", sizes(3, 4, 24, 6, dtype, 3), {});
    add("groups of 2, causal", sizes(3, 4, 24, 6, dtype, 3), causal);
  }
}

Comparison self_attention(const LayerCall& s, double dropout, bool training,
                          Random& random) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = random.normal({s.N, s.Lq, s.E}, s.dtype);
  const AttentionWeights w = draw_weights(random, s, /*bias=*/true);
  textbook::MultiHeadSelfAttention module(s.E, s.H, dropout);
  copy(w, module->q_proj, module->k_proj, module->v_proj, module->out_proj);
  module->train(training);
  AttentionLayer layer = reference_layer(w, s);
  layer.dropout_p = dropout;
  layer.training = training;
  at::manual_seed(random.seed());
  const at::Tensor ours = module->forward(x);
  at::manual_seed(random.seed());
  Comparison result = compare(ours, {x, x, x}, layer, {});
  if (training) result.parts[0].golden.reset();  // the loops do not drop out
  return result;
}

void add_self_attention(std::vector<Case>& cases) {
  const auto add = [&](const char* name, bool training) {
    const LayerCall s = sizes(2, 16, 64, 8);
    cases.push_back({"textbook::MultiHeadSelfAttention", name, shapes(s),
                     [s, training](Random& random) {
                       return self_attention(s, 0.1, training, random);
                     }});
  };
  add("inference", false);
  add("dropout 0.1, same seed", true);
}

// The step inside, against the operator that has it fused; the loops alone
// know its weights.
Comparison inner_step(const at::Tensor& blocked, Random& random) {
  const at::NoGradGuard no_grad;
  const auto heads = [&] { return random.normal({2, 4, 6, 8}); };
  AttentionInputs x{heads(), heads(), heads()};
  if (blocked.defined()) x.options.attn_mask = blocked.logical_not();
  const auto [out, weights] =
      textbook::scaled_dot_product_attention(x.query, x.key, x.value, blocked);
  const GoldenAttention golden = golden_attention(x);
  return {.parts = {make_part("out", out, pytorch::attention(x), golden.out),
                    make_part("weights", weights, {}, golden.weights)},
          .pytorch = Agreement::kClose};
}

}  // namespace

std::vector<Case> textbook_cases() {
  std::vector<Case> cases;
  const auto add_step = [&](const char* name, const at::Tensor& blocked) {
    cases.push_back(
        {"textbook::scaled_dot_product_attention", name, "N2 H4 L6 D8 f32",
         [blocked](Random& random) { return inner_step(blocked, random); }});
  };
  add_step("no mask", {});
  add_step("causal", later_keys(6, 6));
  for (auto dtype : {at::kFloat, at::kDouble})
    add_multi_head(cases, sizes(3, 4, 8, 2, dtype));
  const LayerCall drawn = sizes(3, 4, 8, 2);
  cases.push_back(
      {"textbook::multi_head_attention", "same seed, same layer", shapes(drawn),
       [drawn](Random& random) { return same_seed(drawn, random); }});
  add_modules(cases);
  add_grouped(cases);
  add_self_attention(cases);
  return cases;
}

}  // namespace cli
