// SPDX-License-Identifier: MIT
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include "diagnosis/report/document.h"
#include "multihead/diagnosis.h"

namespace multihead::diagnosis {
namespace {

using Json = nlohmann::ordered_json;

// Text is escaped, and what is no UTF-8 replaced; NaN and infinities are null.
Json to_object(const Finding& finding) {
  return {{"name", finding.name},
          {"stage", finding.stage},
          {"sentence", finding.sentence},
          {"remedy", finding.remedy},
          {"detail", finding.detail}};
}

Json to_array(const std::vector<Finding>& findings) {
  Json array = Json::array();
  for (const Finding& finding : findings) array.push_back(to_object(finding));
  return array;
}

Json to_object(const ComparedCase& c) {
  return {{"name", c.name},       {"dtype", c.dtype},
          {"tensor", c.tensor},   {"shape", c.shape},
          {"agrees", c.agrees},   {"explained", c.explained},
          {"bits", c.bits},       {"exercise", c.exercise},
          {"error", c.error},     {"pytorch_error", c.pytorch_error},
          {"allowed", c.allowed}, {"unexplained", c.unexplained}};
}

const char* name_of(Judgement judgement) {
  constexpr const char* kNames[] = {"bits", "rounding", "fault", "unknown"};
  return kNames[static_cast<int>(judgement)];
}

}  // namespace

std::string to_json(const Verdict& verdict) {
  Json cases = Json::array();
  for (const ComparedCase& c : verdict.cases) cases.push_back(to_object(c));
  Json where = nullptr;
  if (verdict.where) {
    const Place& place = *verdict.where;
    where = {{"case", place.observation},
             {"tensor", place.tensor},
             {"index", place.index},
             {"got", place.got},
             {"expected", place.expected}};
  }
  Json first_stage = nullptr;
  if (verdict.first_stage) first_stage = *verdict.first_stage;
  const Json all = {{"verdict", name_of(verdict.judgement)},
                    {"faults", to_array(verdict.faults)},
                    {"alternatives", verdict.alternatives},
                    {"findings", to_array(verdict.findings)},
                    {"assumptions", to_array(verdict.assumptions)},
                    {"remarks", to_array(verdict.remarks)},
                    {"first_stage", first_stage},
                    {"where", where},
                    {"cases", cases},
                    {"weights", verdict.weights},
                    {"unused", verdict.unused}};
  return all.dump(-1, ' ', false, Json::error_handler_t::replace);
}

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
  const Document document = document_of(json);
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

}  // namespace multihead::diagnosis
