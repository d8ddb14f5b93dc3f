// SPDX-License-Identifier: MIT
//
// Attention as textbooks and exercises write it, to be read from top to bottom.
//
// If this is the first attention that you read, begin with its plain form,
// which is shorter: examples/learn/attention.h, explained in docs/learn.md.
//
// Everything here is made of PyTorch operations. The first half are the steps,
// each a few lines; the second half are the forms, which put the steps
// together. What is said about bad arguments is in arguments.h.
// textbook.py is the same text in Python.
//
// Each form equals torch.nn.MultiheadAttention with the same weights bit for
// bit on that module's ordinary path. Floating-point sums depend on their
// order, so this asks for the same operations in the same order; where a step
// has to be done in one particular way for that reason, it says so.
//
// Letters: N batch, H heads, G key/value heads (groups), Lq queries, Lk keys,
// E = d_model the embedding width, d = E / H the width of one head.
#include "multihead/textbook.h"

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "multihead/textbook/arguments.h"

namespace multihead::textbook {
namespace {

// --- The steps --------------------------------------------------------------

// One learned linear map: x (…, in) → x·weightᵀ + bias (…, out).
struct LinearMap {
  at::Tensor weight, bias;
};

struct Heads {
  at::Tensor q, k, v;
};

// x (N, L, E) → (N, L, out).
//
// The rows are multiplied in PyTorch's order, position before batch item: the
// order of rows decides how a product's sums are grouped, hence the last bit of
// the result.
at::Tensor project(const at::Tensor& x, const LinearMap& by) {
  const auto bias = by.bias.defined() ? std::optional(by.bias) : std::nullopt;
  return at::linear(x.transpose(0, 1), by.weight, bias).transpose(0, 1);
}

// x (N, L, E) through several maps: one (N, L, out) per map.
//
// Maps that read the same tensor are stacked and applied as one matrix product:
// the input is read once, and a large product runs nearer to the machine's peak
// than small ones. PyTorch does so too, and the shape of a product also decides
// its last bits.
std::vector<at::Tensor> project_together(const at::Tensor& x,
                                         const std::vector<LinearMap>& by) {
  std::vector<at::Tensor> weights, biases;
  std::vector<int64_t> widths;
  for (const auto& [weight, bias] : by) {
    weights.push_back(weight);
    if (bias.defined()) biases.push_back(bias);
    widths.push_back(weight.size(0));
  }
  const LinearMap stacked{at::cat(weights),
                          biases.empty() ? at::Tensor() : at::cat(biases)};
  auto parts = project(x, stacked).transpose(0, 1).split_with_sizes(widths, -1);
  for (at::Tensor& part : parts) part = part.contiguous().transpose(0, 1);
  return parts;
}

// What each position looks for (query), what it offers to be found by (key),
// and what it hands over when it is found (value): three learned views of the
// input.
//
// Without them the scores of self-attention would be x·xᵀ: as much from i to j
// as from j to i, and each position mostly for itself.
Heads project_inputs(const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& v, const AttentionWeights& w) {
  const LinearMap to_query{w.query, w.query_bias};
  const LinearMap to_key{w.key, w.key_bias};
  const LinearMap to_value{w.value, w.value_bias};
  if (q.is_same(k) && k.is_same(v)) {  // self-attention: one product
    const auto qkv = project_together(q, {to_query, to_key, to_value});
    return {qkv[0], qkv[1], qkv[2]};
  }
  if (k.is_same(v)) {  // cross-attention, as a decoder reads an encoder: two
    const auto kv = project_together(k, {to_key, to_value});
    return {project(q, to_query), kv[0], kv[1]};
  }
  return {project(q, to_query), project(k, to_key), project(v, to_value)};
}

// (N, L, H·d) → (N, H, L, d), without copying.
//
// Several heads, because one softmax gives one pattern per query: a weighted
// mean that must mix everything the query wants to know. H narrow heads attend
// to H places at once for the cost of one wide head. The split is a view
// followed by a transpose; a direct view as (N, H, L, d) would cut positions,
// not features, into heads.
at::Tensor split_into_heads(const at::Tensor& x, int64_t num_heads) {
  const at::Tensor positions_first = x.transpose(0, 1);
  return positions_first.unflatten(-1, {num_heads, x.size(-1) / num_heads})
      .permute({1, 2, 0, 3});
}

// (N, H, L, d) → (N, L, H·d): the heads' results side by side, one row a
// position. In memory the position comes first, the order that the output
// projection reads.
at::Tensor combine(const at::Tensor& x) {
  const int64_t batch = x.size(0), length = x.size(2);
  const int64_t width = x.size(1) * x.size(3);
  const at::Tensor rows =
      x.permute({2, 0, 1, 3}).reshape({length * batch, width});
  return rows.view({length, batch, width}).transpose(0, 1);
}

// (N, G, L, d) → (N, H, L, d): every query head gets a copy of its group's
// head.
//
// repeat_interleave, not repeat: neighbouring query heads share a key/value
// head (0 0 1 1), the order in which GQA checkpoints keep them; repeat would
// give 0 1 0 1.
at::Tensor expand_groups(const at::Tensor& x, int64_t heads_per_group) {
  return heads_per_group == 1 ? x : x.repeat_interleave(heads_per_group, 1);
}

// (…, rows, columns) → (batch, rows, columns).
at::Tensor matrices(const at::Tensor& x) {
  const auto lead = x.sizes().slice(0, x.dim() - 2);
  return x.reshape({c10::multiply_integers(lead), x.size(-2), x.size(-1)});
}

// How well each key fits each query: (…, Lq, d), (…, Lk, d) → (…, Lq, Lk).
//
// The dot products are divided by √d: for entries of variance 1 the product of
// two d-vectors has variance d, and a softmax over numbers that large is nearly
// one-hot, so that almost no gradient passes. The query is scaled rather than
// the scores: Lq·d multiplications instead of Lq·Lk, and the order in which
// PyTorch does it.
//
// Blocked keys are masked before the softmax, by a score of −∞, because e^−∞ =
// 0 and the others then share the whole weight. Zeroing weights after the
// softmax would leave rows that sum to less than 1, and let blocked keys change
// their denominator.
at::Tensor attention_scores(const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& blocked) {
  auto shape = query.sizes().vec();
  shape.back() = key.size(-2);
  const double scale = std::sqrt(1.0 / static_cast<double>(query.size(-1)));
  const at::Tensor q = matrices(query) * scale;
  const at::Tensor k = matrices(key).transpose(-2, -1);
  if (!blocked.defined()) return at::bmm(q, k).view(shape);
  const at::Tensor mask =
      at::zeros_like(blocked, query.scalar_type())
          .masked_fill(blocked, -std::numeric_limits<double>::infinity());
  // The sums of the product start at the mask (baddbmm), as in PyTorch: to add
  // it afterwards would be one more rounding.
  return at::baddbmm(matrices(mask.expand(shape)), q, k).view(shape);
}

// (…, Lq, d), (…, Lk, d) → (…, Lq, Lk): what share each key has in each query.
//
// The softmax makes the weights of a query positive with sum 1, so that its
// output, weights · v, is a mean of values: it stays in their range however
// many there are. A query whose keys are all blocked divides 0 by 0: NaN, in
// PyTorch too.
at::Tensor attention_weights(const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& blocked = {}) {
  return at::softmax(attention_scores(q, k, blocked), -1);
}

// The same, but a query whose keys are all blocked has weights 0.
//
// The keys of such a row are let through to the softmax and its weights are set
// to 0 afterwards. To replace NaN weights would mend the output only: the
// gradient 0 that comes back, times NaN, is NaN.
at::Tensor attention_weights_or_zero(const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& blocked) {
  const at::Tensor sees_nothing = blocked.all(-1, /*keepdim=*/true);
  const at::Tensor weights =
      attention_weights(q, k, blocked.logical_and(~sees_nothing));
  return weights.masked_fill(sees_nothing, 0.0);
}

// Project, split, attend per head, combine, project.
at::Tensor attention_layer(const char* name,
                           const std::array<at::Tensor, 3>& inputs,
                           const AttentionWeights& w, int64_t num_heads,
                           int64_t num_groups, const at::Tensor& mask) {
  const Heads in = project_inputs(inputs[0], inputs[1], inputs[2], w);
  const int64_t group = num_heads / num_groups;
  const at::Tensor q = split_into_heads(in.q, num_heads);
  const at::Tensor k = expand_groups(split_into_heads(in.k, num_groups), group);
  const at::Tensor v = expand_groups(split_into_heads(in.v, num_groups), group);
  const at::Tensor blocked =
      mask.defined() ? mask_per_head(name, mask, q, k) != 0 : at::Tensor();
  const at::Tensor found = at::matmul(attention_weights(q, k, blocked), v);
  // The heads know nothing of each other; the last map mixes what they found.
  return project(combine(found), {w.output, w.output_bias});
}

// The maps of a module with four linear layers.
AttentionWeights weights_of(const auto& query, const auto& key,
                            const auto& value, const auto& output) {
  AttentionWeights w(query->weight, key->weight, value->weight, output->weight);
  w.query_bias = query->bias;
  w.key_bias = key->bias;
  w.value_bias = value->bias;
  w.output_bias = output->bias;
  return w;
}

}  // namespace

// --- The weights of modules -------------------------------------------------

AttentionWeights::AttentionWeights(at::Tensor query, at::Tensor key,
                                   at::Tensor value, at::Tensor output)
    : query(std::move(query)),
      key(std::move(key)),
      value(std::move(value)),
      output(std::move(output)) {}

AttentionWeights::AttentionWeights(const MultiheadAttention& module) {
  TORCH_CHECK_VALUE(
      !module->options.add_bias_kv() && !module->options.add_zero_attn(),
      "AttentionWeights: module must be without add_bias_kv and "
      "add_zero_attn, got add_bias_kv=",
      module->options.add_bias_kv(),
      ", add_zero_attn=", module->options.add_zero_attn());
  const auto rows = module->in_proj_weight.defined()
                        ? module->in_proj_weight.chunk(3)
                        : std::vector<at::Tensor>{module->q_proj_weight,
                                                  module->k_proj_weight,
                                                  module->v_proj_weight};
  query = rows[0], key = rows[1], value = rows[2];
  output = module->out_proj->weight;
  if (!module->options.bias()) return;
  const auto biases = module->in_proj_bias.chunk(3);
  query_bias = biases[0], key_bias = biases[1], value_bias = biases[2];
  output_bias = module->out_proj->bias;
}

AttentionWeights::AttentionWeights(const GroupedQueryAttention& module)
    : AttentionWeights(weights_of(module->q_proj, module->k_proj,
                                  module->v_proj, module->out_proj)) {}

// --- The forms ---------------------------------------------------------------

std::tuple<at::Tensor, at::Tensor> scaled_dot_product_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& mask) {
  check_attention_inputs("scaled_dot_product_attention", query, key, value,
                         mask);
  const at::Tensor blocked = mask.defined() ? mask != 0 : at::Tensor();
  const at::Tensor weights = attention_weights(query, key, blocked);
  return {at::matmul(weights, value), weights};
}

