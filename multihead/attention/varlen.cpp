// SPDX-License-Identifier: MIT
#include "multihead/attention/varlen.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

#include "multihead/attention/call.h"
#include "multihead/attention/checks.h"
#include "multihead/attention/count.h"
#include "multihead/attention/definition.h"
#include "multihead/attention/nonfinite.h"
#include "multihead/attention/provider.h"
#include "multihead/attention/route.h"
#include "multihead/attention/storage.h"
#include "multihead/optional_tensor.h"
#include "multihead/text/shapes.h"

namespace multihead {
namespace {

using at::Tensor;

constexpr auto* kVarlen = "varlen_attention";
constexpr auto* kPrefix = "varlen_attention: ";

// ---- Checks ---------------------------------------------------------------

// First, since a nested tensor has no sizes to ask for.
void check_tensors(const Tensor& query, const Tensor& key, const Tensor& value,
                   const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                   const VarlenOptions& o) {
  check_defined(kVarlen, query, key, value);
  TORCH_CHECK_TYPE(cu_seqlens_q.defined(), kPrefix,
                   "cu_seqlens_q must be a tensor, got None, an undefined one");
  for (const auto& [name, x] : {std::pair("query", &query),
                                {"key", &key},
                                {"value", &value},
                                {"cu_seqlens_q", &cu_seqlens_q},
                                {"cu_seqlens_k", &cu_seqlens_k},
                                {"block_table", &o.block_table},
                                {"key_lengths", &o.key_lengths},
                                {"alibi_slopes", &o.alibi_slopes},
                                {"sinks", &o.sinks}}) {
    TORCH_CHECK_TYPE(!x->defined() || !x->is_nested(), kPrefix, name,
                     " must be a dense tensor, got a nested one: its sequences "
                     "one after the other are rows, with their bounds");
  }
}

void check_rows(const char* name, const Tensor& x, const Tensor& query,
                int64_t rank) {
  TORCH_CHECK(x.dim() == rank, kPrefix, name, " must be ",
              rank == 4 ? "(pages, page, heads, width) with block_table"
                        : "(rows, heads, width)",
              ", got ", shape_text(x));
  TORCH_CHECK(x.layout() == at::kStrided, kPrefix, name,
              " must be a dense tensor, got ", x.layout());
  check_storage(kPrefix, name, query, x);
  TORCH_CHECK(x.device() == query.device(), kPrefix, name,
              " must be on the device of query, got ", x.device(), " and ",
              query.device());
}

// Integers that are read while the call runs.
// `like`: the meta tensors of a call on meta tensors are taken, too.
void check_integers(const char* name, const Tensor& x, const Tensor& like,
                    bool of_32_bits_only, const char* shape, bool fits) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kInt || (dtype == at::kLong && !of_32_bits_only), kPrefix,
      name, " must be int32", of_32_bits_only ? "" : " or int64", ", got ",
      dtype);
  TORCH_CHECK_VALUE(x.device().is_cpu() || (x.is_meta() && like.is_meta()),
                    kPrefix, name, " must be on the CPU, got one on ",
                    x.device());
  TORCH_CHECK_VALUE(fits, kPrefix, name, " must have the shape ", shape,
                    ", got ", shape_text(x));
}

void check_sequences(const Tensor& query, const VarlenRows& s,
                     const AttentionOptions& options) {
  const Tensor& q = s.cu_seqlens_q;
  check_integers("cu_seqlens_q", q, query, false, "(N + 1,), N at least 0",
                 q.dim() == 1 && q.sym_size(0) >= 1);
  const auto count = q.sym_size(0) - 1;
  if (s.block_table.defined()) {
    TORCH_CHECK_VALUE(!s.cu_seqlens_k.defined(), kPrefix,
                      "cu_seqlens_k must be None with block_table, got both");
    TORCH_CHECK_VALUE(options.key_lengths.defined(), kPrefix,
                      "key_lengths must be given with block_table, got None");
    check_integers(
        "block_table", s.block_table, query, true, "(N, pages)",
        s.block_table.dim() == 2 && s.block_table.sym_size(0) == count);
  } else {
    TORCH_CHECK_VALUE(s.cu_seqlens_k.defined(), kPrefix,
                      "cu_seqlens_k must be given without block_table, got "
                      "None");
    check_integers(
        "cu_seqlens_k", s.cu_seqlens_k, query, false, "of cu_seqlens_q",
        s.cu_seqlens_k.dim() == 1 && s.cu_seqlens_k.sym_size(0) == count + 1);
  }
  if (options.key_lengths.defined()) {
    check_integers("key_lengths", options.key_lengths, query, false, "(N,)",
                   options.key_lengths.dim() == 1 &&
                       options.key_lengths.sym_size(0) == count);
  }
}

