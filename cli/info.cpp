// SPDX-License-Identifier: MIT
#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/terminal/environment.h"
#include "cli/terminal/output.h"
#include "cli/terminal/table.h"
#include "multihead/text/printable.h"

namespace cli {
namespace {

constexpr const char* kFooter = R"(
Examples:
  multihead info
  multihead info --json
)";

using multihead::printable;

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words)
    text += (text.empty() ? "" : " ") + word;
  return text.empty() ? "none that matter" : text;
}

std::string or_absent(const std::string& text) {
  return text.empty() ? "not in this torch" : text;
}

int info(bool json) {
  const Environment e = detect_environment();
  if (json) {
    write_output(to_json(e).dump(2) + "\n");
    return 0;
  }
  Table table({{.title = "", .width = 9}, {.title = ""}}, detect_terminal());
  const auto say = [&](const char* name, const std::string& value) {
    table.row({{name, Style::kDim}, {value}});
  };
  say("multihead", e.version);
  say("torch", e.torch_running + " (built against " + e.torch_built +
                   "), kernels for " + e.torch_isa);
  say("BLAS", or_absent(e.blas));
  say("oneDNN", or_absent(e.onednn));
  say("CPU", e.cpu + (e.cpu_id.empty() ? "" : " (" + e.cpu_id + ")"));
  say("flags", joined(e.isa));
  say("threads", std::to_string(e.threads) + " of " +
                     std::to_string(e.processors) + " processors");
  if (!e.settings.empty()) say("set", printable(joined(e.settings)));
  say("exact", "available: PyTorch's own order of operations");
  say("fused", e.fused.empty() ? "available: kernels for " + e.kernels +
                                     " (MULTIHEAD_ISA may name " +
                                     joined(e.kernels_available) + ")"
                               : "not available: " + e.fused);
  return 0;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  const auto json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("info", "Versions, processor, threads, backends");
  command->footer(kFooter);
  command->add_flag("--json", *json, "Print one JSON object");
  command->callback(
      [&action, json] { action = [json] { return info(*json); }; });
}

}  // namespace cli
