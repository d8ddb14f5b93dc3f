// SPDX-License-Identifier: MIT
#include "diagnosis/report/document.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <set>

#include "diagnosis/report/headline.h"
#include "diagnosis/report/json.h"
#include "multihead/text/dtypes.h"

namespace multihead::diagnosis {
namespace {

using Kind = Block::Kind;

// ---- Words -----------------------------------------------------------------

// "2.4e-07", "0.412", "0", "nan"; "–" of nothing.
std::string number_text(std::optional<double> x, int digits = 3) {
  if (!x) return "–";
  char text[32];
  const bool small = *x != 0 && std::abs(*x) < 1e-3 && digits == 3;
  std::snprintf(text, sizeof text, small ? "%.*e" : "%.*g", small ? 1 : digits,
                *x);
  return text;
}

// `text` with what stands between backticks as code.
Text marked_up(const std::string& text, Emphasis emphasis = Emphasis::kPlain) {
  Text spans;
  size_t at = 0;
  while (at < text.size()) {
    const size_t open = text.find('`', at);
    const size_t close =
        open == std::string::npos ? open : text.find('`', open + 1);
    if (close == std::string::npos) break;
    if (open > at) spans.push_back({text.substr(at, open - at), emphasis});
    spans.push_back({text.substr(open + 1, close - open - 1), Emphasis::kCode});
    at = close + 1;
  }
  if (at < text.size()) spans.push_back({text.substr(at), emphasis});
  return spans;
}

// Adds a note, if there is text.
void note(Document& document, const char* label, Text text) {
  if (!text.empty())
    document.push_back({.kind = Kind::kNote,
                        .label = {label, Emphasis::kDim},
                        .text = std::move(text)});
}

// ---- The cases, in numbers -------------------------------------------------

// Whether attention has a result to compare this case with: else nothing is
// allowed for rounding either.
bool has_reference(const Json& c) {
  return has_number(c, "error") || value_at(c, "allowed") > 0;
}

Text row_of(const Json& c) {
  const bool agrees = is_true(c, "agrees"), bits = is_true(c, "bits");
  std::string name = text_at(c, "name");
  const std::string tensor = text_at(c, "tensor");
  if (!tensor.empty() && tensor != "out") name += ": " + tensor;
  const bool beside = has_number(c, "pytorch_error");
  const char* close = !c.contains("exercise")  ? "–"
                      : !beside && agrees      ? "–"
                      : bits                   ? "bits"
                      : is_true(c, "exercise") ? "yes"
                                               : "no";
  return {mark(agrees),
          {name},
          {short_dtype(text_at(c, "dtype")), Emphasis::kDim},
          {joined(list_at(c, "shape"), "×"), Emphasis::kDim},
          {has_reference(c) ? number_text(number_at(c, "error")) : "–",
           agrees ? Emphasis::kPlain : Emphasis::kBad},
          {beside ? number_text(number_at(c, "pytorch_error")) : "–"},
          {close}};
}

// The exercise's own assertion, where the code is right and PyTorch has
// numbers to stand beside it: rows that see nothing, and dropout, have none.
void add_exercise(Document& document, const Json& cases) {
  const Json* worst = nullptr;
  size_t failing = 0, asked = 0;
  for (const Json& c : cases) {
    if (!c.contains("exercise") || !has_number(c, "pytorch_error")) continue;
    ++asked;
    if (is_true(c, "exercise")) continue;
    ++failing;
    if (!worst || value_at(c, "error") > value_at(*worst, "error")) worst = &c;
  }
  if (asked == 0) return;
  const std::string result =
      worst ? "fails in " + std::to_string(failing) + " of " +
                  std::to_string(asked) + " by rounding: in case " +
                  text_at(*worst, "name") + " your error is " +
                  number_text(number_at(*worst, "error")) + ", PyTorch's own " +
                  number_text(number_at(*worst, "pytorch_error")) + "."
            : "holds in every case, too.";
  note(document, "exercise",
       marked_up("`allclose(atol=1e-8, rtol=1e-5)` " + result));
}

// A table: those that disagree before those that agree, where they are too
// many to see.
void add_cases(Document& document, const Json& cases, bool folded) {
  constexpr size_t kMost = 16;
  if (cases.empty()) return;
  Block table{.kind = Kind::kTable, .folded = folded};
  Text header;
  for (const char* title :
       {"", "case", "", "", "error", "PyTorch's", "allclose"})
    header.push_back({title, Emphasis::kDim});
  table.rows.push_back(std::move(header));

  size_t wrong = 0, left_out = 0;
  for (const Json& c : cases) wrong += !is_true(c, "agrees");
  size_t room = kMost - std::min(wrong, kMost);
  size_t room_for_wrong = kMost;
  for (const Json& c : cases) {
    size_t& left = is_true(c, "agrees") ? room : room_for_wrong;
    if (left == 0) {
      ++left_out;
    } else {
      --left;
      table.rows.push_back(row_of(c));
    }
  }
  if (left_out > 0)
    table.rows.push_back(
        {{""},
         {"… and " + std::to_string(left_out) + " more", Emphasis::kDim}});
  document.push_back(std::move(table));
}

// ---- What is wrong ---------------------------------------------------------

// How it was established: what is left of the error once the faults are in. Of
// float64 where there is any, since its rounding hides least.
void add_evidence(Document& document, const Json& report) {
  const Json& cases = list_at(report, "cases");
  const size_t faults = list_at(report, "faults").size();
  bool has_float64 = false;
  for (const Json& c : cases) {
    has_float64 = has_float64 ||
                  (is_true(c, "explained") && text_at(c, "dtype") == "float64");
  }
  double left = 0, without = 0;
  size_t explained = 0;
  for (const Json& c : cases) {
    if (!is_true(c, "agrees"))
      without = std::max(without, value_at(c, "error"));
    if (!is_true(c, "explained")) continue;
    ++explained;
    if (!has_float64 || text_at(c, "dtype") == "float64")
      left = std::max(left, value_at(c, "unexplained"));
  }
  if (faults == 0 || explained == 0) return;
  const auto differing = [&](auto has) {
    return std::any_of(cases.begin(), cases.end(), [&](const Json& c) {
      return !is_true(c, "agrees") && has(c);
    });
  };
  if (!differing([](const Json&) { return true; })) {
    note(document, "evidence",
         {{"What the heads do is right. What the code makes of their numbers, "
           "or "
           "makes them of, has numbers of several positions in one row."}});
    return;
  }
  const bool is_number =
      differing([](const Json& c) { return has_number(c, "error"); });
  const std::string plain =
      std::string("Without ") + (faults == 1 ? "it" : "them") +
      (is_number ? " the largest difference is " + number_text(without)
       : differing(has_reference) ? " the difference is NaN"
                                  : " there is no result to compare with") +
      ".";
  const std::string share =
      explained < cases.size()
          ? std::to_string(explained) + " of " + counted(cases.size(), "case")
          : all_cases(explained);
  if (is_number && left > without / 4) {
    note(document, "evidence",
         {{"The largest difference, " + number_text(without) +
           ", is of the size that this rounding makes."}});
    return;
  }
  note(document, "evidence",
       {{std::string("Attention with ") +
         (faults == 1 ? "this one change"
                      : "these " + number_word(faults) + " changes") +
         " reproduces your result in " + share + ", to " + number_text(left) +
         (has_float64 ? " in float64" : "") + ". " + plain}});
}

void add_faults(Document& document, const Json& report) {
  const Json& faults = list_at(report, "faults");
  int number = 0;
  for (const Json& fault : faults) {
    std::string sentence =
        faults.size() > 1 ? std::to_string(++number) + ". " : "";
    sentence += text_at(fault, "sentence");
    if (const std::string detail = text_at(fault, "detail"); !detail.empty())
      sentence += " " + detail;
    Text text = marked_up(sentence);
    text.push_back({" "});
    text.push_back({"(" + text_at(fault, "name") + ")", Emphasis::kDim});
    document.push_back({.text = std::move(text)});
    if (faults.size() == 1) add_evidence(document, report);
    note(document, "repair", marked_up(text_at(fault, "remedy")));
  }
  if (faults.size() > 1) add_evidence(document, report);
}

void add_findings(Document& document, const Json& findings) {
  for (const Json& finding : findings) {
    document.push_back({.text = marked_up(text_at(finding, "sentence"))});
    note(document, "where", marked_up(text_at(finding, "detail")));
    note(document, "repair", marked_up(text_at(finding, "remedy")));
  }
}

void add_place(Document& document, const Json& report) {
  const auto where = report.find("where");
  if (where == report.end() || !where->is_object()) return;
  const std::string index = joined(list_at(*where, "index"), ", ");
  const auto got = number_at(*where, "got");
  const auto expected = number_at(*where, "expected");
  // Longer where they would look the same.
  const int digits = number_text(got) == number_text(expected) ? 9 : 3;
  note(document, "where",
       marked_up("`" + text_at(*where, "tensor") + "[" + index + "]` in case " +
                 text_at(*where, "case") + " is " + number_text(got, digits) +
                 " and should be " + number_text(expected, digits) + "."));
}

void add_way_on(Document& document, const Json& report) {
  const std::string stage = text_at(report, "first_stage");
  note(document, "way on",
       marked_up("Print " + (stage.empty() ? "each step" : "the " + stage) +
                 " of a small example, yours and by the book: "
                 "`multihead/textbook.py` has every step with its reason."));
}

// A dump may have poor shapes; a check chose its own, at which only what is the
// same for these arguments is left.
void add_alternatives(Document& document, const Json& report) {
  std::vector<std::string> names;
  for (const Json& names_of_one : list_at(report, "alternatives")) {
    names.push_back(joined(names_of_one, " + "));
  }
  if (names.empty()) return;
  const bool chosen = !list_at(report, "understood").empty();
  note(document, "or else",
       {{chosen ? listed(names, " or ") + ", which is the same here."
                : "These inputs cannot tell it from " + listed(names, " or ") +
                      ". Sizes that all differ, and a mask, can."}});
}

// ---- What was understood ---------------------------------------------------

// What a docstring would say, of conditions that it can state.
std::string docstring_of(const std::string& condition) {
  if (condition == "mask_blocks") return "mask: True = blocked";
  if (condition == "mask_keeps") return "mask: True = may attend";
  return "";
}

// How "right if" becomes "right".
void add_way_to_pass(Document& document, const Json& report) {
  if (outcome_of(report) != Outcome::kRightIf) return;
  std::vector<std::string> allowed, stated;
  for (const Json& condition : list_at(report, "conditions")) {
    const std::string name = text_at(condition, "name");
    append_new(allowed, name);
    if (const std::string said = docstring_of(name); !said.empty())
      append_new(stated, "\"" + said + "\"");
  }
  std::string text = "If that is so, say `--allow ";
  for (const std::string& name : allowed)
    text += (name == allowed.front() ? "" : ",") + name;
  text += "`, `allow=\"all\"` in Python";
  if (!stated.empty())
    text += ", or " + listed(stated) + " in the docstring of the code";
  note(document, "to pass", marked_up(text + "."));
}

// Each once: the engine and what ran the code may have found the same.
void add_remarks(Document& document, const Json& remarks, const char* label) {
  std::set<std::string> said;
  for (const Json& remark : remarks) {
    std::string text = text_at(remark, "sentence");
    const std::string remedy = text_at(remark, "remedy");
    if (!remedy.empty()) text += " " + remedy;
    if (said.insert(text).second) note(document, label, marked_up(text));
  }
}

void add_phrases(Document& document, const Json& phrases, const char* label) {
  note(document, label, marked_up(joined(phrases, " · "), Emphasis::kDim));
}

}  // namespace

Document document_of(const std::string& json) {
  const Json report = parsed_report(json);
  const std::string verdict = text_at(report, "verdict");
  const Json& cases = list_at(report, "cases");
  const bool right = is_right(verdict);
  Document document;
  if (const std::string command = text_at(report, "command"); !command.empty())
    document.push_back({.kind = Kind::kPrompt,
                        .label = {"$", Emphasis::kDim},
                        .text = {{command}}});
  document.push_back(headline(report));
  const bool is_news = verdict == "unknown" && is_flaw_of_out(report);
  if (is_news) add_findings(document, list_at(report, "findings"));
  add_faults(document, report);
  add_place(document, report);
  if (verdict == "unknown") add_way_on(document, report);
  add_alternatives(document, report);
  if (!is_news) add_findings(document, list_at(report, "findings"));
  add_way_to_pass(document, report);
  if (right) add_exercise(document, cases);
  add_cases(document, cases, right);
  add_remarks(document, list_at(report, "assumptions"), "assumed");
  add_remarks(document, list_at(report, "remarks"), "remark");
  add_phrases(document, list_at(report, "understood"), "called");
  add_phrases(document, list_at(report, "weights"), "matched");
  add_phrases(document, list_at(report, "unused"), "not used");
  return document;
}

}  // namespace multihead::diagnosis
