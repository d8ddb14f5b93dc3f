// SPDX-License-Identifier: MIT
//
// What stands beside attention in the same module, and is no fault: norms,
// residual connections, blocks.
#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <functional>
#include <map>
#include <optional>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

using at::Tensor;

// ---- Norms -----------------------------------------------------------------

namespace {

// "q", "norm" of "self.q_norm"; "qnorm" stays whole.
std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words(1);
  for (const unsigned char c : name) {
    if (std::isalpha(c)) {
      words.back() += static_cast<char>(std::tolower(c));
    } else if (!words.back().empty()) {
      words.emplace_back();
    }
  }
  return words;
}

// "q", "q_norm", "normq", "lnq". Asked for every norm of every candidate:
// without strings of its own.
bool is_said_in(std::string_view word, std::string_view text) {
  for (const std::string_view norm : {"", "norm", "ln"}) {
    if (word.size() != text.size() + norm.size()) continue;
    if (word.starts_with(text) && word.ends_with(norm)) return true;
    if (word.starts_with(norm) && word.ends_with(text)) return true;
  }
  return false;
}

bool speaks_of(const Norm& norm,
               std::initializer_list<std::string_view> texts) {
  const std::vector<std::string> words = words_of(norm.name);
  return std::ranges::any_of(texts, [&](std::string_view text) {
    return std::ranges::any_of(
        words, [&](std::string_view word) { return is_said_in(word, text); });
  });
}

bool is_of_role(const Norm& norm, int role) {
  switch (role) {
    case 0:
      return speaks_of(norm, {"q", "query", "queries", "latent", "latents"});
    case 1:
      return speaks_of(
          norm, {"k", "key", "keys", "kv", "context", "memory", "media"});
    default:
      return speaks_of(
          norm, {"v", "value", "values", "kv", "context", "memory", "media"});
  }
}

int64_t width_of(const Norm& norm) {
  return (norm.weight.defined() ? norm.weight : norm.bias).size(-1);
}

// The norm that its name gives to the role; of those that name none, the first
// for what goes in and the last for what comes out. Of heads each role has its
// own where there are several.
const Norm* norm_at(const ObservedCall& call, NormPlace place, int role,
                    int64_t width) {
  std::vector<const Norm*> free;
  const bool of_role = place == NormPlace::kInput || place == NormPlace::kHeads;
  for (const Norm& norm : call.norms) {
    if (width_of(norm) != width) continue;
    if (of_role && is_of_role(norm, role)) return &norm;
    const bool named =
        is_of_role(norm, 0) || is_of_role(norm, 1) || is_of_role(norm, 2);
    if (!named) free.push_back(&norm);
  }
  // One that norms an input norms nothing else.
  const auto is_of_input = [](const Norm* norm) {
    return std::ranges::any_of(norm->of_inputs, std::identity());
  };
  if (place != NormPlace::kInput && !std::ranges::all_of(free, is_of_input))
    std::erase_if(free, is_of_input);
  if (free.empty()) return nullptr;
  if (place == NormPlace::kInput) {
    // Values may come of the input of keys, and both of that of queries.
    for (const int input : {role, role == 2 ? 1 : role, call.same_as[role]}) {
      for (const Norm* norm : free) {
        if (norm->of_inputs[input]) return norm;
      }
    }
  }
  if (place == NormPlace::kHeads && free.size() > 1) {
    for (const Norm* norm : free) {
      if (words_of(norm->name).back().starts_with("qkv"[role])) return norm;
    }
    return free[std::min(static_cast<size_t>(role), free.size() - 1)];
  }
  return of_role ? free.front() : free.back();
}

double usual_eps(const ObservedCall& call, NormKind kind, NormPlace place,
                 const Tensor& x) {
  const bool is_layer =
      kind == NormKind::kLayer || kind == NormKind::kLayerFromOne;
  if (call.norm_eps && is_layer) return *call.norm_eps;
  // A norm of one head after the other has fewer means, one of keys that were
  // repeated for the queries that share them has more.
  const Sizes& n = call.sizes;
  const int64_t means = x.numel() / x.size(-1);
  const bool is_of_heads =
      place == NormPlace::kHeads || place == NormPlace::kContext;
  const int64_t of_one = is_of_heads ? means / n.heads : means;
  const int64_t repeated = is_of_heads ? means * n.heads / n.kv_heads : means;
  for (const int64_t count : {means, of_one, repeated}) {
    const auto shown = call.eps_of_means.find(count);
    if (shown != call.eps_of_means.end()) return shown->second;
  }
  if (is_layer || kind == NormKind::kGroup) return 1e-5;
  if (kind == NormKind::kByHand) return 1e-6;
  return call.dtype == at::kDouble ? 0x1p-52 : 0x1p-23;
}

Tensor standardised(const Tensor& x, NormKind kind, double eps) {
  const int64_t n = x.size(-1);
  switch (kind) {
    case NormKind::kLayer:
    case NormKind::kLayerFromOne:
      return at::layer_norm(x, {n}, /*weight=*/{}, /*bias=*/{}, eps);
    case NormKind::kByHand: {
      require(n > 1);
      const Tensor centred = x - x.mean(-1, /*keepdim=*/true);
      const auto count = static_cast<double>(n - 1);
      const Tensor variance = centred.square().sum(-1, true) / count;
      return centred / (variance.sqrt() + eps);
    }
    case NormKind::kRms:
    case NormKind::kRmsFromOne:
      return x / (x.square().mean(-1, true) + eps).sqrt();
    case NormKind::kUnit:
      return x / x.square().sum(-1, true).sqrt().clamp_min(1e-12);
    case NormKind::kGroup:
    case NormKind::kNone:
      break;
  }
  return x;
}

