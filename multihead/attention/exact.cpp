// SPDX-License-Identifier: MIT
#include "multihead/attention/exact.h"

#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/exp_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/log_cpu_dispatch.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh_cpu_dispatch.h>
#include <ATen/ops/where.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "multihead/kernels/kernels.h"

namespace multihead::exact {
namespace {

// x.to(dtype) without the dispatcher's share when there is nothing to do.
at::Tensor cast(const at::Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == dtype ? x : x.to(dtype);
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Says no too often, where the sum overflows or x is traced: a no costs time,
// never a result.
bool all_finite(const at::Tensor& x) {
  if (!has_values(x)) return false;
  const at::NoGradGuard no_grad;
  return std::isfinite(x.sum().item<double>());
}

// Query rows of one group under each other, (B·G, group·Lq, D), so that both
// products read each key/value head once, uncopied.
at::Tensor fold_groups(const at::Tensor& rows, const Heads& heads) {
  if (heads.num_heads == heads.num_kv_heads) return rows;
  const auto group = heads.num_heads / heads.num_kv_heads;
  return rows.reshape_symint({heads.batch_size * heads.num_kv_heads,
                              group * rows.sym_size(1), rows.sym_size(2)});
}

at::Tensor unfold_groups(const at::Tensor& rows, const Heads& heads) {
  if (heads.num_heads == heads.num_kv_heads) return rows;
  return rows.view_symint({heads.batch_size * heads.num_heads,
                           heads.query.sym_size(1), rows.sym_size(-1)});
}

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

// (B·H, Lq, X) → (B, H, Lq, X)
at::Tensor by_head(const at::Tensor& rows, const Heads& heads) {
  return rows.unflatten_symint(0, {heads.batch_size, heads.num_heads});
}

// q·kᵀ, (B·H, Lq, Lk). A key that is not finite must not reach the queries that
// do not see it, not even as 0·NaN in their gradient: its column is computed
// apart, cut off from the query, and masked later.
at::Tensor query_key_product(const Heads& heads, const at::Tensor& query,
                             const at::Tensor& key, bool masked) {
  const at::Tensor rows = fold_groups(query, heads);
  if (!masked || all_finite(key)) {
    return unfold_groups(at::bmm(rows, key.transpose(-2, -1)), heads);
  }
  const at::Tensor finite = at::isfinite(key).all(-1, /*keepdim=*/true);
  const at::Tensor finite_keys = key.masked_fill(finite.logical_not(), 0.0);
  const at::Tensor scores = at::where(
      finite.transpose(-2, -1), at::bmm(rows, finite_keys.transpose(-2, -1)),
      at::bmm(rows.detach(), key.transpose(-2, -1)));
  return unfold_groups(scores, heads);
}

// weights·v, (B·H, Lq, Dv). A zero weight does not silence a NaN or infinite
// value in a product, so those are taken out and given back, as IEEE sums would
// have them, to the rows that see them.
at::Tensor weights_value_product(const Heads& heads, const at::Tensor& weights,
                                 const at::Tensor& value,
                                 const at::Tensor& visible) {
  const at::Tensor rows = fold_groups(weights, heads);
  if (!visible.defined() || all_finite(value)) {
    return unfold_groups(at::bmm(rows, value), heads);
  }
  const at::Tensor finite = at::isfinite(value);
  const at::Tensor out =
      at::bmm(rows, value.masked_fill(finite.logical_not(), 0.0));

  const at::Tensor seen = fold_groups(
      visible.expand_as(by_head(weights, heads)).flatten(0, 1), heads);
  const at::Tensor kinds = at::cat(
      {value.isnan(), value.eq(kInfinity), value.eq(-kInfinity)}, /*dim=*/-1);
  const auto present =
      at::bmm(seen.to(out.scalar_type()), kinds.to(out.scalar_type()))
          .gt(0)
          .chunk(3, /*dim=*/-1);
  return unfold_groups(
      out.masked_fill(present[0], std::nan(""))
          .add(at::zeros_like(out).masked_fill(present[1], kInfinity))
          .add(at::zeros_like(out).masked_fill(present[2], -kInfinity)),
      heads);
}

// Queries that see no key, 0 where they are not finite: their scores are
// masked, but in the gradient of the keys they would stand as 0·NaN.
at::Tensor seeing_queries(const Heads& heads, const at::Tensor& query,
                          const at::Tensor& visible) {
  if (!visible.defined() || all_finite(query)) return query;
  const at::Tensor blind =
      visible.any(-1, /*keepdim=*/true)
          .logical_not()
          .expand_symint(
              {heads.batch_size, heads.num_heads, query.sym_size(1), 1});
  return query.masked_fill(blind.flatten(0, 1), 0.0);
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
at::Tensor apply_rules(at::Tensor scores, const ScoreRules& rules,
                       const ScoreShape& shape, const at::Tensor& visible) {
  const at::Tensor blocked =
      visible.defined() ? visible.logical_not() : at::Tensor();
  if (rules.softcap) {
    choose_vector_functions();
    // tanh' of a NaN that nobody sees would still be NaN, times 0.
    if (blocked.defined()) scores = scores.masked_fill(blocked, 0.0);
    // Beyond these bounds it or its inverse would leave float32's range.
    const double softcap = std::clamp(*rules.softcap, 1e-30, 1e30);
    scores = (scores / softcap).tanh() * softcap;
  }
  if (rules.mask.bias.defined()) {
    scores = scores + rules.mask.bias.to(scores.scalar_type());
  }
  if (rules.alibi_slopes.defined()) {
    const at::Tensor keys =
        at::arange(at::Scalar(shape.key_length),
                   at::TensorOptions(at::kLong).device(shape.device));
    const at::Tensor distance =
        (query_positions(rules.mask, shape) - keys).abs();
    scores = scores - rules.alibi_slopes.to(scores.scalar_type())
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
at::Tensor scaled_scores(const Heads& heads, const ScoreRules& rules,
                         const at::Tensor& visible) {
  const auto dtype = at::toOpMathType(heads.query.scalar_type());
  return query_key_product(
      heads,
      seeing_queries(heads, cast(heads.query, dtype), visible) * rules.scale,
      cast(heads.key, dtype), visible.defined());
}

// weights (B·H, Lq, Lk)
at::Tensor drop(const at::Tensor& weights, const ScoreRules& rules) {
  if (rules.dropout_factors.defined()) {
    return weights * rules.dropout_factors.reshape_symint(weights.sym_sizes());
  }
  if (rules.dropout_p <= 0.0) return weights;
  return at::dropout(weights, rules.dropout_p, /*train=*/true);
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

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  return !tensor.is_meta() && !tensor.is_nested() &&
         !tensor.key_set().has_any(c10::DispatchKeySet(
             {DispatchKey::Python, DispatchKey::Functionalize,
              DispatchKey::FuncTorchBatched,
              DispatchKey::FuncTorchGradWrapper}));
}

bool has_values(const at::Tensor& tensor) {
  return is_plain(tensor) && !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

at::Tensor expand_groups(const at::Tensor& rows, const Heads& heads) {
  if (heads.num_heads == heads.num_kv_heads) return rows;
  return rows.unsqueeze(1)
      .expand_symint({-1, heads.num_heads / heads.num_kv_heads, -1, -1})
      .flatten(0, 1);
}

Attention attention(const Heads& given, const ScoreRules& rules,
                    bool with_logsumexp) {
  const Heads heads = foldable(given);
  // The types chosen here are the right ones under autocast too.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const auto dtype = heads.query.scalar_type();
  const ScoreShape shape = shape_of(heads);
  const at::Tensor visible = visible_keys(rules.mask, shape);
  const bool needs_rules = visible.defined() || rules.softcap ||
                           rules.alibi_slopes.defined() ||
                           rules.sinks.defined() || with_logsumexp;

  at::Tensor scores = scaled_scores(heads, rules, visible);
  Attention result;
  if (needs_rules) {
    scores = apply_rules(by_head(scores, heads), rules, shape, visible);
    if (rules.sinks.defined()) scores = append_sinks(scores, rules.sinks);
    if (with_logsumexp) result.logsumexp = logsumexp_rows(scores);
  }
  // Without rules, only infinite inputs make a row of −inf; IEEE says NaN
  // there.
  at::Tensor weights =
      needs_rules ? at::_safe_softmax(scores, -1) : at::softmax(scores, -1);
  if (rules.sinks.defined())
    weights = weights.slice_symint(-1, 0, shape.key_length);
  if (needs_rules) weights = weights.flatten(0, 1);
  weights = drop(weights, rules);

  result.out = cast(
      weights_value_product(
          heads, weights, cast(heads.value, at::toOpMathType(dtype)), visible),
      dtype);
  result.weights = cast(weights, dtype);
  return result;
}

at::Tensor weights_from_logsumexp(const Heads& given, const ScoreRules& rules,
                                  const at::Tensor& logsumexp) {
  const Heads heads = foldable(given);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const ScoreShape shape = shape_of(heads);
  const at::Tensor visible = visible_keys(rules.mask, shape);
  const at::Tensor scores =
      apply_rules(by_head(scaled_scores(heads, rules, visible), heads), rules,
                  shape, visible);
  // −inf − −inf would be NaN where a row sees nothing.
  const at::Tensor shift =
      logsumexp.masked_fill(logsumexp.eq(-kInfinity), 0.0).unsqueeze(-1);
  choose_vector_functions();
  const at::Tensor exp = (scores - shift).exp();
  // What the sum of a row should be 1 for, if its logsumexp were not rounded.
  at::Tensor sum = exp.detach().sum(-1, /*keepdim=*/true);
  if (rules.sinks.defined()) {
    sum = sum + (rules.sinks.detach().to(sum.scalar_type()).view({-1, 1, 1}) -
                 shift.detach())
                    .exp();
  }
  const at::Tensor anew =
      shift.detach().abs().gt(kernels::kLargeLogsumexp).logical_and(sum.gt(0));
  const at::Tensor weights = exp / sum.masked_fill(anew.logical_not(), 1.0);
  return cast(drop(weights.flatten(0, 1), rules), heads.query.scalar_type());
}

Attention attention_as_pytorch(const Heads& heads,
                               const at::Tensor& additive_mask,
                               double dropout_p) {
  const auto head_dim = static_cast<double>(
      heads.query.sym_size(-1).guard_int(__FILE__, __LINE__));
  const at::Tensor query = heads.query * std::sqrt(1.0 / head_dim);
  const at::Tensor keys = heads.key.transpose(-2, -1);
  // baddbmm, not bmm and an addition: the mask enters before the rounding.
  const at::Tensor scores = additive_mask.defined()
                                ? at::baddbmm(additive_mask, query, keys)
                                : at::bmm(query, keys);
  at::Tensor weights = at::softmax(scores, -1);
  if (dropout_p > 0.0) weights = at::dropout(weights, dropout_p, true);
  return {at::bmm(weights, heads.value), weights, {}};
}

}  // namespace multihead::exact
