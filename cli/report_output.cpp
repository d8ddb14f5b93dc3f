// SPDX-License-Identifier: MIT
#include "cli/report_output.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/destination.h"
#include "cli/table.h"
#include "multihead/report.h"

namespace cli {
namespace {

using multihead::render_report;
using multihead::ReportFormat;

constexpr int kUsual = 80, kWidest = 100;

constexpr const char* kPage = R"(<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>multihead</title>
<body>
)";

std::string for_standard_output(const std::string& json,
                                const ReportOutput& output) {
  if (output.json) return json + "\n";
  const Terminal terminal = detect_terminal();
  const int width =
      terminal.width > 0 ? std::min(terminal.width, kWidest) : kUsual;
  const std::string text = render_report(
      json, terminal.colour ? ReportFormat::kAnsi : ReportFormat::kText, width);
  return for_terminal(text, terminal);
}

}  // namespace

void show_report(const std::string& json, const std::string& command_line,
                 const ReportOutput& output) {
  std::fputs(for_standard_output(json, output).c_str(), stdout);
  if (!output.html.empty())
    Destination("--html", output.html)
        .write(kPage + render_report(json, ReportFormat::kHtml));
  if (!output.svg.empty()) {
    auto with_command = nlohmann::ordered_json::parse(json);
    with_command["command"] = command_line;
    Destination("--svg", output.svg)
        .write(render_report(with_command.dump(), ReportFormat::kSvg));
  }
}

}  // namespace cli
