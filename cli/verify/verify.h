// SPDX-License-Identifier: MIT
//
// What `multihead verify` runs, what it demands of the results, and what it
// says of them.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/cases/golden.h"
#include "cli/environment.h"
#include "cli/terminal/text.h"

namespace cli {

// --- Verdicts: numbers in, agreement or faults out ---------------------------
// Every dtype that is compared converts to double without loss.

/// One tensor of a result. Absent values are nullopt.
struct Part {
  std::string name;            ///< "out", "weights", "d query"
  std::vector<int64_t> shape;  ///< of ours
  int digits = 53;             ///< of the dtype's significand, in bits
  Values ours = {};
  std::optional<Values> pytorch = {};  ///< PyTorch's answer
  std::optional<Values> golden = {};   ///< the float64 loops' answer
  std::optional<Values> allowed = {};  ///< largest |ours − golden| per element
  std::string misfit = {};             ///< how shape or dtype differ
};

/// What is demanded of ours beside PyTorch's result.
///  kNothing  only the error budget counts.
///  kBits     the same bits: PyTorch ran the same operations in the same order
///            on operands that lie alike.
///  kClose    PyTorch ran other operations. Both sides may use the whole error
///            budget, so they may differ by twice as much; a part without a
///            budget must pass the exercises' allclose.
enum class Agreement { kNothing, kBits, kClose };

struct Comparison {
  std::vector<Part> parts;
  Agreement pytorch = Agreement::kNothing;
};

/// Which demand was not met.
enum class FaultKind { kBits, kClose, kBudget, kResult };

struct Fault {
  FaultKind kind;
  std::string text;
};

struct Verdict {
  Agreement pytorch = Agreement::kNothing;
  std::vector<Fault> faults;         ///< empty: ours agrees
  std::optional<double> difference;  ///< largest, from PyTorch's; 0: same bits
  std::optional<double> error;       ///< largest, of ours, from golden
  std::optional<double> pytorch_error;
  std::optional<double> budget;  ///< largest share of `allowed`; ≤ 1 is within
  std::optional<bool> exercise;  ///< allclose as exercises ask for it
  bool agrees() const { return faults.empty(); }
};

/// A comparison that demands nothing is a fault of its own.
Verdict judge(const Comparison& comparison);

/// One tensor of a comparison; undefined tensors are absent.
Part make_part(std::string name, const at::Tensor& ours,
               const at::Tensor& pytorch, const Golden& golden = {});

// --- Cases: data, listed in files of their own -------------------------------

struct Case {
  std::string group;   ///< what is under test, against what
  std::string name;    ///< with group and shapes unique
  std::string shapes;  ///< sizes and dtype, "N2 L5 Lk7 E16 H4 f32"
  std::function<Comparison(Random&)> run;
};

std::vector<Case> textbook_cases();
std::vector<Case> module_cases();
std::vector<Case> functional_cases();

/// Adds what compare(call, random) is to do with each of `calls`.
void add_cases(std::vector<Case>& cases, const std::string& group, auto&& calls,
               auto compare) {
  for (const auto& call : calls)
    cases.push_back(
        {group, call.name, shapes(call),
         [call, compare](Random& random) { return compare(call, random); }});
}

/// What torch::nn::MultiheadAttention gets wrong in C++, as sentences.
std::vector<std::string> known_wrong_answers(uint64_t seed);

// --- The report --------------------------------------------------------------

struct Outcome {
  const Case* test;
  Verdict verdict;
  double seconds;
};

class VerifyReport {
 public:
  /// Columns are as wide as these cases need.
  explicit VerifyReport(const std::vector<Case>& cases);

  void opening(const Environment& environment, uint64_t seed);
  void add(const Outcome& outcome);
  /// wrong_answers: sentences about what PyTorch itself gets wrong.
  void closing(const std::vector<Outcome>& outcomes, double seconds,
               const std::vector<std::string>& wrong_answers);

 private:
  void list_failures(const std::vector<Outcome>& outcomes);

  Table table_;
  std::string group_;
};

/// All of it as one JSON object.
void print_json(const std::vector<Outcome>& outcomes, uint64_t seed,
                const std::vector<std::string>& wrong_answers);

}  // namespace cli
