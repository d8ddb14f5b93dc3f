// SPDX-License-Identifier: MIT
//
// `multihead verify`: runs the cases, prints the table or JSON, counts.
#include <chrono>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/case.h"
#include "cli/commands.h"
#include "cli/environment.h"
#include "cli/table.h"

namespace cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Outcome {
  const Case* test;
  Verdict verdict;
  double seconds;
};

// A case that throws has failed; the others still run.
Outcome run(const Case& test, uint64_t seed) {
  const auto start = Clock::now();
  Random random(seed, test.group + test.name + test.shapes);
  try {
    return {&test, judge(test.run(random)), seconds_since(start)};
  } catch (const std::exception& error) {
    const std::string what = error.what();
    Verdict verdict;
    verdict.faults.push_back(
        {FaultKind::kResult, "error: " + what.substr(0, what.find('\n'))});
    return {&test, std::move(verdict), seconds_since(start)};
  }
}

std::vector<Case> selected_cases(const std::string& filter) {
  std::vector<Case> cases;
  for (auto list :
       {textbook_cases, module_cases, functional_cases, gradient_cases})
    for (Case& test : list())
      if ((test.group + ": " + test.name + " " + test.shapes).find(filter) !=
          std::string::npos)
        cases.push_back(std::move(test));
  return cases;
}

std::string number(std::optional<double> value, const char* format = "%.1e") {
  if (!value) return "–";
  if (*value == 0) return "0";
  char text[32];
  std::snprintf(text, sizeof text, format, *value);
  return text;
}

std::string against_pytorch(const Verdict& verdict) {
  return verdict.difference == 0 ? "bits" : number(verdict.difference);
}

std::string yes_or_no(std::optional<bool> value) {
  return value ? (*value ? "yes" : "no") : "–";
}

bool bit_for_bit(const Outcome& outcome) {
  return outcome.verdict.pytorch == Demand::kBits && outcome.verdict.agrees();
}

// "close" where PyTorch's result was compared, but not its bits.
const char* verdict_text(const Verdict& verdict) {
  if (!verdict.agrees()) return "✗ differs";
  return verdict.pytorch == Demand::kClose ? "✓ close" : "✓ agrees";
}

const char* meaning(FaultKind kind) {
  switch (kind) {
    case FaultKind::kBits:
      return "Bits differ although both sides ran the same operations, in the "
             "same order, on operands that lie alike. Rounding cannot do that: "
             "it is a defect here, or PyTorch's operation depends on something "
             "that is not known yet. A report with the output of `multihead "
             "info` would help.";
    case FaultKind::kClose:
      return "Not close to PyTorch's: the two are farther apart than the "
             "rounding errors of both. The columns \"error\" and \"its "
             "error\" say which of them is wrong.";
    case FaultKind::kBudget:
      return "Outside the error budget: farther from the definition, computed "
             "in float64, than the dtype's rounding explains. This is a defect "
             "of multihead.";
    case FaultKind::kResult:
      return "No comparable result: an error, or a result that is missing or "
             "has another shape or dtype than it must have.";
  }
  return "";
}

class Report {
 public:
  explicit Report(const std::vector<Case>& cases)
      : terminal_(detect_terminal()), table_(columns(cases), terminal_) {}

  void opening(const Environment& e, const VerifyOptions& options) {
    table_.line("multihead " + e.version + " · torch " + e.torch_running +
                    " · " + e.cpu + " · " + std::to_string(e.threads) +
                    (e.threads == 1 ? " thread" : " threads") + " · seed " +
                    std::to_string(options.seed),
                Style::kBold);
    table_.line("");
    table_.header();
  }

  void add(const Outcome& outcome) {
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
                {number(v.budget, "%.2f")},
                {yes_or_no(v.exercise)},
                {verdict_text(v), v.agrees() ? Style::kGood : Style::kBad}});
    for (const Fault& fault : v.faults)
      table_.line("      " + fault.text, Style::kBad);
  }

  void closing(const std::vector<Outcome>& outcomes, double seconds,
               const std::vector<std::string>& wrong_answers) {
    table_.line("");
    for (const std::string& sentence : wrong_answers) table_.line(sentence);
    list_failures(outcomes);
    size_t agree = 0, bits = 0;
    for (const Outcome& outcome : outcomes) {
      agree += outcome.verdict.agrees();
      bits += bit_for_bit(outcome);
    }
    char text[128];
    std::snprintf(text, sizeof text,
                  "%zu of %zu cases agree; %zu bit for bit. %.1f s", agree,
                  outcomes.size(), bits, seconds);
    table_.line(text, agree == outcomes.size() ? Style::kGood : Style::kBad);
  }

 private:
  // What failed, once more, where it is not between hundreds of other lines,
  // and what it means.
  void list_failures(const std::vector<Outcome>& outcomes) {
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
    for (const FaultKind kind : kinds) table_.line(meaning(kind));
    if (!kinds.empty()) table_.line("");
  }

  static std::vector<Column> columns(const std::vector<Case>& cases) {
    int name = 0, shapes = 0;
    for (const Case& test : cases) {
      name = std::max(name, 2 + display_width(test.name));
      shapes = std::max(shapes, display_width(test.shapes));
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

  Terminal terminal_;
  Table table_;
  std::string group_;
};

template <typename T>
nlohmann::ordered_json or_null(const std::optional<T>& value) {
  return value ? nlohmann::ordered_json(*value) : nullptr;
}

// What is demanded of ours beside PyTorch's result, or null.
nlohmann::ordered_json demand(Demand demand) {
  if (demand == Demand::kNothing) return nullptr;
  return demand == Demand::kBits ? "bits" : "close";
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

void print_json(const std::vector<Outcome>& outcomes,
                const VerifyOptions& options,
                const std::vector<std::string>& wrong_answers) {
  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  bool agree = true;
  for (const Outcome& outcome : outcomes) {
    cases.push_back(to_json(outcome));
    agree = agree && outcome.verdict.agrees();
  }
  const nlohmann::ordered_json all = {
      {"environment", to_json(detect_environment())},
      {"seed", options.seed},
      {"agrees", agree},
      {"cases", std::move(cases)},
      {"pytorch_wrong_answers", wrong_answers}};
  std::puts(all.dump(2).c_str());
}

}  // namespace

int verify(const VerifyOptions& options) {
  const auto start = Clock::now();
  const std::vector<Case> cases = selected_cases(options.filter);
  if (cases.empty()) {
    std::fprintf(stderr, "multihead verify: no case matches \"%s\"\n",
                 options.filter.c_str());
    return 2;
  }
  std::optional<Report> report;
  if (!options.json) {
    report.emplace(cases);
    report->opening(detect_environment(), options);
  }
  std::vector<Outcome> outcomes;
  for (const Case& test : cases) {
    outcomes.push_back(run(test, options.seed));
    if (report) report->add(outcomes.back());
  }
  const auto wrong_answers = options.filter.empty()
                                 ? known_wrong_answers(options.seed)
                                 : std::vector<std::string>();
  if (report)
    report->closing(outcomes, seconds_since(start), wrong_answers);
  else
    print_json(outcomes, options, wrong_answers);
  for (const Outcome& outcome : outcomes)
    if (!outcome.verdict.agrees()) return 1;
  return 0;
}

}  // namespace cli
