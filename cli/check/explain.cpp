// SPDX-License-Identifier: MIT
//
// `multihead explain`: the verdict on tensors that somebody's attention took
// and returned, saved from any framework.
#include <CLI/CLI.hpp>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/check/report_output.h"
#include "cli/commands.h"
#include "cli/terminal/arguments.h"
#include "multihead/diagnosis.h"
#include "multihead/text/printable.h"

namespace cli {
namespace {

struct ExplainOptions {
  std::vector<std::string> files;  ///< dumps, .safetensors: one run in each
  std::map<std::string, std::string> facts;  ///< in place of their metadata
  ReportOutput output = {};
};

constexpr const char* kFooter = R"(
A dump holds query, key, value, out, the weights under their usual names, mask,
and, as metadata, num_heads; docs/explain.md has the list. Several dumps are
several runs of the same code: the verdict fits them all. Options replace the
metadata of each.

Exit status: 0 it is attention, 1 it is not, 2 the dumps cannot be read, or the
report not be written.

Examples:
  multihead explain dump.safetensors
  multihead explain plain.safetensors masked.safetensors --mask blocked
)";

using Json = nlohmann::ordered_json;

multihead::diagnosis::Observation read(const std::string& path,
                                       const ExplainOptions& options) {
  multihead::diagnosis::Observation observation = read_dump(path);
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

std::string cause_of(const multihead::diagnosis::Verdict& verdict) {
  std::string cause;
  for (const multihead::diagnosis::Finding& fault : verdict.faults)
    cause += (cause.empty() ? "" : "+") + fault.name;
  if (!verdict.findings.empty()) return verdict.findings.front().name;
  return cause.empty() ? "unknown" : cause;
}

int explain(const ExplainOptions& options) {
  ReportWriter writer("explain", options.output);
  std::vector<multihead::diagnosis::Observation> observations;
  std::string names;
  for (const std::string& path : options.files) {
    observations.push_back(read(path, options));
    names += (names.empty() ? "" : " ") + path;
  }
  std::jthread waiting = patience(names);
  const multihead::diagnosis::Verdict verdict =
      multihead::diagnosis::explain(observations);
  waiting = {};  // ends it before the report is printed
  const bool passed =
      verdict.judgement == multihead::diagnosis::Judgement::kBits ||
      verdict.judgement == multihead::diagnosis::Judgement::kRounding;
  Json report = {{"target", names},
                 {"passed", passed},
                 {"cause", passed ? Json(nullptr) : Json(cause_of(verdict))}};
  report.update(Json::parse(multihead::diagnosis::to_json(verdict)));
  writer.write(report.dump(2, ' ', false, Json::error_handler_t::replace),
               "multihead explain " + names);
  return passed ? 0 : 1;
}

}  // namespace

void add_explain(CLI::App& app, Action& action) {
  const auto options = std::make_shared<ExplainOptions>();
  CLI::App* command = app.add_subcommand(
      "explain", "The same of tensors that some attention took and returned");
  command->footer(kFooter);
  command->add_option("files", options->files, "Dumps, .safetensors")
      ->required()
      ->check(is_named)
      ->check(is_dump)
      ->type_name("FILE");
  const auto fact = [&](const char* option, const char* name, const char* what,
                        const char* type) {
    command
        ->add_option_function<std::string>(
            option,
            [options, name](const std::string& value) {
              options->facts[name] = value;
            },
            what)
        ->type_name(type);
  };
  fact("--num-heads", "num_heads", "Heads of the queries", "N");
  fact("--num-kv-heads", "num_kv_heads", "Heads of keys and values", "N");
  fact("--mask", "mask", "What mask means: True = blocked, keep; or additive",
       "blocked|keep|additive");
  fact("--padding", "padding", "The same of key_padding_mask",
       "blocked|keep|additive");
  fact("--causal", "is_causal", "Whether it was to be causal",
       "true|false|infer");
  fact("--batch-first", "batch_first", "Whether inputs are (B, L, E)",
       "true|false");
  add_output(*command, options->output);
  command->callback(
      [&action, options] { action = [options] { return explain(*options); }; });
}

}  // namespace cli
