// SPDX-License-Identifier: MIT
#include "cli/verify/report.h"

#include <nlohmann/json.hpp>
#include <set>

#include "cli/terminal/format.h"
#include "cli/terminal/output.h"
#include "cli/terminal/width.h"

namespace cli {
namespace {

std::string number(std::optional<double> value) {
  if (!value) return "–";
  return *value == 0 ? "0" : format("%.1e", *value);
}

std::string share(std::optional<double> value) {
  if (!value) return "–";
  return *value == 0 ? "0" : format("%.2f", *value);
}

std::string against_pytorch(const Verdict& verdict) {
  return verdict.difference == 0 ? "bits" : number(verdict.difference);
}

std::string yes_or_no(std::optional<bool> value) {
  return value ? (*value ? "yes" : "no") : "–";
}

bool bit_for_bit(const Outcome& outcome) {
  return outcome.verdict.pytorch == Agreement::kBits &&
         outcome.verdict.agrees();
}

// "close" where PyTorch's result was compared, but not its bits.
const char* verdict_text(const Verdict& verdict) {
  if (!verdict.agrees()) return "✗ differs";
  return verdict.pytorch == Agreement::kClose ? "✓ close" : "✓ agrees";
}

// One line each on the screen.
std::vector<const char*> meaning(FaultKind kind) {
  switch (kind) {
    case FaultKind::kBits:
      return {
          "Bits differ, although both sides ran the same operations in the "
          "same order on operands that",
          "lie alike. No rounding explains that: it is a defect here, or "
          "one of PyTorch's operations",
          "depends on something unknown so far. Please report it with the "
          "output of `multihead info`."};
    case FaultKind::kClose:
      return {
          "Not close to PyTorch's: the two are farther apart than the "
          "rounding errors of both. The",
          "columns \"error\" and \"its error\" say which of them is "
          "wrong."};
    case FaultKind::kBudget:
      return {
          "Outside the error budget: farther from the definition in float64 "
          "than the rounding of the",
          "dtype explains. This is a defect of multihead."};
    case FaultKind::kResult:
      return {
          "No comparable result: an error, or a result that is missing or "
          "has another shape or dtype",
          "than it must have."};
  }
  return {};
}

std::vector<Column> table_columns(const std::vector<Case>& cases) {
  int name = 0, shapes = 0;
  for (const Case& test : cases) {
    name = std::max(name, 2 + columns(test.name));
    shapes = std::max(shapes, columns(test.shapes));
  }
  return {{.title = "case", .width = name},
          {.title = "shapes", .width = shapes, .dispensable = true},
          {.title = "PyTorch", .width = 7, .right = true},
          {.title = "error", .width = 7, .right = true},
          {.title = "its error", .right = true, .dispensable = true},
          {.title = "budget", .right = true},
          {.title = "allclose", .right = true, .dispensable = true},
          {.title = "verdict", .width = 9}};
}

template <typename T>
nlohmann::ordered_json or_null(const std::optional<T>& value) {
  return value ? nlohmann::ordered_json(*value) : nullptr;
}

// What is demanded of ours beside PyTorch's result, or null.
nlohmann::ordered_json demand(Agreement demand) {
  if (demand == Agreement::kNothing) return nullptr;
  return demand == Agreement::kBits ? "bits" : "close";
}

nlohmann::ordered_json to_json(const Outcome& outcome) {
  const Verdict& v = outcome.verdict;
  nlohmann::ordered_json faults = nlohmann::ordered_json::array();
  for (const Fault& fault : v.faults) faults.push_back(fault.text);
  return {{"group", outcome.test->group},
          {"case", outcome.test->name},
          {"shapes", outcome.test->shapes},
          {"agrees", v.agrees()},
          {"demand", demand(v.pytorch)},
          {"difference", or_null(v.difference)},
          {"error", or_null(v.error)},
          {"pytorch_error", or_null(v.pytorch_error)},
          {"budget", or_null(v.budget)},
          {"allclose", or_null(v.exercise)},
          {"faults", std::move(faults)},
          {"seconds", outcome.seconds}};
}

}  // namespace

VerifyReport::VerifyReport(const std::vector<Case>& cases)
    : table_(table_columns(cases), detect_terminal()) {}

void VerifyReport::opening(const Environment& e, uint64_t seed) {
  table_.line("multihead " + e.version + " · torch " + e.torch_running + " · " +
                  e.cpu + " · " + std::to_string(e.threads) +
                  (e.threads == 1 ? " thread" : " threads") + " · seed " +
                  std::to_string(seed),
              Style::kBold);
  table_.line("");
  table_.header();
}

void VerifyReport::add(const Outcome& outcome) {
  const Case& test = *outcome.test;
  const Verdict& v = outcome.verdict;
  if (test.group != group_) {
    if (!group_.empty()) table_.line("");
    table_.line(group_ = test.group, Style::kBold);
  }
  table_.row({{"  " + test.name},
              {test.shapes, Style::kDim},
              {against_pytorch(v)},
              {number(v.error)},
              {number(v.pytorch_error)},
              {share(v.budget)},
              {yes_or_no(v.exercise)},
              {verdict_text(v), v.agrees() ? Style::kGood : Style::kBad}});
  for (const Fault& fault : v.faults)
    table_.line("      " + fault.text, Style::kBad);
}

void VerifyReport::closing(const std::vector<Outcome>& outcomes, double seconds,
                           const std::vector<std::string>& wrong_answers) {
  table_.line("");
  for (const std::string& sentence : wrong_answers) table_.line(sentence);
  list_failures(outcomes);
  size_t agree = 0, bits = 0;
  for (const Outcome& outcome : outcomes) {
    agree += outcome.verdict.agrees();
    bits += bit_for_bit(outcome);
  }
  table_.line(format("%zu of %zu cases agree; %zu bit for bit. %.1f s", agree,
                     outcomes.size(), bits, seconds),
              agree == outcomes.size() ? Style::kGood : Style::kBad);
}

// What failed, once more, where it is not between hundreds of other lines,
// and what it means.
void VerifyReport::list_failures(const std::vector<Outcome>& outcomes) {
  std::set<FaultKind> kinds;
  for (const Outcome& outcome : outcomes) {
    if (outcome.verdict.agrees()) continue;
    if (kinds.empty()) table_.line("These cases differ:", Style::kBad);
    const Case& test = *outcome.test;
    table_.line("  " + test.group + ": " + test.name + ", " + test.shapes,
                Style::kBold);
    for (const Fault& fault : outcome.verdict.faults) {
      table_.line("      " + fault.text, Style::kBad);
      kinds.insert(fault.kind);
    }
  }
  for (const FaultKind kind : kinds)
    for (const char* line : meaning(kind)) table_.line(line);
  if (!kinds.empty()) table_.line("");
}

void print_json(const std::vector<Outcome>& outcomes, uint64_t seed,
                const std::vector<std::string>& wrong_answers) {
  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  bool agree = true;
  for (const Outcome& outcome : outcomes) {
    cases.push_back(to_json(outcome));
    agree = agree && outcome.verdict.agrees();
  }
  const nlohmann::ordered_json all = {
      {"environment", to_json(detect_environment())},
      {"seed", seed},
      {"agrees", agree},
      {"cases", std::move(cases)},
      {"pytorch_wrong_answers", wrong_answers}};
  write_output(all.dump(2) + "\n");
}

}  // namespace cli
