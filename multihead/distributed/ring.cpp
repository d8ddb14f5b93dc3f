// SPDX-License-Identifier: MIT
//
// Ring attention. W processes hold the tokens of one sequence; queries stay
// where they are, keys and values go round.
//
//   step t of process r   attends to the keys of process r − t, while those of
//                         process r − t − 1 are on their way;
//   forward               merges each result with what it has (merge.cpp);
//   backward              dK and dV go round with their keys, in the compute
//                         type: each process adds its share, and after W steps
//                         they are home.
//
// Sent per process, in elements: forward (W − 1)·|K, V|; backward as much
// again, and W·|dK, dV|. Held: its own keys and two others'.
//
// A process's tokens may be two pieces of the sequence (TokenOrder), so a step
// is up to four calls of the kernels. A part that the rules hide (the future,
// what a window has left behind) is not computed. A sink belongs to no key: it
// is a part without keys, the first one. Every row therefore has a result,
// whatever it sees.
#include "multihead/distributed/ring.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <utility>

#include "multihead/attention/checks.h"
#include "multihead/attention/layout.h"
#include "multihead/attention/route.h"
#include "multihead/attention/storage.h"
#include "multihead/attention/varlen.h"
#include "multihead/distributed/agreement.h"
#include "multihead/distributed/exchange.h"
#include "multihead/distributed/merge.h"
#include "multihead/distributed/parts.h"
#include "multihead/optional_tensor.h"

namespace multihead::distributed {
namespace {

using at::Tensor;

at::ScalarType compute_type(const Tensor& query) {
  return at::toOpMathType(query.scalar_type());
}

// Keys and values of one process, one after the other in one dense tensor.
class KeysAndValues {
 public:
  KeysAndValues(const Tensor& key, const Tensor& value)
      : memory_(at::cat({key.reshape(-1), value.reshape(-1)})) {
    view(key.sizes(), value.sizes());
  }
  /// Empty, for `length` tokens like these.
  KeysAndValues(const KeysAndValues& like, int64_t length) {
    auto keys = like.key.sizes().vec(), values = like.value.sizes().vec();
    keys[2] = values[2] = length;
    memory_ = at::empty(
        {c10::multiply_integers(keys) + c10::multiply_integers(values)},
        like.memory_.options());
    view(keys, values);
  }
  /// Zeros of another type, for the gradients of these.
  KeysAndValues zeros(at::ScalarType dtype) const {
    return {at::zeros_like(key, key.options().dtype(dtype)),
            at::zeros_like(value, value.options().dtype(dtype))};
  }

  const Tensor& memory() const { return memory_; }
  Tensor key, value;

 private:
  void view(at::IntArrayRef keys, at::IntArrayRef values) {
    const int64_t count = c10::multiply_integers(keys);
    key = memory_.narrow(0, 0, count).view(keys);
    value = memory_.narrow(0, count, memory_.numel() - count).view(values);
  }
  Tensor memory_;
};

// Goes round: at step t it is that of process r − t.
class Ring {
 public:
  Ring(const Group& group, const Lengths& lengths, KeysAndValues own)
      : group_(group), lengths_(lengths), here_(std::move(own)) {}

  const KeysAndValues& here() const { return here_; }
  int owner(int step) const {
    return (group_.rank() - step + group_.size()) % group_.size();
  }
  /// Sends what is here on; what comes is that of step + 1.
  void start(int step) {
    next_.emplace(here_, lengths_[owner(step + 1)]);
    shift_.emplace(group_, here_.memory(), next_->memory(), tag(step));
  }
  void finish() {
    shift_->wait();
    here_ = *std::move(next_);
    shift_.reset();
  }
  /// Two rings at once keep apart by their tags.
  void is_second() { second_ = true; }

