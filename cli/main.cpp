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

constexpr const char* kInfoFooter = R"(
Examples:
  multihead info
  multihead info --json
)";

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
    std::fprintf(stderr, "multihead: %s\n", error.what());
    return 2;
  }
}
