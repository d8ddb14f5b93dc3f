// SPDX-License-Identifier: MIT
//
// `multihead check`: multihead.check in a Python of its own, which somebody's
// code may stop, crash or keep busy. `multihead explain`: the same verdict on
// tensors that somebody's attention took and returned.
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "cli/check/child.h"
#include "cli/check/interpreter.h"
#include "cli/check/survey.h"
#include "cli/commands.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/output.h"
#include "cli/terminal/text.h"
#include "multihead/diagnosis.h"

namespace cli {
namespace {

namespace diagnosis = multihead::diagnosis;
using Json = nlohmann::ordered_json;

// Values of options by the name under which they are handed on.
using Words = std::map<std::string, std::string>;

struct WordOption {
  const char *option, *name, *help, *type;
};

void add_words(CLI::App& command, Words& words,
               std::initializer_list<WordOption> options) {
  for (const WordOption& word : options)
    command
        .add_option_function<std::string>(
            word.option,
            [&words, name = word.name](const std::string& value) {
              words[name] = value;
            },
            word.help)
        ->type_name(word.type);
}

// --- Where a report goes -----------------------------------------------------

using diagnosis::render_report;
using diagnosis::ReportFormat;

constexpr int kUsual = 80, kWidest = 100;

constexpr const char* kPage = R"(<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>multihead</title>
<body>
)";

std::string text_of(const std::string& json) {
  const Terminal terminal = detect_terminal();
  const int width =
      terminal.width > 0 ? std::min(terminal.width, kWidest) : kUsual;
  const std::string text = render_report(
      json, terminal.colour ? ReportFormat::kAnsi : ReportFormat::kText, width);
  return terminal.shown(text);
}

// As `git apply` takes it.
std::string patch_of(const std::string& json) {
  const Json report = Json::parse(json);
  return report.contains("patch") ? "\n" + report["patch"].get<std::string>()
                                  : "";
}

// What becomes of a report beside its text on standard output.
struct ReportOutput {
  bool json = false;  // print JSON instead
  // Files, "-" for standard output instead of the text; empty: none.
  std::string html, svg;
};

void add_output(CLI::App& command, ReportOutput& output) {
  command.add_flag("--json", output.json, "Print one JSON object");
  add_file(command, "--html", output.html, "Write a page for browsers");
  add_file(command, "--svg", output.svg, "Draw what a terminal would show");
}

// Made before anything runs: throws where a file cannot be written.
class ReportWriter {
 public:
  // `command`, "check", is what errors name.
  ReportWriter(const std::string& command, const ReportOutput& output)
      : json_(output.json),
        html_(command + ": --html", output.html),
        svg_(command + ": --svg", output.svg) {
    print_at_most_one(command,
                      json_ + html_.standard_output() + svg_.standard_output());
  }

  // Prints a report, the JSON of multihead/diagnosis.h, as text or as it is,
  // unless a file that is asked for goes to standard output; writes the files.
  // `command_line` made it, and stands above it in a picture.
  void write(const std::string& json, const std::string& command_line) {
    const auto printed = [&] {
      if (!html_.standard_output() && !svg_.standard_output())
        write_output(json_ ? json + "\n" : text_of(json) + patch_of(json));
    };
    const auto page = [&] {
      if (html_.wanted())
        html_.write(kPage + render_report(json, ReportFormat::kHtml));
    };
    const auto picture = [&] {
      if (!svg_.wanted()) return;
      Json with_command = Json::parse(json);
      with_command["command"] = printable(command_line);
      svg_.write(render_report(with_command.dump(), ReportFormat::kSvg));
    };
    each_of({printed, page, picture});
  }

