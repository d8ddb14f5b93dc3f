// SPDX-License-Identifier: MIT
#include "multihead/ops/cpu/arguments.h"

#include <ATen/OpMathType.h>

#include <cmath>

#include "multihead/attention/storage.h"

namespace multihead::ops {
namespace {

using at::Tensor;

kernels::Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return kernels::Dtype::kFloat64;
    case at::kBFloat16:
      return kernels::Dtype::kBFloat16;
    case at::kHalf:
      return kernels::Dtype::kFloat16;
    default:
      return kernels::Dtype::kFloat32;
  }
}

kernels::Storage storage_of(const Tensor& query, const Tensor& key) {
  if (!is_stored(query, key)) return kernels::Storage::kAsQuery;
  return key.scalar_type() == at::kChar ? kernels::Storage::kMXInt8
                                        : kernels::Storage::kBFloat16;
}

// In another dtype, what is repeated by stride 0 staying so.
Tensor cast_keeping_repeats(const Tensor& x, at::ScalarType dtype) {
  if (x.scalar_type() == dtype) return x;
  Tensor once = x;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.stride(d) == 0 && x.size(d) > 1) once = once.narrow(d, 0, 1);
  }
  return once.to(dtype).expand(x.sizes());
}

// What the kernels read of a bias without a copy.
bool read_as_it_is(at::ScalarType dtype, at::ScalarType compute_type) {
  return dtype == compute_type ||
         (compute_type == at::kFloat &&
          (dtype == at::kBFloat16 || dtype == at::kHalf));
}

}  // namespace

Tensor four_dimensional(const Tensor& x) {
  return dense_rows(x.dim() == 3 ? x.unsqueeze(0) : x);
}

kernels::StridedRows rows_of(const Tensor& x) {
  return {x.const_data_ptr(), x.size(0) == 1 ? 0 : x.stride(0),
          x.size(1) == 1 ? 0 : x.stride(1), x.stride(2)};
}