at::Tensor multi_head_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    int64_t num_heads, int64_t d_model, const at::Tensor& mask,
    const std::optional<AttentionWeights>& weights) {
  constexpr const char* kName = "multi_head_attention";
  check_heads(kName, "d_model", d_model, "num_heads", num_heads);
  check_inputs(kName, {query, key, value}, d_model);
  const AttentionWeights w = weights ? *weights : draw_packed(d_model, query);
  check_weights(kName, w, d_model, d_model);
  return attention_layer(kName, {query, key, value}, w, num_heads, num_heads,
                         mask);
}

// While a model generates text, it keeps the keys and values of all past
// positions and reads them again for each new one. Fewer key/value heads make
// that memory, and the time it takes to read it, H / G times smaller.
at::Tensor grouped_query_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    int64_t num_query_groups, int64_t d_model, const at::Tensor& mask,
    std::optional<int64_t> num_heads,
    const std::optional<AttentionWeights>& weights) {
  constexpr const char* kName = "grouped_query_attention";
  const int64_t heads = num_heads.value_or(num_query_groups);
  check_heads(kName, "num_heads", heads, "num_query_groups", num_query_groups);
  check_heads(kName, "d_model", d_model, "num_heads", heads);
  check_inputs(kName, {query, key, value}, d_model);
  const int64_t kv_width = d_model / heads * num_query_groups;
  const AttentionWeights w =
      weights ? *weights : draw_separate(d_model, kv_width, query);
  check_weights(kName, w, d_model, kv_width);
  return attention_layer(kName, {query, key, value}, w, heads, num_query_groups,
                         mask);
}