// ---- Numbers --------------------------------------------------------------

// In the order of memory of a contiguous tensor.
std::vector<int64_t> numbers_of(const Tensor& integers) {
  std::vector<int64_t> numbers;
  if (!is_plain(integers)) {  // a transform of torch.func: one by one
    const Tensor flat = integers.flatten();
    for (int64_t i = 0; i < flat.numel(); ++i) {
      numbers.push_back(flat.select(0, i).item<int64_t>());
    }
    return numbers;
  }
  const Tensor x = integers.to(at::kLong).contiguous();
  const auto* data = x.const_data_ptr<int64_t>();
  numbers.assign(data, data + x.numel());
  return numbers;
}

std::vector<int64_t> starts_of(const char* name, const Tensor& cu_seqlens,
                               int64_t rows, const char* tensor) {
  std::vector<int64_t> starts = numbers_of(cu_seqlens);
  TORCH_CHECK_VALUE(starts.front() == 0, kPrefix, name,
                    " must begin with 0, got ", starts.front());
  for (size_t n = 1; n < starts.size(); ++n) {
    TORCH_CHECK_VALUE(starts[n - 1] <= starts[n], kPrefix, name,
                      " must ascend, got ", starts[n - 1], " before ",
                      starts[n]);
  }
  TORCH_CHECK_VALUE(starts.back() == rows, kPrefix, name, " must end with the ",
                    rows, " rows of ", tensor, ", got ", starts.back());
  return starts;
}

void check_pages(const VarlenPlaces& places, int64_t pages, int64_t page) {
  const Tensor& table = places.block_table;
  const auto* entries = table.const_data_ptr<int32_t>();
  for (int64_t n = 0; n < places.count(); ++n) {
    const int64_t used = (places.key_lengths[n] + page - 1) / page;
    TORCH_CHECK_VALUE(pages > 0 || used == 0, kPrefix,
                      "key must have the pages that block_table names, got 0 "
                      "pages and ",
                      places.key_lengths[n], " keys in sequence ", n);
    for (int64_t i = 0; i < used; ++i) {
      const int64_t entry = entries[n * table.size(1) + i];
      TORCH_CHECK_VALUE(0 <= entry && entry < pages, kPrefix,
                        "block_table must name pages from 0 to ", pages - 1,
                        ", got ", entry, " for page ", i, " of sequence ", n);
    }
  }
}

// ---- Pages as rows --------------------------------------------------------

struct UnpagedRows {
  Tensor key, value;
  VarlenRows sequences;
};

// Keys and values out of their pages, as many rows for each sequence as its row
// of the table has room for; gradients pass. No value is needed.
UnpagedRows without_pages(const Tensor& query, const Tensor& key,
                          const Tensor& value, const VarlenRows& sequences,
                          const AttentionOptions& options) {
  Tensor table = sequences.block_table;
  if (has_values(table)) places_of(query, key, sequences, options);  // checks
  if (key.sym_size(0) == 0) table = table.narrow(1, 0, 0);  // nothing to name
  // Entries beyond a length may be anything.
  const Tensor pages = table.clamp_min(0)
                           .clamp_max(at::Scalar(key.sym_size(0) - 1))
                           .flatten()
                           .to(key.device(), at::kLong);
  const auto rows_of = [&](const Tensor& x) {
    return x.index_select(0, pages).flatten(0, 1);
  };
  const at::Scalar end(table.sym_size(0) + 1),
      room(table.sym_size(1) * key.sym_size(1));
  const Tensor cu_seqlens_k = at::arange(end, at::kLong).mul(room);
  return {
      rows_of(key), rows_of(value), {sequences.cu_seqlens_q, cu_seqlens_k, {}}};
}

// ---- The function ---------------------------------------------------------

Route varlen_route(const Tensor& query, const Tensor& key, const Tensor& value,
                   const AttentionOptions& options) {
  if (current_backend() == Backend::kExact) {
    return route_unless(kAskedForExact, Way::kDefinition);
  }
  std::string reason = kernel_refusal(
      {&query, &key, &value, &options.alibi_slopes, &options.sinks},
      query.scalar_type());
  if (reason.empty() && !query.is_cpu()) {
    reason = "the kernels of ragged batches run on the CPU";
  }
  return route_unless(std::move(reason), Way::kDefinition);
}