 private:
  int tag(int step) const { return 2 * step + (second_ ? 1 : 0); }
  const Group& group_;
  const Lengths& lengths_;
  KeysAndValues here_;
  std::optional<KeysAndValues> next_;
  std::optional<Shift> shift_;
  bool second_ = false;
};

Tensor rows(const Tensor& x, const Span& span) {
  return x.narrow(2, span.row, span.length);
}

// f(queries, keys) for each part of a step that is seen.
template <class F>
void for_each_part(const Whole& whole, int rank, int owner_of_keys,
                   const F& f) {
  const auto all_keys = whole.keys_of(owner_of_keys);
  for (const Span& queries : whole.queries_of(rank)) {
    for (const Span& keys : all_keys) {
      if (!whole.hides(queries, keys)) f(queries, keys);
    }
  }
}

// key_mask (B, Lk) of all keys, in the order of the sequence.
Tensor mask_of_all_keys(const Group& group, TokenOrder order,
                        const Places& places, const Tensor& key_mask) {
  if (!key_mask.defined()) return {};
  const Lengths& lengths = places.key_lengths;
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  Tensor padded = at::zeros({key_mask.size(0), longest}, key_mask.options());
  padded.narrow(1, 0, key_mask.size(1)).copy_(key_mask);
  const auto gathered = group.all_gather(padded);
  Tensor all =
      at::empty({key_mask.size(0), total(lengths)}, key_mask.options());
  for (int r = 0; r < group.size(); ++r) {
    for (const Span& span : spans_of(order, lengths, r)) {
      all.narrow(1, span.position, span.length)
          .copy_(gathered[r].narrow(1, span.row, span.length));
    }
  }
  return all;
}

AttentionOptions sinks_alone(const AttentionOptions& options) {
  return {.enable_gqa = options.enable_gqa, .sinks = options.sinks};
}

Tensor no_rows(const Tensor& x) { return x.narrow(2, 0, 0); }

// Where documents begin; neither: a batch.
struct Documents {
  const std::optional<Tensor>& cu_seqlens_q;
  const std::optional<Tensor>& cu_seqlens_k;
};

void check_documents(const char* fn, const Tensor& query,
                     const AttentionOptions& options,
                     const Documents& documents) {
  TORCH_CHECK(query.size(0) == 1, fn,
              ": query must be (1, H, T, D) with cu_seqlens_q, got ",
              query.sizes());
  TORCH_CHECK(documents.cu_seqlens_k, fn,
              ": cu_seqlens_k must be given with cu_seqlens_q, got None");
  TORCH_CHECK(!options.attn_mask.defined() && !options.key_mask.defined() &&
                  !options.query_offset.defined(),
              fn,
              ": attn_mask, key_mask and query_offset must be None with "
              "cu_seqlens_q");
}

// What a process can say by itself about its arguments.
void check(const Tensor& query, const Tensor& key, const Tensor& value,
           const AttentionOptions& options, const Documents& documents) {
  constexpr auto* fn = "ring_attention";
  check_defined(fn, query, key, value);
  TORCH_CHECK(query.dim() == 4, fn, ": query must be (B, H, Lq, D), got ",
              query.sizes());
  AttentionOptions own = options;  // the others are of all processes' tokens
  own.attn_mask = own.key_mask = own.key_lengths = Tensor();
  if (documents.cu_seqlens_q) {
    check_documents(fn, query, options, documents);
    own.alibi_slopes = Tensor();
  }
  check_fused_attention(query, key, value, own);
  check_not_stored(fn, query, key, value);
  const Tensor& mask = options.attn_mask;
  TORCH_CHECK(!mask.defined() || mask.scalar_type() == at::kBool ||
                  mask.is_floating_point(),
              fn, ": attn_mask must be bool or floating point, got ",
              mask.scalar_type());
  const Tensor& keep = options.key_mask;
  TORCH_CHECK(
      !keep.defined() ||
          (keep.scalar_type() == at::kBool && keep.dim() == 2 &&
           keep.size(0) == query.size(0) && keep.size(1) == key.size(2)),
      fn, ": key_mask must be bool (B, Lk) of this process's keys, (",
      query.size(0), ", ", key.size(2), "), got ", keep.scalar_type(), " ",
      keep.sizes());
  check_route(fn, route_unless(kernel_refusal({&query, &key, &value, &mask},
                                              query.scalar_type()),
                               Way::kRefused));
}

// What is the same everywhere, as agree() has found, and of all tokens. Where
// documents begin, as numbers.
VarlenPlaces check_of_all(const Tensor& query, const Tensor& key,
                          const Tensor& value, const AttentionOptions& options,
                          const Documents& documents, const Places& places) {
  if (documents.cu_seqlens_q) {
    const auto as_rows = [](const Tensor& x, const Lengths& lengths) {
      return x.new_empty({}).expand({total(lengths), x.size(1), x.size(3)});
    };
    const VarlenRows sequences{
        *documents.cu_seqlens_q, *documents.cu_seqlens_k, {}};
    const Tensor q = as_rows(query, places.query_lengths);
    const Tensor k = as_rows(key, places.key_lengths);
    check_varlen(q, k, as_rows(value, places.key_lengths), sequences, options);
    return places_of(q, k, sequences, options);
  }
  const auto as_long = [&](const Tensor& x) {
    auto sizes = x.sizes().vec();
    sizes[2] = total(places.key_lengths);
    return x.new_empty({}).expand(sizes);
  };
  check_fused_attention(
      no_rows(query), as_long(key), as_long(value),
      {.enable_gqa = options.enable_gqa, .key_lengths = options.key_lengths});
  return {};
}

Whole whole_of(const Group& group, TokenOrder order, const Places& places,
               AttentionOptions options, const VarlenPlaces& documents) {
  options.key_mask = mask_of_all_keys(group, order, places, options.key_mask);
  return {options, order, places, documents.query_starts, documents.key_starts};
}

std::tuple<Tensor, Tensor, Tensor> forward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const AttentionOptions& options, std::string_view group_name,
    std::string_view order_name, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& state) {
  const Group group{std::string(group_name)};
  const TokenOrder order = token_order_from_name(order_name);
  const Documents documents{cu_seqlens_q, cu_seqlens_k};
  std::exception_ptr refused;
  try {
    check(query, key, value, options, documents);
    check_dropout_state(options.dropout_p, state);
  } catch (...) {
    refused = std::current_exception();
  }
  const Bounds bounds{or_undefined(cu_seqlens_q), or_undefined(cu_seqlens_k)};
  const Places places =
      agree(group, order, {query, key, value}, options, bounds, state, refused);
  const Whole whole =
      whole_of(group, order, places, options,
               check_of_all(query, key, value, options, documents, places));

  const auto [nothing, sink] = call::run<call::FusedAttention>(
      query, no_rows(key), no_rows(value), sinks_alone(options),
      std::optional<Tensor>());
  const Tensor out =
      at::zeros(nothing.sizes(), query.options().dtype(compute_type(query)));
  const Tensor logsumexp = sink.clone();
  Ring ring(group, places.key_lengths, KeysAndValues(key, value));
  for (int step = 0; step < group.size(); ++step) {
    const bool is_last = step + 1 == group.size();
    if (!is_last) ring.start(step);
    const KeysAndValues& here = ring.here();
    for_each_part(whole, group.rank(), ring.owner(step),
                  [&](const Span& q, const Span& k) {
                    const auto [part, lse] = call::run<call::FusedAttention>(
                        rows(query, q), rows(here.key, k), rows(here.value, k),
                        whole.of_part(q, k),
                        whole.dropout_state(q, k, query.size(1)));
                    merge_into(rows(out, q), rows(logsumexp, q), part, lse);
                  });
    if (!is_last) ring.finish();
  }
  return {out, logsumexp, places.as_tensor()};
}

// Sums of the gradients that stay on their process.
class OwnGradients {
 public:
  OwnGradients(const Tensor& query, const AttentionOptions& options,
               const call::Needs& needs)
      : query_(at::zeros(query.sizes(),
                         query.options().dtype(compute_type(query)))) {
    size_t i = 3;
    fields::for_each_differentiable(options, [&](const Tensor& x) {
      if (needs[i] && x.defined() && x.is_floating_point()) {
        options_[i - 3] =
            at::zeros(x.sizes(), x.options().dtype(compute_type(x)));
      }
      ++i;
    });
  }

