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
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>

#include "cli/bench/case.h"
#include "cli/bench/compare.h"
#include "cli/bench/report.h"
#include "cli/bench/runner.h"
#include "cli/bench/targets.h"
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
  std::vector<std::string> compare;  ///< a record, or two and nothing runs
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

Exit status: 0 ours is right everywhere, or two records were compared, 1 it is
not right, 2 nothing was run, or the result could not be written.

Examples:
  multihead bench
  multihead bench --list
  multihead bench --filter "causal d64" --threads 1
  multihead bench --filter backward
  multihead bench --full --json bench.json --svg bench.svg
  multihead bench --compare bench.json --filter "d64 L512"
  multihead bench --compare before.json after.json
)";

// A form of the result and where it goes.
struct Output {
  Destination to;
  std::string (*text_of)(const BenchRun&);
};

std::string title(const BenchCase& test) {
  return test.group + ": " + test.name + " " + shapes(test);
}

// What a run is about.
struct Selection {
  std::string isa;
  Family family;
  std::optional<Record> record;  // that it is compared with
  std::vector<BenchCase> cases;  // those of the record, or of the grid
};

[[noreturn]] void refuse_filter(const BenchOptions& options,
                                const std::vector<BenchCase>& all) {
  std::vector<std::string> titles;
  for (const BenchCase& test : all) {
    if (title(test).find(options.filter) != std::string::npos)
      throw std::invalid_argument("bench: \"" + options.filter +
                                  "\" needs --full");
    titles.push_back(title(test));
  }
  throw std::invalid_argument("bench: " +
                              no_case_matches(options.filter, titles));
}

[[noreturn]] void refuse_record(const char* which, const std::string& file) {
  throw std::invalid_argument(
      std::string("bench: --compare must have a case ") + which + ", got " +
      file + ", which has none");
}

Record selected_record(const BenchOptions& options, const std::string& file) {
  Record record = read_record(file);
  record.keep(options.filter, options.threads);
  if (record.cases.empty())
    refuse_record("that --filter and --threads leave", file);
  return record;
}

