// SPDX-License-Identifier: MIT
//
// Where a report goes: to the terminal, as it can show it, and into files.
#pragma once

#include <string>

#include "cli/terminal/output.h"

namespace CLI {
class App;
}

namespace cli {

/// What becomes of a report beside its text on standard output.
struct ReportOutput {
  bool json = false;  ///< print JSON instead
  /// Files, "-" for standard output instead of the text; empty: none.
  std::string html, svg;
};

/// Adds --json, --html and --svg.
void add_output(CLI::App& command, ReportOutput& output);

/// Made before anything runs: throws where a file cannot be written.
class ReportWriter {
 public:
  /// `command`, "check", is what errors name.
  ReportWriter(const std::string& command, const ReportOutput& output);

  /// Prints a report, the JSON of multihead/diagnosis.h, as text or as it is,
  /// unless a file that is asked for goes to standard output; writes the files.
  /// `command_line` made it, and stands above it in a picture.
  void write(const std::string& json, const std::string& command_line);

 private:
  bool json_;
  Destination html_, svg_;
};

}  // namespace cli
