// SPDX-License-Identifier: MIT
//
// Verdicts as people read them. The words are written here once, for the
// command, for Python and for notebooks; what is said about attention comes
// from the verdict itself (explain.h).
#pragma once

#include <string>
#include <string_view>

#include "multihead/explain.h"

namespace [[gnu::visibility("default")]] multihead {

enum class ReportFormat {
  kText,  ///< plain
  kAnsi,  ///< with the escape codes of a terminal's colours
  kHtml,  ///< a fragment with its own style, for light and dark pages
  kSvg,   ///< a picture of the coloured text
};

/// "text", "ansi", "html" or "svg"; throws c10::ValueError otherwise.
ReportFormat report_format_from_name(std::string_view name);

/// Renders a verdict (explain.h), a JSON object to which these may be added:
///   target      string, whose attention it is: "attention.py: attend"
///   findings    [{name, sentence, remedy, detail}], what kept the code from
///               being right beside faults of attention: raises, hangs ...
///   understood  [string], how the code was called
///   command     string, a command line to be shown above
/// A verdict of "unchecked" says that it never came to one. Lines of at most
/// `width` columns (HTML breaks its own). Ends in a newline. Throws
/// c10::ValueError where `json` is none, or lacks a verdict.
std::string render_report(const std::string& json, ReportFormat format,
                          int width = 80);

/// A verdict as plain text: what render_report makes of its to_json. For the
/// other formats: render_report(to_json(verdict), ReportFormat::kHtml).
std::string to_text(const Verdict& verdict, int width = 80);

}  // namespace multihead
