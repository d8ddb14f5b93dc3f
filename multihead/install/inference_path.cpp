// SPDX-License-Identifier: MIT
//
// aten::_native_multi_head_attention: what torch.nn.MultiheadAttention and, by
// way of _transformer_encoder_layer_fwd, torch.nn.TransformerEncoderLayer call
// in eval mode where nothing is differentiated. It projects by one packed
// matrix. Tensors are (B, L, E), or nested: B sequences of their own lengths,
// the padding dropped.
#include <ATen/NestedTensorImpl.h>
#include <ATen/ops/_native_multi_head_attention_native.h>
#include <ATen/ops/_nested_view_from_buffer.h>
#include <ATen/ops/linear.h>

#include "multihead/attention/call.h"
#include "multihead/attention/provider.h"
#include "multihead/attention/route.h"
#include "multihead/functional.h"
#include "multihead/install/overrides.h"
#include "multihead/layer/checks.h"

namespace multihead::overrides {
namespace {

using at::Tensor;
using OutAndWeights = std::tuple<Tensor, Tensor>;

struct Call {
  const Tensor &query, &key, &value;
  int64_t embed_dim, num_heads;
  const Tensor &in_proj_weight, &in_proj_bias, &out_proj_weight, &out_proj_bias;
  const std::optional<Tensor>& mask;
  bool need_weights, average_attn_weights;
  std::optional<int64_t> mask_type;