  Tensor query(const Span& span) const { return rows(query_, span); }
  /// That of the i-th option that can have one; undefined: not wanted.
  const Tensor& option(size_t i) const { return options_[i]; }

  /// As the arguments are.
  call::Gradients as(const Tensor& query, const Tensor& key,
                     const Tensor& value, const KeysAndValues& keys,
                     const AttentionOptions& options,
                     const call::Needs& needs) const {
    std::array<Tensor, std::tuple_size_v<call::Needs>> all;
    const auto like = [](const Tensor& x, const Tensor& sum) {
      return at::empty_like(x).copy_(sum);
    };
    if (needs[0]) all[0] = like(query, query_);
    if (needs[1]) all[1] = like(key, keys.key);
    if (needs[2]) all[2] = like(value, keys.value);
    size_t i = 0;
    fields::for_each_differentiable(options, [&](const Tensor& x) {
      if (options_[i].defined()) all[i + 3] = options_[i].to(x.scalar_type());
      ++i;
    });
    return std::tuple_cat(std::move(all));
  }

 private:
  Tensor query_;
  std::array<Tensor, fields::kDifferentiableCount> options_;
};

// What the kernels' backward is given beside keys and values, for some queries:
// out as the kernels take it, and by dlogsumexp what its rounding has changed.
struct BackwardRows {
  Tensor query, dout, out, logsumexp, dlogsumexp;