 private:
  bool json_;
  Destination html_, svg_;
};

// --- check -------------------------------------------------------------------

// Of the conditions of right code, those that hold: names, or "all".
using Allowed = std::vector<std::string>;

struct CheckOptions {
  std::string target;  // "file.py" or "file.py:name"
  Words passed_on;     // to Python's multihead.check
  bool causal = false;
  Allowed allowed = {};
  double time_limit = 20;  // seconds, for the code under test
  bool limited = false;    // the user said so
  double budget = 55;      // seconds, for all of a folder
  std::string sarif;       // a file for what is found in a folder
  bool fix = false;        // find a patch that repairs it
  ReportOutput output = {};
};

// What is wrong with a name; "" if a condition has it.
std::string is_condition(const std::string& name) {
  if (name == "all") return "";
  std::vector<std::string> names;
  for (const diagnosis::Condition& condition : diagnosis::all_conditions()) {
    if (condition.name == name) return "";
    names.push_back(condition.name);
  }
  return "must name a condition (" + joined(names, ", ") + ") or be all, got " +
         printable(name);
}

void add_allow(CLI::App& command, Allowed& allowed) {
  command
      .add_option("--allow", allowed,
                  "Conditions of right code that hold, or all of them")
      ->delimiter(',')
      ->take_all()
      ->expected(1)
      ->check(is_condition)
      ->type_name("NAME[,NAME]|all");
}

// As the report says, whose judgement and `passed` it sets.
int finish(Json& report) {
  const std::string json =
      report.dump(-1, ' ', false, Json::error_handler_t::replace);
  const diagnosis::Outcome outcome = diagnosis::outcome_of(json);
  report["passed"] = outcome == diagnosis::Outcome::kRight;
  report["judgement"] = diagnosis::name_of(outcome);
  return diagnosis::exit_status(outcome);
}

constexpr const char* kFooter = R"(
Calls the code with inputs, masks and weights that tell mistakes apart, and names
the one change to attention that gives the same results. FILE is a Python file or
a notebook; NAME a function, a module, or its class, where FILE has several. It
runs in a process of its own, by MULTIHEAD_PYTHON, the active environment, or
python3, whichever comes first.

Of a folder, it checks every class and function whose code looks like attention,
the likeliest first, two at a time, and prints a table. Tests, environments and what
git ignores are left out.

Exit status: 0 it is attention, 1 it is not, 2 it could not be judged, or the
report not be written, 3 it is attention if something is meant that nothing
states, and that --allow does not name. Of a folder: 0 nothing that could be
judged is wrong, 1 something is, 2 nothing could be judged.

Examples:
  multihead check attention.py
  multihead check src --sarif attention.sarif
  multihead check attention.py --allow mask_keeps,causal_by_itself
  multihead check attention.py:MultiHeadAttention --num-heads 4
  multihead check attention.py --mask keep --json
  multihead check attention.py --call 'Attention(dim=E)(x, mask=mask)'
)";

// Seconds for what is not the code under test: calls of it; what its file
// imports, and the verdict.
constexpr double kGrace = 2, kRest = 60;
// For the patches that are tried, which Python limits by itself.
constexpr double kRepair = 90;
constexpr const char *kLoading = "loading\n", *kJudging = "judging\n";

// What Python runs. By default it would look for modules in the working folder
// first, where a file may be called random.py. An answer is
// "report", an exit status, and a report, or, for status 2, mostly a
// sentence. Before it there may be "running" and "judging", as the check goes
// on, and where a process was ended. It does not outlive the command,
// whatever ends that. The collector would find no garbage among what is
// imported, and take a tenth of the time.
constexpr const char* kBootstrap = R"py(
import gc, os, signal, sys
gc.disable()
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
gc.freeze()
gc.enable()
os.write(3, b"started\n")
faulthandler.enable(3)
faulthandler.register(signal.SIGTERM, 3, chain=True)
answer(3, os.environ.pop("MULTIHEAD_ANSWER", ""), sys.argv[1:])
)py";

std::string seconds_text(double seconds) { return format("%g", seconds); }

