// SPDX-License-Identifier: MIT
//
// `multihead verify`: chooses the cases and runs them.
#include <CLI/CLI.hpp>
#include <chrono>
#include <exception>
#include <memory>
#include <stdexcept>

#include "cli/cases/case.h"
#include "cli/commands.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/environment.h"
#include "cli/terminal/suggestion.h"
#include "cli/verify/report.h"

namespace cli {
namespace {

struct VerifyOptions {
  bool json = false;
  uint64_t seed = 0;
  std::string filter;  ///< part of "group: case"; empty = all
};

constexpr const char* kFooter = R"(
Columns:
  PyTorch    "bits" where every bit equals PyTorch's, else the largest difference
  error      largest error against plain float64 loops
  its error  the same of PyTorch's own result
  budget     worst share of the error that the dtype allows; up to 1 is within
  allclose   atol 1e-8, rtol 1e-5 against PyTorch, as exercises ask; for
             information where bits are not demanded

Exit status: 0 every case agrees, 1 a case does not, 2 nothing to compare, or
the result could not be written.

Examples:
  multihead verify
  multihead verify --filter padding
  multihead verify --seed 7 --json > verify.json
)";

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

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  const auto options = std::make_shared<VerifyOptions>();
  CLI::App* command = app.add_subcommand(
      "verify", "Compare this library with PyTorch, case by case");
  command->footer(kFooter);
  command->add_flag("--json", options->json, "Print one JSON object");
  command->add_option("--seed", options->seed, "Seed of all random inputs")
      ->check(is_seed)
      ->capture_default_str();
  command
      ->add_option("--filter", options->filter,
                   "Only cases whose group or name contains TEXT")
      ->type_name("TEXT");
  command->callback(
      [&action, options] { action = [options] { return verify(*options); }; });
}

}  // namespace cli
