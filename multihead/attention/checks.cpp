// SPDX-License-Identifier: MIT
#include "multihead/attention/checks.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/_assert_async.h>

#include <cmath>

#include "multihead/attention/fields.h"
#include "multihead/attention/mask.h"
#include "multihead/attention/nonfinite.h"
#include "multihead/attention/storage.h"
#include "multihead/text/shapes.h"

namespace multihead {
namespace {

// first ≤ integers ≤ last. Values of traced tensors are asserted when they
// exist; in that error `last_name` stands for `last`, which may be a symbol.
void check_values(const char* name, at::Tensor integers, int64_t first,
                  const c10::SymInt& last, const char* last_name) {
  constexpr auto* fn = "scaled_dot_product_attention: ";
  if (integers.is_meta()) return;
  // Under vmap the values of all batch items are those of the tensor beneath.
  while (const auto* batched = at::functorch::maybeGetBatchedImpl(integers)) {
    integers = batched->value();
  }
  integers = integers.to(at::kLong);  // int8 cannot be compared with 300
  if (const auto limit = last.maybe_as_int();
      limit && has_values(integers) && integers.is_cpu()) {
    // Read in place: operations would cost a decoding step more than attention.
    const at::Tensor dense = integers.contiguous();
    const auto* values = dense.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < dense.numel(); ++i) {
      TORCH_CHECK_VALUE(first <= values[i] && values[i] <= *limit, fn, name,
                        " must be between ", first, " and ", last, ", got ",
                        values[i]);
    }
    return;
  }
  const at::Tensor invalid =
      integers.lt(first).logical_or(integers.gt(at::Scalar(last)));
  if (!has_values(integers)) {
    at::_assert_async(
        invalid.any().logical_not(),
        c10::str(fn, name, " must be between ", first, " and ", last_name));
    return;
  }
  if (!invalid.any().item<bool>()) return;
  TORCH_CHECK_VALUE(false, fn, name, " must be between ", first, " and ", last,
                    ", got ",
                    integers.masked_select(invalid)[0].item<int64_t>());
}

// So that no sum of a position, a length and a distance overflows.
constexpr int64_t kLargestOffset = int64_t{1} << 62;

void check_query_offset(const at::Tensor& offset,
                        const c10::SymInt& batch_size) {
  constexpr auto* fn = "scaled_dot_product_attention: ";
  const auto dtype = offset.scalar_type();
  TORCH_CHECK_VALUE(
      at::isIntegralType(dtype, /*includeBool=*/false) && dtype != at::kUInt64,
      fn, "query_offset must be an integer or integers, got ", dtype);
  TORCH_CHECK_VALUE(offset.dim() == 0 ||
                        (offset.dim() == 1 && offset.sym_size(0) == batch_size),
                    fn, "query_offset must have the shape () or (", batch_size,
                    ",), got ", shape_text(offset));
  // Narrower types cannot be outside. To read the values of another device
  // would wait for it.
  if (dtype != at::kLong || (has_values(offset) && !offset.is_cpu())) {
    return;
  }
  check_values("query_offset", offset, -kLargestOffset, kLargestOffset, "2^62");
}

void check_extensions(const at::Tensor& query, const at::Tensor& key,
                      const AttentionOptions& o) {
  constexpr auto* fn = "scaled_dot_product_attention: ";
  const c10::SymInt batch_size = query.dim() == 4 ? query.sym_size(0) : 1;
  const auto num_heads = query.sym_size(-3);
  if (o.query_offset.defined()) check_query_offset(o.query_offset, batch_size);
  if (o.key_lengths.defined()) {
    TORCH_CHECK_VALUE(at::isIntegralType(o.key_lengths.scalar_type(),
                                         /*includeBool=*/false),
                      fn, "key_lengths must be integers, got ",
                      o.key_lengths.scalar_type());
    TORCH_CHECK_VALUE(
        o.key_lengths.dim() == 1 && o.key_lengths.sym_size(0) == batch_size, fn,
        "key_lengths must have the shape (", batch_size, ",), got ",
        shape_text(o.key_lengths));
    check_values("key_lengths", o.key_lengths, 0, key.sym_size(-2),
                 "the key length");
  }
  if (o.key_mask.defined()) {
    TORCH_CHECK_VALUE(o.key_mask.scalar_type() == at::kBool, fn,
                      "key_mask must be bool, got ", o.key_mask.scalar_type());
    TORCH_CHECK_VALUE(o.key_mask.dim() == 2 &&
                          o.key_mask.sym_size(0) == batch_size &&
                          o.key_mask.sym_size(1) == key.sym_size(-2),
                      fn, "key_mask must have the shape (", batch_size, ", ",
                      key.sym_size(-2), "), got ", shape_text(o.key_mask));
  }
  check_slopes_and_sinks(o, batch_size, num_heads, fn);
}

// Broadcast of sizes that must be equal or 1.
bool broadcastable(const c10::SymInt& from, const c10::SymInt& to) {
  return from == to || from == 1;
}

void check_heads(const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value, bool enable_gqa) {
  constexpr auto* fn = "scaled_dot_product_attention: ";
  const auto num_heads = query.sym_size(-3);
  for (const auto& [name, x] : {std::pair("key", &key), {"value", &value}}) {
    const auto heads = x->sym_size(-3);
    TORCH_CHECK(heads == num_heads || heads == 1 ||
                    (enable_gqa && heads > 0 && num_heads % heads == 0),
                fn, name, " must have ",
                enable_gqa ? "a number of heads that divides that of query"
                           : "as many heads as query, or enable_gqa",
                ", got ", heads, " and ", num_heads,
                shapes_text(query, key, value));
    TORCH_CHECK(
        query.dim() == 3 || broadcastable(x->sym_size(0), query.sym_size(0)),
        fn, name, " must have the batch size of query, got ", x->sym_size(0),
        " and ", query.sym_size(0), shapes_text(query, key, value));
  }
}

void check_attention_mask(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& mask) {
  constexpr auto* fn = "scaled_dot_product_attention: ";
  TORCH_CHECK(is_mask_dtype(mask), fn,
              "attn_mask must be bool or floating point, got ",
              mask.scalar_type());
  const c10::SymInt batch_size = query.dim() == 4 ? query.sym_size(0) : 1;
  const std::array<c10::SymInt, 4> target{batch_size, query.sym_size(-3),
                                          query.sym_size(-2), key.sym_size(-2)};
  bool fits = mask.dim() <= query.dim();
  for (int64_t i = 1; fits && i <= mask.dim(); ++i) {
    fits = broadcastable(mask.sym_size(-i), target[4 - i]);
  }
  TORCH_CHECK(fits, fn, "attn_mask must broadcast to ",
              tuple_text(c10::SymIntArrayRef(target).slice(4 - query.dim())),
              ", got ", shape_text(mask));
}

}  // namespace

