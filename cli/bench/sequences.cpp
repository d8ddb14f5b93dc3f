// SPDX-License-Identifier: MIT
#include "cli/bench/sequences.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <ranges>

#include "cli/bench/timing.h"
#include "cli/cases/answers.h"
#include "cli/cases/golden.h"
#include "multihead/cache.h"
#include "multihead/mxint8.h"
#include "multihead/stats.h"

namespace cli {
namespace {

using enum Implementation;

// Sequences in one of the forms that somebody may have them in.
struct Form {
  Implementation who;
  std::vector<at::Tensor> inputs;  // query, key, value
  at::Tensor dout;                 // like query; undefined: no gradients
  // One output like query, or one for each sequence.
  std::function<Outputs(const std::vector<at::Tensor>&)> attend;
  // What a tensor like query has of sequence n: (1, heads, L, D).
  std::function<at::Tensor(const at::Tensor&, int64_t)> part;
};

// What is asked for: the sequences one by one, (1, heads, L, D).
struct Sequences {
  std::vector<AttentionInputs> inputs;
  std::vector<Reference> references;

  int64_t count() const { return static_cast<int64_t>(inputs.size()); }
};

// The outputs; in training, after them the gradients of the inputs.
Outputs run(const Form& form) {
  if (!form.dout.defined()) return form.attend(form.inputs);
  const at::AutoGradMode with_grad(true);
  Outputs results = form.attend(form.inputs);
  Outputs douts{form.dout};
  if (const auto count = static_cast<int64_t>(results.size()); count > 1) {
    douts.clear();
    for (int64_t n = 0; n < count; ++n)
      douts.push_back(form.part(form.dout, n));
  }
  const auto gradients = torch::autograd::grad(results, form.inputs, douts);
  results.insert(results.end(), gradients.begin(), gradients.end());
  return results;
}

std::string fault_of(const Form& form, const Outputs& found,
                     const Sequences& asked) {
  const size_t gradients = form.dout.defined() ? form.inputs.size() : 0;
  const size_t outputs = form.who == kSeparate ? asked.inputs.size() : 1;
  if (found.size() < outputs + gradients) return "results are missing";
  const at::ScalarType dtype = form.inputs[0].scalar_type();
  const reference::Precision precision =
      is_ours(form.who) ? attention_precision(dtype) : layer_precision(dtype);
  for (int64_t n = 0; n < asked.count(); ++n) {
    Outputs parts{outputs == 1 ? form.part(found[0], n) : found[n]};
    for (size_t i = 0; i < gradients; ++i)
      parts.push_back(form.part(found[outputs + i], n));
    const std::string reason = fault(parts, asked.references[n], precision);
    if (!reason.empty()) return c10::str("sequence ", n, ": ", reason);
  }
  return "";
}

void expect_fused(const Form& form) {
  multihead::reset_stats();
  run(form);
  const auto counts = multihead::stats();
  TORCH_CHECK(!counts.empty(), "no call was counted");
  for (const multihead::CallCount& count : counts)
    TORCH_CHECK(count.way == "fused",
                "the fused kernels did not run: ", count.reason);
}

// sets: the forms of each copy of the inputs, which are timed by turns.
PreparedCase prepare(const std::vector<std::vector<Form>>& sets,
                     const Sequences& asked, Pass pass) {
  PreparedCase prepared;
  const auto shared = std::make_shared<const Sequences>(asked);
  for (size_t i = 0; i < sets[0].size(); ++i) {
    std::vector<Form> copies;
    for (const auto& forms : sets) copies.push_back(forms[i]);
    const Form form = copies[0];
    Contender contender{.who = form.who};
    contender.prepare = [form] {
      if (is_ours(form.who)) expect_fused(form);
    };
    contender.timed = [copies, turn = size_t{0}]() mutable {
      turn = (turn + 1) % copies.size();
      return run(copies[turn]);
    };
    contender.verified = [form] { return run(form); };
    contender.fault = [form, shared](const Outputs& found) {
      return fault_of(form, found, *shared);
    };
    prepared.contenders.push_back(std::move(contender));
  }
  for (const AttentionInputs& x : asked.inputs) {
    prepared.flop += attention_flop(x, pass);
    prepared.bytes += static_cast<double>(2 * x.query.nbytes() +
                                          x.key.nbytes() + x.value.nbytes());
  }
  return prepared;
}

// Attention of (1, heads, L, D), and of its batch.
at::Tensor attend(const std::vector<at::Tensor>& x, const at::Tensor& lengths) {
  return ours::attention(
      {x[0], x[1], x[2], {.enable_gqa = true, .key_lengths = lengths}});
}

// --- Sequences of different lengths ------------------------------------------

// Rows (T, heads, D) of sequence n as (1, heads, L, D).
at::Tensor rows_of(const at::Tensor& x, const std::vector<int64_t>& starts,
                   int64_t n) {
  return x.narrow(0, starts[n], starts[n + 1] - starts[n])
      .transpose(0, 1)
      .unsqueeze(0);
}

// (T, heads, D) → (N, heads, longest, D), the rest 0.
at::Tensor padded(const at::Tensor& x, const std::vector<int64_t>& lengths) {
  const auto count = static_cast<int64_t>(lengths.size());
  const at::Tensor result = at::zeros(
      {count, x.size(1), std::ranges::max(lengths), x.size(2)}, x.options());
  int64_t first = 0;
  for (int64_t n = 0; n < count; first += lengths[n++])
    result[n]
        .narrow(1, 0, lengths[n])
        .copy_(x.narrow(0, first, lengths[n]).transpose(0, 1));
  return result;
}

std::vector<Form> ragged_forms(const std::vector<int64_t>& lengths,
                               const std::vector<int64_t>& starts,
                               const std::vector<at::Tensor>& rows,
                               const at::Tensor& dout) {
  using Tensors = std::vector<at::Tensor>;
  const at::Tensor bounds = at::tensor(starts), sizes = at::tensor(lengths);
  const auto part = [starts](const at::Tensor& x, int64_t n) {
    return rows_of(x, starts, n);
  };
  const auto part_of_padded = [lengths](const at::Tensor& x, int64_t n) {
    return x.narrow(0, n, 1).narrow(2, 0, lengths[n]);
  };
  Tensors wide;
  for (const at::Tensor& x : rows) wide.push_back(padded(x.detach(), lengths));
  if (dout.defined())
    for (at::Tensor& x : wide) x = leaf(x);
  const at::Tensor wide_dout =
      dout.defined() ? padded(dout, lengths) : at::Tensor();
  const at::Tensor keep = at::arange(wide[0].size(2))
                              .lt(sizes.unsqueeze(1))
                              .unsqueeze(1)
                              .unsqueeze(1);
  const auto together = [bounds](const Tensors& x) -> Outputs {
    return {multihead::varlen_attention(x[0], x[1], x[2], bounds, bounds)};
  };
  const auto one_by_one = [part, count = sizes.size(0)](const Tensors& x) {
    Outputs outputs;
    for (int64_t n = 0; n < count; ++n)
      outputs.push_back(
          attend({part(x[0], n), part(x[1], n), part(x[2], n)}, {}));
    return outputs;
  };
  return {
      {kOurs, rows, dout, together, part},
      {kSeparate, rows, dout, one_by_one, part},
      {kPadded, wide, wide_dout,
       [sizes](const Tensors& x) -> Outputs { return {attend(x, sizes)}; },
       part_of_padded},
      {kSdpa, wide, wide_dout,
       [keep](const Tensors& x) -> Outputs {
         return {pytorch::attention({x[0], x[1], x[2], {.attn_mask = keep}})};
       },
       part_of_padded}};
}

// --- Keys in a cache ---------------------------------------------------------

at::Tensor unchanged(const at::Tensor& x, int64_t) { return x; }

// x: query (1, H, 1, D), key and value (1, G, Lk, D).
Form in_cache(Implementation who, const std::vector<at::Tensor>& x,
              at::ScalarType storage) {
  multihead::KVCache cache(
      multihead::KVCacheOptions(1, x[1].size(1), x[1].size(3))
          .capacity(x[1].size(2))
          .dtype(storage));
  cache.append(x[1], x[2]);
  return {
      who,
      {x[0], cache.key(), cache.value()},
      {},
      [lengths = cache.lengths()](const std::vector<at::Tensor>& y) -> Outputs {
        return {attend(y, lengths)};
      },
      unchanged};
}

// x, rounded to what a cache of that dtype can hold.
at::Tensor numbers_in(at::ScalarType storage, const at::Tensor& x) {
  return storage == at::kChar
             ? multihead::from_mxint8(multihead::to_mxint8(x), x.scalar_type())
             : x.to(storage).to(x.scalar_type());
}

std::vector<Form> cached_forms(const CachedCall& call,
                               const std::vector<at::Tensor>& rows) {
  const Form cached = in_cache(kOurs, rows, call.storage);
  if (call.storage != call.dtype)
    return {cached, in_cache(kWide, rows, call.dtype)};
  return {
      cached,
      {kContiguous,
       rows,
       {},
       [](const std::vector<at::Tensor>& x) -> Outputs {
         return {attend(x, {})};
       },
       unchanged},
      {kSdpa,
       rows,
       {},
       [](const std::vector<at::Tensor>& x) -> Outputs {
         return {pytorch::attention({x[0], x[1], x[2], {.enable_gqa = true}})};
       },
       unchanged}};
}

// --- Keys in pages -----------------------------------------------------------

// key and value (Lk, G, D); query (1, H, D).
std::vector<Form> paged_forms(const PagedCall& call,
                              const std::vector<at::Tensor>& rows,
                              const at::Tensor& order) {
  using Tensors = std::vector<at::Tensor>;
  const int64_t pages = order.size(0);
  const at::Tensor table = order.to(at::kInt).unsqueeze(0),
                   lengths = at::tensor({call.Lk}),
                   one = at::tensor({int64_t{0}, int64_t{1}}),
                   bounds = at::tensor({int64_t{0}, call.Lk});
  Tensors pools{rows[0]}, heads;
  for (size_t i = 1; i < rows.size(); ++i) {
    const at::Tensor cut = rows[i].unflatten(0, {pages, call.page});
    pools.push_back(at::empty_like(cut).index_copy_(0, order, cut));
  }
  const auto part = [](const at::Tensor& x, int64_t) {
    return x.transpose(0, 1).unsqueeze(0);
  };
  for (const at::Tensor& x : rows) heads.push_back(part(x, 0));
  return {
      {kOurs,
       pools,
       {},
       [=](const Tensors& x) -> Outputs {
         return {multihead::varlen_attention(
             x[0], x[1], x[2], one, {},
             {.key_lengths = lengths, .block_table = table})};
       },
       part},
      {kContiguous,
       rows,
       {},
       [=](const Tensors& x) -> Outputs {
         return {multihead::varlen_attention(x[0], x[1], x[2], one, bounds)};
       },
       part},
      in_cache(kCache, heads, call.dtype)};
}

// Sets of forms; cold: so many that what each has of keys and values is more
// than the caches hold.
template <class MakeForms>
std::vector<std::vector<Form>> sets_of(bool cold,
                                       const std::vector<at::Tensor>& rows,
                                       const MakeForms& forms) {
  std::vector<std::vector<Form>> sets;
  const auto add = [&] {
    sets.push_back(forms(
        std::vector<at::Tensor>{rows[0], rows[1].clone(), rows[2].clone()}));
  };
  add();
  const auto bytes_of = [](const Form& form) {
    return static_cast<int64_t>(form.inputs[1].nbytes() +
                                form.inputs[2].nbytes());
  };
  const int64_t bytes =
      std::ranges::min(sets[0] | std::views::transform(bytes_of));
  const int64_t copies = cold ? 2 * last_level_cache() / bytes : 0;
  for (int64_t i = 0; i < copies; ++i) add();
  return sets;
}

}  // namespace

PreparedCase prepare_ragged(const RaggedCall& call, Pass pass, Random& random) {
  TORCH_CHECK(pass != Pass::kBackward,
              "sequences are not timed backward alone");
  std::vector<int64_t> starts{0};
  for (const int64_t n : call.lengths) starts.push_back(starts.back() + n);
  const std::array<int64_t, 3> sizes{starts.back(), call.H, call.D};
  std::vector<at::Tensor> rows;
  for (int i = 0; i < 3; ++i) rows.push_back(random.normal(sizes, call.dtype));
  at::Tensor dout;
  if (pass == Pass::kBoth) {
    for (at::Tensor& x : rows) x = leaf(x);
    dout = random.normal(sizes, call.dtype);
  }
  Sequences asked;
  for (size_t n = 0; n < call.lengths.size(); ++n) {
    const auto part = [&](const at::Tensor& x) {
      return rows_of(x.detach(), starts, static_cast<int64_t>(n));
    };
    asked.inputs.push_back({part(rows[0]), part(rows[1]), part(rows[2])});
    asked.references.push_back(
        reference_of(asked.inputs.back(), dout.defined() ? part(dout) : dout));
  }
  return prepare({ragged_forms(call.lengths, starts, rows, dout)}, asked, pass);
}

PreparedCase prepare_paged(const PagedCall& call, bool cold, Random& random) {
  const std::array<int64_t, 3> sizes{call.Lk, call.G, call.D};
  const std::vector<at::Tensor> rows{
      random.normal({1, call.H, call.D}, call.dtype),
      random.normal(sizes, call.dtype), random.normal(sizes, call.dtype)};
  const at::Tensor order = random.uniform({call.Lk / call.page}).argsort();
  Sequences asked;
  asked.inputs.push_back({rows[0].unsqueeze(2),
                          rows[1].transpose(0, 1).unsqueeze(0),
                          rows[2].transpose(0, 1).unsqueeze(0),
                          {.enable_gqa = true}});
  asked.references.push_back(reference_of(asked.inputs[0]));
  return prepare(sets_of(cold, rows,
                         [&](const std::vector<at::Tensor>& x) {
                           return paged_forms(call, x, order);
                         }),
                 asked, Pass::kForward);
}

PreparedCase prepare_cached(const CachedCall& call, bool cold, Random& random) {
  const std::array<int64_t, 4> sizes{1, call.G, call.Lk, call.D};
  const std::vector<at::Tensor> rows{
      random.normal({1, call.H, 1, call.D}, call.dtype),
      numbers_in(call.storage, random.normal(sizes, call.dtype)),
      numbers_in(call.storage, random.normal(sizes, call.dtype))};
  Sequences asked;
  asked.inputs.push_back({rows[0], rows[1], rows[2], {.enable_gqa = true}});
  asked.references.push_back(reference_of(asked.inputs[0]));
  return prepare(sets_of(cold, rows,
                         [&](const std::vector<at::Tensor>& x) {
                           return cached_forms(call, x);
                         }),
                 asked, Pass::kForward);
}

}  // namespace cli