  BackwardRows of(const Span& q) const {
    return {rows(query, q), rows(dout, q), rows(out, q), rows(logsumexp, q),
            rows(dlogsumexp, q)};
  }
};

BackwardRows backward_rows(const Tensor& query, const Tensor& dout,
                           const Tensor& out, const Tensor& logsumexp,
                           const std::optional<Tensor>& dlogsumexp) {
  const auto dtype = query.scalar_type();
  BackwardRows x{query, dout.to(dtype), out.to(dtype), logsumexp,
                 dlogsumexp ? *dlogsumexp : at::zeros_like(logsumexp)};
  if (dtype != out.scalar_type()) {
    // Δ = Σ out·dout − dlogsumexp is to be that of `out`, not of its 16 bits.
    const Tensor rounded = x.out.to(out.scalar_type()) - out;
    x.dlogsumexp = x.dlogsumexp + (rounded * x.dout).sum(-1);
  }
  return x;
}

call::Gradients backward_of(const BackwardRows& x, const Tensor& key,
                            const Tensor& value, const call::Needs& needs,
                            const AttentionOptions& options,
                            const std::optional<Tensor>& state) {
  return call::run<call::FusedAttentionBackward>(
      x.dout, std::optional(x.dlogsumexp), x.query, key, value, x.out,
      x.logsumexp, needs, options, state, /*is_part=*/true);
}

Tensor gradient_of_sinks(const BackwardRows& own, const Tensor& no_key,
                         const Tensor& no_value,
                         const AttentionOptions& options) {
  call::Needs needs{};
  needs.back() = true;
  return std::get<std::tuple_size_v<call::Needs> - 1>(
      backward_of(own, no_key, no_value, needs, sinks_alone(options), {}));
}

call::Gradients backward(const Tensor& dout,
                         const std::optional<Tensor>& dlogsumexp,
                         const Tensor& query, const Tensor& key,
                         const Tensor& value, const Tensor& out,
                         const Tensor& logsumexp, const Tensor& places_words,
                         call::Needs needs, const AttentionOptions& options,
                         std::string_view group_name,
                         std::string_view order_name,
                         const std::optional<Tensor>& cu_seqlens_q,
                         const std::optional<Tensor>& cu_seqlens_k) {
  const Group group{std::string(group_name)};
  const TokenOrder order = token_order_from_name(order_name);
  const Places places = Places::from_tensor(places_words);
  const Whole whole =
      whole_of(group, order, places, options,
               check_of_all(query, key, value, options,
                            {cu_seqlens_q, cu_seqlens_k}, places));
  const BackwardRows own =
      backward_rows(query, dout, out, logsumexp, dlogsumexp);
  const OwnGradients sums(query, options, needs);
  const Tensor &dmask = sums.option(0), &dslopes = sums.option(1),
               &dsinks = sums.option(2);
  if (dsinks.defined()) {
    dsinks.copy_(gradient_of_sinks(own, no_rows(key), no_rows(value), options));
  }
  call::Needs of_part{true, true, true, dmask.defined(), dslopes.defined()};
  Ring ring(group, places.key_lengths, KeysAndValues(key, value));
  Ring gradients(group, places.key_lengths,
                 ring.here().zeros(compute_type(query)));
  gradients.is_second();
  for (int step = 0; step < group.size(); ++step) {
    const bool is_last = step + 1 == group.size();
    if (!is_last) ring.start(step);
    const KeysAndValues& here = ring.here();
    KeysAndValues shares = here.zeros(compute_type(query));
    for_each_part(whole, group.rank(), ring.owner(step),
                  [&](const Span& q, const Span& k) {
                    const AttentionOptions rules = whole.of_part(q, k);
                    const auto [dq, dk, dv, dm, ds, unused] =
                        backward_of(own.of(q), rows(here.key, k),
                                    rows(here.value, k), of_part, rules,
                                    whole.dropout_state(q, k, query.size(1)));
                    sums.query(q).add_(dq);
                    rows(shares.key, k).add_(dk);
                    rows(shares.value, k).add_(dv);
                    if (dm.defined()) whole.mask_of_part(dmask, q, k).add_(dm);
                    if (ds.defined()) whole.slopes_of_part(dslopes, q).add_(ds);
                  });
    // Those of the process before have come while this one computed.
    if (step > 0) gradients.finish();
    gradients.here().key.add_(shares.key);
    gradients.here().value.add_(shares.value);
    if (group.size() > 1) gradients.start(step);
    if (!is_last) ring.finish();
  }
  if (group.size() > 1) gradients.finish();
  return sums.as(query, key, value, gradients.here(), options, needs);
}

std::tuple<Tensor, Tensor, Tensor> forward_meta(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const AttentionOptions& /*options*/, std::string_view group_name,
    std::string_view /*order*/, const std::optional<Tensor>& /*cu_seqlens_q*/,
    const std::optional<Tensor>& /*cu_seqlens_k*/,
    const std::optional<Tensor>& /*state*/) {
  const Group group{std::string(group_name)};
  auto sizes = query.sym_sizes().vec();
  sizes.back() = value.sym_size(-1);
  const auto dtype = compute_type(query);
  return {at::empty_symint(sizes, query.options().dtype(dtype)),
          empty_logsumexp(query),
          at::empty({2 * group.size() + 2}, query.options().dtype(at::kLong))};
}

call::Gradients backward_meta(
    const Tensor& /*dout*/, const std::optional<Tensor>& /*dlogsumexp*/,
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& /*out*/, const Tensor& /*logsumexp*/,
    const Tensor& /*places*/, call::Needs needs,
    const AttentionOptions& options, std::string_view /*group*/,
    std::string_view /*order*/, const std::optional<Tensor>& /*cu_seqlens_q*/,
    const std::optional<Tensor>& /*cu_seqlens_k*/) {
  std::array<Tensor, std::tuple_size_v<call::Needs>> all;
  if (needs[0]) all[0] = at::empty_like(query);
  if (needs[1]) all[1] = at::empty_like(key);
  if (needs[2]) all[2] = at::empty_like(value);
  size_t i = 3;
  fields::for_each_differentiable(options, [&](const Tensor& x) {
    if (needs[i] && x.defined() && x.is_floating_point()) {
      all[i] = at::empty_like(x);
    }
    ++i;
  });
  return std::tuple_cat(std::move(all));
}

}  // namespace