  bool is_self_attention() const {
    return query.is_same(key) && key.is_same(value);
  }
};

AttentionLayer layer_of(const Call& c) {
  return {.embed_dim = c.embed_dim,
          .num_heads = c.num_heads,
          .in_proj_weight = c.in_proj_weight,
          .in_proj_bias = c.in_proj_bias,
          .out_proj_weight = c.out_proj_weight,
          .out_proj_bias = c.out_proj_bias,
          .batch_first = true};
}

// The mask without what expand() repeats: often all heads and batches have one.
Tensor once(Tensor mask) {
  for (int64_t dim = 0; dim < mask.dim(); ++dim) {
    if (mask.stride(dim) == 0 && mask.size(dim) > 1) {
      mask = mask.narrow(dim, 0, 1);
    }
  }
  return mask;
}

// mask_type says which of PyTorch's masks it is: 0 (L, L), 1 (B, L) of keys,
// 2 (B, H, L, L). What is not 0 is blocked, −inf among it.
std::vector<int64_t> mask_shape(const Call& c) {
  const int64_t batch = c.query.size(0), length = c.query.size(1);
  if (*c.mask_type == 0) return {length, length};
  if (*c.mask_type == 1) return {batch, length};
  return {batch, c.num_heads, length, length};
}

ForwardOptions options_of(const Call& c) {
  ForwardOptions options;
  options.need_weights(c.need_weights)
      .average_attn_weights(c.average_attn_weights)
      .fast_path(false);
  if (!c.mask) return options;
  const Tensor some = once(*c.mask).to(at::kBool);
  const Tensor blocked = some.expand(c.mask->sizes());
  if (*c.mask_type == 1) return options.key_padding_mask(blocked);
  if (*c.mask_type == 0) return options.attn_mask(blocked);
  const bool is_shared = some.size(0) == 1 && some.size(1) == 1;
  return options.attn_mask(
      is_shared ? blocked[0][0]
                : blocked.reshape({-1, blocked.size(2), blocked.size(3)}));
}

// The sequences of a nested tensor lie one after the other, as rows of one
// matrix: it is projected at once, and each is attended to by itself.
Tensor attend_to_sequences(const Call& c) {
  const auto* nested = at::native::get_nested_tensor_impl(c.query);
  const Tensor sizes = nested->get_nested_sizes();
  const Tensor rows = nested->get_buffer().view({-1, c.embed_dim});
  const Tensor projected = at::linear(rows, c.in_proj_weight, c.in_proj_bias)
                               .view({rows.size(0), 3, c.num_heads, -1});
  const Tensor attended = at::empty_like(rows);
  const auto* lengths = sizes.const_data_ptr<int64_t>();
  int64_t first = 0;
  for (int64_t b = 0; b < sizes.size(0); ++b) {
    const int64_t length = lengths[b * sizes.size(1)];
    const auto heads = [&](int64_t which) {
      return projected.select(1, which)
          .narrow(0, first, length)
          .transpose(0, 1);
    };
    const Tensor out = std::get<0>(call::run<call::FusedAttention>(
        heads(0), heads(1), heads(2), AttentionOptions{},
        std::optional<Tensor>()));
    attended.narrow(0, first, length).copy_(out.transpose(0, 1).flatten(1));
    first += length;
  }
  const Tensor out = at::linear(attended, c.out_proj_weight, c.out_proj_bias);
  return at::_nested_view_from_buffer(out.view(-1), sizes,
                                      nested->get_nested_strides(),
                                      nested->get_storage_offsets());
}

// PyTorch's modules hand numbers to be added to the scores on as they are, and
// its kernel takes all but 0 for blocked.
bool has_numbers(const Tensor& mask) {
  if (!mask.is_floating_point()) return false;
  const Tensor some = once(mask);
  return some.isfinite().logical_and_(some.ne(0)).any().item<bool>();
}

bool weights_fit(const Call& c) {
  const int64_t width = c.embed_dim;
  const auto fits = [&](const Tensor& x, at::IntArrayRef sizes) {
    return x.sizes() == sizes && x.scalar_type() == c.query.scalar_type();
  };
  return c.num_heads > 0 && width > 0 && width % c.num_heads == 0 &&
         fits(c.in_proj_weight, {3 * width, width}) &&
         fits(c.in_proj_bias, {3 * width}) &&
         fits(c.out_proj_weight, {width, width}) &&
         fits(c.out_proj_bias, {width});
}

constexpr auto* kWeights = "PyTorch refuses weights of such sizes or dtypes";

// Sets the options of a call that is not refused.
std::string refusal_of_dense(const Call& c, ForwardOptions& options) {
  if (c.query.dim() != 3 || c.key.sizes() != c.query.sizes() ||
      c.value.sizes() != c.query.sizes()) {
    return "PyTorch's inference path takes 3-D tensors of one shape";
  }
  if (c.query.size(2) != c.embed_dim || !weights_fit(c)) return kWeights;
  if (c.mask && (!c.mask_type || *c.mask_type < 0 || *c.mask_type > 2 ||
                 c.mask->sizes() != mask_shape(c))) {
    return "a mask without its mask_type";
  }
  if (c.mask && has_numbers(*c.mask)) {
    return "PyTorch's inference path blocks where a mask has numbers";
  }
  options = options_of(c);
  return route(c.query, c.key, c.value, layer_of(c), options).reason;
}

std::string refusal_of_nested(const Call& c) {
  if (!c.is_self_attention()) return "nested tensors of cross-attention";
  if (c.mask || c.need_weights) return "nested tensors with a mask or weights";
  const auto* nested = at::native::get_nested_tensor_impl(c.query);
  if (c.query.dim() != 3 ||
      !at::native::nested_tensor_impl_is_contiguous(nested)) {
    return "a nested tensor that is not contiguous";
  }
  if (nested->opt_size(2) != c.embed_dim || !weights_fit(c)) return kWeights;
  return kernel_refusal({&c.in_proj_weight}, c.query.scalar_type());
}

// kRegistered: as PyTorch's operator, in its place.
template <bool kRegistered>
OutAndWeights run_inference_path(
    const Tensor& query, const Tensor& key, const Tensor& value,
    int64_t embed_dim, int64_t num_head, const Tensor& qkv_weight,
    const Tensor& qkv_bias, const Tensor& proj_weight, const Tensor& proj_bias,
    const std::optional<Tensor>& mask, bool need_weights,
    bool average_attn_weights, std::optional<int64_t> mask_type) {
  const Call c{query,     key,        value,        embed_dim,
               num_head,  qkv_weight, qkv_bias,     proj_weight,
               proj_bias, mask,       need_weights, average_attn_weights,
               mask_type};
  check_no_provider("_native_multi_head_attention", "inference path");
  const bool is_nested =
      query.is_nested() || key.is_nested() || value.is_nested();
  ForwardOptions options;
  const auto pytorchs = [&] {
    return at::native::native_multi_head_attention_cpu(
        query, key, value, embed_dim, num_head, qkv_weight, qkv_bias,
        proj_weight, proj_bias, mask, need_weights, average_attn_weights,
        mask_type);
  };
  if (kRegistered && !is_wanted) return pytorchs();
  return run(
      [&] {
        return is_nested ? refusal_of_nested(c) : refusal_of_dense(c, options);
      },
      [&]() -> OutAndWeights {
        if (is_nested) return {attend_to_sequences(c), Tensor()};
        return multi_head_attention_forward(query, key, value, layer_of(c),
                                            options);
      },
      [&] {
        if (!is_nested) check_forward(query, key, value, layer_of(c), options);
      },
      pytorchs);
}

OutAndWeights nested_multi_head_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    int64_t embed_dim, int64_t num_head, const Tensor& qkv_weight,
    const Tensor& qkv_bias, const Tensor& proj_weight, const Tensor& proj_bias,
    const std::optional<Tensor>& mask, bool need_weights,
    bool average_attn_weights, std::optional<int64_t> mask_type) {
  const SourceGuard source(Source::kModule);
  return run_inference_path<false>(
      query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight,
      proj_bias, mask, need_weights, average_attn_weights, mask_type);
}

}  // namespace

void native_multi_head_attention(Registrations& all) {
  for (const auto key :
       {c10::DispatchKey::CPU, c10::DispatchKey::NestedTensorCPU}) {
    library_for(all, key).impl("_native_multi_head_attention",
                               TORCH_FN(run_inference_path<true>));
  }
}

TORCH_LIBRARY_IMPL(multihead, NestedTensorCPU, m) {
  m.impl("nested_multi_head_attention", TORCH_FN(nested_multi_head_attention));
}

}  // namespace multihead::overrides
