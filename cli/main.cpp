// SPDX-License-Identifier: MIT
//
// `multihead`: the command. One file per sub-command beside this one.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <functional>

#include "cli/commands.h"
#include "multihead/version.h"

namespace {

constexpr const char* kExamples = R"(
Examples:
  multihead verify                    compare everything with PyTorch
  multihead verify --filter textbook  only the textbook forms
  multihead verify --json | jq .      the same for programs
  multihead bench --filter causal     times beside PyTorch's, shares of the peak
  multihead info                      versions, processor, backends
)";

constexpr const char* kVerifyFooter = R"(
Columns:
  PyTorch    "bits" where every bit equals PyTorch's, else the largest difference
  error      largest error against plain float64 loops
  its error  the same of PyTorch's own result
  budget     worst share of the error that the dtype allows; up to 1 is within
  allclose   atol 1e-8, rtol 1e-5 against PyTorch, as exercises ask; for
             information where bits are not demanded

Exit status: 0 every case agrees, 1 a case does not, 2 nothing to compare.

Examples:
  multihead verify
  multihead verify --filter padding
  multihead verify --seed 7 --json > verify.json
)";

constexpr const char* kBenchFooter = R"(
Every contender's result is compared with float64 before it is timed; then they
take turns, call by call. "backward" times autograd's backward alone, "forward +
backward" and "training steps" both. Ours has to take its kernels everywhere.
Columns:
  best, median, spread  of the time of one call; distance of the quartiles
  G/s      GFLOP/s of useful work: pairs that a mask hides do not count;
           GB/s in "few queries"
  of peak  share of what the processor's multiply-add units (or memory) gave in
           the same process right before and after, without AMX
  MiB      memory that the first call took, its results included
  × best   their best time over ours
  × paired median of their time over ours, round by round

MULTIHEAD_ISA limits this library's kernels, and the peak with them; --same-isa
limits PyTorch too.

Exit status: 0 ours is right everywhere, 1 it is not, 2 nothing was run.

Examples:
  multihead bench
  multihead bench --list
  multihead bench --filter "causal d64" --threads 1
  multihead bench --filter backward
  multihead bench --full --json bench.json --svg bench.svg
)";

constexpr const char* kInfoFooter = R"(
Examples:
  multihead info
  multihead info --json
)";

void add_bench(CLI::App& app, cli::BenchOptions& bench,
               std::function<int()>& command) {
  CLI::App* bench_command = app.add_subcommand(
      "bench", "Time this library beside PyTorch, verified first");
  bench_command->footer(kBenchFooter);
  const auto file = [&](const char* name, std::string& path, const char* what) {
    bench_command->add_option(name, path, what)->type_name("FILE");
  };
  file("--json", bench.json,
       "Write everything as one JSON object, - prints it");
  file("--csv", bench.csv, "Write one line for each contender of each case");
  file("--svg", bench.svg, "Draw ratios and shares of the peak");
  file("--markdown", bench.markdown, "Write README's table: headline cases");
  bench_command
      ->add_option("--filter", bench.filter,
                   "Only cases whose group, name or sizes contain TEXT")
      ->type_name("TEXT");
  bench_command->add_flag("--full", bench.full, "All cases, for many minutes");
  bench_command->add_flag("--list", bench.list, "Name the cases, run nothing");
  bench_command
      ->add_option("--threads", bench.threads,
                   "Numbers of threads, 1,4 for instance; default: 1 and all")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024))
      ->type_name("N,...");
  bench_command->add_option("--rounds", bench.rounds, "At least so many rounds")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  bench_command
      ->add_option("--seconds", bench.seconds,
                   "Time for the calls of one case, if the rounds allow")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  bench_command->add_flag("--same-isa", bench.same_isa,
                          "Hold PyTorch to the registers of our kernels, "
                          "without AMX");
  bench_command->add_flag("--quick", bench.quick, "Three rounds, for a look");
  bench_command->add_option("--seed", bench.seed, "Seed of all random inputs")
      ->capture_default_str();
  bench_command->callback([&] { command = [&] { return cli::bench(bench); }; });
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Attention for PyTorch, exact and fast.", "multihead"};
  app.footer(kExamples);
  app.set_version_flag("--version", "multihead " MULTIHEAD_VERSION
                                    " (torch " MULTIHEAD_TORCH_VERSION ")");
  std::function<int()> command;

  cli::VerifyOptions verify;
  CLI::App* verify_command = app.add_subcommand(
      "verify", "Compare this library with PyTorch, case by case");
  verify_command->footer(kVerifyFooter);
  verify_command->add_flag("--json", verify.json, "Print one JSON object");
  verify_command->add_option("--seed", verify.seed, "Seed of all random inputs")
      ->capture_default_str();
  verify_command
      ->add_option("--filter", verify.filter,
                   "Only cases whose group or name contains TEXT")
      ->type_name("TEXT");
  verify_command->callback(
      [&] { command = [&] { return cli::verify(verify); }; });

  cli::BenchOptions bench;
  add_bench(app, bench, command);

  cli::InfoOptions info;
  CLI::App* info_command =
      app.add_subcommand("info", "Versions, processor, threads, backends");
  info_command->footer(kInfoFooter);
  info_command->add_flag("--json", info.json, "Print one JSON object");
  info_command->callback([&] { command = [&] { return cli::info(info); }; });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {  // --help and --version too
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (!command) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  }
  try {
    return command();
  } catch (const std::exception& error) {
    const std::string what = error.what();  // torch adds its call stack
    std::fprintf(stderr, "multihead: %s\n",
                 what.substr(0, what.find('\n')).c_str());
    return 2;
  }
}
