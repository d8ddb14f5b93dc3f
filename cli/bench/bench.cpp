// SPDX-License-Identifier: MIT
//
// `multihead bench`: chooses cases, runs them, shows and writes what came out.
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>

#include "cli/bench/case.h"
#include "cli/bench/report.h"
#include "cli/bench/runner.h"
#include "cli/commands.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/output.h"
#include "cli/terminal/text.h"
#include "multihead/functional.h"

namespace cli {
namespace {

struct BenchOptions {
  std::string filter;        ///< part of "group: case sizes"; empty = all
  bool full = false;         ///< every case, not the standard grid
  bool list = false;         ///< name the cases instead of running them
  std::vector<int> threads;  ///< empty: 1, and all
  int rounds = 10;           ///< at least so many, except of slow calls
  double seconds = 1;        ///< for the calls of one case, roughly
  bool quick = false;        ///< few rounds, for a look
  bool same_isa = false;     ///< PyTorch uses what our kernels do: no AMX
  uint64_t seed = 0;
  /// Files that get the result, "-" for standard output; empty: none.
  std::string json, csv, markdown, svg;
};

const std::string kBeforeColumns = R"(
Every contender's result is compared with float64 before it is timed; then they
take turns, call by call. "backward" times autograd's backward alone, "forward +
backward" and "training steps" both. Ours has to take its kernels everywhere.
Columns:
)";
constexpr const char* kAfterColumns = R"(
MULTIHEAD_ISA limits this library's kernels, and the peak with them; --same-isa
limits PyTorch too.

Exit status: 0 ours is right everywhere, 1 it is not, 2 nothing was run, or the
result could not be written.

Examples:
  multihead bench
  multihead bench --list
  multihead bench --filter "causal d64" --threads 1
  multihead bench --filter backward
  multihead bench --full --json bench.json --svg bench.svg
)";

// A form of the result and where it goes.
struct Output {
  Destination to;
  std::string (*text_of)(const BenchRun&);
};

std::string title(const BenchCase& test) {
  return test.group + ": " + test.name + " " + shapes(test);
}

std::vector<BenchCase> selected_cases(const BenchOptions& options,
                                      const std::string& isa) {
  std::vector<BenchCase> cases = bench_cases(isa);
  std::erase_if(cases, [&](const BenchCase& test) {
    return (test.full_only && !options.full) ||
           title(test).find(options.filter) == std::string::npos;
  });
  return cases;
}

[[noreturn]] void refuse_filter(const BenchOptions& options,
                                const std::string& isa) {
  std::vector<std::string> titles;
  for (const BenchCase& test : bench_cases(isa)) {
    if (title(test).find(options.filter) != std::string::npos)
      throw std::invalid_argument("bench: \"" + options.filter +
                                  "\" needs --full");
    titles.push_back(title(test));
  }
  throw std::invalid_argument("bench: " +
                              no_case_matches(options.filter, titles));
}

void list(const std::vector<BenchCase>& cases) {
  int width = 0;
  for (const BenchCase& test : cases)
    width = std::max(width, 2 + columns(test.name));
  Table table({{.title = "case", .width = width}, {.title = "sizes"}});
  std::string group;
  for (const BenchCase& test : cases) {
    if (test.group != group) table.line(group = test.group, Style::kBold);
    table.row({{"  " + test.name}, {shapes(test), Style::kDim}});
  }
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof text, "%Y-%m-%d", std::localtime(&now));
  return text;
}

// The registers of our kernels, and tiles only where we use them. Has to come
// before PyTorch and its libraries look, which they do once.
void hold_pytorch_to(const std::string& isa) {
  constexpr const char* kVariables[] = {
      "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"};
  const IsaFacts& facts = facts_of(isa);
  for (int i = 0; i < 3; ++i)
    if (facts.held[i]) setenv(kVariables[i], facts.held[i], /*overwrite=*/1);
}

// As asked for, else one and all that this process may use.
std::vector<int> threads_for(const BenchCase& test, const BenchOptions& options,
                             int all) {
  if (!options.threads.empty()) return options.threads;
  if (all == 1 || (test.one_thread && !options.full)) return {1};
  return {1, all};
}

