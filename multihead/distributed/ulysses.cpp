// SPDX-License-Identifier: MIT
//
// Attention by heads over a sequence that lies on W processes by tokens. One
// exchange gives each process all tokens of H/W heads, the kernels compute
// those as one process would, to the bit, and another exchange brings output
// and logsumexp back to their tokens.
// Source: "DeepSpeed Ulysses: System Optimizations for Enabling Training of
// Extreme Long Sequence Transformer Models".
//
// Sent per process, in elements: (W − 1)/W · (|Q| + |K| + |V| + |O| + |lse|)
// forward, and as much again for their gradients. Whatever the rules hide, all
// processes have the same work.
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

// Those of one of several tensors.
Lengths of_tensor(at::IntArrayRef lengths, size_t tensor, const Group& group) {
  const auto processes = static_cast<size_t>(group.size());
  return lengths.slice(tensor * processes, processes).vec();
}

std::vector<Tensor> tokens_to_heads(at::TensorList tensors,
                                    std::string_view group_name,
                                    std::string_view order_name,
                                    at::IntArrayRef tokens) {
  const Group group(kUlysses, group_name);
  const TokenOrder order = token_order_from_name(order_name);
  std::vector<std::vector<Tensor>> parts(group.size());
  std::vector<std::vector<std::vector<int64_t>>> sizes(group.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& x = tensors[i];
    const int64_t heads = x.size(1) / group.size();
    const Lengths lengths = of_tensor(tokens, i, group);
    for (int r = 0; r < group.size(); ++r) {
      parts[r].push_back(x.narrow(1, r * heads, heads));
      sizes[r].push_back(with(x, heads, lengths[r]));
    }
  }
  const auto received = group.all_to_all(parts, sizes);
  std::vector<Tensor> results;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Lengths lengths = of_tensor(tokens, i, group);
    const Tensor all =
        at::empty(with(received[0][i], received[0][i].size(1), total(lengths)),
                  tensors[i].options());
    for (int r = 0; r < group.size(); ++r) {
      for (const Span& span : spans_of(order, lengths, r)) {
        all.narrow(2, span.position, span.length)
            .copy_(received[r][i].narrow(2, span.row, span.length));
      }
    }
    results.push_back(all);
  }
  return results;
}

std::vector<Tensor> heads_to_tokens(at::TensorList tensors,
                                    std::string_view group_name,
                                    std::string_view order_name,
                                    at::IntArrayRef tokens) {
  const Group group(kUlysses, group_name);
  const TokenOrder order = token_order_from_name(order_name);
  std::vector<std::vector<Tensor>> parts(group.size());
  std::vector<std::vector<std::vector<int64_t>>> sizes(group.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& x = tensors[i];
    const Lengths lengths = of_tensor(tokens, i, group);
    for (int r = 0; r < group.size(); ++r) {
      parts[r].push_back(own_tokens(x, spans_of(order, lengths, r)));
      sizes[r].push_back(with(x, x.size(1), lengths[group.rank()]));
    }
  }
  const auto received = group.all_to_all(parts, sizes);
  std::vector<Tensor> results;
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::vector<Tensor> heads;
    for (const auto& of_process : received) heads.push_back(of_process[i]);
    results.push_back(at::cat(heads, 1));
  }
  return results;
}

std::vector<Tensor> tokens_to_heads_meta(at::TensorList tensors,
                                         std::string_view group_name,
                                         std::string_view /*order*/,
                                         at::IntArrayRef tokens) {
  const Group group(kUlysses, group_name);
  std::vector<Tensor> results;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& x = tensors[i];
    results.push_back(x.new_empty(
        with(x, x.size(1) / group.size(), total(of_tensor(tokens, i, group)))));
  }
  return results;
}

std::vector<Tensor> heads_to_tokens_meta(at::TensorList tensors,
                                         std::string_view group_name,
                                         std::string_view /*order*/,
                                         at::IntArrayRef tokens) {
  const Group group(kUlysses, group_name);
  std::vector<Tensor> results;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& x = tensors[i];
    results.push_back(
        x.new_empty(with(x, x.size(1) * group.size(),
                         of_tensor(tokens, i, group)[group.rank()])));
  }
  return results;
}

Lengths joined(std::initializer_list<const Lengths*> parts) {
  Lengths all;
  for (const Lengths* each : parts) {
    all.insert(all.end(), each->begin(), each->end());
  }
  return all;
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
  const Lengths &queries = places.query_lengths, &keys = places.key_lengths;
  const auto inputs = exchange<TokensToHeads>(
      {query, key, value}, location.group, location.order_name(),
      joined({&queries, &keys, &keys}));
  const Tensor &q = inputs[0], &k = inputs[1], &v = inputs[2];
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
  const auto results = exchange<HeadsToTokens>(
      {out, logsumexp.unsqueeze(-1)}, location.group, location.order_name(),
      joined({&queries, &queries}));
  return {results[0], results[1].squeeze(-1)};
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
