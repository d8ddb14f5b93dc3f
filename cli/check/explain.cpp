// SPDX-License-Identifier: MIT
//
// `multihead explain`: the verdict on tensors that somebody's attention took
// and returned, saved from any framework.
#include "multihead/explain.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/check/dump.h"
#include "cli/check/report_output.h"
#include "cli/commands.h"
#include "multihead/text/printable.h"

namespace cli {
namespace {

using Json = nlohmann::ordered_json;

multihead::Observation read(const std::string& path,
                            const ExplainOptions& options) {
  multihead::Observation observation = read_dump(path);
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
                   multihead::printable(names).c_str());
  });
}

std::string cause_of(const multihead::Verdict& verdict) {
  std::string cause;
  for (const multihead::Finding& fault : verdict.faults)
    cause += (cause.empty() ? "" : "+") + fault.name;
  if (!verdict.findings.empty()) return verdict.findings.front().name;
  return cause.empty() ? "unknown" : cause;
}

}  // namespace

int explain(const ExplainOptions& options) {
  ReportWriter writer("explain", options.output);
  std::vector<multihead::Observation> observations;
  std::string names;
  for (const std::string& path : options.files) {
    observations.push_back(read(path, options));
    names += (names.empty() ? "" : " ") + path;
  }
  std::jthread waiting = patience(names);
  const multihead::Verdict verdict = multihead::explain(observations);
  waiting = {};  // ends it before the report is printed
  const bool passed = verdict.judgement == multihead::Judgement::kBits ||
                      verdict.judgement == multihead::Judgement::kRounding;
  Json report = {{"target", names},
                 {"passed", passed},
                 {"cause", passed ? Json(nullptr) : Json(cause_of(verdict))}};
  report.update(Json::parse(multihead::to_json(verdict)));
  writer.write(report.dump(2, ' ', false, Json::error_handler_t::replace),
               "multihead explain " + names);
  return passed ? 0 : 1;
}

}  // namespace cli
