// SPDX-License-Identifier: MIT
#include "multihead/attention/nonfinite.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cmath>

#include "multihead/attention/mask.h"

namespace multihead {
namespace {

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

}  // namespace

// The column of a key that is not finite is computed apart, cut off from the
// query, and masked later.
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

// Values that are not finite are taken out and given back, as IEEE sums would
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

}  // namespace multihead