std::vector<std::string> command(const CheckOptions& options) {
  std::vector<std::string> words = {python(), "-c", kBootstrap, options.target};
  for (const auto& [option, value] : options.passed_on)
    words.insert(words.end(), {option, value});
  if (options.causal) words.push_back("--causal");
  if (options.fix) words.push_back("--fix");
  if (!options.allowed.empty())
    words.insert(words.end(), {"--allow", joined(options.allowed, ",")});
  words.insert(words.end(), {"--time-limit", seconds_text(options.time_limit)});
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

std::string dumped(const Json& report) {
  return report.dump(2, ' ', false, Json::error_handler_t::replace);
}

// A report of code that did not come back: its target, one finding.
std::string failure(const CheckOptions& options, const char* name,
                    const std::string& sentence, const std::string& remedy,
                    const std::string& detail = "") {
  const Json finding = {{"name", name},
                        {"sentence", sentence},
                        {"remedy", remedy},
                        {"detail", detail},
                        {"kind", "failure"}};
  Json report = {
      {"target", options.target}, {"passed", false},
      {"judgement", ""},          {"cause", name},
      {"verdict", "unchecked"},   {"findings", Json::array({finding})}};
  finish(report);
  return dumped(report);
}

std::string crash(const CheckOptions& options, const ChildEnd& end) {
  if (end.signal == SIGKILL)
    return failure(options, "crashes",
                   "The system killed the process (SIGKILL).",
                   "Most often memory had run out: look for a tensor that is "
                   "larger than it should be.");
  if (end.signal != 0)
    return failure(
        options, "crashes",
        std::string("It crashes the process: ") + strsignal(end.signal) + ".",
        "Python code alone cannot do that. Look for what reads or "
        "writes memory by itself: an extension, ctypes, an "
        "uncompiled kernel.",
        last_place(end.answer, options.target));
  return failure(
      options, "crashes",
      "It ends the whole process, with status " + std::to_string(end.status) +
          ", past every way out that Python has.",
      "Look for `os._exit`, or for a library that gives up like that.");
}

std::string hang(const CheckOptions& options, const std::string& answer) {
  return failure(options, "hangs",
                 "It had not come to an end after " +
                     seconds_text(options.time_limit) +
                     " s, and Python could not interrupt it. It was ended, and "
                     "what it had started with it.",
                 "Look for a loop outside of Python's own code, or one that "
                 "catches every exception. If it only needs longer, "
                 "--time-limit gives it more.",
                 last_place(answer, options.target));
}

// An answer that the limit on files has cut says nothing about the code.
void refuse_cut(const std::string& answer) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && answer.size() >= limit.rlim_cur)
    throw std::runtime_error("check: Python's report must fit into a file of " +
                             std::to_string(limit.rlim_cur) +
                             " bytes (ulimit -f), got more");
}

// The same for each that a folder has.
int survey_of(const CheckOptions& options) {
  if (!options.output.html.empty() || !options.output.svg.empty())
    throw std::invalid_argument(
        "check: --html and --svg are of one report; a folder has --json and "
        "--sarif");
  if (options.fix)
    throw std::invalid_argument("check: --fix is for one file, got a folder");
  offer_package();
  SurveyOptions all = {.root = options.target,
                       .command = {python(), "-c", kBootstrap},
                       .budget = options.budget,
                       .json = options.output.json,
                       .sarif = options.sarif};
  if (options.limited) all.time_limit = options.time_limit;
  for (const auto& [option, value] : options.passed_on)
    all.options.insert(all.options.end(), {option, value});
  if (options.causal) all.options.push_back("--causal");
  if (!options.allowed.empty())
    all.options.insert(all.options.end(),
                       {"--allow", joined(options.allowed, ",")});
  return survey(all);
}

int check(const CheckOptions& options) {
  if (std::filesystem::is_directory(options.target)) return survey_of(options);
  if (!options.sarif.empty())
    throw std::invalid_argument("check: --sarif is for a folder, got a file");
  ReportWriter writer("check", options.output);
  offer_package();
  const std::string command_line = "multihead check " + options.target;
  const ChildEnd end = run_child(
      {.command = command(options),
       .time_limit = options.time_limit + kGrace + (options.fix ? kRepair : 0),
       .resting_marks = {kLoading, kJudging},
       .resting_limit = kRest + (options.fix ? kRepair : 0),
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
  writer.write(end.timed_out ? hang(options, end.answer) : crash(options, end),
               command_line);
  return 1;
}

// --- explain -----------------------------------------------------------------

struct ExplainOptions {
  std::vector<std::string> files;  // dumps, .safetensors: one run in each
  Words facts;                     // in place of their metadata
  Allowed allowed = {};
  ReportOutput output = {};
};

constexpr const char* kExplainFooter = R"(
A dump holds query, key, value, out, the weights under their usual names, mask,
and, as metadata, num_heads; docs/explain.md has the list. Several dumps are
several runs of the same code: the verdict fits them all. Options replace the
metadata of each.

Exit status: 0 it is attention, 1 it is not, 2 the dumps cannot be read or judged,
or the report not be written, 3 it is attention if something is meant that
nothing states, and that --allow does not name.

Examples:
  multihead explain dump.safetensors
  multihead explain plain.safetensors masked.safetensors --mask blocked
)";

diagnosis::Observation read(const std::string& path,
                            const ExplainOptions& options) {
  diagnosis::Observation observation = read_dump(path);
  observation.metadata.try_emplace("name",
                                   std::filesystem::path(path).stem().string());
  for (const auto& [name, value] : options.facts)
    observation.metadata[name] = value;
  return observation;
}

// Says, after a while, that it is still at work.
std::jthread patience(const std::string& names) {
  return std::jthread([names](std::stop_token stop) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any ended;
    ended.wait_for(lock, stop, std::chrono::seconds(2), [] { return false; });
    if (!stop.stop_requested())
      std::fprintf(stderr, "multihead: explaining %s\n",
                   printable(names).c_str());
  });
}

