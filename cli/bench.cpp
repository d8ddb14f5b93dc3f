// SPDX-License-Identifier: MIT
//
// `multihead bench`: chooses cases, runs them, shows and writes what came out.
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "cli/bench_report.h"
#include "cli/bench_run.h"
#include "cli/commands.h"
#include "cli/destination.h"
#include "multihead/functional.h"

namespace cli {
namespace {

// A form of the result and where it goes.
struct Output {
  Destination to;
  std::string (*text_of)(const Run&);
};

std::vector<BenchCase> selected_cases(const BenchOptions& options,
                                      const std::string& isa) {
  std::vector<BenchCase> cases = bench_cases(isa);
  std::erase_if(cases, [&](const BenchCase& test) {
    return (test.full_only && !options.full) ||
           (test.group + ": " + test.name + " " + shapes(test))
                   .find(options.filter) == std::string::npos;
  });
  return cases;
}

void list(const std::vector<BenchCase>& cases) {
  int width = 0;
  for (const BenchCase& test : cases)
    width = std::max(width, 2 + display_width(test.name));
  Table table({{.title = "case", .width = width}, {.title = "sizes"}},
              detect_terminal());
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
  if (isa == "amx") return;
  constexpr const char* kVariables[] = {
      "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"};
  constexpr const char* kPortable[] = {"default", "SSE4_2", "SSE41"};
  constexpr const char* kAvx2[] = {"avx2", "AVX2", "AVX2"};
  constexpr const char* kAvx512[] = {"avx512", "AVX512_E3", "AVX512_CORE_BF16"};
  const auto& values = isa == "portable" ? kPortable
                       : isa == "avx2"   ? kAvx2
                                         : kAvx512;
  for (int i = 0; i < 3; ++i) setenv(kVariables[i], values[i], /*overwrite=*/1);
}

// As asked for, else one and all that this process may use.
std::vector<int> threads_for(const BenchCase& test, const BenchOptions& options,
                             int all) {
  if (!options.threads.empty()) return options.threads;
  if (all == 1 || (test.one_thread && !options.full)) return {1};
  return {1, all};
}

}  // namespace

int bench(const BenchOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const std::string isa = multihead::kernel_isa();
  const std::vector<BenchCase> cases = selected_cases(options, isa);
  if (cases.empty()) {
    std::fprintf(stderr, "multihead bench: no case matches \"%s\"\n",
                 options.filter.c_str());
    return 2;
  }
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
  Run run{
      .environment = detect_environment(),
      .date = today(),
      .isa = isa,
      .has_tiles = !options.same_isa &&
                   measure_arithmetic(Unit::kBFloat16Tiles, 512, 1).has_value(),
      .same_isa = options.same_isa,
      .plan = {.rounds = options.quick ? 3 : options.rounds,
               .seconds = options.quick ? 0.05 : options.seconds}};
  std::optional<BenchTable> table;
  if (printed == 0) {
    table.emplace(cases, detect_terminal());
    table->opening(run);
  }
  const int all = at::get_num_threads();
  Runner runner(isa, run.plan, options.seed);
  for (const BenchCase& test : cases)
    runner.run(test, threads_for(test, options, all), [&](Measurement m) {
      if (table) table->add(m);
      run.measurements.push_back(std::move(m));
    });
  if (table)
    table->closing(run, std::chrono::duration<double>(
                            std::chrono::steady_clock::now() - start)
                            .count());
  for (Output& output : outputs)
    if (output.to.wanted()) output.to.write(output.text_of(run));
  for (const Measurement& m : run.measurements)
    if (!m.right()) return 1;
  return 0;
}

}  // namespace cli
