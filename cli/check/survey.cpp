// SPDX-License-Identifier: MIT
#include "cli/check/survey.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>

#include "cli/check/child.h"
#include "cli/check/interpreter.h"
#include "cli/check/lanes.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/output.h"
#include "cli/terminal/text.h"
#include "multihead/diagnosis.h"

namespace cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr int kLanes = 2, kRoom = 98;  // columns of a line
constexpr double kFindLimit = 30;      // seconds

// The modules that look for attention need no PyTorch, which importing the
// whole package would import.
constexpr const char* kFind = R"py(
import importlib.util, json, os, sys
sys.path[:] = [folder for folder in sys.path if folder]
spec = importlib.util.find_spec("multihead")
if spec is None:
    os.write(3, f"report 2\ncheck: {sys.executable} has no Python package multihead; "
             "install it there (MULTIHEAD_PYTHON names another Python)\n".encode())
    os._exit(2)
sys.path.insert(0, os.path.join(spec.submodule_search_locations[0], "check"))
from workplace.find import find
found = json.dumps(find(sys.argv[1]).to_dict())
with open(3, "wb") as answer:
    answer.write(b"report 0\n" + found.encode(errors="replace"))
)py";

Json find(const std::string& root) {
  const ChildEnd end =
      run_child({.command = {python(), "-c", kFind, root},
                 .start_limit = kFindLimit,
                 .time_limit = kFindLimit,
                 .waiting = "multihead: reading " + printable(root)});
  const auto answer = answered(end.answer);
  if (end.interrupted) throw std::runtime_error("check: interrupted");
  if (!answer)
    throw std::runtime_error("check: " + root + " could not be read in time");
  if (answer->first != 0)
    throw std::runtime_error(
        answer->second.substr(0, answer->second.find('\n')));
  return Json::parse(answer->second);
}

// ---- What a report comes to ------------------------------------------------

std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>()
                                                     : "";
}

const Json& list_at(const Json& object, const char* key) {
  static const Json empty = Json::array();
  const auto found = object.find(key);
  return found != object.end() && found->is_array() ? *found : empty;
}

// Flaws of a program that are its own, however it was called.
bool is_own_flaw(const std::string& name) {
  static const std::set<std::string> kOwn = {
      "changes_inputs",  "random",     "wrong_shape",    "not_finite",
      "returns_nothing", "wrong_type", "integer_output",
  };
  return kOwn.contains(name);
}

const std::map<std::string, Json>& catalogue() {
  static const std::map<std::string, Json> known = [] {
    std::map<std::string, Json> all;
    for (const Json& entry :
         Json::parse(multihead::diagnosis::fault_catalogue()))
      all[entry["name"]] = entry;
    return all;
  }();
  return known;
}

Json fault_of(const Json& finding) {
  const std::string name = text_at(finding, "name");
  const auto known = catalogue().find(name);
  return {{"code", known == catalogue().end() ? "" : known->second["code"]},
          {"name", name},
          {"sentence", text_at(finding, "sentence")},
          {"remedy", text_at(finding, "remedy")},
          {"detail", text_at(finding, "detail")}};
}

Json sentences(const Json& list) {
  Json said = Json::array();
  for (const Json& entry : list) said.push_back(text_at(entry, "sentence"));
  return said;
}

// Fills in verdict, faults, conditions, reason and remedy.
void judge(Json& target, const Json& report) {
  const std::string verdict = text_at(report, "verdict");
  const bool right = verdict == "bits" || verdict == "rounding";
  const auto because = [&](const char* what, const Json& finding) {
    target["verdict"] = what;
    target["reason"] = text_at(finding, "sentence");
    target["remedy"] = text_at(finding, "remedy");
    target["detail"] = text_at(finding, "detail");
  };
  for (const Json& fault : list_at(report, "faults"))
    if (verdict == "fault") target["faults"].push_back(fault_of(fault));
  const bool is_wrong = text_at(report, "judgement") == "wrong";
  for (const Json& finding : list_at(report, "findings")) {
    const std::string name = text_at(finding, "name");
    // Not what only took too long.
    const bool is_fault =
        is_own_flaw(name) ||
        (is_wrong && (name == "raises" || name == "cache_differs"));
    if (is_fault && (right || verdict == "unchecked"))
      target["faults"].push_back(fault_of(finding));
  }
  if (!target["faults"].empty())
    return because("wrong", target["faults"].front());
  const Json& findings = list_at(report, "findings");
  if (right && text_at(report, "judgement") == "right_if") {
    target["conditions"] = sentences(list_at(report, "conditions"));
    return because("right if", list_at(report, "conditions").front());
  }
  if (right && findings.empty()) return because("right", {});
  if (verdict == "unknown") {
    const auto& entry = catalogue().at("unknown")["places"][0];
    target["faults"].push_back(
        fault_of({{"name", "unknown"},
                  {"sentence", entry["sentence"]},
                  {"remedy", entry["remedy"]},
                  {"detail", "The first step that differs: " +
                                 (text_at(report, "first_stage").empty()
                                      ? std::string("not known")
                                      : text_at(report, "first_stage")) +
                                 "."}}));
    return because("wrong", target["faults"].front());
  }
  because("not judged", findings.empty() ? Json::object() : findings.front());
}

