// SPDX-License-Identifier: MIT
#include "cli/check/report_output.h"

#include <CLI/App.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/terminal/arguments.h"
#include "cli/terminal/output.h"
#include "cli/terminal/table.h"
#include "multihead/diagnosis.h"
#include "multihead/text/printable.h"

namespace cli {
namespace {

using multihead::printable;
using multihead::diagnosis::render_report;
using multihead::diagnosis::ReportFormat;

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
  return for_terminal(text, terminal);
}

}  // namespace

void add_output(CLI::App& command, ReportOutput& output) {
  command.add_flag("--json", output.json, "Print one JSON object");
  add_file(command, "--html", output.html, "Write a page for browsers");
  add_file(command, "--svg", output.svg, "Draw what a terminal would show");
}

ReportWriter::ReportWriter(const std::string& command,
                           const ReportOutput& output)
    : json_(output.json),
      html_(command + ": --html", output.html),
      svg_(command + ": --svg", output.svg) {
  print_at_most_one(command,
                    json_ + html_.standard_output() + svg_.standard_output());
}

void ReportWriter::write(const std::string& json,
                         const std::string& command_line) {
  const auto printed = [&] {
    if (!html_.standard_output() && !svg_.standard_output())
      write_output(json_ ? json + "\n" : text_of(json));
  };
  const auto page = [&] {
    if (html_.wanted())
      html_.write(kPage + render_report(json, ReportFormat::kHtml));
  };
  const auto picture = [&] {
    if (!svg_.wanted()) return;
    auto with_command = nlohmann::ordered_json::parse(json);
    with_command["command"] = printable(command_line);
    svg_.write(render_report(with_command.dump(), ReportFormat::kSvg));
  };
  each_of({printed, page, picture});
}

}  // namespace cli