BenchRun new_run(const BenchOptions& options, const std::string& isa) {
  return {
      .environment = detect_environment(),
      .date = today(),
      .isa = isa,
      .has_tiles = !options.same_isa &&
                   measure_arithmetic(Unit::kBFloat16Tiles, 512, 1).has_value(),
      .same_isa = options.same_isa,
      .plan = {.rounds = options.quick ? 3 : options.rounds,
               .seconds = options.quick ? 0.05 : options.seconds}};
}

int bench(const BenchOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const std::string isa = multihead::kernel_isa();
  const std::vector<BenchCase> cases = selected_cases(options, isa);
  if (cases.empty()) refuse_filter(options, isa);
  if (options.list) {
    list(cases);
    return 0;
  }
  Output outputs[] = {{{"bench: --json", options.json}, to_json},
                      {{"bench: --csv", options.csv}, to_csv},
                      {{"bench: --markdown", options.markdown}, to_markdown},
                      {{"bench: --svg", options.svg}, to_svg}};
  const auto printed = std::ranges::count_if(
      outputs, [](const Output& o) { return o.to.standard_output(); });
  print_at_most_one("bench", printed);

  if (options.same_isa) hold_pytorch_to(isa);
  BenchRun run = new_run(options, isa);
  const bool files = std::ranges::any_of(
      outputs, [](const Output& o) { return o.to.wanted(); });
  std::optional<BenchTable> table;
  std::exception_ptr failure;
  if (printed == 0) table.emplace(cases);
  // Where the table cannot be printed, a run goes on whose result is also
  // written into files: it took minutes.
  const auto show = [&](const auto& part) {
    if (table) try {
        part(*table);
      } catch (const std::runtime_error&) {
        if (!files) throw;
        failure = std::current_exception();
        table.reset();
      }
  };
  show([&](BenchTable& t) { t.opening(run); });
  const int all = at::get_num_threads();
  Runner runner(isa, run.plan, options.seed);
  for (const BenchCase& test : cases)
    runner.run(test, threads_for(test, options, all), [&](Measurement m) {
      show([&](BenchTable& t) { t.add(m); });
      run.measurements.push_back(std::move(m));
    });
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - start;
  show([&](BenchTable& t) { t.closing(run, seconds.count()); });
  std::vector<std::function<void()>> steps;
  for (const Output& output : outputs)
    steps.push_back([&] { output.to.write(output.text_of, run); });
  steps.push_back([&] {
    if (failure) std::rethrow_exception(failure);
  });
  each_of(steps);
  for (const Measurement& m : run.measurements)
    if (!m.right()) return 1;
  return 0;
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench", "Time this library beside PyTorch, verified first");
  command->footer(kBeforeColumns + describe_metrics() + kAfterColumns);
  add_file(*command, "--json", options->json,
           "Write everything as one JSON object, - prints it");
  add_file(*command, "--csv", options->csv,
           "Write one line for each contender of each case");
  add_file(*command, "--svg", options->svg,
           "Draw ratios and shares of the peak");
  add_file(*command, "--markdown", options->markdown,
           "Write README's table: headline cases");
  command
      ->add_option("--filter", options->filter,
                   "Only cases whose group, name or sizes contain TEXT")
      ->type_name("TEXT");
  command->add_flag("--full", options->full, "All cases, for many minutes");
  command->add_flag("--list", options->list, "Name the cases, run nothing");
  command
      ->add_option("--threads", options->threads,
                   "Numbers of threads, 1,4 for instance; default: 1 and all")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024))
      ->type_name("N,...");
  command->add_option("--rounds", options->rounds, "At least so many rounds")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command
      ->add_option("--seconds", options->seconds,
                   "Time for the calls of one case, if the rounds allow")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command->add_flag("--same-isa", options->same_isa,
                    "Hold PyTorch to the registers of our kernels, "
                    "without AMX");
  command->add_flag("--quick", options->quick, "Three rounds, for a look");
  command->add_option("--seed", options->seed, "Seed of all random inputs")
      ->check(is_seed)
      ->capture_default_str();
  command->callback(
      [&action, options] { action = [options] { return bench(*options); }; });
}

}  // namespace cli