std::tuple<Tensor, Tensor> attend_varlen(const Tensor& query, const Tensor& key,
                                         const Tensor& value,
                                         const Tensor& cu_seqlens_q,
                                         const Tensor& cu_seqlens_k,
                                         const VarlenOptions& o,
                                         bool with_lse) {
  check_tensors(query, key, value, cu_seqlens_q, cu_seqlens_k, o);
  const VarlenRows sequences{cu_seqlens_q, cu_seqlens_k, o.block_table};
  const AttentionOptions options{.dropout_p = o.dropout_p,
                                 .is_causal = o.is_causal,
                                 .scale = o.scale,
                                 .enable_gqa = true,
                                 .causal_alignment = o.causal_alignment,
                                 .window = o.window,
                                 .key_lengths = o.key_lengths,
                                 .softcap = o.softcap,
                                 .alibi_slopes = o.alibi_slopes,
                                 .sinks = o.sinks};
  const Route way = varlen_route(query, key, value, options);
  const SourceGuard source(Source::kFunction);
  count(way);
  check_route(kVarlen, way);
  const auto run = [&](const Tensor& keys, const Tensor& values,
                       const VarlenRows& s) {
    return call::run<call::FusedVarlenAttention>(
        query, keys, values, s.cu_seqlens_q, optional(s.cu_seqlens_k),
        optional(s.block_table), options,
        call::draw_dropout_state(options.dropout_p));
  };
  if (const Provider* provider = current_provider();
      provider != nullptr && way.way == Way::kFused) {
    if (o.block_table.defined()) check_no_provider(kVarlen, "block_table");
    return provider->varlen_attention(
        query, key, value, cu_seqlens_q,
        cu_seqlens_k.defined() ? cu_seqlens_k : cu_seqlens_q, options,
        call::draw_dropout_state(options.dropout_p));
  }
  if (way.way == Way::kFused) {
    const bool recorded = call::is_recorded(query) || call::is_recorded(key) ||
                          call::is_recorded(value) ||
                          call::is_recorded(options);
    if (!recorded && query.scalar_type() != at::kDouble) {
      return run(key, value, sequences);
    }
    const Tensor keys = restored(query, key), values = restored(query, value);
    if (!recorded || !o.block_table.defined()) {
      return run(keys, values, sequences);
    }
    check_varlen(query, keys, values, sequences, options);
    const UnpagedRows rows =
        without_pages(query, keys, values, sequences, options);
    return run(rows.key, rows.value, rows.sequences);
  }
  const Tensor q = call::autocast(query), k = call::autocast(key),
               v = call::autocast(value);
  check_varlen(q, k, v, sequences, options);
  warn_of_all_weights(kVarlen, q, way);
  return definition::varlen_attention(q, restored(q, k), restored(q, v),
                                      sequences, options, with_lse);
}

}  // namespace

int64_t VarlenPlaces::longest_query() const {
  int64_t longest = 0;
  for (int64_t n = 0; n < count(); ++n) {
    longest = std::max(longest, query_length(n));
  }
  return longest;
}

int64_t VarlenPlaces::longest_key() const {
  int64_t longest = 0;
  for (int64_t n = 0; n < count(); ++n) {
    longest = std::max(longest, key_starts.empty()
                                    ? key_lengths[n]
                                    : key_starts[n + 1] - key_starts[n]);
  }
  return longest;
}

void check_varlen(const Tensor& query, const Tensor& key, const Tensor& value,
                  const VarlenRows& sequences,
                  const AttentionOptions& options) {
  check_domains(options, kPrefix);
  TORCH_CHECK_VALUE(
      !options.attn_mask.defined() && !options.key_mask.defined() &&
          !options.query_offset.defined(),
      kPrefix,
      "attn_mask, key_mask and query_offset must be None, got one of them");
  const int64_t rank = sequences.block_table.defined() ? 4 : 3;
  check_rows("query", query, query, 3);
  check_rows("key", key, query, rank);
  check_rows("value", value, query, rank);
  const auto shapes = [&] { return shapes_text(query, key, value); };
  TORCH_CHECK(key.scalar_type() == value.scalar_type(), kPrefix,
              "value must have the dtype of key, got ", value.scalar_type(),
              " and ", key.scalar_type());
  TORCH_CHECK(query.sym_size(-1) == width_of(key), kPrefix,
              "key must have the head width of query, got ", width_of(key),
              " and ", query.sym_size(-1), shapes());
  for (int64_t d = 0; d < rank - 1; ++d) {
    TORCH_CHECK(key.sym_size(d) == value.sym_size(d), kPrefix,
                "value must have the ", d == rank - 2 ? "heads" : "rows",
                " of key, got ", value.sym_size(d), " and ", key.sym_size(d),
                shapes());
  }
  const auto heads = query.sym_size(1), groups = key.sym_size(-2);
  TORCH_CHECK(
      groups > 0 && heads % groups == 0, kPrefix,
      "key must have a number of heads that divides that of query, got ",
      groups, " and ", heads, shapes());
  check_sequences(query, sequences, options);
  const auto count = sequences.cu_seqlens_q.sym_size(0) - 1;
  check_slopes_and_sinks(options, count, heads, kPrefix);
  for (const auto& [name, x] :
       {std::pair("alibi_slopes", &options.alibi_slopes),
        {"sinks", &options.sinks}}) {
    TORCH_CHECK(!x->defined() || x->device() == query.device(), kPrefix, name,
                " must be on the device of query, got ", x->device(), " and ",
                query.device());
  }
}

