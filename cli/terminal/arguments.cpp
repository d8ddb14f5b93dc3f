// SPDX-License-Identifier: MIT
#include "cli/terminal/arguments.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/terminal/output.h"
#include "cli/terminal/suggestion.h"
#include "multihead/text/printable.h"

namespace cli {
namespace {

// What the arguments that the parser does not know may have meant.
std::string meant(const CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  std::vector<std::string> options, commands = {"--help", "--version"};
  for (const CLI::Option* option :
       static_cast<const CLI::App&>(chosen.empty() ? app : *chosen[0])
           .get_options())
    for (const std::string& name : option->get_lnames())
      options.push_back("--" + name);
  for (const CLI::App* command :
       app.get_subcommands([](auto*) { return true; }))
    commands.push_back(command->get_name());
  for (const std::string& argument : app.remaining(/*recurse=*/true)) {
    const bool is_option = argument.starts_with('-');
    if (!is_option && !chosen.empty()) continue;
    const std::string name = nearest(argument.substr(0, argument.find('=')),
                                     is_option ? options : commands);
    if (!name.empty()) return "Did you mean " + name + "?\n";
  }
  return "";
}

}  // namespace

std::string is_named(const std::string& path) {
  return path.empty() ? "the name of the file must not be empty" : "";
}

std::string is_code(const std::string& target) {
  return target.ends_with(".safetensors")
             ? target + " is a dump: multihead explain " + target
             : "";
}

std::string is_seed(const std::string& text) {
  uint64_t seed = 0;
  const char* end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data(), end, seed);
  return last == end && error == std::errc()
             ? ""
             : "must be a whole number from 0 to 18446744073709551615, got " +
                   text;
}

std::string is_dump(const std::string& path) {
  const std::string kind = std::filesystem::path(path).extension().string();
  if (kind == ".py" || kind == ".ipynb")
    return path + " is code: multihead check " + path;
  for (const char* other : {".npy", ".npz", ".pt", ".pth", ".pkl", ".bin"})
    if (kind == other)
      return path +
             " must be .safetensors; docs/explain.md says how to save it so";
  return "";
}

void add_file(CLI::App& command, const std::string& name, std::string& path,
              const std::string& what) {
  command.add_option(name, path, what)->check(is_named)->type_name("FILE");
}

multihead::Safetensors read_dump(const std::string& path) {
  try {
    return multihead::read_safetensors(path);
  } catch (const std::runtime_error& error) {
    const std::string hint = did_you_mean_file(path);
    if (hint.empty()) throw;
    throw std::runtime_error(error.what() + hint);
  }
}

int answer(const CLI::App& app, const CLI::ParseError& error) {
  std::ostringstream said, wrong;
  if (app.exit(error, said, wrong) == 0) {
    write_output(said.str());
    return 0;
  }
  const std::string text = std::string(error.what()) + "\n" + meant(app) +
                           "Run with --help for more information.\n";
  std::fputs(multihead::printable(text, "\n").c_str(), stderr);
  return 2;
}

}  // namespace cli
