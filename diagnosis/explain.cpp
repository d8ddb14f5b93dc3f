// SPDX-License-Identifier: MIT
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "diagnosis/search/locate.h"
#include "diagnosis/search/pytorch_result.h"
#include "diagnosis/search/remarks.h"
#include "diagnosis/search/search.h"
#include "diagnosis/search/tolerance.h"
#include "multihead/diagnosis.h"
#include "multihead/text/dtypes.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// ---- Words -----------------------------------------------------------------

std::string filled_in(std::string_view text, const Sizes& n) {
  const std::pair<std::string_view, int64_t> sizes[] = {
      {"{B}", n.batch},    {"{H}", n.heads}, {"{G}", n.kv_heads},
      {"{Lq}", n.queries}, {"{Lk}", n.keys}, {"{D}", n.width},
      {"{E}", n.embed_dim}};
  std::string result(text);
  for (const auto& [letter, size] : sizes) {
    for (size_t at; (at = result.find(letter)) != std::string::npos;) {
      result.replace(at, letter.size(), std::to_string(size));
    }
  }
  return result;
}

Finding finding(const Pick& pick, const Sizes& sizes) {
  return {
      std::string(pick.fault->name), std::string(name_of(*pick.fault->stage)),
      filled_in(pick.fault->sentence, sizes),
      filled_in(pick.fault->remedy, sizes), filled_in(pick.way->detail, sizes)};
}

Finding finding(const Convention& convention) {
  return {.name = std::string(convention.name),
          .sentence = std::string(convention.sentence),
          .remedy = std::string(convention.remedy)};
}

// ---- Which calls first -----------------------------------------------------

// What tells most comes first: small, float64, evaluation, no mask.
std::vector<ObservedCall> in_order(const std::vector<ObservedCall>& calls) {
  const auto rank = [&](const ObservedCall& call) {
    return std::tuple(
        is_large(call, calls), call.dtype != at::kDouble, call.training,
        call.mask.numbers.defined() || call.padding.numbers.defined() ||
            call.causal == CausalRequest::kYes);
  };
  std::vector<ObservedCall> ordered = calls;
  std::stable_sort(ordered.begin(), ordered.end(),
                   [&](const ObservedCall& a, const ObservedCall& b) {
                     return rank(a) < rank(b);
                   });
  return ordered;
}

// ---- Cases -----------------------------------------------------------------

Recipe recipe_of(const std::vector<const Convention*>& conventions) {
  Recipe recipe;
  for (const Convention* convention : conventions) convention->apply(recipe);
  return recipe;
}

Tensor only(const Tensor& rows, const Tensor& x) {
  return rows.defined() ? x.masked_fill(rows.logical_not().unsqueeze(-1), 0.0)
                        : x;
}

// With what PyTorch makes of the same, where it has the call.
ComparedCase with_pytorch(const ObservedCall& call, const Recipe& recipe,
                          ComparedCase compared) {
  const std::optional<Stages> reference = simulate(call, recipe);
  if (!reference) return compared;
  compared.allowed =
      rounding_allowed(call.dtype, *reference, largest_finite(reference->out));
  const Tensor ours = call.out.to(call.dtype);
  for (const Tensor& result : pytorch_results(call, recipe)) {
    if (result.sizes() != ours.sizes()) continue;
    const Tensor rows = seeing_rows(call, *reference);
    const double error =
        largest_difference(result.to(at::kDouble), reference->out, rows);
    if (!(compared.pytorch_error <= error)) compared.pytorch_error = error;
    compared.bits = compared.bits || result.equal(ours);
    compared.exercise =
        compared.exercise ||
        at::allclose(only(rows, ours), only(rows, result), /*rtol=*/1e-5,
                     /*atol=*/1e-8, /*equal_nan=*/true);
  }
  return compared;
}

// What one call returned beside attention, and beside attention with its
// faults: the first tensor that is not right, else out.
ComparedCase compare(const ObservedCall& call, const Recipe& attention,
                     const Explanation* explanation) {
  const bool in_float = explanation != nullptr && explanation->in_float;
  const auto precision =
      in_float && call.dtype == at::kDouble ? at::kFloat : call.dtype;
  const Errors plain = errors(call, attention, precision);
  const Errors faulty =
      explanation ? errors(call, explanation->recipe, precision) : Errors{};
  ComparedCase compared{
      .name = call.name,
      .dtype = dtype_name(call.dtype),
      .tensor = "out",
      .shape = call.out.sizes().vec(),
      .agrees = plain.fit(),
      .explained = faulty.fit(),
      .pytorch_error = std::numeric_limits<double>::quiet_NaN()};
  const auto take = [&](const char* tensor, Error Errors::* error) {
    compared.tensor = tensor;
    compared.error = (plain.*error).difference;
    compared.unexplained = compared.explained ? (faulty.*error).difference : 0;
  };
  take("out", &Errors::out);
  if (plain.out.share > 1) return with_pytorch(call, attention, compared);
  if (plain.weights.share > 1) {
    take("weights", &Errors::weights);
  } else if (plain.gradients.share > 1) {
    take("gradients", &Errors::gradients);
  } else {
    return with_pytorch(call, attention, compared);
  }
  return compared;
}

