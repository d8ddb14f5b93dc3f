// SPDX-License-Identifier: MIT
//
// Attention by heads over a sequence that lies on W processes by tokens. One
// exchange gives each process all tokens of H/W heads, the kernels compute
// those as one process would, to the bit, and another exchange brings the
// output back to its tokens.
// Source: "DeepSpeed Ulysses: System Optimizations for Enabling Training of
// Extreme Long Sequence Transformer Models".
//
// Sent per process, in elements: (W − 1)/W · (|Q| + |K| + |V| + |O|) forward,
// and as much again for their gradients. Whatever the rules hide, all processes
// have the same work.
#include "multihead/distributed/ulysses.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include "multihead/attention/call.h"
#include "multihead/distributed/attend.h"
#include "multihead/distributed/checks.h"
#include "multihead/optional_tensor.h"

namespace multihead::distributed {
namespace {

using at::Tensor;

constexpr auto* kUlysses = "ulysses_attention";

std::vector<int64_t> with(const Tensor& x, int64_t heads, int64_t tokens) {
  auto sizes = x.sizes().vec();
  sizes[1] = heads;
  sizes[2] = tokens;
  return sizes;
}

// A process's tokens, moved from all of the sequence.
Tensor own_tokens(const Tensor& all, const std::vector<Span>& spans) {
  std::vector<Tensor> pieces{all.narrow(2, 0, 0)};
  for (const Span& span : spans) {
    pieces.push_back(all.narrow(2, span.position, span.length));
  }
  return at::cat(pieces, 2);
}

Tensor tokens_to_heads(const Tensor& x, std::string_view group_name,
                       std::string_view order_name, at::IntArrayRef tokens) {
  const Group group(kUlysses, group_name);
  const TokenOrder order = token_order_from_name(order_name);
  const Lengths lengths = tokens.vec();
  const int64_t heads = x.size(1) / group.size();
  std::vector<Tensor> parts;
  std::vector<std::vector<int64_t>> sizes;
  for (int r = 0; r < group.size(); ++r) {
    parts.push_back(x.narrow(1, r * heads, heads));
    sizes.push_back(with(x, heads, lengths[r]));
  }
  const auto received = group.all_to_all(parts, sizes);
  Tensor all = at::empty(with(x, heads, total(lengths)), x.options());
  for (int r = 0; r < group.size(); ++r) {
    for (const Span& span : spans_of(order, lengths, r)) {
      all.narrow(2, span.position, span.length)
          .copy_(received[r].narrow(2, span.row, span.length));
    }
  }
  return all;
}

Tensor heads_to_tokens(const Tensor& x, std::string_view group_name,
                       std::string_view order_name, at::IntArrayRef tokens) {
  const Group group(kUlysses, group_name);
  const TokenOrder order = token_order_from_name(order_name);
  const Lengths lengths = tokens.vec();
  std::vector<Tensor> parts;
  for (int r = 0; r < group.size(); ++r) {
    parts.push_back(own_tokens(x, spans_of(order, lengths, r)));
  }
  const std::vector sizes(parts.size(),
                          with(x, x.size(1), lengths[group.rank()]));
  return at::cat(group.all_to_all(parts, sizes), 1);
}

Tensor tokens_to_heads_meta(const Tensor& x, std::string_view group_name,
                            std::string_view /*order*/,
                            at::IntArrayRef tokens) {
  const Group group(kUlysses, group_name);
  return x.new_empty(with(x, x.size(1) / group.size(), total(tokens.vec())));
}

Tensor heads_to_tokens_meta(const Tensor& x, std::string_view group_name,
                            std::string_view /*order*/,
                            at::IntArrayRef tokens) {
  const Group group(kUlysses, group_name);
  return x.new_empty(with(x, x.size(1) * group.size(), tokens[group.rank()]));
}

// The options of a call with heads `first` and following, `count` of them.
AttentionOptions of_heads(AttentionOptions options, int64_t first,
                          int64_t count) {
  for (Tensor* x : {&options.alibi_slopes, &options.sinks}) {
    if (x->defined()) *x = x->narrow(-1, first, count);
  }
  return options;
}

}  // namespace

std::tuple<Tensor, Tensor> ulysses(const OwnCall& call,
                                   const Location& location) {
  const auto& [query, key, value, options, documents, state] = call;
  const Group group(kUlysses, location.group);
  const Places places = agree_on(group, location.order, Method::kUlysses, call);
  check_of_all(call, places);
  const auto to_heads = [&](const Tensor& x, const Lengths& lengths) {
    return exchange<TokensToHeads>(x, location.group, location.order_name(),
                                   lengths);
  };
  const Tensor q = to_heads(query, places.query_lengths),
               k = to_heads(key, places.key_lengths),
               v = to_heads(value, places.key_lengths);
  const int64_t heads = q.size(1), first = group.rank() * heads;
  AttentionOptions own = of_heads(options, first, heads);
  own.key_mask = mask_of_all_keys(group, location.order, places.key_lengths,
                                  options.key_mask);
  std::optional<Tensor> own_state;
  if (const Drawn& drawn = places.drawn; state) {
    own_state = at::tensor(
        {drawn.seed, drawn.offset, drawn.first_batch, drawn.first_head + first,
         drawn.heads_in_all, int64_t{0}, int64_t{0}},
        at::kLong);
  }
  Tensor out, logsumexp;
  if (documents.cu_seqlens_q) {
    const auto rows = [](const Tensor& x) {
      return x.squeeze(0).transpose(0, 1);
    };
    std::tie(out, logsumexp) = call::run<call::FusedVarlenAttention>(
        rows(q), rows(k), rows(v), *documents.cu_seqlens_q,
        documents.cu_seqlens_k, std::optional<Tensor>(), own, own_state);
    out = out.transpose(0, 1).unsqueeze(0);
    logsumexp = logsumexp.unsqueeze(0);
  } else {
    std::tie(out, logsumexp) =
        call::run<call::FusedAttention>(q, k, v, own, own_state);
  }
  const auto to_tokens = [&](const Tensor& x) {
    return exchange<HeadsToTokens>(x, location.group, location.order_name(),
                                   places.query_lengths);
  };
  return {to_tokens(out), to_tokens(logsumexp.unsqueeze(-1)).squeeze(-1)};
}

TORCH_LIBRARY_IMPL(multihead, CPU, m) {
  m.impl("tokens_to_heads", &tokens_to_heads);
  m.impl("heads_to_tokens", &heads_to_tokens);
}
TORCH_LIBRARY_IMPL(multihead, Meta, m) {
  m.impl("tokens_to_heads", &tokens_to_heads_meta);
  m.impl("heads_to_tokens", &heads_to_tokens_meta);
}

}  // namespace multihead::distributed