MultiHeadAttentionImpl::MultiHeadAttentionImpl(int64_t d_model,
                                               int64_t num_heads)
    : d_model(d_model), num_heads(num_heads) {
  check_heads("MultiHeadAttention", "d_model", d_model, "num_heads", num_heads);
  d_k = d_model / num_heads;
  reset();
}

void MultiHeadAttentionImpl::reset() {
  W_q = register_module("W_q", torch::nn::Linear(d_model, d_model));
  W_k = register_module("W_k", torch::nn::Linear(d_model, d_model));
  W_v = register_module("W_v", torch::nn::Linear(d_model, d_model));
  W_o = register_module("W_o", torch::nn::Linear(d_model, d_model));
}

at::Tensor MultiHeadAttentionImpl::split_heads(const at::Tensor& x) const {
  return split_into_heads(x, num_heads);
}

at::Tensor MultiHeadAttentionImpl::combine_heads(const at::Tensor& x) const {
  return combine(x);
}

at::Tensor MultiHeadAttentionImpl::forward(const at::Tensor& Q,
                                           const at::Tensor& K,
                                           const at::Tensor& V,
                                           const at::Tensor& mask) {
  constexpr const char* kName = "MultiHeadAttention";
  check_inputs(kName, {Q, K, V}, d_model, {"Q", "K", "V"});
  const AttentionWeights w = weights_of(W_q, W_k, W_v, W_o);
  const Heads in = project_inputs(Q, K, V, w);
  const at::Tensor q = split_heads(in.q);
  const at::Tensor k = split_heads(in.k);
  const at::Tensor v = split_heads(in.v);
  const at::Tensor weights =
      mask.defined() ? attention_weights_or_zero(
                           q, k, mask_per_head(kName, mask, q, k) == 0)
                     : attention_weights(q, k);
  return project(combine_heads(at::matmul(weights, v)),
                 {w.output, w.output_bias});
}

