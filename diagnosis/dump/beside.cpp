// SPDX-License-Identifier: MIT
#include "diagnosis/dump/beside.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <initializer_list>

#include "multihead/text/shapes.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// ---- Names -----------------------------------------------------------------

std::string last_part(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

// "norm" of "norm.weight"; of a name without parts, the name without its
// ending.
std::string owner_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  if (dot != std::string::npos) return name.substr(0, dot);
  const size_t line = name.rfind('_');
  return line == std::string::npos ? "" : name.substr(0, line);
}

bool is_one_of(const std::string& text,
               std::initializer_list<std::string_view> texts) {
  return std::ranges::find(texts, text) != texts.end();
}

bool is_shift(const std::string& name) {
  const std::string last = last_part(name);
  return is_one_of(last, {"bias", "beta", "b_2", "b", "shift", "offset"}) ||
         last.ends_with("_bias") || last.ends_with("_beta");
}

// ---- Facts -----------------------------------------------------------------

std::optional<double> number_of(const std::string& text) {
  double number = 0;
  const char* whole = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), whole, number);
  if (error != std::errc() || end != whole || !std::isfinite(number)) return {};
  return number;
}

std::optional<double> number_at(const Observation& from,
                                const std::string& name) {
  const auto entry = from.metadata.find(name);
  return entry == from.metadata.end() ? std::nullopt : number_of(entry->second);
}

// "4,0": four keys to the left and none to the right. A size alone counts the
// query's own key and those before it where somebody says so, or something
// else.
std::optional<GivenWindow> window_of(const Observation& from) {
  const auto size = number_at(from, "window_size");
  if (size && *size >= 1 && *size < 1e9) {
    const auto counts = from.metadata.find("window_counts");
    const bool is_said = counts != from.metadata.end();
    TORCH_CHECK_VALUE(!is_said || counts->second == "own_key",
                      "explain: window_counts must be own_key, got \"",
                      is_said ? counts->second : "", "\"");
    return GivenWindow{static_cast<int64_t>(*size) - 1, 0, !is_said};
  }
  const auto entry = from.metadata.find("window");
  if (entry == from.metadata.end()) return {};
  const std::string& text = entry->second;
  const size_t comma = text.find(',');
  const auto left = number_of(text.substr(0, comma));
  const auto right = comma == std::string::npos
                         ? std::nullopt
                         : number_of(text.substr(comma + 1));
  const auto is_size = [](std::optional<double> x) {
    return x && *x >= -1 && *x < 1e9 && *x == std::floor(*x);
  };
  TORCH_CHECK_VALUE(is_size(left) && is_size(right),
                    "explain: window must be two whole numbers from -1, as "
                    "\"4,0\", got \"",
                    text, "\"");
  return GivenWindow{static_cast<int64_t>(*left), static_cast<int64_t>(*right)};
}

// ---- Parameters that are not attention's own -------------------------------

constexpr std::array kInputNames = {"query", "key", "value"};

// The members of each owner, those that are not attention's own.
using Owned = std::map<std::string, std::map<std::string, Tensor>>;

Owned unused_by_owner(const Observation& from, const ObservedCall& call) {
  Owned owned;
  for (const std::string& name : call.weights.unused) {
    const auto entry = from.tensors.find(name);
    if (entry == from.tensors.end()) continue;
    const Tensor& x = entry->second;
    if (!x.is_floating_point() || x.numel() == 0) continue;
    owned[owner_of(name)][name] = x.detach().to(at::kCPU, at::kDouble);
  }
  return owned;
}

// Whether the members can be those of a norm.
bool read_norm(const Observation& from, const std::string& owner,
               const std::map<std::string, Tensor>& members,
               ObservedCall& call) {
  Norm norm;
  norm.name = owner;
  for (const auto& [name, tensor] : members) {
    Tensor& part = is_shift(name) ? norm.bias : norm.weight;
    // One for all heads, or each its own.
    const bool of_heads = tensor.dim() == 3 && tensor.size(1) == 1 &&
                          tensor.size(0) == call.sizes.heads;
    if ((tensor.dim() != 1 && !of_heads) || tensor.size(-1) < 2 ||
        part.defined()) {
      return false;
    }
    part = tensor;
    if (norm.name.empty()) norm.name = name;
    const auto inputs = from.metadata.find("norms:" + name);
    if (inputs == from.metadata.end()) continue;
    for (int role = 0; role < 3; ++role) {
      norm.of_inputs[role] |=
          inputs->second.find(kInputNames[role]) != std::string::npos;
    }
  }
  if (norm.weight.defined() && norm.bias.defined() &&
      norm.weight.sizes() != norm.bias.sizes()) {
    return false;
  }
  norm.eps = number_at(from, "eps:" + owner);
  const auto groups = number_at(from, "groups:" + owner);
  if (groups && *groups >= 1 && *groups <= 65536) {
    norm.groups = static_cast<int64_t>(*groups);
  }
  call.norms.push_back(norm);
  return true;
}

