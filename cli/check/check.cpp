// SPDX-License-Identifier: MIT
//
// `multihead check`: multihead.check in a Python of its own, which somebody's
// code may stop, crash or keep busy.
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string_view>

#include "cli/check/child.h"
#include "cli/check/report_output.h"
#include "cli/commands.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/suggestion.h"
#include "multihead/text/printable.h"

namespace cli {
namespace {

struct CheckOptions {
  std::string target;                  ///< "file.py" or "file.py:name"
  std::vector<std::string> passed_on;  ///< to Python's multihead.check
  double time_limit = 20;              ///< seconds, for the code under test
  ReportOutput output = {};
};

constexpr const char* kFooter = R"(
Calls the code with inputs, masks and weights that tell mistakes apart, and names
the one change to attention that gives the same results. FILE is a Python file or
a notebook; NAME a function, a module, or its class, where FILE has several. It
runs in a process of its own, by MULTIHEAD_PYTHON, the active environment, or
python3, whichever comes first.

Exit status: 0 it is attention, 1 it is not, 2 it could not be checked, or the
report not be written.

Examples:
  multihead check attention.py
  multihead check attention.py:MultiHeadAttention --num-heads 4
  multihead check attention.py --mask keep --json
)";

using Json = nlohmann::ordered_json;
using multihead::printable;

// Seconds for what is not the code under test: calls of it, the verdict.
constexpr double kGrace = 2, kVerdict = 60;
constexpr const char* kJudging = "judging\n";

// What Python runs. Of its own accord it would look for modules in the
// working folder first, where a file may be called random.py. An answer is
// "report", an exit status, and a report, or, for status 2, mostly a
// sentence. Before it there may be "running" and "judging", as the check goes
// on, and where a process was ended. It does not outlive the command,
// whatever ends that.
constexpr const char* kBootstrap = R"py(
import os, signal, sys
sys.path[:] = [folder for folder in sys.path if folder]
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    import faulthandler
    import multihead
    from multihead.check.__main__ import answer
except ImportError as error:
    if getattr(error, "name", None) == "torch":
        why = f"{sys.executable} has no PyTorch"
    elif getattr(error, "name", None) == "multihead":
        why = f"{sys.executable} has no Python package multihead; install it there"
    else:
        why = f"{sys.executable}: {error}"
    why += " (MULTIHEAD_PYTHON names another Python)"
    os.write(3, f"report 2\ncheck: {why}\n".encode())
    os._exit(2)
os.write(3, b"started\n")
faulthandler.enable(3)
faulthandler.register(signal.SIGTERM, 3, chain=True)
answer(3, os.environ.pop("MULTIHEAD_ANSWER", ""), sys.argv[1:])
)py";

std::string environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

// As ./run chooses it, but for .venv.
std::string python() {
  const std::string named = environment("MULTIHEAD_PYTHON");
  if (!named.empty()) return named;
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const std::string folder = environment(variable);
    const std::string candidate = folder + "/bin/python";
    if (!folder.empty() && access(candidate.c_str(), X_OK) == 0)
      return candidate;
  }
  return "python3";
}

// The package in the build folder, if this is the command there; elsewhere it
// is installed where Python finds it.
void offer_package() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  const fs::path folder = self.parent_path().parent_path() / "python";
  if (error || !fs::exists(folder / "multihead" / "_built.py")) return;
  const std::string others = environment("PYTHONPATH");
  const std::string path =
      folder.string() + (others.empty() ? "" : ":" + others);
  setenv("PYTHONPATH", path.c_str(), /*overwrite=*/1);
}

std::vector<std::string> command(const CheckOptions& options) {
  std::vector<std::string> words = {python(), "-c", kBootstrap, options.target};
  words.insert(words.end(), options.passed_on.begin(), options.passed_on.end());
  std::ostringstream seconds;
  seconds << options.time_limit;
  words.insert(words.end(), {"--time-limit", seconds.str()});
  return words;
}

std::string file_of(const std::string& target) {
  const size_t colon = target.rfind(':');
  return target.substr(0, colon == 0 ? std::string::npos : colon);
}

// Where Python was, from the lines that faulthandler writes: `  File "…",
// line 12 in attend`, the innermost first.
std::string last_place(const std::string& answer, const std::string& target) {
  const std::string name =
      std::filesystem::path(file_of(target)).filename().string();
  std::istringstream lines(answer);
  for (std::string line; std::getline(lines, line);) {
    const size_t file = line.find("File \"");
    const size_t end = line.find("\", ", file + 1);
    if (file == std::string::npos || end == std::string::npos) continue;
    const std::filesystem::path path(line.substr(file + 6, end - file - 6));
    if (path.filename() == name) return name + ", " + line.substr(end + 3);
  }
  return "";
}

Json finding(const char* name, const std::string& sentence,
             const std::string& remedy, const std::string& detail = "") {
  return {{"name", name},
          {"sentence", sentence},
          {"remedy", remedy},
          {"detail", detail},
          {"kind", "failure"}};
}

