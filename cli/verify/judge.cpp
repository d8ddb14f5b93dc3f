// SPDX-License-Identifier: MIT
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "cli/verify/verify.h"

namespace cli {
namespace {

struct Tolerance {
  double atol, rtol;
};
constexpr Tolerance kExercise{1e-8, 1e-5};

// |x − y|; 0 for the same infinity or for two NaN, infinite for one NaN.
double distance(double x, double y) {
  if (x == y || (std::isnan(x) && std::isnan(y))) return 0;
  if (std::isnan(x) || std::isnan(y))
    return std::numeric_limits<double>::infinity();
  return std::abs(x - y);
}

// Element by element: how many exceed their bound, the worst share of it.
struct Excess {
  int64_t count = 0, first = 0;
  double difference = 0, share = 0;
};

// bound(i) ≥ 0 is what |x[i] − y[i]| may reach.
template <typename Bound>
Excess excess(const Values& x, const Values& y, Bound bound) {
  Excess result;
  for (size_t i = 0; i < x.size(); ++i) {
    const double difference = distance(x[i], y[i]);
    if (difference == 0) continue;
    const double share = difference / bound(i);
    result.difference = std::max(result.difference, difference);
    result.share = std::max(result.share, share);
    if (!(share <= 1) && result.count++ == 0) result.first = i;
  }
  return result;
}

// "out[1, 0, 3]"
std::string element(const Part& part, int64_t index) {
  std::string text = "]";
  for (size_t d = part.shape.size(); d-- > 0;) {
    text.insert(0, std::to_string(index % part.shape[d]));
    index /= part.shape[d];
    if (d > 0) text.insert(0, ", ");
  }
  return part.name + "[" + text;
}

// As few digits as tell the value from every other of its dtype.
std::string exact_number(double value, int digits) {
  char text[32];
  const std::to_chars_result end =
      digits <= std::numeric_limits<float>::digits
          ? std::to_chars(text, text + sizeof text, static_cast<float>(value))
          : std::to_chars(text, text + sizeof text, value);
  return {text, end.ptr};
}

// How far x is from y in units in the last place of y, a number of `digits`
// bits; empty where that says nothing: not finite, zero, or a million units.
std::string units_apart(double x, double y, int digits) {
  if (!std::isfinite(x) || !std::isfinite(y) || y == 0) return {};
  const double unit = std::ldexp(1.0, std::ilogb(y) - digits + 1);
  const double units = std::round(std::abs(x - y) / unit);
  if (!(units < 1e6)) return {};
  if (units < 1) return " (less than one unit in the last place)";
  if (units == 1) return " (one unit in the last place)";
  return format(" (%.0f units in the last place)", units);
}

std::string explain(const Part& part, const Excess& excess,
                    const Values& expected, const std::string& demand) {
  const double x = part.ours[excess.first], y = expected[excess.first];
  return part.name + ": " + std::to_string(excess.count) + " of " +
         std::to_string(part.ours.size()) + " elements " + demand + ", first " +
         element(part, excess.first) + " = " + exact_number(x, part.digits) +
         " instead of " + exact_number(y, part.digits) +
         units_apart(x, y, part.digits) + ", largest difference " +
         exact_number(excess.difference, 11);
}

void raise(std::optional<double>& largest, double value) {
  largest = std::max(largest.value_or(0), value);
}

void judge_against_pytorch(const Part& part, Verdict& verdict) {
  const Values& expected = *part.pytorch;
  const auto within = [&](Tolerance t) {
    return excess(part.ours, expected, [&](size_t i) {
      return t.atol + t.rtol * std::abs(expected[i]);
    });
  };
  const Excess bits = within({0, 0}), exercise = within(kExercise);
  raise(verdict.difference, bits.difference);
  verdict.exercise = verdict.exercise.value_or(true) && exercise.count == 0;
  const auto demand = [&](FaultKind kind, const Excess& e, const char* text) {
    if (e.count > 0)
      verdict.faults.push_back({kind, explain(part, e, expected, text)});
  };
  if (verdict.pytorch == Agreement::kBits)
    demand(FaultKind::kBits, bits, "differ from PyTorch's bits");
  if (verdict.pytorch == Agreement::kClose)
    demand(FaultKind::kClose,
           part.allowed
               ? excess(part.ours, expected,
                        [&](size_t i) { return 2 * (*part.allowed)[i]; })
               : exercise,
           "are not close to PyTorch's");
}

void judge_against_golden(const Part& part, Verdict& verdict) {
  const auto largest = [&](const Values& values) {
    return excess(values, *part.golden, [](size_t) { return 1.0; }).difference;
  };
  raise(verdict.error, largest(part.ours));
  if (part.pytorch) raise(verdict.pytorch_error, largest(*part.pytorch));
  if (!part.allowed) return;
  const Excess budget = excess(part.ours, *part.golden,
                               [&](size_t i) { return (*part.allowed)[i]; });
  raise(verdict.budget, budget.share);
  if (budget.count > 0)
    verdict.faults.push_back(
        {FaultKind::kBudget,
         explain(part, budget, *part.golden, "are outside the error budget")});
}

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

int significand_bits(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 8
         : dtype == at::kHalf   ? 11
         : dtype == at::kFloat  ? 24
                                : 53;
}

}  // namespace

Verdict judge(const Comparison& comparison) {
  Verdict verdict;
  verdict.pytorch = comparison.pytorch;
  const auto no_result = [&](const std::string& text) {
    verdict.faults.push_back({FaultKind::kResult, text});
  };
  for (const Part& part : comparison.parts) {
    if (!part.misfit.empty()) {
      no_result(part.name + ": " + part.misfit);
      continue;
    }
    if (!(part.pytorch && comparison.pytorch != Agreement::kNothing) &&
        !(part.golden && part.allowed))
      no_result(part.name + ": nothing is demanded of it");
    if (part.pytorch) judge_against_pytorch(part, verdict);
    if (part.golden) judge_against_golden(part, verdict);
  }
  if (comparison.parts.empty()) no_result("no result");
  return verdict;
}

Part make_part(std::string name, const at::Tensor& ours,
               const at::Tensor& pytorch, const Golden& golden) {
  Part part{.name = std::move(name), .shape = {}};
  if (!ours.defined()) {
    part.misfit = "missing";
    return part;
  }
  part.shape = ours.sizes().vec();
  part.digits = significand_bits(ours.scalar_type());
  part.ours = values(ours);
  if (pytorch.defined()) {
    part.pytorch = values(pytorch);
    if (ours.sizes() != pytorch.sizes() ||
        ours.scalar_type() != pytorch.scalar_type())
      part.misfit = describe(ours) + " instead of " + describe(pytorch);
  }
  if (golden.value.defined()) {
    part.golden = values(golden.value);
    if (golden.allowed.defined()) part.allowed = values(golden.allowed);
    if (ours.sizes() != golden.value.sizes())
      part.misfit = c10::str("shape ", ours.sizes(), " instead of ",
                             golden.value.sizes());
  }
  return part;
}

}  // namespace cli