// x (B, L, n): of each item, and of each group of features, over all positions.
Tensor standardised_by_group(const Tensor& x, int64_t groups, double eps) {
  require(x.dim() == 3 && groups > 0 && x.size(2) % groups == 0);
  const Tensor parts = x.unflatten(2, {groups, -1});
  const Tensor centred = parts - parts.mean({1, 3}, /*keepdim=*/true);
  const Tensor variance = centred.square().mean({1, 3}, /*keepdim=*/true);
  return (centred / (variance + eps).sqrt()).flatten(2);
}

}  // namespace

bool has_norm(const ObservedCall& call, int64_t width) {
  return std::ranges::any_of(
      call.norms, [&](const Norm& norm) { return width_of(norm) == width; });
}

Concern norm_of(const ObservedCall& call, NormKind kind,
                std::initializer_list<int64_t> widths) {
  if (!call.has_weights) return Concern::kNo;
  const bool has_shift = std::ranges::any_of(
      call.norms, [](const Norm& norm) { return norm.bias.defined(); });
  const bool named = std::ranges::any_of(
      widths, [&](int64_t width) { return has_norm(call, width); });
  if (named && kind != NormKind::kUnit) {
    return maybe(shows_its_way(call) || (kind == NormKind::kRms) != has_shift);
  }
  return maybe(shows_its_way(call) && kind != NormKind::kByHand);
}

Tensor normalised(const ObservedCall& call, NormKind kind, NormPlace place,
                  int role, const Tensor& x) {
  if (kind == NormKind::kNone) return x;
  const Norm* norm = kind == NormKind::kUnit
                         ? nullptr
                         : norm_at(call, place, role, x.size(-1));
  const double eps =
      norm && norm->eps ? *norm->eps : usual_eps(call, kind, place, x);
  require((kind == NormKind::kGroup) == (norm && norm->groups > 0));
  Tensor y = kind == NormKind::kGroup
                 ? standardised_by_group(x, norm->groups, eps)
                 : standardised(x, kind, eps);
  const bool from_one =
      kind == NormKind::kRmsFromOne || kind == NormKind::kLayerFromOne;
  require(!from_one || (norm && norm->weight.defined()));
  if (norm && norm->weight.defined()) {
    y = y * (from_one ? norm->weight + 1.0 : norm->weight);
  }
  if (norm && norm->bias.defined()) y = y + norm->bias;
  return y;
}

// ---- Blocks of keys --------------------------------------------------------

int64_t shown_block(const ObservedCall& call) {
  if (call.block > 0) return call.block;
  const Sizes& n = call.sizes;
  // The size in which most tensors end that is no other size of the call.
  std::map<int64_t, int> counts;
  for (const Tensor& x : call.trace) {
    const int64_t size = x.dim() < 2 ? 0 : x.size(-1);
    const bool is_other =
        size == n.keys || size == n.queries || size == n.width ||
        size == n.value_width || size == n.kv_heads * n.width ||
        size == n.kv_heads * n.value_width || size % n.embed_dim == 0;
    if (size > 1 && !is_other) ++counts[size];
  }
  if (counts.empty()) return 0;
  // The last block may be shorter.
  const auto most = std::ranges::max_element(counts, {}, [](const auto& entry) {
    return std::pair(entry.second, entry.first);
  });
  return most->second > 1 ? most->first : 0;
}

int64_t shown_blocks(const ObservedCall& call) {
  const Sizes& n = call.sizes;
  if (n.queries != n.keys) return 0;
  for (const Tensor& x : call.trace) {
    if (x.dim() < 3 || x.size(-1) != x.size(-2) || x.size(-1) < 2) continue;
    const int64_t size = x.size(-1), blocks = (n.keys + size - 1) / size;
    const bool is_other = blocks < 2 || size == n.batch || size == n.width ||
                          size == n.value_width || size == n.heads;
    if (!is_other && x.numel() == n.batch * n.heads * blocks * size * size)
      return size;
  }
  return 0;
}

// ---- Around the output -----------------------------------------------------

Tensor output_gain(const ObservedCall& call) {
  const auto speaks = [](const std::string& name) {
    return std::ranges::any_of(
        std::array{"gamma", "gain", "gate", "alpha", "scale"},
        [&](const char* word) { return name.find(word) != std::string::npos; });
  };
  const int64_t width = call.out.size(-1);
  for (const bool any : {false, true}) {
    for (const auto& [name, number] : call.numbers) {
      if (number.numel() == 1 && (any || speaks(name))) return number.view({1});
    }
    for (const Norm& norm : call.norms) {
      const bool is_gain = norm.weight.defined() && !norm.bias.defined();
      if (is_gain && width_of(norm) == width && (any || speaks(norm.name)))
        return norm.weight;
    }
  }
  return {};
}

Tensor finished_beside(const ObservedCall& call, const Recipe& recipe,
                       const Stages& stages, Tensor out) {
  if (recipe.output_gain) {
    const Tensor gain = output_gain(call);
    require(gain.defined());
    out = out * gain;
  }
  const auto norm = [&] {
    out = normalised(call, recipe.output_norm, NormPlace::kOutput, 2, out);
  };
  if (recipe.residual == Residual::kAfterNorm) norm();
  if (recipe.residual != Residual::kNone &&
      recipe.residual != Residual::kSetBlock) {
    const Tensor& input =
        recipe.residual == Residual::kNormedInput ? stages.inputs[0]
        : recipe.residual == Residual::kValues    ? stages.projected[2]
                                                  : call.inputs[0];
    require(out.sizes() == input.sizes());
    out = out + input;
  }
  if (recipe.residual != Residual::kAfterNorm) norm();
  if (recipe.residual == Residual::kThenRelu) out = out.relu();
  return out;
}

}  // namespace multihead::diagnosis