void check_slopes_and_sinks(const AttentionOptions& o,
                            const c10::SymInt& batch_size,
                            const c10::SymInt& num_heads, const char* fn) {
  if (o.sinks.defined()) {
    TORCH_CHECK_VALUE(o.sinks.is_floating_point(), fn,
                      "sinks must be floating point, got ",
                      o.sinks.scalar_type());
    TORCH_CHECK_VALUE(o.sinks.dim() == 1 && o.sinks.sym_size(0) == num_heads,
                      fn, "sinks must have the shape (", num_heads, ",), got ",
                      shape_text(o.sinks));
  }
  if (o.alibi_slopes.defined()) {
    const at::Tensor& slopes = o.alibi_slopes;
    TORCH_CHECK_VALUE(slopes.is_floating_point(), fn,
                      "alibi_slopes must be floating point, got ",
                      slopes.scalar_type());
    const bool fits = (slopes.dim() == 1 || slopes.dim() == 2) &&
                      slopes.sym_size(-1) == num_heads &&
                      (slopes.dim() == 1 || slopes.sym_size(0) == batch_size);
    TORCH_CHECK_VALUE(fits, fn, "alibi_slopes must have the shape (", num_heads,
                      ",) or (", batch_size, ", ", num_heads, "), got ",
                      shape_text(slopes));
  }
}

void check_domains(const AttentionOptions& o, const char* fn) {
  TORCH_CHECK(o.dropout_p >= 0.0 && o.dropout_p <= 1.0, fn,
              "dropout_p must be between 0 and 1, got ", o.dropout_p);
  TORCH_CHECK_VALUE(!o.scale || std::isfinite(*o.scale), fn,
                    "scale must be finite, got ", *o.scale);
  TORCH_CHECK_VALUE(
      !o.softcap || (std::isfinite(*o.softcap) && *o.softcap >= 0), fn,
      "softcap must be finite and at least 0, got ", *o.softcap);
  TORCH_CHECK_VALUE(!o.window || ((*o.window)[0] >= -1 && (*o.window)[1] >= -1),
                    fn, "window must be two sizes of at least -1, got (",
                    (*o.window)[0], ", ", (*o.window)[1], ")");
  TORCH_CHECK_VALUE(!o.query_offset.defined() ||
                        o.causal_alignment == CausalAlignment::kTopLeft,
                    fn,
                    "query_offset must not be given with causal_alignment "
                    "\"bottom_right\", got both");
}

