// SPDX-License-Identifier: MIT
#include "multihead/attention/definition.h"

#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/exp_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/log_cpu_dispatch.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/tanh_cpu_dispatch.h>
#include <ATen/ops/xlogy.h>

#include <algorithm>
#include <cmath>

#include "multihead/attention/layout.h"
#include "multihead/attention/nonfinite.h"
#include "multihead/kernels/kernels.h"

namespace multihead::definition {
namespace {

// x.to(dtype) without the dispatcher's share when there is nothing to do.
at::Tensor cast(const at::Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == dtype ? x : x.to(dtype);
}

// What happens to the scores between the two products.
struct ScoreTransform {
  double scale = 1.0;
  std::optional<double> softcap = {};
  Mask mask = {};
  at::Tensor alibi_slopes = {};  ///< (H) or (B, H)
  at::Tensor sinks = {};         ///< (H)
  double dropout_p = 0.0;
  /// (B, H, Lq, Lk), 0 or 1/(1 − dropout_p): draws that were made before.
  at::Tensor dropout_factors = {};

  /// Whether scores are more than scale·q·k. A rule that is missing here is
  /// left out of calls that have no other. (Masks are asked by what is
  /// visible.)
  bool has_rules() const {
    return softcap || alibi_slopes.defined() || sinks.defined();
  }
};

// torch.export cannot show that folding holds for every length: a traced call
// gives each query head its own copy of keys and values instead.
Heads foldable(const Heads& heads) {
  if (heads.num_heads == heads.num_kv_heads || is_plain(heads.query)) {
    return heads;
  }
  return {heads.query,
          expand_groups(heads.key, heads),
          expand_groups(heads.value, heads),
          heads.batch_size,
          heads.num_heads,
          heads.num_heads};
}

// MKL chooses the kernel of a vector function at its first call. Where several
// threads make that call together, one of them may get the kernel of 11 bits
// for its part (known of MKL 2024, in torch.tanh too: an error of 1e-4 in one
// of some thousand processes). So one element goes first, on one thread, past
// the dispatcher: a tracer must not see it.
void choose_vector_functions() {
  [[maybe_unused]] static const bool chosen = [] {
    float single = 1.0F;
    double twice = 1.0;
    for (const at::Tensor& one : {at::from_blob(&single, {1}, at::kFloat),
                                  at::from_blob(&twice, {1}, at::kDouble)}) {
      at::cpu::tanh(one);
      at::cpu::exp(one);
      at::cpu::log(one);
    }
    return true;
  }();
}

// cap·tanh(s/cap), + bias, − slope·|i + offset − j|, −inf where not visible.
at::Tensor transform_scores(at::Tensor scores, const ScoreTransform& transform,
                            const ScoreShape& shape,
                            const at::Tensor& visible) {
  const at::Tensor blocked =
      visible.defined() ? visible.logical_not() : at::Tensor();
  if (transform.softcap) {
    choose_vector_functions();
    // tanh' of a NaN that nobody sees would still be NaN, times 0.
    if (blocked.defined()) scores = scores.masked_fill(blocked, 0.0);
    // Beyond these bounds it or its inverse would leave float32's range.
    const double softcap = std::clamp(*transform.softcap, 1e-30, 1e30);
    scores = (scores / softcap).tanh() * softcap;
  }
  if (transform.mask.bias.defined()) {
    scores = scores + transform.mask.bias.to(scores.scalar_type());
  }
  if (transform.alibi_slopes.defined()) {
    const at::Tensor keys =
        at::arange(at::Scalar(shape.key_length),
                   at::TensorOptions(at::kLong).device(shape.device));
    const at::Tensor distance =
        (query_positions(transform.mask, shape) - keys).abs();
    scores = scores - transform.alibi_slopes.to(scores.scalar_type())
                              .unsqueeze(-1)
                              .unsqueeze(-1) *
                          distance;
  }
  return blocked.defined() ? scores.masked_fill(blocked, -kInfinity) : scores;
}

ScoreShape shape_of(const Heads& heads) {
  return {heads.query.sym_size(1), heads.key.sym_size(1), heads.query.device()};
}

// scale·q·kᵀ, (B·H, Lq, Lk), in float32 for 16-bit types.
at::Tensor scaled_scores(const Heads& heads, const ScoreTransform& transform,
                         const at::Tensor& visible) {
  const auto dtype = at::toOpMathType(heads.query.scalar_type());
  return query_key_product(
      heads,
      seeing_queries(heads, cast(heads.query, dtype), visible) *
          transform.scale,
      cast(heads.key, dtype), visible.defined());
}

// weights (B·H, Lq, Lk)
at::Tensor drop(const at::Tensor& weights, const ScoreTransform& transform) {
  if (transform.dropout_factors.defined()) {
    return weights *
           transform.dropout_factors.reshape_symint(weights.sym_sizes());
  }
  if (transform.dropout_p <= 0.0) return weights;
  return at::dropout(weights, transform.dropout_p, /*train=*/true);
}

// (B, H, Lq, Lk + 1): the sink is one more key, without a value.
at::Tensor append_sinks(const at::Tensor& scores, const at::Tensor& sinks) {
  const at::Tensor column = sinks.to(scores.scalar_type()).view({-1, 1, 1});
  return at::cat(
      {scores, column.expand_symint({scores.sym_size(0), scores.sym_size(1),
                                     scores.sym_size(2), 1})},
      /*dim=*/-1);
}

// Rows without a visible key give −inf and pass no gradient on. The gradient of
// at::logsumexp is exp(scores − logsumexp), wrong by a factor where logsumexp
// is so large that its last bit is no small number; so it is a constant here,
// and what it lacks is differentiated.
at::Tensor logsumexp_rows(const at::Tensor& scores) {
  choose_vector_functions();
  const at::Tensor blocked = scores.eq(-kInfinity).all(-1, /*keepdim=*/true);
  const at::Tensor rows = scores.masked_fill(blocked, 0.0);
  const at::Tensor rounded = at::logsumexp(rows.detach(), -1, /*keepdim=*/true);
  const at::Tensor near = rounded.masked_fill(rounded.abs().eq(kInfinity), 0.0);
  return (near + (rows - near).exp().sum(-1, /*keepdim=*/true).log())
      .masked_fill(blocked, -kInfinity)
      .squeeze(-1);
}

// exp(scores − logsumexp), (B·H, Lq, Lk), after dropout where its factors are
// given: the weights of that attention, as a function of logsumexp (B, H, Lq)
// too. A large logsumexp is taken for that of these scores and sinks, and what
// it lost in rounding made up for. Values are not looked at.
at::Tensor weights_from_logsumexp(const Heads& given,
                                  const ScoreTransform& transform,
                                  const at::Tensor& logsumexp) {
  const Heads heads = foldable(given);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const ScoreShape shape = shape_of(heads);
  const at::Tensor visible = visible_keys(transform.mask, shape);
  const at::Tensor scores =
      transform_scores(by_head(scaled_scores(heads, transform, visible), heads),
                       transform, shape, visible);
  // −inf − −inf would be NaN where a row sees nothing.
  const at::Tensor shift =
      logsumexp.masked_fill(logsumexp.eq(-kInfinity), 0.0).unsqueeze(-1);
  choose_vector_functions();
  const at::Tensor exp = (scores - shift).exp();
  // What the sum of a row should be 1 for, if its logsumexp were not rounded.
  at::Tensor sum = exp.detach().sum(-1, /*keepdim=*/true);
  if (transform.sinks.defined()) {
    sum =
        sum + (transform.sinks.detach().to(sum.scalar_type()).view({-1, 1, 1}) -
               shift.detach())
                  .exp();
  }
  const at::Tensor anew =
      shift.detach().abs().gt(kernels::kLargeLogsumexp).logical_and(sum.gt(0));
  const at::Tensor weights = exp / sum.masked_fill(anew.logical_not(), 1.0);
  return cast(drop(weights.flatten(0, 1), transform),
              heads.query.scalar_type());
}

HeadResults attend(const Heads& given, const ScoreTransform& transform,
                   bool with_logsumexp) {
  const Heads heads = foldable(given);
  // The types chosen here are the right ones under autocast too.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const auto dtype = heads.query.scalar_type();
  const ScoreShape shape = shape_of(heads);
  const at::Tensor visible = visible_keys(transform.mask, shape);
  const bool transforms =
      visible.defined() || transform.has_rules() || with_logsumexp;

  at::Tensor scores = scaled_scores(heads, transform, visible);
  HeadResults result;
  if (transforms) {
    scores =
        transform_scores(by_head(scores, heads), transform, shape, visible);
    if (transform.sinks.defined())
      scores = append_sinks(scores, transform.sinks);
    if (with_logsumexp) result.logsumexp = logsumexp_rows(scores);
  }
  // Without transform, only infinite inputs make a row of −inf; IEEE says NaN
  // there.
  at::Tensor weights =
      transforms ? at::_safe_softmax(scores, -1) : at::softmax(scores, -1);
  if (transform.sinks.defined())
    weights = weights.slice_symint(-1, 0, shape.key_length);
  if (transforms) weights = weights.flatten(0, 1);
  weights = drop(weights, transform);

  result.out = cast(
      weights_value_product(
          heads, weights, cast(heads.value, at::toOpMathType(dtype)), visible),
      dtype);
  result.weights = cast(weights, dtype);
  return result;
}

// ---- From the arguments of scaled_dot_product_attention -------------------

double default_scale(const c10::SymInt& head_dim) {
  const auto width =
      static_cast<double>(head_dim.guard_int(__FILE__, __LINE__));
  return width > 0 ? 1.0 / std::sqrt(width) : 1.0;
}

// (H, L, D) → (1, H, L, D)
at::Tensor with_batch(const at::Tensor& x) {
  return x.dim() == 3 ? x.unsqueeze(0) : x;
}

// (B, heads, L, X) → (B·heads', L, X) with heads' = `heads` or, for one head
// that stands for all, repeated.
at::Tensor flatten_heads(const at::Tensor& x, const c10::SymInt& batch_size,
                         const c10::SymInt& heads) {
  const at::Tensor full = x.sym_size(0) == batch_size
                              ? x
                              : x.expand_symint({batch_size, -1, -1, -1});
  if (x.sym_size(1) == heads) return full.flatten(0, 1);
  return full.unsqueeze(2)
      .expand_symint({-1, -1, heads / x.sym_size(1), -1, -1})
      .flatten(0, 2);
}

// Keys and values may be grouped differently; then each query head gets its own
// of both.
Heads heads_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const at::Tensor query = with_batch(q), key = with_batch(k),
                   value = with_batch(v);
  const auto batch_size = query.sym_size(0), num_heads = query.sym_size(1);
  const auto num_kv_heads =
      key.sym_size(1) == value.sym_size(1) ? key.sym_size(1) : num_heads;
  return {flatten_heads(query, batch_size, num_heads),
          flatten_heads(key, batch_size, num_kv_heads),
          flatten_heads(value, batch_size, num_kv_heads),
          batch_size,
          num_heads,
          num_kv_heads};
}

ScoreTransform transform_of(const at::Tensor& query,
                            const AttentionOptions& options) {
  // All of them: an option that the definition forgets must not compile.
  const auto& [attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment,
               query_offset, window, key_lengths, key_mask, softcap,
               alibi_slopes, sinks] = options;
  ScoreTransform transform{
      .scale = scale.value_or(default_scale(query.sym_size(-1))),
      .mask = {.is_causal = is_causal,
               .alignment = alignment,
               .query_offset = query_offset,
               .window = window,
               .key_mask = key_mask},
      .alibi_slopes = alibi_slopes,
      .sinks = sinks,
      .dropout_p = dropout_p};
  if (softcap.value_or(0.0) != 0.0) transform.softcap = softcap;
  if (key_lengths.defined()) {
    transform.mask.key_lengths = key_lengths.to(at::kLong);
  }
  if (attn_mask.defined()) {
    (attn_mask.scalar_type() == at::kBool ? transform.mask.keep
                                          : transform.mask.bias) = attn_mask;
  }
  return transform;
}

// (B·H, Lq, X) → (B, H, Lq, X), or (H, Lq, X) as query is.
at::Tensor as_query(const at::Tensor& rows, const at::Tensor& query) {
  return query.dim() == 3
             ? rows
             : rows.unflatten_symint(0, {query.sym_size(0), query.sym_size(1)});
}

}  // namespace

