// SPDX-License-Identifier: MIT
//
// `multihead verify`: chooses the cases and runs them.
#include <chrono>
#include <exception>
#include <stdexcept>

#include "cli/cases/case.h"
#include "cli/commands.h"
#include "cli/terminal/environment.h"
#include "cli/terminal/suggestion.h"
#include "cli/verify/report.h"

namespace cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

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

std::string title(const Case& test) {
  return test.group + ": " + test.name + " " + test.shapes;
}

std::vector<Case> selected_cases(const std::string& filter) {
  std::vector<Case> cases;
  for (auto list :
       {textbook_cases, module_cases, functional_cases, gradient_cases})
    for (Case& test : list())
      if (title(test).find(filter) != std::string::npos)
        cases.push_back(std::move(test));
  return cases;
}

}  // namespace

int verify(const VerifyOptions& options) {
  const auto start = Clock::now();
  const std::vector<Case> cases = selected_cases(options.filter);
  if (cases.empty()) {
    std::vector<std::string> titles;
    for (const Case& test : selected_cases("")) titles.push_back(title(test));
    throw std::invalid_argument("verify: " +
                                no_case_matches(options.filter, titles));
  }
  std::optional<VerifyReport> report;
  if (!options.json) {
    report.emplace(cases);
    report->opening(detect_environment(), options.seed);
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
    print_json(outcomes, options.seed, wrong_answers);
  for (const Outcome& outcome : outcomes)
    if (!outcome.verdict.agrees()) return 1;
  return 0;
}

}  // namespace cli
