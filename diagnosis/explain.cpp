// SPDX-License-Identifier: MIT
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <mutex>

#include "diagnosis/search/arrangement.h"
#include "diagnosis/search/assumptions.h"
#include "diagnosis/search/search.h"
#include "multihead/diagnosis.h"
#include "multihead/text/dtypes.h"
#include "multihead/text/shapes.h"

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
  std::ranges::stable_sort(ordered, {}, rank);
  return ordered;
}

// ---- Cases -----------------------------------------------------------------

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
    const Tensor seen =
        rows.defined() ? at::where(rows.unsqueeze(-1), result, ours) : result;
    compared.exercise =
        compared.exercise || at::allclose(ours, seen, /*rtol=*/1e-5,
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
  // First: it shows what stands beside attention, which is then known.
  const Errors faulty =
      explanation ? errors(call, explanation->recipe, precision) : Errors{};
  const Errors plain = errors(call, attention, precision);
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

// ---- What is worth knowing beside the verdict ------------------------------

const Finding kNaNRows = {
    "nan_rows", "weights",
    "A query whose keys are all blocked gives NaN: the softmax of "
    "nothing but -inf. `nn.MultiheadAttention` gives NaN there with "
    "weights, and 0 without.",
    "Where such rows occur, as in padded batches, set their weights to "
    "0."};

const Finding kUniformRows = {
    "uniform_rows", "weights",
    "A query whose keys are all blocked attends to the blocked keys: "
    "a finite sentinel cancels in the softmax.",
    "Where such rows occur, set their weights to 0."};

const Finding kComputedInFloat = {
    "computed_in_float32", "weights",
    "In float64 it agrees to the digits of float32 only: something is "
    "rounded to float32 on the way, or a small number is added.",
    "That is right for float32 and narrower inputs."};

const Finding kTurnedByHead = {
    "rotary_by_head", "heads",
    "Queries and keys are turned by which head they are, not by their "
    "positions: both by the same angle, which no score shows, so that it has "
    "no effect.",
    "Rotary tables (L, d) belong beside the positions: (1, 1, L, d) for heads "
    "(B, H, L, d), (1, L, 1, d) for (B, L, H, d)."};

const Finding kInputsNotFinite = {
    "inputs_not_finite", "",
    "Inputs hold NaN or infinite numbers: what these reach is not judged.",
    "Save a case of finite numbers."};

const Finding kCutShort = {
    "search_cut_short", "",
    "The search for faults was cut short: not all of them, alone and in "
    "pairs, were tried on tensors of this size.",
    "A case of a few positions and features is searched to the end."};

const Finding kTooSmall = {
    "too_few_numbers", "output",
    "Some faults would explain it, but attention comes so near already, or out "
    "holds so few different numbers, that they may fit by chance.",
    "Save a larger case, or one in float64."};

Finding lost_in_rounding(const Stages& stages) {
  return {"lost_in_rounding", "scores",
          "Scores are as large as " + c10::str(largest_finite(stages.scores)) +
              ": rounding alone may change the weights, and nothing "
              "can be told from the result.",
          "Save a case with smaller numbers, or in float64."};
}

// Its shape, or numbers that are not finite where attention's are.
std::optional<Finding> flaw_of_out(const ObservedCall& call,
                                   const Stages& stages) {
  if (stages.out.sizes() != call.out.sizes()) {
    return Finding{
        "wrong_shape", "output",
        "out has the shape " + shape_text(call.out) +
            ", attention on these inputs " + shape_text(stages.out) + ".",
        "Each query gets one output: all sizes but the last are those of the "
        "query, and the heads are merged into the last."};
  }
  Tensor wrong =
      call.out.isfinite().logical_not().logical_and(stages.out.isfinite());
  if (const Tensor rows = seeing_rows(call, stages); rows.defined()) {
    wrong = wrong.logical_and(rows.unsqueeze(-1));
  }
  const int64_t count = wrong.sum().item<int64_t>();
  if (count == 0) return std::nullopt;
  const Tensor first = wrong.nonzero()[0].contiguous();
  const std::span index(first.const_data_ptr<int64_t>(), first.size(0));
  return Finding{
      "not_finite", "output",
      c10::str("Of ", wrong.numel(), " numbers of out, ", count,
               count == 1 ? " is" : " are",
               " NaN or infinite where attention's are not, first out[",
               c10::Join(", ", index), "]."),
      "Print each intermediate tensor's `isfinite().all()`: the first that is "
      "false is where to look."};
}

// What became of queries that see no key; nullptr: nothing to say.
const Finding* on_fully_masked_rows(const ObservedCall& call,
                                    const Recipe& attention) {
  const std::optional<Stages> stages = simulate(call, attention);
  if (!stages || !stages->fully_masked.defined()) return nullptr;
  const Tensor fully_masked = seeing_rows(call, *stages).logical_not();
  if (call.out.isnan().any(-1).logical_and(fully_masked).any().item<bool>()) {
    return &kNaNRows;
  }
  const double allowed =
      rounding_allowed(call.dtype, *stages, largest_finite(stages->out));
  return largest_difference(call.out, stages->out, fully_masked) > allowed
             ? &kUniformRows
             : nullptr;
}

// Whether rotary positions were taken along the heads, as the first call that
// shows its way tells.
bool turns_by_head(std::span<const ObservedCall> calls,
                   const Recipe& attention) {
  const auto call = std::ranges::find_if(
      calls, [](const ObservedCall& one) { return !one.trace.empty(); });
  if (call == calls.end() || attention.rotary != Rotary::kNone) return false;
  const std::optional<Stages> stages = simulate(*call, attention);
  return stages && shown_turn(*call, stages->heads[0], /*by_head=*/true);
}

std::vector<Finding> flaws_of_out(std::span<const ObservedCall> calls,
                                  const Recipe& attention);

// Those of an output that is right only as PyTorch's own numbers are, which
// overflow likewise.
std::vector<Finding> shared_flaws(std::span<const ObservedCall> calls,
                                  const Recipe& attention) {
  std::vector<Finding> flaws = flaws_of_out(calls, attention);
  for (Finding& flaw : flaws)
    flaw.sentence += " PyTorch's own overflow like them.";
  return flaws;
}

// On calls beside attention by `attention`, the conventions of `explanation`.
std::vector<Finding> remarks(std::span<const ObservedCall> calls,
                             const Recipe& attention,
                             const Explanation& explanation) {
  // Where a fault meets the mask, it is what becomes of fully masked rows.
  const bool masks =
      std::ranges::none_of(explanation.faults, [](const Pick& pick) {
        return pick.fault->stage == Stage::kMaskedScores;
      });
  std::vector<Finding> all;
  if (explanation.faults.empty()) all = shared_flaws(calls, attention);
  for (const Finding* remark : {&kNaNRows, &kUniformRows}) {
    const bool concerns = std::ranges::any_of(calls, [&](const auto& call) {
      return on_fully_masked_rows(call, attention) == remark;
    });
    if (masks && concerns) all.push_back(*remark);
  }
  if (explanation.in_float) all.push_back(kComputedInFloat);
  if (turns_by_head(calls, attention)) all.push_back(kTurnedByHead);
  const bool finite = std::ranges::all_of(calls, [](const ObservedCall& call) {
    return std::ranges::all_of(call.inputs, [](const auto& x) {
      return x.isfinite().all().template item<bool>();
    });
  });
  if (!finite) all.push_back(kInputsNotFinite);
  return all;
}

// On a search that explained nothing: why that may be.
std::vector<Finding> remarks_on_search(std::span<const ObservedCall> calls,
                                       const SearchResult& result) {
  std::vector<Finding> all;
  if (result.cut_short) all.push_back(kCutShort);
  if (result.by_chance) all.push_back(kTooSmall);
  for (const ObservedCall& call : calls) {
    const std::optional<Stages> stages = simulate(call, Recipe{});
    if (!stages || !is_lost_in_rounding(call.dtype, *stages)) continue;
    all.push_back(lost_in_rounding(*stages));
    break;
  }
  return all;
}

// Each once, in calls that nothing explains.
std::vector<Finding> flaws_of_out(std::span<const ObservedCall> calls,
                                  const Recipe& attention) {
  std::vector<Finding> all;
  for (const ObservedCall& call : calls) {
    const std::optional<Stages> stages = simulate(call, attention);
    const auto flaw = stages ? flaw_of_out(call, *stages) : std::nullopt;
    if (flaw && std::ranges::find(all, flaw->name, &Finding::name) == all.end())
      all.push_back(*flaw);
  }
  return all;
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
    if (std::ranges::find(all, one) == all.end()) all.push_back(one);
  }
}

