// SPDX-License-Identifier: MIT
//
// A survey as SARIF 2.1.0, for code review. A rule is a fault by its name; it
// carries its page as text, and a link to that where MULTIHEAD_DOCS_URL says
// where the documents are published.
#include <cctype>
#include <cstring>
#include <filesystem>
#include <map>

#include "cli/check/survey.h"
#include "cli/terminal/text.h"
#include "multihead/diagnosis.h"
#include "multihead/version.h"

namespace cli {
namespace {

using Json = nlohmann::ordered_json;

// Without the braces of sizes, which no call fills in here.
std::string general(std::string text) {
  std::erase_if(text, [](char c) { return c == '{' || c == '}'; });
  return text;
}

Json rule_of(const Json& entry) {
  const std::string name = entry["name"];
  const Json& place = entry["places"][0];
  const std::string sentence = general(place["sentence"]);
  const std::string hurts = entry["hurts"];
  const std::string remedy = general(place["remedy"]);
  Json rule = {{"id", name},
               {"name", entry["code"]},
               {"shortDescription", {{"text", sentence}}},
               {"fullDescription", {{"text", sentence + " " + hurts}}},
               {"help",
                {{"text", hurts + "\n\n" + remedy},
                 {"markdown", sentence + "\n\n**Why it hurts.** " + hurts +
                                  "\n\n**Repair.** " + remedy}}},
               {"properties",
                {{"code", entry["code"]},
                 {"page", "docs/faults/" + name + ".md"},
                 {"tags", Json::array({"attention"})}}}};
  const std::string base = environment("MULTIHEAD_DOCS_URL");
  if (!base.empty()) rule["helpUri"] = base + "/faults/" + name + ".md";
  return rule;
}

// A path as a part of a URI.
std::string as_uri(const std::string& path) {
  std::string uri;
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = std::isalnum(byte) || std::strchr("-._~/", c);
    uri += plain && c != 0 ? std::string(1, c) : format("%%%02X", byte);
  }
  return uri;
}

// From here, as code review wants it, not from the folder that was checked.
std::string relative(const std::string& file) {
  std::error_code error;
  const auto path = std::filesystem::proximate(file, error);
  return error ? file : path.string();
}

Json result_of(const Json& target, const Json& fault, int rule) {
  const std::string name = fault["name"], file = relative(target["file"]);
  std::string message = target["name"].get<std::string>() + ": " +
                        fault["sentence"].get<std::string>();
  for (const char* key : {"detail", "remedy"})
    if (const std::string more = fault[key]; !more.empty())
      message += "\n" + more;
  const bool in_cell = !target["cell"].get<std::string>().empty();
  // Lines of a notebook's cell are none of its file.
  Json region = {{"startLine", in_cell ? Json(1) : target["line"]}};
  return {{"ruleId", name},
          {"ruleIndex", rule},
          {"level", name == "unknown" ? "warning" : "error"},
          {"message", {{"text", message}}},
          {"locations",
           Json::array({{{"physicalLocation",
                          {{"artifactLocation", {{"uri", as_uri(file)}}},
                           {"region", region}}},
                         {"logicalLocations",
                          Json::array({{{"name", target["name"]}}})}}})},
          {"partialFingerprints",
           {{"multihead/v1",
             file + ":" + target["name"].get<std::string>() + ":" + name}}}};
}

}  // namespace

std::string to_sarif(const Json& survey) {
  std::map<std::string, Json> catalogue;
  for (const Json& entry : Json::parse(multihead::diagnosis::fault_catalogue()))
    catalogue[entry["name"]] = entry;
  Json rules = Json::array(), results = Json::array(), notes = Json::array();
  std::map<std::string, int> at;
  for (const Json& target : survey["targets"]) {
    for (const Json& fault : target["faults"]) {
      const std::string name = fault["name"];
      if (!at.contains(name) && catalogue.contains(name)) {
        at[name] = static_cast<int>(rules.size());
        rules.push_back(rule_of(catalogue[name]));
      }
      results.push_back(
          result_of(target, fault, at.contains(name) ? at[name] : -1));
    }
    const std::string verdict = target["verdict"];
    if (verdict == "not judged" || verdict == "not reached")
      notes.push_back(
          {{"level", "note"},
           {"message",
            {{"text", target["file"].get<std::string>() + ": " +
                          target["name"].get<std::string>() + ": " + verdict +
                          ". " + target["reason"].get<std::string>()}}}});
  }
  const Json driver = {{"name", "multihead check"},
                       {"semanticVersion", MULTIHEAD_VERSION},
                       {"rules", rules}};
  const Json run = {
      {"tool", {{"driver", driver}}},
      {"invocations", Json::array({{{"executionSuccessful", true},
                                    {"toolExecutionNotifications", notes}}})},
      {"columnKind", "utf16CodeUnits"},
      {"results", results}};
  const Json log = {
      {"$schema", "https://json.schemastore.org/sarif-2.1.0.json"},
      {"version", "2.1.0"},
      {"runs", Json::array({run})}};
  return log.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace cli
