// SPDX-License-Identifier: MIT
//
// Where a report goes: to the terminal, as it can show it, and into files.
#pragma once

#include <string>

#include "cli/commands.h"

namespace cli {

/// Prints a report, the JSON of multihead/report.h, as text or as it is, and
/// writes the files that are asked for. `command_line` made it, and stands
/// above it in a picture. Throws std::runtime_error where a file cannot be
/// written.
void show_report(const std::string& json, const std::string& command_line,
                 const ReportOutput& output);

}  // namespace cli
