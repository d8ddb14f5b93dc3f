// SPDX-License-Identifier: MIT
//
// `multihead verify`: chooses the cases, runs them, says what came out.
#include "cli/verify/verify.h"

#include <CLI/CLI.hpp>
#include <chrono>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "cli/commands.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/output.h"

namespace cli {
namespace {

using Json = nlohmann::ordered_json;

std::string number(std::optional<double> value, const char* form = "%.1e") {
  return !value ? "–" : *value == 0 ? "0" : format(form, *value);
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

// By FaultKind; the lines of a screen.
constexpr const char* kMeanings[] = {
    R"(Bits differ, although both sides ran the same operations in the same order on operands that
lie alike. No rounding explains that: it is a defect here, or one of PyTorch's operations
depends on something unknown so far. Please report it with the output of `multihead info`.)",
    R"(Not close to PyTorch's: the two are farther apart than the rounding errors of both. The
columns "error" and "its error" say which of them is wrong.)",
    R"(Outside the error budget: farther from the definition in float64 than the rounding of the
dtype explains. This is a defect of multihead.)",
    R"(No comparable result: an error, or a result that is missing or has another shape or dtype
than it must have.)"};

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
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : nullptr;
}

// What is demanded of ours beside PyTorch's result, or null.
Json demand(Agreement demand) {
  if (demand == Agreement::kNothing) return nullptr;
  return demand == Agreement::kBits ? "bits" : "close";
}

Json to_json(const Outcome& outcome) {
  const Verdict& v = outcome.verdict;
  Json faults = Json::array();
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
  for (auto list : {textbook_cases, module_cases, functional_cases})
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

VerifyReport::VerifyReport(const std::vector<Case>& cases)
    : table_(table_columns(cases)) {}

void VerifyReport::opening(const Environment& e, uint64_t seed) {
  table_.line("multihead " + e.version + " · torch " + e.torch_running + " · " +
                  e.cpu + " · " + plural(e.threads, "thread") + " · seed " +
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
              {number(v.budget, "%.2f")},
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
    table_.line(kMeanings[static_cast<int>(kind)]);
  if (!kinds.empty()) table_.line("");
}

void print_json(const std::vector<Outcome>& outcomes, uint64_t seed,
                const std::vector<std::string>& wrong_answers) {
  Json cases = Json::array();
  bool agree = true;
  for (const Outcome& outcome : outcomes) {
    cases.push_back(to_json(outcome));
    agree = agree && outcome.verdict.agrees();
  }
  const Json all = {{"environment", to_json(detect_environment())},
                    {"seed", seed},
                    {"agrees", agree},
                    {"cases", std::move(cases)},
                    {"pytorch_wrong_answers", wrong_answers}};
  write_output(all.dump(2) + "\n");
}

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