// ---- What was read ---------------------------------------------------------

// A square matrix has no side of its own until the numbers decide.
std::vector<std::string> matched(const ObservedCall& call,
                                 const Recipe& attention) {
  std::vector<std::string> lines = call.weights.matched;
  for (std::string& line : lines) {
    const size_t at = line.find(kEitherOrientation);
    if (at == std::string::npos) continue;
    line.replace(at, kEitherOrientation.size(),
                 attention.weights_in_out ? "(in, out)" : "(out, in)");
  }
  return lines;
}

void append_new(std::vector<std::string>& all,
                const std::vector<std::string>& more) {
  for (const std::string& one : more) {
    if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
  }
}

// ---- The verdict -----------------------------------------------------------

Judgement judgement_of(const Verdict& verdict, bool explained) {
  if (!explained) return Judgement::kUnknown;
  if (!verdict.faults.empty()) return Judgement::kFault;
  const bool bits = std::all_of(verdict.cases.begin(), verdict.cases.end(),
                                [](const ComparedCase& c) { return c.bits; });
  return bits ? Judgement::kBits : Judgement::kRounding;
}

void describe(std::span<const ObservedCall> calls, const Explanation& best,
              const Recipe& attention, Verdict& verdict) {
  const ObservedCall* failing = &calls.front();
  for (const ObservedCall& call : calls) {
    if (!errors(call, attention, call.dtype).fit()) {
      failing = &call;
      break;
    }
  }
  for (const Pick& pick : best.faults) {
    verdict.faults.push_back(finding(pick, failing->sizes));
  }
  if (!best.faults.empty()) {
    const Pick first = std::ranges::min(
        best.faults, {}, [](const Pick& pick) { return pick.fault->stage; });
    verdict.first_stage = name_of(*first.fault->stage);
  }
}

// The tensors are tiny: threads would only wait for each other. The number is
// PyTorch's for the whole process, so calls take turns.
class OneThread {
 public:
  OneThread() : turn_(taken()), threads_(at::get_num_threads()) {
    if (threads_ != 1) at::set_num_threads(1);
  }
  ~OneThread() {
    if (threads_ != 1) at::set_num_threads(threads_);
  }

 private:
  static std::mutex& taken() {
    static std::mutex mutex;
    return mutex;
  }

  std::lock_guard<std::mutex> turn_;
  int threads_;
};

// What is compared is computed step by step, as whole matrices.
void check_size(const ObservedCall& call) {
  constexpr int64_t kMost = int64_t{1} << 26;
  const Sizes& n = call.sizes;
  TORCH_CHECK_VALUE(n.batch * n.heads <= kMost / n.queries / n.keys,
                    "explain: query and key must make no more than ", kMost,
                    " scores, got ", n.batch, " x ", n.heads, " x ", n.queries,
                    " x ", n.keys, "; save a smaller case");
}

}  // namespace

Verdict explain(std::span<const Observation> observations) {
  TORCH_CHECK_VALUE(!observations.empty(),
                    "explain: observations must hold at least one, got none");
  const at::NoGradGuard no_grad;
  const OneThread one_thread;
  std::vector<ObservedCall> calls;
  for (const Observation& observation : observations) {
    calls.push_back(read_dump(observation));
    check_size(calls.back());
  }
  const std::vector<ObservedCall> ordered = in_order(calls);
  const SearchResult result = search(ordered);
  const std::vector<Explanation>& found = result.explanations;
  const Explanation* best = found.empty() ? nullptr : &found.front();

  Verdict verdict;
  const auto& conventions = best ? best->conventions : result.nearest;
  const Recipe attention = recipe_of(conventions);
  if (best == nullptr) {
    verdict.findings = flaws_of_out(ordered, attention);
    verdict.remarks = remarks_on_search(ordered, result);
  }
  for (const Convention* convention : conventions) {
    verdict.assumptions.push_back(finding(*convention));
  }
  if (best != nullptr) {
    describe(ordered, *best, attention, verdict);
    const auto more = remarks(ordered, attention, *best);
    verdict.remarks.insert(verdict.remarks.end(), more.begin(), more.end());
  }
  for (size_t i = 1; i < found.size(); ++i) {
    verdict.alternatives.push_back(names_of(found[i]));
  }
  for (const ObservedCall& call : calls) {
    verdict.cases.push_back(compare(call, attention, best));
  }
  verdict.judgement = judgement_of(verdict, best != nullptr);
  if (best == nullptr || !best->faults.empty()) {
    const Difference difference = locate(ordered, attention);
    verdict.where = difference.place;
    if (!verdict.first_stage && difference.stage) {
      verdict.first_stage = name_of(*difference.stage);
    }
  }
  for (const ObservedCall& call : calls) {
    append_new(verdict.weights, matched(call, attention));
    append_new(verdict.unused, call.weights.unused);
  }
  return verdict;
}

}  // namespace multihead::diagnosis