// ---- The verdict -----------------------------------------------------------

Judgement judgement_of(const Verdict& verdict, bool explained) {
  if (!explained) return Judgement::kUnknown;
  if (!verdict.faults.empty()) return Judgement::kFault;
  return std::ranges::all_of(verdict.cases, &ComparedCase::bits)
             ? Judgement::kBits
             : Judgement::kRounding;
}

void describe(std::span<const ObservedCall> calls, const Explanation& best,
              const Recipe& attention, Verdict& verdict) {
  const auto found = std::ranges::find_if(calls, [&](const auto& call) {
    return !errors(call, attention, call.dtype).fit();
  });
  const ObservedCall& failing = found != calls.end() ? *found : calls.front();
  for (const Pick& pick : best.faults) {
    verdict.faults.push_back(finding(pick, failing.sizes));
  }
  if (!best.faults.empty()) {
    const Pick first = std::ranges::min(
        best.faults, {}, [](const Pick& pick) { return pick.fault->stage; });
    verdict.first_stage = name_of(*first.fault->stage);
  }
}

// What is compared is computed step by step, as whole matrices.
void check_size(const ObservedCall& call) {
  constexpr int64_t kMost = int64_t{1} << 26;
  const Sizes& n = call.sizes;
  TORCH_CHECK_VALUE(n.batch * n.heads <= kMost / n.queries / n.keys,
                    "explain: query and key must make no more than ", kMost,
                    " scores, got ", n.batch, " x ", n.heads, " x ", n.queries,
                    " x ", n.keys, "; save a smaller case");
}

