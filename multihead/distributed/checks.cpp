// SPDX-License-Identifier: MIT
#include "multihead/distributed/checks.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "multihead/attention/checks.h"
#include "multihead/attention/route.h"
#include "multihead/attention/storage.h"
#include "multihead/optional_tensor.h"

namespace multihead::distributed {
namespace {

using at::Tensor;

void check_documents(const char* fn, const OwnCall& call) {
  const auto& [query, key, value, options, documents, state] = call;
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

// Whole heads lie on each process while attention is computed.
void check_heads(const char* fn, int processes, const OwnCall& call) {
  const int64_t heads = call.query.size(1), groups = call.key.size(1);
  TORCH_CHECK(heads % processes == 0 && groups % processes == 0, fn,
              ": the heads of query and of key must be multiples of the number "
              "of processes, ",
              processes, ", got ", heads, " and ", groups);
  TORCH_CHECK(!call.options.attn_mask.defined(), fn,
              ": attn_mask must be None, got one: ring_attention takes it");
}

// What a process can say by itself about its arguments.
void check(const char* fn, const OwnCall& call) {
  const auto& [query, key, value, options, documents, state] = call;
  check_defined(fn, query, key, value);
  TORCH_CHECK(query.dim() == 4, fn, ": query must be (B, H, Lq, D), got ",
              query.sizes());
  AttentionOptions own = options;  // the others are of all processes' tokens
  own.attn_mask = own.key_mask = own.key_lengths = Tensor();
  if (documents.cu_seqlens_q) {
    check_documents(fn, call);
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
  check_dropout_state(options.dropout_p, state);
}

}  // namespace

Places agree_on(const Group& group, TokenOrder order, Method method,
                const OwnCall& call) {
  std::exception_ptr refused;
  try {
    check(group.function(), call);
    if (method == Method::kUlysses) {
      check_heads(group.function(), group.size(), call);
    }
  } catch (...) {
    refused = std::current_exception();
  }
  const Bounds bounds{or_undefined(call.documents.cu_seqlens_q),
                      or_undefined(call.documents.cu_seqlens_k)};
  return agree(group, order, method, {call.query, call.key, call.value},
               call.options, bounds, call.dropout_state, refused);
}

VarlenPlaces check_of_all(const OwnCall& call, const Places& places) {
  const auto& [query, key, value, options, documents, state] = call;
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
      query.narrow(2, 0, 0), as_long(key), as_long(value),
      {.enable_gqa = options.enable_gqa, .key_lengths = options.key_lengths});
  return {};
}

Tensor mask_of_all_keys(const Group& group, TokenOrder order,
                        const Lengths& lengths, const Tensor& mask) {
  if (!mask.defined()) return {};
  const auto with_keys = [&](int64_t keys) {
    auto sizes = mask.sizes().vec();
    sizes.back() = keys;
    return at::zeros(sizes, mask.options());
  };
  const Tensor padded =
      with_keys(*std::max_element(lengths.begin(), lengths.end()));
  padded.narrow(-1, 0, mask.size(-1)).copy_(mask);
  const auto gathered = group.all_gather(padded);
  Tensor all = with_keys(total(lengths));
  for (int r = 0; r < group.size(); ++r) {
    for (const Span& span : spans_of(order, lengths, r)) {
      all.narrow(-1, span.position, span.length)
          .copy_(gathered[r].narrow(-1, span.row, span.length));
    }
  }
  return all;
}

}  // namespace multihead::distributed