HeadResults attention(const Heads& heads, double scale, const Mask& mask,
                      double dropout_p) {
  return attend(heads, {.scale = scale, .mask = mask, .dropout_p = dropout_p},
                /*with_logsumexp=*/false);
}

std::tuple<at::Tensor, at::Tensor> attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionOptions& options, bool with_lse,
    const at::Tensor& dropout_factors) {
  ScoreTransform transform = transform_of(query, options);
  transform.dropout_factors = dropout_factors;
  const HeadResults result =
      attend(heads_of(query, key, value), transform, with_lse);
  const bool squeezes = with_lse && query.dim() == 3;
  return {in_layout_of(query, as_query(result.out, query)),
          squeezes ? result.logsumexp.squeeze(0) : result.logsumexp};
}

at::Tensor weights(const at::Tensor& query, const at::Tensor& key,
                   const at::Tensor& logsumexp, const AttentionOptions& options,
                   const at::Tensor& dropout_factors, bool average) {
  ScoreTransform transform = transform_of(query, options);
  transform.dropout_factors = dropout_factors;
  const at::Tensor weights = as_query(
      weights_from_logsumexp(heads_of(query, key, key), transform, logsumexp),
      query);
  return average ? weights.mean(-3) : weights;
}

AttentionSummary summary(const at::Tensor& query, const at::Tensor& key,
                         const AttentionOptions& options, int64_t k) {
  const ScoreTransform transform = transform_of(query, options);
  const Heads heads = heads_of(query, key, key);
  const at::Tensor visible = visible_keys(
      transform.mask, {query.sym_size(-2), key.sym_size(-2), query.device()});
  const at::Tensor weights =
      attend(heads, transform, false)
          .weights.to(at::toOpMathType(query.scalar_type()))
          .unflatten_symint(0, {heads.batch_size, heads.num_heads});
  // Of equal weights the lower key first; keys that are not seen last.
  const at::Tensor ranked =
      visible.defined() ? weights.masked_fill(visible.logical_not(), -1.0)
                        : weights;
  const auto [sorted, order] =
      ranked.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  const int64_t missing = std::max<int64_t>(k - key.size(-2), 0);
  const at::Tensor largest =
      at::constant_pad_nd(sorted.slice(-1, 0, k), {0, missing}, -1.0);
  const at::Tensor keys =
      at::constant_pad_nd(order.slice(-1, 0, k), {0, missing}, -1);
  const at::Tensor absent = largest.lt(0);
  const auto unbatched = [&](const at::Tensor& x) {
    return query.dim() == 3 ? x.squeeze(0) : x;
  };
  return {unbatched(largest.masked_fill(absent, 0.0)),
          unbatched(keys.masked_fill(absent, -1)),
          unbatched(-at::xlogy(weights, weights).sum(-1))};
}

}  // namespace multihead::definition
