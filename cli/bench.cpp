// SPDX-License-Identifier: MIT
//
// `multihead bench`: chooses cases, runs them, shows and writes what came out.
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>

#include "cli/bench_report.h"
#include "cli/bench_run.h"
#include "cli/commands.h"
#include "multihead/functional.h"
#include "multihead/safetensors_file.h"

namespace cli {
namespace {

using multihead::safetensors::OutputFile;

// Where a text goes: a file that appears as a whole, or standard output. It is
// opened before anything runs, so that a typing error costs no time.
class Destination {
 public:
  Destination(const char* option, const std::string& path) {
    if (path.empty() || path == "-") {
      standard_output_ = path == "-";
      return;
    }
    const std::string where =
        std::string("multihead bench: ") + option + " " + path;
    if (std::filesystem::exists(path) &&
        !std::filesystem::is_regular_file(path))
      throw std::invalid_argument(where + ": must be a regular file");
    file_ = std::make_unique<OutputFile>(path, where);
  }

  bool standard_output() const { return standard_output_; }

  void write(const Run& run, std::string (*text_of)(const Run&)) {
    if (!standard_output_ && !file_) return;
    const std::string text = text_of(run);
    if (standard_output_) std::fputs(text.c_str(), stdout);
    if (!file_) return;
    file_->write_at(0, std::as_bytes(std::span(text)));
    file_->commit();
  }

 private:
  bool standard_output_ = false;
  std::unique_ptr<OutputFile> file_;
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
  Destination json("--json", options.json), csv("--csv", options.csv),
      markdown("--markdown", options.markdown), svg("--svg", options.svg);
  const int outputs = json.standard_output() + csv.standard_output() +
                      markdown.standard_output() + svg.standard_output();
  if (outputs > 1)
    throw std::invalid_argument(
        "multihead bench: only one of --json, --csv, --markdown and --svg may "
        "be -");

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
  if (outputs == 0) {
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
  json.write(run, to_json);
  csv.write(run, to_csv);
  markdown.write(run, to_markdown);
  svg.write(run, to_svg);
  for (const Measurement& m : run.measurements)
    if (!m.right()) return 1;
  return 0;
}

}  // namespace cli
