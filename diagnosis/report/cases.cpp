// SPDX-License-Identifier: MIT
#include "diagnosis/report/cases.h"

#include <algorithm>

namespace multihead::diagnosis {
namespace {

using Kind = Block::Kind;

std::string short_dtype(std::string dtype) {
  if (dtype.starts_with("torch.")) dtype.erase(0, 6);
  if (dtype.starts_with("float")) return "f" + dtype.substr(5);
  if (dtype.starts_with("bfloat")) return "bf" + dtype.substr(6);
  return dtype;
}

Text row_of(const Json& c) {
  const bool agrees = is_true(c, "agrees"), bits = is_true(c, "bits");
  std::string name = text_at(c, "name"), shape;
  const std::string tensor = text_at(c, "tensor");
  if (!tensor.empty() && tensor != "out") name += ": " + tensor;
  for (const Json& size : list_at(c, "shape"))
    shape += (shape.empty() ? "" : "×") + size.dump();
  const bool beside = has_number(c, "pytorch_error");
  const char* close = !c.contains("exercise")  ? "–"
                      : !beside && agrees      ? "–"
                      : bits                   ? "bits"
                      : is_true(c, "exercise") ? "yes"
                                               : "no";
  return {mark(agrees),
          {name},
          {short_dtype(text_at(c, "dtype")), Style::kDim},
          {shape, Style::kDim},
          {has_reference(c) ? number_at(c, "error") : "–",
           agrees ? Style::kPlain : Style::kBad},
          {beside ? number_at(c, "pytorch_error") : "–"},
          {close}};
}

}  // namespace

double value_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? found->get<double>() : 0;
}

bool has_number(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number();
}

bool has_reference(const Json& c) {
  return has_number(c, "error") || value_at(c, "allowed") > 0;
}

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
  const std::string test = "`allclose(atol=1e-8, rtol=1e-5)` ";
  if (!worst) {
    note(document, "exercise", marked_up(test + "holds in every case, too."));
    return;
  }
  note(document, "exercise",
       marked_up(test + "fails in " + std::to_string(failing) + " of " +
                 std::to_string(asked) + " by rounding: in case " +
                 text_at(*worst, "name") + " your error is " +
                 number_at(*worst, "error") + ", PyTorch's own " +
                 number_at(*worst, "pytorch_error") + "."));
}

void add_cases(Document& document, const Json& cases, bool folded) {
  constexpr size_t kMost = 16;
  if (cases.empty()) return;
  Block table{.kind = Kind::kTable, .folded = folded};
  Text header;
  for (const char* title :
       {"", "case", "", "", "error", "PyTorch's", "allclose"})
    header.push_back({title, Style::kDim});
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
        {{""}, {"… and " + std::to_string(left_out) + " more", Style::kDim}});
  document.push_back(std::move(table));
}

}  // namespace multihead::diagnosis
