// SPDX-License-Identifier: MIT
#include "multihead/layer/checks.h"

#include <array>

#include "multihead/attention/mask.h"
#include "multihead/errors.h"
#include "multihead/layer/projection.h"
#include "multihead/text/shapes.h"

namespace multihead {
namespace {

std::string expected_rank(bool is_batched, const char* what, const char* ranks,
                          int64_t got) {
  return c10::str(is_batched ? "For batched (3-D) `query`, expected `"
                             : "For unbatched (2-D) `query`, expected `",
                  what, "` to be `None`", ranks, " but found ", got,
                  "-D tensor instead");
}

void check_ranks(const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value, int64_t num_heads,
                 const ForwardOptions& options) {
  const int64_t rank = query.dim();
  MULTIHEAD_ASSERT(rank == 2 || rank == 3,
                   "query should be unbatched 2D or batched 3D tensor but "
                   "received ",
                   rank, "-D query tensor");
  const bool is_batched = rank == 3;
  MULTIHEAD_ASSERT(key.dim() == rank && value.dim() == rank, "For ",
                   is_batched ? "batched (3-D)" : "unbatched (2-D)",
                   " `query`, expected `key` and `value` to be ", rank,
                   "-D but found ", key.dim(), "-D and ", value.dim(),
                   "-D tensors respectively");
  const at::Tensor& padding = options.key_padding_mask();
  MULTIHEAD_ASSERT(
      !padding.defined() || padding.dim() == rank - 1,
      expected_rank(is_batched, "key_padding_mask",
                    is_batched ? " or 2-D" : " or 1-D", padding.dim()));
  const at::Tensor& mask = options.attn_mask();
  if (!mask.defined()) return;
  MULTIHEAD_ASSERT(
      mask.dim() == 2 || mask.dim() == 3,
      expected_rank(is_batched, "attn_mask", ", 2-D or 3-D", mask.dim()));
  if (is_batched || mask.dim() == 2) return;
  const std::array<c10::SymInt, 3> expected{num_heads, query.sym_size(0),
                                            key.sym_size(0)};
  MULTIHEAD_ASSERT(mask.sym_sizes() == c10::SymIntArrayRef(expected),
                   "Expected `attn_mask` shape to be ", tuple_text(expected),
                   " but got ", shape_text(mask));
}

// PyTorch raises ValueError with weights, RuntimeError without.
void check_dropout(const AttentionLayer& layer, bool need_weights) {
  constexpr auto* text = "dropout probability must be between 0 and 1, got ";
  const double p = layer.training ? layer.dropout_p : 0.0;
  TORCH_CHECK_VALUE(!need_weights || p <= 1.0, text, p);
  TORCH_CHECK(need_weights || (p >= 0.0 && p <= 1.0), text, p);
}

// Separate weights against the widths of what they project.
void check_weights(const Sequences& inputs, const AttentionLayer& layer) {
  if (layer.in_proj_weight.defined()) return;
  const int64_t query_rows = layer.num_heads * head_dim(layer);
  const int64_t kv_rows = num_kv_heads(layer) * head_dim(layer);
  if (layer.is_projected) {
    for (const auto& [name, x] :
         {std::pair("key", &inputs.key), {"value", &inputs.value}}) {
      TORCH_CHECK(x->sym_size(-1) == kv_rows,
                  "multi_head_attention_forward: ", name, " must have ",
                  num_kv_heads(layer), " heads of width ", head_dim(layer),
                  ", got ", x->sym_size(-1), " columns",
                  shapes_text(inputs.query, inputs.key, inputs.value));
    }
    return;
  }
  struct Projection {
    const char *name, *what;
    const at::Tensor &weight, &input;
    int64_t rows;
  };
  for (const auto& p :
       {Projection{"q_proj_weight", "query", layer.q_proj_weight, inputs.query,
                   query_rows},
        Projection{"k_proj_weight", "key", layer.k_proj_weight, inputs.key,
                   kv_rows},
        Projection{"v_proj_weight", "value", layer.v_proj_weight, inputs.value,
                   kv_rows}}) {
    MULTIHEAD_ASSERT(p.weight.defined(),
                     "use_separate_proj_weight is True but ", p.name,
                     " is None");
    const std::array<c10::SymInt, 2> expected{p.rows, p.input.sym_size(-1)};
    MULTIHEAD_ASSERT(p.weight.sym_sizes() == c10::SymIntArrayRef(expected),
                     "expecting ", p.what, " weights shape of ",
                     tuple_text(expected), ", but got ", shape_text(p.weight));
  }
}

void check_extra_keys(const AttentionLayer& layer,
                      const ForwardOptions& options, const c10::SymInt& batch,
                      const c10::SymInt& key_length) {
  const bool k = layer.bias_k.defined(), v = layer.bias_v.defined();
  MULTIHEAD_ASSERT(v || !k, "bias_k is set but bias_v is None");
  MULTIHEAD_ASSERT(k || !v, "bias_v is set but bias_k is None");
  const c10::SymInt heads = batch * num_kv_heads(layer);
  for (const auto& [name, rows] :
       {std::pair("static_k", &options.static_k()),
        std::pair("static_v", &options.static_v())}) {
    if (!rows->defined()) continue;
    MULTIHEAD_ASSERT(!k, "bias cannot be added to static ",
                     name[7] == 'k' ? "key." : "value.");
    MULTIHEAD_ASSERT(rows->sym_size(0) == heads, "expecting ", name,
                     ".size(0) of ", heads, ", but got ", rows->sym_size(0));
    MULTIHEAD_ASSERT(rows->sym_size(2) == head_dim(layer), "expecting ", name,
                     ".size(2) of ", head_dim(layer), ", but got ",
                     rows->sym_size(2));
  }
  const auto length = [](const at::Tensor& given,
                         const c10::SymInt& projected) {
    return given.defined() ? given.sym_size(1) : projected;
  };
  const auto keys = length(options.static_k(), key_length);
  const auto values = length(options.static_v(), key_length);
  TORCH_CHECK(keys == values,
              "multi_head_attention_forward: static_k and static_v must leave "
              "as many keys as values, got ",
              keys, " and ", values);
}

// mask (Lq, Lk) or (B·H, Lq, Lk), against the latter.
void check_mask_shape(const at::Tensor& mask,
                      const std::array<c10::SymInt, 3>& shape) {
  if (!mask.defined()) return;
  const auto expected = c10::SymIntArrayRef(shape).slice(3 - mask.dim());
  TORCH_CHECK(mask.sym_sizes() == expected, "The shape of the ", mask.dim(),
              "D attn_mask is ", shape_text(mask), ", but should be ",
              tuple_text(expected), ".");
}

}  // namespace

void check_mask_dtypes(const ForwardOptions& options) {
  for (const auto& [name, mask] :
       {std::pair("key_padding_mask", &options.key_padding_mask()),
        {"attn_mask", &options.attn_mask()}}) {
    MULTIHEAD_ASSERT(!mask->defined() || is_mask_dtype(*mask),
                     "only bool and floating types of ", name,
                     " are supported");
  }
}

void check_forward(const at::Tensor& query, const at::Tensor& key,
                   const at::Tensor& value, const AttentionLayer& layer,
                   const ForwardOptions& options) {
  check_ranks(query, key, value, layer.num_heads, options);
  check_layer_sizes(layer);
  MULTIHEAD_ASSERT(query.sym_size(-1) == layer.embed_dim,
                   "was expecting embedding dimension of ", layer.embed_dim,
                   ", but got ", query.sym_size(-1));
  const bool packed = layer.in_proj_weight.defined();
  const auto leading = [&](const at::Tensor& x) {
    return packed ? x.sym_sizes() : x.sym_sizes().slice(0, x.dim() - 1);
  };
  MULTIHEAD_ASSERT(leading(key) == leading(value), "key shape ",
                   shape_text(key), " does not match value shape ",
                   shape_text(value));
  check_weights({query, key, value}, layer);
  TORCH_CHECK(layer.out_proj_weight.defined() || !layer.out_proj_bias.defined(),
              "multi_head_attention_forward: out_proj_bias must come with "
              "out_proj_weight, got out_proj_weight None");

  const bool is_batched = query.dim() == 3;
  const int64_t length_dim = is_batched && layer.batch_first ? 1 : 0;
  const int64_t batch_dim = 1 - length_dim;
  const c10::SymInt batch = is_batched ? query.sym_size(batch_dim) : 1;
  const c10::SymInt key_length = key.sym_size(length_dim);
  TORCH_CHECK(!is_batched || key.sym_size(batch_dim) == batch,
              "multi_head_attention_forward: key must have the batch size of "
              "query, got ",
              key.sym_size(batch_dim), " and ", batch,
              shapes_text(query, key, value));
  check_mask_shape(
      options.attn_mask(),
      {batch * layer.num_heads, query.sym_size(length_dim), key_length});
  check_extra_keys(layer, options, batch, key_length);
  check_dropout(layer, options.need_weights());

  const at::Tensor& padding = options.key_padding_mask();
  if (!padding.defined()) return;
  const c10::SymInt padding_batch = is_batched ? padding.sym_size(0) : 1;
  const c10::SymInt padded_length = options.static_k().defined()
                                        ? options.static_k().sym_size(1)
                                        : key_length;
  MULTIHEAD_ASSERT(padding_batch == batch,
                   "Expected key_padded_mask.shape[0] to be ", batch,
                   ", but got ", padding_batch);
  MULTIHEAD_ASSERT(padding.sym_size(-1) == padded_length,
                   "Expected key_padded_mask.shape[1] to be ", padded_length,
                   ", but got ", padding.sym_size(-1));
}

void check_layer_sizes(const AttentionLayer& layer) {
  TORCH_CHECK_VALUE(layer.embed_dim > 0 && layer.num_heads > 0,
                    "embed_dim and num_heads must be greater than 0, got "
                    "embed_dim=",
                    layer.embed_dim, " and num_heads=", layer.num_heads,
                    " instead");
  MULTIHEAD_ASSERT(layer.head_dim || layer.embed_dim % layer.num_heads == 0,
                   "embed_dim must be divisible by num_heads, got embed_dim=",
                   layer.embed_dim, " and num_heads=", layer.num_heads);
  TORCH_CHECK_VALUE(head_dim(layer) > 0,
                    "head_dim must be greater than 0, got ", head_dim(layer));
  TORCH_CHECK_VALUE(
      num_kv_heads(layer) > 0 && layer.num_heads % num_kv_heads(layer) == 0,
      "num_kv_heads must divide num_heads, got num_kv_heads=",
      num_kv_heads(layer), " and num_heads=", layer.num_heads);
}

void check_groups(const char* function, const at::Tensor& rows,
                  int64_t row_heads, int64_t num_heads, int64_t num_kv_heads) {
  TORCH_CHECK_VALUE(
      num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0,
      function, ": num_kv_heads must divide num_heads, got ", num_kv_heads,
      " and ", num_heads);
  TORCH_CHECK_VALUE(rows.dim() > 0 && rows.size(0) % row_heads == 0, function,
                    ": rows must consist of ", row_heads, " heads, got shape ",
                    rows.sizes());
}

}  // namespace multihead