std::vector<ObservedCall> read(std::span<const Observation> observations) {
  TORCH_CHECK_VALUE(!observations.empty(),
                    "explain: observations must hold at least one, got none");
  std::vector<ObservedCall> calls;
  for (const Observation& observation : observations) {
    calls.push_back(read_dump(observation));
    check_size(calls.back());
  }
  // Calls that show nothing of their way have the blocks of those that do.
  int64_t of_keys = 0, block = 0;
  for (ObservedCall& call : calls) {
    call.block = shown_block(call);
    of_keys = of_keys > 0 ? of_keys : call.block;
    block = block > 0 ? block : shown_blocks(call);
  }
  for (ObservedCall& call : calls) {
    if (call.block == 0) call.block = of_keys;
    const bool is_longer =
        call.sizes.queries == call.sizes.keys && call.sizes.keys > block;
    call.own_block = is_longer ? block : 0;
    call.last_followed = {};
  }
  return calls;
}

// The tensors are tiny: threads would only wait for each other. The number is
// PyTorch's for the whole process, so calls take turns.
class OneThread {
 public:
  OneThread() {
    if (threads_ != 1) at::set_num_threads(1);
  }
  ~OneThread() {
    if (threads_ != 1) at::set_num_threads(threads_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  static std::mutex& turn() {
    static std::mutex mutex;
    return mutex;
  }
  const std::lock_guard<std::mutex> lock_{turn()};
  const int threads_ = at::get_num_threads();
};

// No gradients, and none of the layers of dispatch that would record them,
// which cost a tenth of a search: gradients() alone has them back.
struct Unrecorded {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
};

}  // namespace

int fewest_faults(std::span<const Observation> observations, int most) {
  TORCH_CHECK_VALUE(most == 0 || most == 1,
                    "fewest_faults: most must be 0 or 1, got ", most);
  const Unrecorded unrecorded;
  const OneThread one_thread;
  return static_cast<int>(fewest_faults(in_order(read(observations)), most));
}

Verdict explain(std::span<const Observation> observations) {
  const Unrecorded unrecorded;
  const OneThread one_thread;
  const std::vector<ObservedCall> calls = read(observations);
  const std::vector<ObservedCall> ordered = in_order(calls);
  const SearchResult result = search(ordered);
  const std::vector<Explanation>& found = result.explanations;
  const Explanation* best = found.empty() ? nullptr : &found.front();

  Verdict verdict;
  verdict.effort = result.effort;
  const auto& conventions = best ? best->conventions : result.nearest;
  const Recipe attention = with(conventions);
  if (best == nullptr) {
    verdict.findings = flaws_of_out(ordered, attention);
    // What out itself shows needs no search.
    if (verdict.findings.empty())
      verdict.remarks = remarks_on_search(ordered, result);
  }
  if (best != nullptr) describe(ordered, *best, attention, verdict);
  if (best != nullptr && best->faults.empty()) {
    if (auto fault = misplaced(ordered.front())) {
      verdict.first_stage = fault->stage;
      verdict.faults.push_back(*std::move(fault));
    }
  }
  assume(ordered, conventions, best, verdict);
  if (best != nullptr) {
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