// A candidate as it is printed, before anything is known of it.
Json target_of(const std::string& root, const Json& candidate) {
  namespace fs = std::filesystem;
  const fs::path file = fs::path(root) / text_at(candidate, "file");
  return {{"file", file.lexically_normal().string()},
          {"line", candidate["line"]},
          {"cell", candidate["cell"]},
          {"end_line", candidate["end_line"]},
          {"name", candidate["name"]},
          {"verdict", "not reached"},
          {"faults", Json::array()},
          {"conditions", Json::array()},
          {"reason", ""},
          {"remedy", ""},
          {"detail", ""},
          {"same_as", candidate["same_as"]},
          {"seconds", 0.0}};
}

Json surveyed(const SurveyOptions& options, Lanes& lanes,
              Clock::time_point start) {
  const auto elapsed = [&] {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const Json found = find(options.root);
  std::vector<std::string> targets;
  for (const Json& candidate : found["candidates"])
    if (text_at(candidate, "same_as").empty())
      targets.push_back(candidate["target"]);
  const auto outcomes = lanes.check(targets, options.budget - elapsed());
  for (const CheckedTarget& outcome : outcomes)
    if (outcome.why.ends_with("(MULTIHEAD_PYTHON names another Python)"))
      throw std::runtime_error(outcome.why);  // it is nobody's attention
  std::map<std::string, Json> judged;
  Json all = Json::array();
  size_t next = 0;
  for (const Json& candidate : found["candidates"]) {
    if (!text_at(candidate, "same_as").empty()) continue;
    Json target = target_of(options.root, candidate);
    const CheckedTarget& outcome = outcomes[next++];
    if (outcome.reached) {
      target["seconds"] = outcome.seconds;
      target["verdict"] = "not judged";
      target["reason"] = outcome.why == "late"
                             ? "It had not come to an end in time."
                             : outcome.why;
      if (outcome.why == "late")
        target["remedy"] = "Give it longer: --time-limit.";
      if (outcome.report.is_object()) judge(target, outcome.report);
    }
    judged[candidate["target"]] = target;
  }
  for (const Json& candidate : found["candidates"]) {
    const std::string same = text_at(candidate, "same_as");
    Json target = target_of(options.root, candidate);
    const Json& known =
        judged[same.empty() ? text_at(candidate, "target") : same];
    for (const char* key : {"verdict", "faults", "conditions", "reason",
                            "remedy", "detail", "seconds"})
      target[key] = known[key];
    all.push_back(target);
  }
  return {{"folder", options.root},
          {"files", found["files"]},
          {"other_frameworks", found["other"]},
          {"seconds", elapsed()},
          {"targets", all}};
}

// ---- The table -------------------------------------------------------------

// Wrong ones first: they are what somebody acts on.
constexpr std::pair<std::string_view, Style> kVerdicts[] = {
    {"wrong", Style::kBad},          {"right if", Style::kWarning},
    {"not judged", Style::kWarning}, {"right", Style::kGood},
    {"not reached", Style::kDim},
};

std::string place_of(const Json& target) {
  return printable(text_at(target, "file") + text_at(target, "cell") + ":" +
                   std::to_string(target["line"].get<int>()));
}

std::string names_of(const Json& target) {
  std::vector<std::string> names;
  for (const Json& fault : target["faults"])
    names.push_back(text_at(fault, "name"));
  return joined(names, " + ");
}

std::string words_of(const Json& target) {
  const std::string verdict = text_at(target, "verdict");
  if (verdict != "wrong") return verdict;
  const std::string names = names_of(target);
  return "wrong: " + (names == "unknown" ? "no known fault" : names);
}

int width_of(const Json& targets, auto&& text, int most) {
  int widest = 0;
  for (const Json& target : targets)
    widest = std::max(widest, columns(text(target)));
  return std::min(widest, most);
}

void print_table(const Json& targets) {
  const auto name = [](const Json& t) { return printable(text_at(t, "name")); };
  Table table({{"where", width_of(targets, place_of, 60)},
               {"name", width_of(targets, name, 40)},
               {"verdict", width_of(targets, words_of, 60)},
               {"seconds", 7, /*right=*/true, /*dispensable=*/true}});
  table.header();
  for (const auto& [verdict, style] : kVerdicts)
    for (const Json& target : targets) {
      if (text_at(target, "verdict") != verdict) continue;
      const bool copy = !text_at(target, "same_as").empty();
      const bool reached = target["verdict"] != "not reached";
      table.row({{place_of(target)},
                 {name(target)},
                 {words_of(target), style},
                 {copy      ? "copy"
                  : reached ? format("%.1f", target["seconds"].get<double>())
                            : ""}});
    }
}

// Words in lines that a terminal shows, each after two spaces.
std::string paragraph(const std::string& text) {
  const int width = detect_terminal().width;
  const int room = width > 0 ? std::min(width - 2, kRoom) : kRoom;
  std::string lines, line;
  std::istringstream words(printable(text, "\n"));
  for (std::string word; words >> word;) {
    const bool fits = columns(line) + 1 + columns(word) <= room;
    if (!line.empty() && !fits) lines += "\n  " + line, line.clear();
    line += (line.empty() ? "" : " ") + word;
  }
  return lines + "\n  " + line;
}

// What to do about each that is not simply right, those of one sentence
// together.
std::string notes_of(const Json& targets) {
  std::string text;
  std::set<std::string> said;
  for (const auto& [verdict, style] : kVerdicts)
    for (const Json& target : targets) {
      if (text_at(target, "verdict") != verdict) continue;
      std::vector<Json> notes;
      for (const Json& fault : target["faults"]) notes.push_back(fault);
      if (notes.empty() && !text_at(target, "reason").empty())
        notes.push_back({{"code", ""},
                         {"name", std::string(verdict)},
                         {"sentence", target["reason"]},
                         {"remedy", target["remedy"]},
                         {"detail", target["detail"]}});
      for (const Json& note : notes) {
        std::string where;
        for (const Json& other : targets)
          if (text_at(other, "reason") == text_at(target, "reason") &&
              other["faults"] == target["faults"] &&
              other["verdict"] == target["verdict"])
            where += (where.empty() ? "" : ", ") + place_of(other);
        const std::string code = text_at(note, "code");
        std::string entry = "\n" + (code.empty() ? "" : code + " ") +
                            text_at(note, "name") + "  " + where +
                            paragraph(text_at(note, "sentence"));
        for (const char* key : {"detail", "remedy"})
          if (const std::string more = text_at(note, key); !more.empty())
            entry += paragraph(more);
        if (said.insert(entry).second) text += entry + "\n";
      }
    }
  return text;
}

constexpr const char* kCall =
    "\nTo have one judged that was not, say how it is called:\n"
    "  multihead check FILE:NAME --call 'NAME(dim=E)(x, mask=mask)'\n";

std::map<std::string, int> counts_of(const Json& targets) {
  std::map<std::string, int> counts;
  for (const Json& target : targets) ++counts[text_at(target, "verdict")];
  return counts;
}

std::string summary_of(const Json& survey) {
  auto counts = counts_of(survey["targets"]);
  std::vector<std::string> parts;
  for (const auto& [verdict, style] : kVerdicts)
    if (const int count = counts[std::string(verdict)])
      parts.push_back(std::to_string(count) + " " + std::string(verdict));
  std::string text =
      plural(static_cast<int64_t>(survey["targets"].size()), "candidate") +
      " in " + plural(survey["files"].get<int64_t>(), "file") + ": " +
      joined(parts, ", ") + ". " +
      format("%.0f s", survey["seconds"].get<double>());
  if (const int64_t other = survey["other_frameworks"].get<int64_t>())
    text += "; " + std::to_string(other) + " of other frameworks left out";
  if (counts["not reached"] > 0) text += "; --budget gives it longer than that";
  return text;
}

int status_of(const Json& targets) {
  auto counts = counts_of(targets);
  if (counts["wrong"] > 0) return 1;
  return counts["right"] + counts["right if"] > 0 ? 0 : 2;
}

}  // namespace

int survey(const SurveyOptions& options) {
  const auto start = Clock::now();
  const Destination sarif("check: --sarif", options.sarif);
  print_at_most_one("check", options.json + sarif.standard_output());
  Lanes lanes(kLanes, options);
  const Json survey = surveyed(options, lanes, start);
  const Json& targets = survey["targets"];
  if (sarif.wanted()) sarif.write(to_sarif(survey) + "\n");
  if (options.json)
    write_output(survey.dump(2, ' ', false, Json::error_handler_t::replace) +
                 "\n");
  if (targets.empty() && !options.json && !sarif.standard_output())
    throw std::runtime_error(
        "check: " + printable(options.root) +
        " must have attention in it, got none that looks like it in " +
        plural(survey["files"].get<int64_t>(), "file"));
  if (!options.json && !sarif.standard_output()) {
    print_table(targets);
    const bool ask = counts_of(targets)["not judged"] > 0;
    write_output(detect_terminal().shown(notes_of(targets) +
                                         (ask ? kCall : "") + "\n" +
                                         summary_of(survey) + "\n"));
  }
  return status_of(targets);
}

}  // namespace cli