VarlenPlaces places_of(const Tensor& query, const Tensor& key,
                       const VarlenRows& sequences,
                       const AttentionOptions& options) {
  VarlenPlaces places;
  places.query_starts =
      starts_of("cu_seqlens_q", sequences.cu_seqlens_q, query.size(0), "query");
  const bool in_pages = sequences.block_table.defined();
  const int64_t page = in_pages ? key.size(1) : 0;
  if (in_pages) {
    const Tensor& table = sequences.block_table;
    places.block_table =
        is_plain(table)
            ? table.contiguous()
            : at::tensor(numbers_of(table), at::kInt).view(table.sizes());
    TORCH_CHECK_VALUE(page > 0, kPrefix,
                      "key must have pages of at least 1 row, "
                      "got 0 (key.shape=",
                      shape_text(key), ")");
  } else {
    places.key_starts =
        starts_of("cu_seqlens_k", sequences.cu_seqlens_k, key.size(0), "key");
  }
  if (options.key_lengths.defined()) {
    places.key_lengths = numbers_of(options.key_lengths);
  }
  places.key_lengths.resize(places.count(), -1);
  for (int64_t n = 0; n < places.count(); ++n) {
    const int64_t rows = in_pages
                             ? places.block_table.size(1) * page
                             : places.key_starts[n + 1] - places.key_starts[n];
    int64_t& length = places.key_lengths[n];
    if (!options.key_lengths.defined()) length = rows;
    TORCH_CHECK_VALUE(0 <= length && length <= rows, kPrefix,
                      "key_lengths must be between 0 and the ", rows,
                      " rows of sequence ", n, ", got ", length);
  }
  if (in_pages) check_pages(places, key.size(0), page);
  return places;
}

std::tuple<Tensor, Tensor> definition::varlen_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const VarlenRows& sequences, const AttentionOptions& options, bool with_lse,
    const Tensor& dropout_factors) {
  if (sequences.block_table.defined()) {
    const UnpagedRows rows =
        without_pages(query, key, value, sequences, options);
    return varlen_attention(query, rows.key, rows.value, rows.sequences,
                            options, with_lse, dropout_factors);
  }
  const VarlenPlaces places = places_of(query, key, sequences, options);
  std::vector<Tensor> outs, lses;
  for (int64_t n = 0; n < places.count(); ++n) {
    const int64_t queries = places.query_length(n);
    const int64_t keys = places.key_lengths[n];
    const auto keys_of = [&](const Tensor& x) {
      return x.narrow(0, places.key_starts[n], keys).transpose(0, 1);
    };
    AttentionOptions rules = options;
    rules.key_lengths = Tensor();
    if (options.alibi_slopes.defined() && options.alibi_slopes.dim() == 2) {
      rules.alibi_slopes = options.alibi_slopes.select(0, n);
    }
    const Tensor factors = dropout_factors.defined()
                               ? dropout_factors.select(0, n)
                                     .narrow(1, 0, queries)
                                     .narrow(2, 0, keys)
                               : Tensor();
    const auto [out, lse] = attention(
        query.narrow(0, places.query_starts[n], queries).transpose(0, 1),
        keys_of(key), keys_of(value), rules, with_lse, factors);
    outs.push_back(out.transpose(0, 1));
    lses.push_back(lse);
  }
  if (outs.empty()) {
    const auto number = at::toOpMathType(query.scalar_type());
    return {query.new_empty({0, query.size(1), value.size(-1)}),
            query.new_empty({query.size(1), 0}, number)};
  }
  return {at::cat(outs), with_lse ? at::cat(lses, 1) : Tensor()};
}

Tensor varlen_attention(const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& cu_seqlens_q,
                        const Tensor& cu_seqlens_k,
                        const VarlenOptions& options) {
  return std::get<0>(attend_varlen(query, key, value, cu_seqlens_q,
                                   cu_seqlens_k, options, /*with_lse=*/false));
}

std::tuple<Tensor, Tensor> varlen_attention_with_lse(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    const VarlenOptions& options) {
  return attend_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, options,
                       /*with_lse=*/true);
}

}  // namespace multihead
