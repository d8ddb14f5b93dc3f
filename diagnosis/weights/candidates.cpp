// SPDX-License-Identifier: MIT
#include "diagnosis/weights/candidates.h"

#include <ATen/ops/stack.h>

#include <algorithm>
#include <iterator>

#include "multihead/text/shapes.h"

namespace multihead::diagnosis {
namespace {

using enum Role;

// Without a name the width of a head is taken to be the usual one.
bool fits_by_place(Role role, const Candidate& candidate,
                   const LayerSizes& sizes) {
  const Extents extents{heads_of(role, sizes),
                        sizes.embed_dim / sizes.num_heads, sizes.embed_dim,
                        role == kOutput};
  return candidate.is_matrix() && candidate.tensor.dim() == 2 &&
         orient(candidate.tensor, extents, {candidate.declared, true});
}

// "w1" and "w2", "a" and "b": other names come in no order.
bool names_are_in_order(const std::vector<Candidate*>& candidates) {
  const auto list = [](const Candidate* candidate) {
    const std::string& name = candidate->names[0];
    return name.size() == 1 ? "" : list_name(name);
  };
  return std::ranges::all_of(candidates, [&](const Candidate* candidate) {
    return list(candidate) == list(candidates[0]);
  });
}

// All heads in one tensor; the members as they are if that is not what they
// are.
Candidates stack(const Candidates& members, int64_t heads) {
  const bool alike = std::ranges::all_of(members, [&](const Candidate& member) {
    return member.tensor.sizes() == members[0].tensor.sizes();
  });
  if (heads == 1 || static_cast<int64_t>(members.size()) != heads || !alike ||
      is_list_of_layers(list_name(members[0].names[0]))) {
    return members;
  }
  Candidate whole = members[0];
  whole.names.clear();
  std::vector<at::Tensor> tensors;
  for (const Candidate& member : members) {
    whole.names.push_back(member.names[0]);
    tensors.push_back(member.tensor);
  }
  whole.tensor = at::stack(tensors);
  return {whole};
}

// (3, E, E), (3, H, E, D), (E, 3, H, D): an axis holds the parts.
Candidates parts_of(const Candidate& whole) {
  const bool is_pair = whole.parsed.role == kKeyValue;
  const std::vector<Role> roles =
      is_pair ? std::vector{kKey, kValue} : std::vector{kQuery, kKey, kValue};
  const auto count = static_cast<int64_t>(roles.size());
  const at::Tensor& tensor = whole.tensor;
  const int64_t rank = tensor.dim() + (whole.is_bias ? 1 : 0);
  const int64_t axis = rank == 4 && tensor.size(0) != count ? 1 : 0;
  const bool fused = is_pair || whole.parsed.role == kFused;
  if (!fused || rank < 3 || tensor.size(axis) != count) return {whole};
  Candidates parts(roles.size(), whole);
  for (int64_t i = 0; i < count; ++i) {
    parts[i].names[0] += c10::str("[", i, "]");
    parts[i].tensor = tensor.select(axis, i);
    parts[i].parsed.role = roles[i];
  }
  return parts;
}

}  // namespace

std::string Candidate::name() const {
  return names.size() == 1 ? names[0] : list_name(names[0]);
}

Candidates candidates_of(
    const std::map<std::string, at::Tensor>& weights,
    const std::map<std::string, Orientation>& orientations) {
  Candidates candidates;
  for (const auto& [name, tensor] : weights) {
    if (!tensor.defined() || !tensor.is_floating_point()) continue;
    Candidate candidate{{name}, tensor, parse_name(name)};
    const auto [role, is_weak, says, stem] = candidate.parsed;
    // GPT-2 calls its causal mask (1, 1, L, L) bias.
    const bool is_mask = says == Says::kBias && tensor.dim() > 3;
    if (says == Says::kBuffer || is_mask) continue;
    candidate.is_bias = tensor.dim() == 1
                            ? says != Says::kWeight
                            : says == Says::kBias && role != kNone;
    // Convolutions of width 1: (out, in, 1).
    at::Tensor& kept = candidate.tensor;
    while (candidate.is_matrix() && kept.dim() > 2 && kept.size(-1) == 1) {
      kept = kept.squeeze(-1);
    }
    const auto known = orientations.find(name);
    if (known != orientations.end()) candidate.declared = known->second;
    std::ranges::move(parts_of(candidate), std::back_inserter(candidates));
  }
  std::ranges::sort(candidates, [](const Candidate& a, const Candidate& b) {
    return comes_before(a.names[0], b.names[0]);
  });
  return candidates;
}

void assign_roles_by_place(Candidates& candidates, const LayerSizes& sizes) {
  Candidates outputs = candidates;
  std::erase_if(outputs, [&](const Candidate& candidate) {
    return candidate.parsed.role != kOutput ||
           !fits_by_place(kOutput, candidate, sizes);
  });
  prefer_strong_names(outputs);
  // "linear.0" to "linear.3" are not four outputs.
  const bool has_output = outputs.size() == 1;
  std::vector<Candidate*> free;
  for (Candidate& candidate : candidates) {
    if (has_output && candidate.names == outputs[0].names) continue;
    constexpr Role kAny[] = {kQuery, kKey, kFused, kKeyValue};
    if (std::ranges::any_of(kAny, [&](Role role) {
          return fits_by_place(role, candidate, sizes);
        })) {
      free.push_back(&candidate);
    }
  }
  std::vector<std::vector<Role>> orders{
      {kQuery, kKey, kValue}, {kQuery, kKeyValue}, {kFused}};
  for (size_t i = 0; i < 3 && !has_output; ++i) {
    orders.push_back(orders[i]);
    orders.back().push_back(kOutput);
  }
  for (const std::vector<Role>& order : orders) {
    const auto fits = [&](Role role, const Candidate* candidate) {
      return fits_by_place(role, *candidate, sizes);
    };
    if (!std::ranges::equal(order, free, fits)) continue;
    // The shape of a fused matrix is a name.
    if (order[0] == kQuery && !names_are_in_order(free)) return;
    for (size_t i = 0; i < order.size(); ++i) {
      const std::string stem = free[i]->parsed.stem;
      for (Candidate& candidate : candidates) {
        if (candidate.parsed.stem != stem) continue;
        candidate.parsed.role = order[i];
        candidate.by_place = true;
      }
    }
    return;
  }
}

void prefer_strong_names(Candidates& candidates) {
  const auto is_weak = [](const Candidate& c) { return c.parsed.is_weak; };
  if (!std::ranges::all_of(candidates, is_weak)) {
    std::erase_if(candidates, is_weak);
  }
}

Candidates stack_heads(const Candidates& candidates, int64_t heads) {
  std::map<std::string, Candidates> lists;
  for (const Candidate& candidate : candidates) {
    lists[list_name(candidate.names[0])].push_back(candidate);
  }
  Candidates stacked;
  for (const auto& [name, members] : lists) {
    std::ranges::move(stack(members, heads), std::back_inserter(stacked));
  }
  return stacked;
}

int64_t heads_of(Role role, const LayerSizes& sizes) {
  const int64_t heads = sizes.num_heads, groups = sizes.num_kv_heads;
  return role == kFused                   ? heads + 2 * groups
         : role == kKeyValue              ? 2 * groups
         : role == kKey || role == kValue ? groups
                                          : heads;
}

std::string list_text(const Candidates& candidates, const char* glue) {
  std::string text;
  for (const Candidate& candidate : candidates) {
    text += c10::str(text.empty() ? "" : glue, candidate.name(), " ",
                     shape_text(candidate.tensor));
  }
  return text;
}

}  // namespace multihead::diagnosis
