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
#include "multihead/distributed/attend.h"
#include "multihead/distributed/checks.h"
#include "multihead/distributed/exchange.h"
#include "multihead/distributed/merge.h"
#include "multihead/distributed/parts.h"
#include "multihead/optional_tensor.h"

namespace multihead::distributed {
namespace {

using at::Tensor;

constexpr auto* kRing = "ring_attention";

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

AttentionOptions sinks_alone(const AttentionOptions& options) {
  return {.enable_gqa = options.enable_gqa, .sinks = options.sinks};
}

Tensor no_rows(const Tensor& x) { return x.narrow(2, 0, 0); }

Whole whole_of(const Group& group, TokenOrder order, const Places& places,
               const OwnCall& call) {
  const VarlenPlaces documents = check_of_all(call, places);
  AttentionOptions options = call.options;
  options.key_mask =
      mask_of_all_keys(group, order, places.key_lengths, options.key_mask);
  return {options, order, places, documents.query_starts, documents.key_starts};
}

std::tuple<Tensor, Tensor, Tensor> forward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const AttentionOptions& options, std::string_view group_name,
    std::string_view order_name, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& state) {
  const Group group(kRing, group_name);
  const TokenOrder order = token_order_from_name(order_name);
  const OwnCall call{query, key, value, options, {cu_seqlens_q, cu_seqlens_k},
                     state};
  const Places places = agree_on(group, order, Method::kRing, call);
  const Whole whole = whole_of(group, order, places, call);

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
                        whole.of_part(q, k), whole.dropout_state(q, k));
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
  const Group group(kRing, group_name);
  const TokenOrder order = token_order_from_name(order_name);
  const Places places = Places::from_tensor(places_words);
  const std::optional<Tensor> no_state;
  const Whole whole = whole_of(
      group, order, places,
      {query, key, value, options, {cu_seqlens_q, cu_seqlens_k}, no_state});
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
                    const auto [dq, dk, dv, dm, ds, unused] = backward_of(
                        own.of(q), rows(here.key, k), rows(here.value, k),
                        of_part, rules, whole.dropout_state(q, k));
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
  const Group group(kRing, group_name);
  auto sizes = query.sym_sizes().vec();
  sizes.back() = value.sym_size(-1);
  const auto dtype = compute_type(query);
  return {at::empty_symint(sizes, query.options().dtype(dtype)),
          empty_logsumexp(query),
          at::empty({Places::words(group.size())},
                    query.options().dtype(at::kLong))};
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

std::string_view Location::order_name() const {
  return order == TokenOrder::kContiguous ? "contiguous" : "head_tail";
}

std::tuple<Tensor, Tensor> ring(const OwnCall& call, const Location& location) {
  const auto [out, logsumexp, places] = call::run<call::FusedRingAttention>(
      call.query, call.key, call.value, call.options,
      std::string_view(location.group), location.order_name(),
      call.documents.cu_seqlens_q, call.documents.cu_seqlens_k,
      call.dropout_state);
  return {out.to(call.query.scalar_type()), logsumexp};
}

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