Json crash(const ChildEnd& end, const std::string& target) {
  const std::string place = last_place(end.answer, target);
  if (end.signal == SIGKILL)
    return finding("crashes", "The system killed the process (SIGKILL).",
                   "Most often memory had run out: look for a tensor that is "
                   "larger than it should be.");
  if (end.signal != 0)
    return finding(
        "crashes",
        std::string("It crashes the process: ") + strsignal(end.signal) + ".",
        "Python code alone cannot do that. Look for what reads or "
        "writes memory by itself: an extension, ctypes, an "
        "uncompiled kernel.",
        place);
  return finding("crashes",
                 "It ends the whole process, with status " +
                     std::to_string(end.status) +
                     ", past every way out that Python has.",
                 "Look for `os._exit`, or for a library that gives up like "
                 "that.");
}

Json hang(const CheckOptions& options, const std::string& answer) {
  std::ostringstream seconds;
  seconds << options.time_limit;
  return finding("hangs",
                 "It had not come to an end after " + seconds.str() +
                     " s, and Python could not interrupt it. It was ended, and "
                     "what it had started with it.",
                 "Look for a loop outside of Python's own code, or one that "
                 "catches every exception. If it only needs longer, "
                 "--time-limit gives it more.",
                 last_place(answer, options.target));
}

std::string report_of(const CheckOptions& options, Json found) {
  const std::string cause = found["name"];
  const Json report = {{"target", options.target},
                       {"passed", false},
                       {"cause", cause},
                       {"verdict", "unchecked"},
                       {"findings", Json::array({std::move(found)})}};
  return report.dump(2, ' ', false, Json::error_handler_t::replace);
}

// The exit status and the text of an answer; nullopt where there is none.
std::optional<std::pair<int, std::string>> answered(const std::string& answer) {
  constexpr std::string_view kMarker = "report ";
  size_t at = 0;
  while (at < answer.size() && answer.compare(at, kMarker.size(), kMarker) != 0)
    at = std::min(answer.find('\n', at), answer.size() - 1) + 1;
  const size_t line_end = answer.find('\n', at);
  if (line_end == std::string::npos) return std::nullopt;
  return std::pair(std::atoi(answer.c_str() + at + kMarker.size()),
                   answer.substr(line_end + 1));
}

// An answer that the limit on files has cut says nothing about the code.
void refuse_cut(const std::string& answer) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && answer.size() >= limit.rlim_cur)
    throw std::runtime_error("check: Python's report must fit into a file of " +
                             std::to_string(limit.rlim_cur) +
                             " bytes (ulimit -f), got more");
}

int check(const CheckOptions& options) {
  ReportWriter writer("check", options.output);
  offer_package();
  const std::string command_line = "multihead check " + options.target;
  const ChildEnd end = run_child(
      {.command = command(options),
       .time_limit = options.time_limit + kGrace,
       .resting_mark = kJudging,
       .resting_limit = kVerdict,
       .waiting = "multihead: checking " + printable(options.target)});
  if (end.interrupted) return 130;
  refuse_cut(end.answer);
  if (const auto answer = answered(end.answer)) {
    const auto& [status, text] = *answer;
    // A report of what could not be called is one, too.
    if (status == 2 && !text.starts_with("{"))
      throw std::runtime_error(text.substr(0, text.find('\n')) +
                               did_you_mean_file(file_of(options.target)));
    writer.write(text, command_line);
    return status;
  }
  if (!end.answer.starts_with("started"))
    throw std::runtime_error("check: " + python() +
                             " did not come up with PyTorch (MULTIHEAD_PYTHON "
                             "names another Python)");
  if (end.timed_out && end.answer.find(kJudging) != std::string::npos &&
      last_place(end.answer, options.target).empty())
    throw std::runtime_error("check: there was no verdict in time");
  writer.write(report_of(options, end.timed_out ? hang(options, end.answer)
                                                : crash(end, options.target)),
               command_line);
  return 1;
}

}  // namespace

void add_check(CLI::App& app, Action& action) {
  const auto options = std::make_shared<CheckOptions>();
  CLI::App* command = app.add_subcommand(
      "check", "Say whether somebody's attention is right, and what is not");
  command->footer(kFooter);
  command->add_option("target", options->target, "What to check, with its file")
      ->required()
      ->check(is_named)
      ->check(is_code)
      ->type_name("FILE[:NAME]");
  const auto pass_on = [&](const char* name, const char* what,
                           const char* type) {
    command
        ->add_option_function<std::string>(
            name,
            [options, name](const std::string& value) {
              options->passed_on.insert(options->passed_on.end(),
                                        {name, value});
            },
            what)
        ->type_name(type);
  };
  pass_on("--num-heads", "Heads to call it with", "N");
  pass_on("--embed-dim", "Width of its inputs", "N");
  pass_on("--num-kv-heads", "Heads of keys and values", "N");
  pass_on("--mask", "What its mask means: True = blocked, keep; or additive",
          "blocked|keep|additive");
  pass_on("--layout", "Of its inputs", "batch-first|sequence-first");
  command->add_flag_callback(
      "--causal", [options] { options->passed_on.push_back("--causal"); },
      "It is causal by itself");
  command
      ->add_option("--time-limit", options->time_limit,
                   "Seconds that the code may use, all calls together")
      ->check(CLI::Range(0.1, 86400.0))
      ->type_name("SECONDS")
      ->capture_default_str();
  add_output(*command, options->output);
  command->callback(
      [&action, options] { action = [options] { return check(*options); }; });
}

}  // namespace cli