TORCH_LIBRARY_IMPL(multihead, CPU, m) {
  using fields::implementation;
  m.impl("fused_ring_attention", implementation<&forward>);
  m.impl("fused_ring_attention_backward", implementation<&backward>);
}
TORCH_LIBRARY_IMPL(multihead, Meta, m) {
  using fields::implementation;
  m.impl("fused_ring_attention", implementation<&forward_meta>);
  m.impl("fused_ring_attention_backward", implementation<&backward_meta>);
}

}  // namespace multihead::distributed

namespace multihead {

namespace {

std::tuple<at::Tensor, at::Tensor> ring(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionOptions& options, const std::string& group, TokenOrder order,
    const at::Tensor& cu_seqlens_q = {}, const at::Tensor& cu_seqlens_k = {}) {
  const std::string_view name =
      order == TokenOrder::kContiguous ? "contiguous" : "head_tail";
  auto [out, logsumexp, places] = call::run<call::FusedRingAttention>(
      query, key, value, options, std::string_view(group), name,
      optional(cu_seqlens_q), optional(cu_seqlens_k),
      call::draw_dropout_state(options.dropout_p));
  return {out.to(query.scalar_type()), logsumexp};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> ring_attention_with_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::string& group, const AttentionOptions& options,
    TokenOrder order) {
  check_defined("ring_attention", query, key, value);
  const auto batched = [](const at::Tensor& x) {
    return call::autocast(x.dim() == 3 ? x.unsqueeze(0) : x);
  };
  auto [out, logsumexp] =
      ring(batched(query), batched(key), batched(value), options, group, order);
  if (query.dim() == 3) return {out.squeeze(0), logsumexp.squeeze(0)};
  return {out, logsumexp};
}

at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const std::string& group,
                          const AttentionOptions& options, TokenOrder order) {
  return std::get<0>(
      ring_attention_with_lse(query, key, value, group, options, order));
}

std::tuple<at::Tensor, at::Tensor> ring_varlen_attention_with_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
    const std::string& group, const VarlenOptions& options, TokenOrder order) {
  static constexpr auto* fn = "ring_attention";
  check_defined(fn, query, key, value);
  TORCH_CHECK(!options.block_table.defined(), fn,
              ": block_table must be None, got one");
  const auto heads_first = [](const at::Tensor& x) {
    TORCH_CHECK(x.dim() == 3, fn,
                ": query, key and value must be (T, heads, width) with "
                "cu_seqlens, got ",
                x.sizes());
    return call::autocast(x.transpose(0, 1).unsqueeze(0));
  };
  const AttentionOptions rules{.dropout_p = options.dropout_p,
                               .is_causal = options.is_causal,
                               .scale = options.scale,
                               .enable_gqa = true,
                               .causal_alignment = options.causal_alignment,
                               .window = options.window,
                               .key_lengths = options.key_lengths,
                               .softcap = options.softcap,
                               .alibi_slopes = options.alibi_slopes,
                               .sinks = options.sinks};
  const auto [out, logsumexp] =
      ring(heads_first(query), heads_first(key), heads_first(value), rules,
           group, order, cu_seqlens_q, cu_seqlens_k);
  return {out.squeeze(0).transpose(0, 1), logsumexp.squeeze(0)};
}

}  // namespace multihead