kernels::StridedOutRows out_rows_of(const Tensor& x) {
  return {x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

Tensor dense_rows(const Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous();
}

kernels::StridedRows rows_like(const kernels::StridedRows& like,
                               const Tensor& x) {
  kernels::StridedRows rows = like;
  rows.data = x.const_data_ptr();
  rows.batch = like.block_table ? x.stride(0) : 0;
  rows.head = x.stride(-2);
  rows.row = x.stride(-3);
  return rows;
}

kernels::StridedOutRows out_rows_like(const kernels::StridedRows& like,
                                      const Tensor& x) {
  return {x.mutable_data_ptr(), 0, x.stride(1), x.stride(0), like.starts};
}

kernels::ScoreGradients score_gradients_of(const Tensor& x) {
  int64_t strides[4] = {};
  for (int64_t d = 0; d < x.dim(); ++d) {
    const bool repeats = x.size(d) == 1;
    strides[4 - x.dim() + d] = repeats ? 0 : x.stride(d);
  }
  return {x.mutable_data_ptr(), strides[0], strides[1], strides[2], strides[3]};
}

// Tensors of the options are read in place: who calls holds them.
AttentionArguments::AttentionArguments(const Tensor& query, const Tensor& key,
                                       const AttentionOptions& options,
                                       const std::optional<Tensor>& state)
    : query_(four_dimensional(query)), key_(four_dimensional(key)) {
  kernels::AttentionArgs& a = attention;
  a.dtype = dtype_of(query_);
  a.storage = storage_of(query_, key_);
  a.B = query_.size(0);
  a.H = query_.size(1);
  a.Lq = query_.size(2);
  a.D = query_.size(3);
  a.G = key_.size(1);
  a.Lk = key_.size(2);
  a.query = rows_of(query_);
  a.key = rows_of(key_);
  set_rules(options, state);
}

AttentionArguments::AttentionArguments(const Tensor& query, const Tensor& key,
                                       const VarlenRows& sequences,
                                       const AttentionOptions& options,
                                       const std::optional<Tensor>& state)
    : query_(dense_rows(query)),
      key_(dense_rows(key)),
      places_(places_of(query, key, sequences, options)) {
  kernels::AttentionArgs& a = attention;
  a.dtype = dtype_of(query_);
  a.storage = storage_of(query_, key_);
  a.B = places_.count();
  a.H = query_.size(1);
  a.D = query_.size(2);
  a.G = key_.size(-2);
  a.Lq = places_.longest_query();
  a.Lk = places_.longest_key();
  a.query = rows_like({.starts = places_.query_starts.data()}, query_);
  if (places_.block_table.defined()) {
    const Tensor& table = places_.block_table;
    a.key = rows_like({.block_table = table.const_data_ptr<int32_t>(),
                       .table_stride = table.size(1),
                       .page = key_.size(1)},
                      key_);
  } else {
    a.key = rows_like({.starts = places_.key_starts.data()}, key_);
  }
  set_rules(options, state);
}

void AttentionArguments::set_rules(const AttentionOptions& options,
                                   const std::optional<Tensor>& state) {
  kernels::AttentionArgs& a = attention;
  // All of them: an option that the kernels do not get must not compile.
  const auto& [attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment,
               query_offset, window, key_lengths, key_mask, softcap,
               alibi_slopes, sinks] = options;
  const auto width = static_cast<double>(a.D);
  a.scale = scale.value_or(width > 0 ? 1 / std::sqrt(width) : 1.0);
  a.softcap = softcap.value_or(0.0);
  a.visibility.is_causal = is_causal;
  if (window) {
    a.visibility.left = (*window)[0];
    a.visibility.right = (*window)[1];
  }
  if (!places_.key_lengths.empty()) {
    a.visibility.key_lengths = places_.key_lengths.data();
  } else if (key_lengths.defined()) {
    a.visibility.key_lengths =
        keep(key_lengths.to(at::kLong).contiguous()).const_data_ptr<int64_t>();
  }
  if (key_mask.defined()) {
    a.key_mask = {static_cast<const uint8_t*>(key_mask.const_data_ptr()),
                  key_mask.stride(0), key_mask.stride(1)};
  }
  if (attn_mask.defined()) set_mask(attn_mask);
  if (alibi_slopes.defined()) {
    const Tensor& slopes = keep(alibi_slopes.to(at::kDouble));
    a.alibi_slopes = slopes.const_data_ptr<double>();
    a.alibi_head = slopes.stride(-1);
    a.alibi_batch = slopes.dim() == 2 ? slopes.stride(0) : 0;
  }
  if (sinks.defined()) {
    a.sinks = keep(sinks.to(at::kDouble).contiguous()).const_data_ptr<double>();
  }
  set_offsets(alignment, query_offset);
  if (dropout_p > 0.0) {
    const Tensor words = state->contiguous();
    const auto* word = words.const_data_ptr<int64_t>();
    a.dropout.probability = dropout_p;
    a.dropout.seed = static_cast<uint64_t>(word[0]);
    a.dropout.offset = static_cast<uint64_t>(word[1]);
    if (words.numel() > 2) {
      a.dropout.first_batch = word[2];
      a.dropout.first_head = word[3];
      a.dropout.heads = word[4];
      a.dropout.first_query = word[5];
      a.dropout.first_key = word[6];
    }
  }
}

// After the key lengths.
void AttentionArguments::set_offsets(CausalAlignment alignment,
                                     const Tensor& query_offset) {
  const bool bottom_right = alignment == CausalAlignment::kBottomRight;
  if (!bottom_right && !query_offset.defined()) return;
  kernels::AttentionArgs& a = attention;
  offsets_.resize(a.B);
  if (bottom_right) {
    const int64_t* lengths = a.visibility.key_lengths;
    for (int64_t b = 0; b < a.B; ++b) {
      const int64_t queries =
          a.query.starts ? a.query.starts[b + 1] - a.query.starts[b] : a.Lq;
      offsets_[b] = (lengths ? lengths[b] : a.Lk) - queries;
    }
  } else {
    const Tensor given = query_offset.to(at::kLong).contiguous();
    const auto* offsets = given.const_data_ptr<int64_t>();
    for (int64_t b = 0; b < a.B; ++b) {
      offsets_[b] = offsets[given.dim() == 0 ? 0 : b];
    }
  }
  a.visibility.query_offsets = offsets_.data();
}

void AttentionArguments::set_mask(const Tensor& attn_mask) {
  using Kind = kernels::ScoreMask::Kind;
  kernels::AttentionArgs& a = attention;
  const auto compute_type = at::toOpMathType(query_.scalar_type());
  const bool is_keep = attn_mask.scalar_type() == at::kBool;
  const Tensor& mask =
      is_keep || read_as_it_is(attn_mask.scalar_type(), compute_type)
          ? attn_mask
          : keep(cast_keeping_repeats(attn_mask, compute_type));
  const Tensor full = mask.expand({a.B, a.H, a.Lq, a.Lk});
  a.mask = {is_keep ? Kind::kKeep : Kind::kBias,
            full.const_data_ptr(),
            dtype_of(full),
            full.stride(0),
            full.stride(1),
            full.stride(2),
            full.stride(3)};
}

}  // namespace multihead::ops
