// SPDX-License-Identifier: MIT
#include "diagnosis/dump/metadata.h"

#include <charconv>
#include <cmath>

#include "multihead/text/shapes.h"

namespace multihead::diagnosis {

using at::Tensor;

namespace {

// The whole text as a number; nullopt where it is none.
template <typename Number>
std::optional<Number> number_in(const std::string& text) {
  Number number = 0;
  const char* whole = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), whole, number);
  if (error != std::errc() || end != whole) return std::nullopt;
  return number;
}

}  // namespace

const std::string* find_text(const Observation& from, const std::string& name) {
  const auto entry = from.metadata.find(name);
  return entry == from.metadata.end() ? nullptr : &entry->second;
}

std::optional<int64_t> find_count(const Observation& from,
                                  const std::string& name) {
  const std::string* text = find_text(from, name);
  if (text == nullptr) return std::nullopt;
  const std::optional<int64_t> count = number_in<int64_t>(*text);
  TORCH_CHECK_VALUE(count && *count >= 1 && *count <= 65536, "explain: ", name,
                    " must be a number from 1 to 65536, got \"", *text, "\"");
  return count;
}

std::optional<double> find_number(const Observation& from,
                                  const std::string& name) {
  const std::string* text = find_text(from, name);
  if (text == nullptr) return std::nullopt;
  const std::optional<double> number = number_in<double>(*text);
  TORCH_CHECK_VALUE(number && std::isfinite(*number), "explain: ", name,
                    " must be a number, got \"", *text, "\"");
  return number;
}

bool find_flag(const Observation& from, const std::string& name, bool absent) {
  return find_choice<bool>(from, name, absent,
                           {{"true", true}, {"false", false}});
}

Tensor find(const Observation& from, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto entry = from.tensors.find(name);
    if (entry != from.tensors.end()) return entry->second.detach();
  }
  return {};
}

bool is_floating(const Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  return type == at::kDouble || type == at::kFloat || type == at::kBFloat16 ||
         type == at::kHalf;
}

Tensor numbers(const Tensor& x, const char* name) {
  if (!x.defined()) return x;
  TORCH_CHECK_VALUE(
      is_floating(x) ||
          at::isIntegralType(x.scalar_type(), /*includeBool=*/true),
      "explain: ", name, " must hold real numbers of 16 bits or more, got ",
      x.scalar_type());
  return x.to(at::kCPU, at::kDouble);
}

Tensor features(const Tensor& x, const char* name) {
  TORCH_CHECK_VALUE(is_floating(x), "explain: ", name,
                    " must be float64, float32, bfloat16 or float16, got ",
                    x.scalar_type());
  TORCH_CHECK_VALUE(x.numel() > 0, "explain: ", name,
                    " must hold an element, got shape ", shape_text(x));
  return numbers(x, name);
}

}  // namespace multihead::diagnosis