std::string cause_of(const diagnosis::Verdict& verdict) {
  if (!verdict.findings.empty()) return verdict.findings.front().name;
  std::vector<std::string> names;
  for (const diagnosis::Finding& fault : verdict.faults)
    names.push_back(fault.name);
  return names.empty() ? "unknown" : joined(names, "+");
}

int explain(const ExplainOptions& options) {
  ReportWriter writer("explain", options.output);
  std::vector<diagnosis::Observation> observations;
  for (const std::string& path : options.files)
    observations.push_back(read(path, options));
  const std::string names = joined(options.files);
  std::jthread waiting = patience(names);
  const diagnosis::Verdict verdict = diagnosis::explain(observations);
  waiting = {};  // ends it before the report is printed
  const bool right = verdict.judgement == diagnosis::Judgement::kBits ||
                     verdict.judgement == diagnosis::Judgement::kRounding;
  Json report = {{"target", names},
                 {"passed", false},
                 {"judgement", ""},
                 {"cause", right ? Json(nullptr) : Json(cause_of(verdict))}};
  report.update(Json::parse(diagnosis::to_json(verdict)));
  report["allowed"] = options.allowed;
  const int status = finish(report);
  writer.write(dumped(report), "multihead explain " + names);
  return status;
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
      ->type_name("FILE[:NAME] or FOLDER");
  add_words(
      *command, options->passed_on,
      {{"--call", "--call", "How: \"Attention(dim=E)(x, mask=mask)\"",
        "EXPRESSION"},
       {"--num-heads", "--num-heads", "Heads to call it with", "N"},
       {"--embed-dim", "--embed-dim", "Width of its inputs", "N"},
       {"--num-kv-heads", "--num-kv-heads", "Heads of keys and values", "N"},
       {"--mask", "--mask",
        "What its mask means: True = blocked, keep; or additive",
        "blocked|keep|additive"},
       {"--layout", "--layout", "Of its inputs",
        "batch-first|sequence-first"}});
  command->add_flag("--causal", options->causal, "It is causal by itself");
  add_allow(*command, options->allowed);
  command
      ->add_option("--time-limit", options->time_limit,
                   "Seconds that the code may use, all calls together (of a "
                   "folder 10, each)")
      ->check(CLI::Range(0.1, 86400.0))
      ->type_name("SECONDS")
      ->capture_default_str();
  command
      ->add_option("--budget", options->budget, "Seconds for all of a folder")
      ->check(CLI::Range(1.0, 86400.0))
      ->type_name("SECONDS")
      ->capture_default_str();
  command->add_flag("--fix", options->fix,
                    "Print a patch that repairs it, proved by checking it");
  add_output(*command, options->output);
  add_file(*command, "--sarif", options->sarif,
           "Write what is wrong in a folder, for code review");
  command->callback([&action, options, command] {
    options->limited = command->count("--time-limit") > 0;
    action = [options] { return check(*options); };
  });
}

void add_explain(CLI::App& app, Action& action) {
  const auto options = std::make_shared<ExplainOptions>();
  CLI::App* command = app.add_subcommand(
      "explain", "The same of tensors that some attention took and returned");
  command->footer(kExplainFooter);
  command->add_option("files", options->files, "Dumps, .safetensors")
      ->required()
      ->check(is_named)
      ->check(is_dump)
      ->type_name("FILE");
  add_words(
      *command, options->facts,
      {{"--num-heads", "num_heads", "Heads of the queries", "N"},
       {"--num-kv-heads", "num_kv_heads", "Heads of keys and values", "N"},
       {"--mask", "mask", "What mask means: True = blocked, keep; or additive",
        "blocked|keep|additive"},
       {"--padding", "padding", "The same of key_padding_mask",
        "blocked|keep|additive"},
       {"--causal", "is_causal", "Whether it was to be causal",
        "true|false|infer"},
       {"--batch-first", "batch_first", "Whether inputs are (B, L, E)",
        "true|false"}});
  add_allow(*command, options->allowed);
  add_output(*command, options->output);
  command->callback(
      [&action, options] { action = [options] { return explain(*options); }; });
}

}  // namespace cli