MultiHeadSelfAttentionImpl::MultiHeadSelfAttentionImpl(int64_t dim,
                                                       int64_t num_heads,
                                                       double dropout)
    : dim(dim), num_heads(num_heads), dropout(dropout) {
  constexpr const char* kName = "MultiHeadSelfAttention";
  check_heads(kName, "dim", dim, "num_heads", num_heads);
  TORCH_CHECK_VALUE(dropout >= 0.0 && dropout <= 1.0, kName,
                    ": dropout must be from 0 to 1, got ", dropout);
  reset();
}

void MultiHeadSelfAttentionImpl::reset() {
  q_proj = register_module("q_proj", torch::nn::Linear(dim, dim));
  k_proj = register_module("k_proj", torch::nn::Linear(dim, dim));
  v_proj = register_module("v_proj", torch::nn::Linear(dim, dim));
  out_proj = register_module("out_proj", torch::nn::Linear(dim, dim));
}

at::Tensor MultiHeadSelfAttentionImpl::forward(const at::Tensor& x) {
  check_inputs("MultiHeadSelfAttention", {x, x, x}, dim, {"x", "x", "x"});
  const AttentionWeights w = weights_of(q_proj, k_proj, v_proj, out_proj);
  const Heads in = project_inputs(x, x, x, w);
  const at::Tensor q = split_into_heads(in.q, num_heads);
  const at::Tensor k = split_into_heads(in.k, num_heads);
  const at::Tensor v = split_into_heads(in.v, num_heads);
  // Dropout after the softmax, on the weights: connections disappear, the
  // others grow by 1 / (1 − p), and the mean output stays the same. Dropped
  // before the softmax, a score would be 0, which is a connection like any
  // other.
  const at::Tensor weights =
      at::dropout(attention_weights(q, k), dropout, is_training());
  return project(combine(at::matmul(weights, v)), {w.output, w.output_bias});
}

}  // namespace multihead::textbook
