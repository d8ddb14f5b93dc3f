// SPDX-License-Identifier: MIT
#include "multihead/report.h"

#include <c10/util/Exception.h>

#include "diagnosis/report/document.h"

namespace multihead {

ReportFormat report_format_from_name(std::string_view name) {
  if (name == "text") return ReportFormat::kText;
  if (name == "ansi") return ReportFormat::kAnsi;
  if (name == "html") return ReportFormat::kHtml;
  if (name == "svg") return ReportFormat::kSvg;
  TORCH_CHECK_VALUE(false,
                    "render_report: format must be \"text\", \"ansi\", "
                    "\"html\" or \"svg\", got \"",
                    name, "\"");
}

std::string render_report(const std::string& json, ReportFormat format,
                          int width) {
  const report::Document document = report::document_of(json);
  switch (format) {
    case ReportFormat::kHtml:
      return to_html(document);
    case ReportFormat::kSvg:
      return to_svg(document, width);
    default:
      return to_text(document, format == ReportFormat::kAnsi, width);
  }
}

std::string to_text(const Verdict& verdict, int width) {
  return render_report(to_json(verdict), ReportFormat::kText, width);
}

}  // namespace multihead
