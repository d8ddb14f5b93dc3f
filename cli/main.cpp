// SPDX-License-Identifier: MIT
//
// `multihead`: the command. Its sub-commands: commands.h.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string_view>

#include "cli/commands.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/output.h"
#include "multihead/text/printable.h"
#include "multihead/version.h"

namespace {

constexpr const char* kExamples = R"(
Examples:
  multihead verify                    compare everything with PyTorch
  multihead verify --filter textbook  only the textbook forms
  multihead verify --json | jq .      the same for programs
  multihead bench --filter causal     times beside PyTorch's, shares of the peak
  multihead check attention.py        is it attention, and if not, what is wrong?
  multihead explain dump.safetensors  the same of tensors from any framework
  multihead show                      attention weights as a picture
  multihead info                      versions, processor, backends
)";

int run(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "run")
    throw std::invalid_argument("use python -m multihead run");
  CLI::App app{"Attention for PyTorch, exact and fast.", "multihead"};
  app.footer(kExamples);
  app.set_version_flag("--version", "multihead " MULTIHEAD_VERSION
                                    " (torch " MULTIHEAD_TORCH_VERSION ")");
  cli::Action action;
  for (const auto add : {cli::add_verify, cli::add_bench, cli::add_check,
                         cli::add_explain, cli::add_show, cli::add_info})
    add(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return cli::answer(app, error);
  }
  if (action) return action();
  cli::write_output(app.help());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  cli::guard_output();
  try {
    const int status = run(argc, argv);
    cli::finish_output();
    return status;
  } catch (const std::exception& error) {
    const std::string what = error.what();  // torch adds its call stack
    std::fprintf(stderr, "multihead: %s\n",
                 multihead::printable(what.substr(0, what.find('\n'))).c_str());
    return 2;
  }
}
