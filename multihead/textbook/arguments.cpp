// SPDX-License-Identifier: MIT
#include "multihead/textbook/arguments.h"

#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include <cmath>

namespace multihead::textbook {
namespace {

at::Tensor parameter(int64_t rows, int64_t columns, const at::Tensor& like) {
  return at::empty({rows, columns}, like.options()).set_requires_grad(true);
}

// As torch.nn.Linear draws its weight.
at::Tensor draw_output(int64_t width, const at::Tensor& like) {
  return torch::nn::init::kaiming_uniform_(parameter(width, width, like),
                                           std::sqrt(5));
}

// ±√(6 / (rows + columns)) keeps the variance of activations the same from
// layer to layer, forward and backward.
at::Tensor draw_xavier(int64_t rows, int64_t width, const at::Tensor& like) {
  return torch::nn::init::xavier_uniform_(parameter(rows, width, like));
}

void check_matrix(const char* name, const char* role, const at::Tensor& weight,
                  const at::Tensor& bias, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(weight.defined() && weight.sizes() == shape, name,
                    ": weights must have the ", role, " matrix of shape ",
                    shape, ", got ",
                    weight.defined() ? c10::str(weight.sizes()) : "none");
  TORCH_CHECK_VALUE(!bias.defined() || bias.sizes() == shape.slice(0, 1), name,
                    ": weights must have the ", role, " bias of shape ",
                    shape.slice(0, 1), ", got ", bias.sizes());
}

void check_mask(const char* name, const at::Tensor& mask,
                at::IntArrayRef shape) {
  const auto sizes = mask.sizes();
  bool fits = sizes.size() <= shape.size();
  for (size_t i = 1; fits && i <= sizes.size(); ++i) {
    const int64_t size = sizes[sizes.size() - i];
    fits = size == 1 || size == shape[shape.size() - i];
  }
  TORCH_CHECK_VALUE(fits, name, ": mask must broadcast to ", shape, ", got ",
                    sizes);
}

}  // namespace

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
    : query(module->q_proj->weight),
      key(module->k_proj->weight),
      value(module->v_proj->weight),
      output(module->out_proj->weight),
      query_bias(module->q_proj->bias),
      key_bias(module->k_proj->bias),
      value_bias(module->v_proj->bias),
      output_bias(module->out_proj->bias) {}

AttentionWeights draw_packed(int64_t width, const at::Tensor& like) {
  at::Tensor output = draw_output(width, like);
  const auto rows = draw_xavier(3 * width, width, like).chunk(3);
  return {rows[0], rows[1], rows[2], std::move(output)};
}

AttentionWeights draw_separate(int64_t width, int64_t kv_width,
                               const at::Tensor& like) {
  AttentionWeights weights;
  weights.output = draw_output(width, like);
  weights.query = draw_xavier(width, width, like);
  weights.key = draw_xavier(kv_width, width, like);
  weights.value = draw_xavier(kv_width, width, like);
  return weights;
}

void check_weights(const char* name, const AttentionWeights& w, int64_t width,
                   int64_t kv_width) {
  check_matrix(name, "query", w.query, w.query_bias, {width, width});
  check_matrix(name, "key", w.key, w.key_bias, {kv_width, width});
  check_matrix(name, "value", w.value, w.value_bias, {kv_width, width});
  check_matrix(name, "output", w.output, w.output_bias, {width, width});
  const int biases =
      w.query_bias.defined() + w.key_bias.defined() + w.value_bias.defined();
  TORCH_CHECK_VALUE(biases == 0 || biases == 3, name,
                    ": weights must have biases for query, key and value, or "
                    "for none of them, got ",
                    biases);
}

void check_heads(const char* name, const char* whole, int64_t size,
                 const char* part, int64_t count) {
  TORCH_CHECK_VALUE(count > 0, name, ": ", part, " must be positive, got ",
                    count);
  TORCH_CHECK_VALUE(size > 0 && size % count == 0, name, ": ", whole,
                    " must be a positive multiple of ", part, ", got ", size,
                    " (", part, "=", count, ")");
}

void check_share(const char* name, const char* argument, double share) {
  TORCH_CHECK_VALUE(share >= 0.0 && share <= 1.0, name, ": ", argument,
                    " must be from 0 to 1, got ", share);
}

void check_inputs(const char* name, const std::array<at::Tensor, 3>& inputs,
                  int64_t width, const std::array<const char*, 3>& names) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& x = inputs[i];
    TORCH_CHECK_VALUE(x.dim() == 3 && x.size(-1) == width, name, ": ", names[i],
                      " must have the shape (N, L, ", width, "), got ",
                      x.sizes());
  }
  const auto& [q, k, v] = inputs;
  TORCH_CHECK_VALUE(k.size(0) == q.size(0), name, ": ", names[1],
                    " must have the batch size of ", names[0], ", got ",
                    k.sizes(), " (", names[0], ".shape=", q.sizes(), ")");
  TORCH_CHECK_VALUE(v.sizes() == k.sizes(), name, ": ", names[2],
                    " must have the shape of ", names[1], ", got ", v.sizes(),
                    " (", names[1], ".shape=", k.sizes(), ")");
}

void check_attention_inputs(const char* name, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& mask) {
  TORCH_CHECK_VALUE(q.dim() >= 2 && q.size(-1) > 0, name,
                    ": q must have the shape (…, Lq, d), d > 0, got ",
                    q.sizes());
  const auto lead = [](const at::Tensor& x) {
    return x.sizes().slice(0, x.dim() - 2);
  };
  TORCH_CHECK_VALUE(
      k.dim() == q.dim() && lead(k) == lead(q) && k.size(-1) == q.size(-1),
      name, ": k must have the shape (…, Lk, d) of q, got ", k.sizes(),
      " (q.shape=", q.sizes(), ")");
  TORCH_CHECK_VALUE(
      v.dim() == k.dim() && lead(v) == lead(k) && v.size(-2) == k.size(-2),
      name, ": v must have the shape (…, Lk, dv) of k, got ", v.sizes(),
      " (k.shape=", k.sizes(), ")");
  if (!mask.defined()) return;
  auto scores = q.sizes().vec();
  scores.back() = k.size(-2);
  check_mask(name, mask, scores);
}

at::Tensor mask_per_head(const char* name, const at::Tensor& mask,
                         const at::Tensor& q, const at::Tensor& k) {
  const int64_t batch = q.size(0), heads = q.size(1);
  at::Tensor per_head = mask;
  if (mask.dim() == 3) {
    per_head = mask.size(0) == batch * heads ? mask.unflatten(0, {batch, heads})
                                             : mask.unsqueeze(1);
  }
  check_mask(name, per_head, {batch, heads, q.size(-2), k.size(-2)});
  return per_head;
}

}  // namespace multihead::textbook