// Whether the members mix heads: (H, H), or as a convolution has it, and (H).
bool read_mix(const std::map<std::string, Tensor>& members,
              ObservedCall& call) {
  const int64_t heads = call.sizes.heads;
  if (heads < 2 || members.size() > 2) return false;
  HeadMix mix;
  for (const auto& [name, x] : members) {
    const bool is_matrix = x.dim() >= 2 && x.numel() == heads * heads &&
                           x.size(0) == heads && x.size(1) == heads;
    Tensor& part = is_matrix ? mix.weight : mix.bias;
    if (part.defined()) return false;
    if (!is_matrix && (x.dim() != 1 || x.numel() != heads)) return false;
    part = is_matrix ? x.reshape({heads, heads}) : x;
  }
  if (mix.weight.defined()) call.mixes.push_back(mix);
  return mix.weight.defined();
}

void read_parameters(const Observation& from, ObservedCall& call) {
  for (const auto& [owner, members] : unused_by_owner(from, call)) {
    if (read_mix(members, call)) continue;
    const bool is_norm = read_norm(from, owner, members, call);
    for (const auto& [name, x] : members) {
      if (x.numel() == 1 || (x.numel() == call.sizes.heads && x.dim() != 2)) {
        call.numbers[name] = x.reshape({-1, 1, 1});
      } else if (x.dim() >= 2 && !is_norm) {
        call.has_tables = true;
      }
    }
  }
}

// ---- Rotary positions ------------------------------------------------------

// (…, L, n) of one item → (L, n), of pairs. Undefined: it is something else.
Tensor table_of(const Observation& from, const char* name) {
  const auto entry = from.tensors.find(name);
  if (entry == from.tensors.end()) return {};
  Tensor x = entry->second.detach();
  if (!x.is_floating_point() || x.numel() == 0) return {};
  x = x.to(at::kCPU, at::kDouble);
  for (int64_t d = x.dim() - 1; d >= 0 && x.dim() > 2; --d) {
    if (x.size(d) == 1) x = x.squeeze(d);
  }
  while (x.dim() > 2) x = x.select(0, 0);  // the same for all items
  return x.dim() == 2 ? x : Tensor();
}

void read_rotary(const Observation& from, ObservedCall& call) {
  const Tensor cosines = table_of(from, "cos"), sines = table_of(from, "sin");
  if (!cosines.defined() || !sines.defined()) return;
  if (cosines.sizes() != sines.sizes()) return;
  const int64_t longest = std::max(call.sizes.queries, call.sizes.keys);
  if (cosines.size(0) < longest) return;
  call.cosines = cosines;
  call.sines = sines;
}

// ---- What else is to be seen -----------------------------------------------

void read_gradients(const Observation& from, ObservedCall& call) {
  const auto matrices = call.weights.matrices();
  for (const auto& [name, value] : from.metadata) {
    if (!name.starts_with("gradient:") || value != "none") continue;
    for (size_t i = 0; i < matrices.size(); ++i) {
      if (matrices[i]->name == name.substr(9)) call.without_gradient[i] = true;
    }
  }
}

// To how many digits all of out is rounded; 0: to none that could be told.
int digits_of(const ObservedCall& call) {
  const Tensor& x = call.out;
  const bool wide = call.dtype == at::kDouble || call.dtype == at::kFloat;
  if (!wide || x.numel() < 8 || !x.isfinite().all().item<bool>()) return 0;
  const double largest = x.abs().max().item<double>();
  const double unit = call.dtype == at::kDouble ? 0x1p-52 : 0x1p-23;
  double power = 1;
  for (int digits = 0; digits <= 6; ++digits, power *= 10) {
    const double allowed = 2 * unit * largest * power;
    if (allowed > 0.02 || largest * power < 8) continue;
    const Tensor scaled = x * power;
    const double off = (scaled - scaled.round()).abs().max().item<double>();
    if (off <= allowed + 1e-12) return digits;  // whole numbers are not rounded
  }
  return 0;
}

}  // namespace

void read_beside(const Observation& from, ObservedCall& call) {
  call.window = window_of(from);
  call.norm_eps = number_at(from, "norm_eps");
  for (const auto& [name, text] : from.metadata) {
    if (!name.starts_with("norm_eps:")) continue;
    const auto count = number_of(name.substr(9)), eps = number_of(text);
    if (count && eps) call.eps_of_means[static_cast<int64_t>(*count)] = *eps;
  }
  if (const auto block = number_at(from, "block_size"); block && *block >= 1) {
    call.block = static_cast<int64_t>(std::min(*block, 1e9));
  }
  call.digits = digits_of(call);
  read_rotary(from, call);
  if (const auto given = number_at(from, "scale_argument")) {
    call.numbers["its argument"] = at::full({1, 1, 1}, *given, at::kDouble);
  }
  if (!call.has_weights) return;
  call.turns_heads = from.metadata.contains("turns_heads");
  const auto owner = from.metadata.find("weights");
  call.owns_weights = owner != from.metadata.end() && owner->second == "own";
  read_parameters(from, call);
  read_gradients(from, call);
}

}  // namespace multihead::diagnosis