Selection select(const BenchOptions& options) {
  Selection chosen{
      .isa = multihead::kernel_isa(), .family = {}, .record = {}, .cases = {}};
  chosen.family = family_of(chosen.isa, cpu_id());
  if (!options.compare.empty())
    chosen.record = selected_record(options, options.compare[0]);
  const std::vector<BenchCase> all = bench_cases(chosen.family);
  std::ranges::copy_if(
      all, std::back_inserter(chosen.cases), [&](const BenchCase& test) {
        if (chosen.record)
          return !chosen.record->threads_of(title(test)).empty();
        return (!test.full_only || options.full) &&
               title(test).find(options.filter) != std::string::npos;
      });
  if (!chosen.cases.empty()) return chosen;
  if (chosen.record)
    refuse_record("that this version knows", chosen.record->file);
  refuse_filter(options, all);
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

// As asked for, else those of the record that this process may use, else one
// and all of them.
std::vector<int> threads_for(const BenchCase& test, const BenchOptions& options,
                             const std::optional<Record>& record, int all) {
  if (record) {
    std::vector<int> threads = record->threads_of(title(test));
    if (options.threads.empty())
      std::erase_if(threads, [&](int count) { return count > all; });
    return threads;
  }
  if (!options.threads.empty()) return options.threads;
  if (all == 1 || (test.one_thread && !options.full)) return {1};
  return {1, all};
}

BenchRun new_run(const BenchOptions& options, const Selection& chosen) {
  return {
      .environment = detect_environment(),
      .date = today(),
      .isa = chosen.isa,
      .family = name(chosen.family),
      .has_tiles = !options.same_isa &&
                   measure_arithmetic(Unit::kBFloat16Tiles, 512, 1).has_value(),
      .same_isa = options.same_isa,
      .plan = {.rounds = options.quick ? 3 : options.rounds,
               .seconds = options.quick ? 0.05 : options.seconds}};
}

// Measures the cases and prints a table that grows meanwhile, if there is one.
// Where it cannot be printed and `files` get the result, the run goes on, for
// it took minutes, and `failure` says why.
BenchRun measure(const BenchOptions& options, const Selection& chosen,
                 std::optional<BenchTable> table, bool files,
                 std::exception_ptr& failure) {
  const auto start = std::chrono::steady_clock::now();
  const auto show = [&](const auto& part) {
    if (table) try {
        part(*table);
      } catch (const std::runtime_error&) {
        if (!files) throw;
        failure = std::current_exception();
        table.reset();
      }
  };
  BenchRun run = new_run(options, chosen);
  show([&](BenchTable& t) { t.opening(run); });
  const int all = at::get_num_threads();
  Runner runner(chosen.isa, run.plan, options.seed);
  for (const BenchCase& test : chosen.cases)
    runner.run(test, threads_for(test, options, chosen.record, all),
               [&](Measurement m) {
                 show([&](BenchTable& t) { t.add(m); });
                 run.measurements.push_back(std::move(m));
               });
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - start;
  show([&](BenchTable& t) { t.closing(run, seconds.count()); });
  return run;
}

int bench(const BenchOptions& options) {
  const Selection chosen = select(options);
  if (options.list) {
    list(chosen.cases);
    return 0;
  }
  Output outputs[] = {{{"bench: --json", options.json}, to_json},
                      {{"bench: --csv", options.csv}, to_csv},
                      {{"bench: --markdown", options.markdown}, to_markdown},
                      {{"bench: --svg", options.svg}, to_svg}};
  const auto printed = std::ranges::count_if(
      outputs, [](const Output& o) { return o.to.standard_output(); });
  // A comparison is printed as well.
  print_at_most_one("bench", printed + (printed > 0 && chosen.record));
  const bool files = std::ranges::any_of(
      outputs, [](const Output& o) { return o.to.wanted(); });

  if (options.same_isa) hold_pytorch_to(chosen.isa);
  std::optional<BenchTable> table;
  if (printed == 0) table.emplace(chosen.cases);
  std::exception_ptr failure;
  const BenchRun run =
      measure(options, chosen, std::move(table), files, failure);
  std::vector<std::function<void()>> steps;
  for (const Output& output : outputs)
    steps.push_back([&] { output.to.write(output.text_of, run); });
  steps.push_back([&] {
    if (failure) std::rethrow_exception(failure);
    if (!chosen.record) return;
    write_output("\n");
    show_comparison(*chosen.record, parse_record(to_json(run), "this run"));
  });
  each_of(steps);
  for (const Measurement& m : run.measurements)
    if (!m.right()) return 1;
  return 0;
}

int compare_records(const BenchOptions& options) {
  for (const std::string* file :
       {&options.json, &options.csv, &options.markdown, &options.svg})
    if (!file->empty())
      throw std::invalid_argument(
          "bench: --compare must name one record where a result is to be "
          "written, got two");
  show_comparison(selected_record(options, options.compare[0]),
                  selected_record(options, options.compare[1]));
  return 0;
}

void add_outputs(CLI::App& command, BenchOptions& options) {
  add_file(command, "--json", options.json,
           "Write everything as one JSON object, - prints it");
  add_file(command, "--csv", options.csv,
           "Write one line for each contender of each case");
  add_file(command, "--svg", options.svg, "Draw ratios and shares of the peak");
  add_file(command, "--markdown", options.markdown,
           "Write README's table: headline cases");
}

void add_choices(CLI::App& command, BenchOptions& options) {
  command
      .add_option("--compare", options.compare,
                  "Run the cases of a record of --json, or take a second "
                  "one, and say what became faster or slower")
      ->check(is_named)
      ->expected(1, 2)
      ->type_name("FILE [FILE]");
  command
      .add_option("--filter", options.filter,
                  "Only cases whose group, name or sizes contain TEXT")
      ->type_name("TEXT");
  command.add_flag("--full", options.full, "All cases, for many minutes");
  command.add_flag("--list", options.list, "Name the cases, run nothing");
  command
      .add_option("--threads", options.threads,
                  "Numbers of threads, 1,4 for instance; default: 1 and all")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024))
      ->type_name("N,...");
  command.add_option("--rounds", options.rounds, "At least so many rounds")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command
      .add_option("--seconds", options.seconds,
                  "Time for the calls of one case, if the rounds allow")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command.add_flag("--same-isa", options.same_isa,
                   "Hold PyTorch to the registers of our kernels, "
                   "without AMX");
  command.add_flag("--quick", options.quick, "Three rounds, for a look");
  command.add_option("--seed", options.seed, "Seed of all random inputs")
      ->check(is_seed)
      ->capture_default_str();
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench", "Time this library beside PyTorch, verified first");
  command->footer(kBeforeColumns + describe_metrics() + describe_comparison() +
                  kAfterColumns);
  add_outputs(*command, *options);
  add_choices(*command, *options);
  command->callback([&action, options] {
    action = [options] {
      return options->compare.size() == 2 ? compare_records(*options)
                                          : bench(*options);
    };
  });
}

}  // namespace cli
