// SPDX-License-Identifier: MIT
//
// Verdicts of `multihead verify`: numbers in, agreement or faults out. Free of
// torch; every dtype it compares converts to double without loss.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace cli {

using Values = std::vector<double>;

/// One tensor of a result. Absent values are nullopt.
struct Part {
  std::string name;            ///< "out", "weights", "d query"
  std::vector<int64_t> shape;  ///< of ours
  Values ours = {};
  std::optional<Values> pytorch = {};  ///< PyTorch's answer
  std::optional<Values> golden = {};   ///< the float64 loops' answer
  std::optional<Values> allowed = {};  ///< largest |ours − golden| per element
  std::string misfit = {};             ///< how shape or dtype differ
};

struct Tolerance {
  double atol, rtol;
};
/// What the exercises ask for.
inline constexpr Tolerance kExercise{1e-8, 1e-5};

/// Results and what is demanded of them, beside each part's budget.
struct Comparison {
  std::vector<Part> parts;
  bool bits = false;                    ///< equal to PyTorch's, bit for bit
  std::optional<Tolerance> close = {};  ///< allclose to PyTorch's
};

struct Verdict {
  std::vector<std::string> faults;   ///< empty: ours agrees
  std::optional<double> difference;  ///< largest, from PyTorch's; 0: same bits
  std::optional<double> error;       ///< largest, of ours, from golden
  std::optional<double> pytorch_error;
  std::optional<double> budget;  ///< largest share of `allowed`; ≤ 1 is within
  std::optional<bool> exercise;  ///< allclose at kExercise
  bool agrees() const { return faults.empty(); }
};

/// |x − y|; 0 for the same infinity or for two NaN, infinite for one NaN.
inline double distance(double x, double y) {
  if (x == y || (std::isnan(x) && std::isnan(y))) return 0;
  if (std::isnan(x) || std::isnan(y))
    return std::numeric_limits<double>::infinity();
  return std::abs(x - y);
}

/// Element by element: how many exceed their bound, the worst share of it.
struct Excess {
  int64_t count = 0, first = 0;
  double difference = 0, share = 0;
};

/// bound(i) ≥ 0 is what |x[i] − y[i]| may reach.
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

/// "out[1, 0, 3]"
inline std::string element(const Part& part, int64_t index) {
  std::string text = "]";
  for (size_t d = part.shape.size(); d-- > 0;) {
    text.insert(0, std::to_string(index % part.shape[d]));
    index /= part.shape[d];
    if (d > 0) text.insert(0, ", ");
  }
  return part.name + "[" + text;
}

inline std::string explain(const Part& part, const Excess& excess,
                           const Values& expected, const std::string& demand) {
  std::ostringstream text;
  text.precision(9);
  text << part.name << ": " << excess.count << " of " << part.ours.size()
       << " elements " << demand << ", first " << element(part, excess.first)
       << " = " << part.ours[excess.first] << " instead of "
       << expected[excess.first] << ", largest difference "
       << excess.difference;
  return text.str();
}

inline void raise(std::optional<double>& largest, double value) {
  largest = std::max(largest.value_or(0), value);
}

inline void judge_against_pytorch(const Part& part, const Comparison& demands,
                                  Verdict& verdict) {
  const Values& expected = *part.pytorch;
  const auto within = [&](Tolerance t) {
    return excess(part.ours, expected, [&](size_t i) {
      return t.atol + t.rtol * std::abs(expected[i]);
    });
  };
  const Excess bits = within({0, 0});
  raise(verdict.difference, bits.difference);
  verdict.exercise =
      verdict.exercise.value_or(true) && within(kExercise).count == 0;
  if (demands.bits && bits.count > 0)
    verdict.faults.push_back(
        explain(part, bits, expected, "differ from PyTorch's bits"));
  if (!demands.close) return;
  const Excess close = within(*demands.close);
  if (close.count > 0)
    verdict.faults.push_back(
        explain(part, close, expected, "are not close to PyTorch's"));
}

inline void judge_against_golden(const Part& part, Verdict& verdict) {
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
        explain(part, budget, *part.golden, "are outside the error budget"));
}

/// A comparison that demands nothing is a fault of its own.
inline Verdict judge(const Comparison& comparison) {
  Verdict verdict;
  for (const Part& part : comparison.parts) {
    const bool demanded =
        (part.pytorch && (comparison.bits || comparison.close)) ||
        (part.golden && part.allowed);
    if (!part.misfit.empty()) {
      verdict.faults.push_back(part.name + ": " + part.misfit);
      continue;
    }
    if (!demanded)
      verdict.faults.push_back(part.name + ": nothing is demanded of it");
    if (part.pytorch) judge_against_pytorch(part, comparison, verdict);
    if (part.golden) judge_against_golden(part, verdict);
  }
  if (comparison.parts.empty()) verdict.faults.push_back("no result");
  return verdict;
}

}  // namespace cli