void check_attention(const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const AttentionOptions& options) {
  constexpr auto* fn = "scaled_dot_product_attention: ";
  for (const auto& [name, x] :
       {std::pair("query", &query), {"key", &key}, {"value", &value}}) {
    TORCH_CHECK(x->dim() == query.dim() && (x->dim() == 3 || x->dim() == 4), fn,
                name,
                x == &query ? " must be 3-D or 4-D, got "
                            : " must be 3-D or 4-D and have the rank of query, "
                              "got ",
                x->dim(), "-D", shapes_text(query, key, value));
    TORCH_CHECK(!x->is_nested(), fn, name, " must be a dense tensor where an ",
                "argument is given that PyTorch's function lacks, got a nested "
                "one");
    TORCH_CHECK(x->layout() == at::kStrided, fn, name,
                " must be a dense tensor, got layout ", x->layout());
    check_storage(fn, name, query, *x);
  }
  TORCH_CHECK(key.scalar_type() == value.scalar_type(), fn,
              "value must have the dtype of key, got ", value.scalar_type(),
              " and ", key.scalar_type());
  const auto check_device = [&](std::string_view name, const at::Tensor& x) {
    TORCH_CHECK(!x.defined() || x.device() == query.device(), fn, name,
                " must be on the device of query, got ", x.device(), " and ",
                query.device());
  };
  check_device("key", key);
  check_device("value", value);
  fields::for_each_tensor(options, [&](const auto& field, const auto& x) {
    check_device(field.name, x);
  });
  TORCH_CHECK(query.sym_size(-1) == width_of(key), fn,
              "key must have the head width of query, got ", width_of(key),
              " and ", query.sym_size(-1), shapes_text(query, key, value));
  check_lengths(key, value);
  check_heads(query, key, value, options.enable_gqa);
  check_extensions(query, key, options);
  if (options.attn_mask.defined()) {
    check_attention_mask(query, key, options.attn_mask);
  }
}

void check_fused_attention(const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value,
                           const AttentionOptions& options) {
  check_domains(options);
  check_attention(query, key, value, options);
  TORCH_CHECK(key.sym_size(-3) == value.sym_size(-3),
              "fused_attention: value must have as many heads as key, got ",
              value.sym_size(-3), " and ", key.sym_size(-3),
              shapes_text(query, key, value));
  TORCH_CHECK(is_fused_dtype(query.scalar_type()),
              "fused_attention: query must be float32, float64, bfloat16 or "
              "float16, got ",
              query.scalar_type());
}

void check_logsumexp(const char* function, const at::Tensor& query,
                     const at::Tensor& logsumexp) {
  const auto dtype =
      query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK(
      logsumexp.sym_sizes() == query.sym_sizes().slice(0, query.dim() - 1) &&
          logsumexp.scalar_type() == dtype,
      function, ": logsumexp must be ", dtype,
      " of query's shape without the last dimension, got ",
      logsumexp.scalar_type(), " ", shape_text(logsumexp),
      " (query.shape=", shape_text(query), ")");
}

void check_dropout_state(double dropout_p,
                         const std::optional<at::Tensor>& state) {
  if (dropout_p == 0.0) return;
  constexpr auto* expected =
      "fused_attention: dropout_state must be int64 of shape (2,), or (7,) for "
      "a part of a call, when dropout_p > 0, got ";
  TORCH_CHECK_VALUE(state && state->defined(), expected, "None");
  TORCH_CHECK_VALUE(state->scalar_type() == at::kLong && state->dim() == 1 &&
                        (state->sym_size(0) == 2 || state->sym_size(0) == 7),
                    expected, state->scalar_type(), " ", shape_text(*state));
  TORCH_CHECK_VALUE(state->device().is_cpu() || state->is_meta(), expected,
                    "one on ", state->device());
}

void check_count(int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, "attention_summary: k must be at least 0, got ",
                    count);
}

bool is_fused_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble ||
         dtype == at::kBFloat16 || dtype == at::kHalf;
}

void check_defined(const char* function, const at::Tensor& query,
                   const at::Tensor& key, const at::Tensor& value) {
  for (const auto& [name, x] :
       {std::pair("query", &query), {"key", &key}, {"value", &value}}) {
    TORCH_CHECK_TYPE(x->defined(), function, ": ", name,
                     " must be a tensor, got None, an undefined one");
  }
}

void check_lengths(const at::Tensor& key, const at::Tensor& value) {
  TORCH_CHECK(
      key.dim() < 2 || value.dim() < 2 ||
          key.sym_size(-2) == value.sym_size(-2),
      "scaled_dot_product_attention: value must have the length of key, "
      "got ",
      value.sym_size(-2), " and ", key.sym_size(-2),
      " (key.shape=", shape_text(key), ", value.shape=", shape_text(value),
      ")");
}

void check_for_pytorch(const at::Tensor& key, const at::Tensor& value,
                       bool enable_gqa) {
  check_lengths(key, value);
  if (!enable_gqa || key.dim() < 3 || value.dim() < 3) return;
  TORCH_CHECK(
      key.sym_size(-3) != 0 || value.sym_size(-3) == 0,
      "scaled_dot_product_attention: key must have heads where value has "
      "some, got 0 and ",
      value.sym_size(-3), " (key.shape=", shape_text(key),
      ", value.shape=", shape_text(value), ")");
}

}  // namespace multihead
