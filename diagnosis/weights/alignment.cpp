// SPDX-License-Identifier: MIT
#include "diagnosis/weights/alignment.h"

#include <ATen/ops/block_diag.h>

#include <algorithm>
#include <optional>
#include <set>

#include "diagnosis/weights/candidates.h"

namespace multihead::diagnosis {
namespace {

using enum Role;

using Matrix = AlignedWeights::Matrix;

/// A candidate as what it was taken for.
struct Match {
  Candidate candidate;
  OrientedMatrix matrix;
};

constexpr Role kInputs[] = {kQuery, kKey, kValue};

std::string text(Orientation orientation) {
  return orientation == Orientation::kOutIn ? " (out, in)"
         : orientation == Orientation::kInOut
             ? " (in, out)"
             : c10::str(" ", kEitherOrientation);
}

const char* text(FusedOrder order) {
  switch (order) {
    case FusedOrder::kNotFused:
      return "";
    case FusedOrder::kPartByPart:
      return ", part by part";
    case FusedOrder::kHeadByHead:
      return ", head by head";
    case FusedOrder::kHeadFeaturePart:
      return ", cut as (head feature part)";
    case FusedOrder::kFeaturePartHead:
      return ", cut as (feature part head)";
    case FusedOrder::kFeatureHeadPart:
      return ", cut as (feature head part)";
    case FusedOrder::kPartFeatureHead:
      return ", cut as (part feature head)";
  }
  return "";
}

bool is_fused(Role role) { return role == kFused || role == kKeyValue; }

bool is_named_input(const Candidate& candidate) {
  const Role role = candidate.parsed.role;
  return candidate.is_matrix() && role != kNone && role != kOutput;
}

void check_single(const Candidates& found, Role role, const char* what) {
  TORCH_CHECK_VALUE(found.size() < 2, "explain: weights must have one ",
                    role_text(role), " ", what, ", got ",
                    list_text(found, " and "));
}

class Aligner {
 public:
  Aligner(Candidates candidates, const LayerSizes& sizes, FusedOrder order)
      : candidates_(std::move(candidates)), sizes_(sizes), order_(order) {}

  AlignedWeights align() {
    if (std::ranges::any_of(candidates_, &Candidate::is_matrix)) {
      if (std::ranges::none_of(candidates_, is_named_input)) {
        assign_roles_by_place(candidates_, sizes_);
      }
      take_weights();
      take_biases();
    }
    for (const Candidate& candidate : candidates_) {
      const std::string& name = candidate.names[0];
      if (!used_.contains(name)) aligned_.unused.push_back(name);
    }
    return std::move(aligned_);
  }

 private:
  // How a matrix of this role and size may be read, the likelier first. Keys
  // and values may come from sequences of another width; how wide a head is,
  // the queries tell, or values whose own width is known.
  std::vector<Extents> readings(Role role, const at::Tensor& weight) const {
    const int64_t heads = heads_of(role, sizes_), size = weight.numel() / heads;
    if (role == kOutput) return output_readings();
    if (const int64_t width = shared_width(role, weight); width > 0) {
      return {{1, width, width}};
    }
    if (head_dim_ == 0) {
      return {{heads, size / sizes_.embed_dim, sizes_.embed_dim}};
    }
    std::vector<Extents> found{{heads, head_dim_, size / head_dim_}};
    if (role == kValue && sizes_.vdim > 0) {
      found.insert(found.begin(), {heads, size / sizes_.vdim, sizes_.vdim});
    }
    return found;
  }

  // The width of a head where a matrix is no larger than (D, D): one for all.
  int64_t shared_width(Role role, const at::Tensor& weight) const {
    const int64_t width = sizes_.embed_dim / sizes_.num_heads;
    const bool is_small = !is_fused(role) && sizes_.num_heads > 1 &&
                          width * sizes_.num_heads == sizes_.embed_dim &&
                          weight.dim() == 2 && weight.size(0) == width &&
                          weight.size(1) == width;
    return is_small && (head_dim_ == 0 || head_dim_ == width) ? width : 0;
  }

  std::vector<Extents> output_readings() const {
    std::vector<Extents> found;
    for (const int64_t width : {sizes_.embed_dim, sizes_.out_dim}) {
      if (width == 0) continue;
      found.push_back({sizes_.num_heads, value_dim_, width, true});
      // One head wide, where heads are added up instead of laid side by side.
      found.push_back({1, value_dim_, width, true});
    }
    // A matrix for each head by itself, (D, D).
    found.push_back({1, value_dim_, value_dim_, true});
    return found;
  }

  std::optional<OrientedMatrix> oriented(Role role, const Candidate& c) const {
    using enum Orientation;
    // Fused ones must be cut now, so a square one is read as PyTorch stores it.
    const Orientation custom = c.parsed.says == Says::kKernel ? kInOut
                               : is_fused(role)               ? kOutIn
                                                              : kUnknown;
    const Hint hint =
        c.declared != kUnknown ? Hint{c.declared, true} : Hint{custom};
    if (const auto matrix = of_slices(role, c, hint)) return matrix;
    for (const Extents& expected : readings(role, c.tensor)) {
      auto matrix = orient(c.tensor, expected, hint);
      if (!matrix) continue;
      if (role != kOutput && shared_width(role, c.tensor) > 0) {
        const std::vector<at::Tensor> same(heads_of(role, sizes_),
                                           matrix->weight);
        matrix->weight = at::block_diag(same);
      }
      return matrix;
    }
    return std::nullopt;
  }

  // (H, D, D): each head has a matrix of its own, for its slice of the input.
  std::optional<OrientedMatrix> of_slices(Role role, const Candidate& c,
                                          const Hint& hint) const {
    const int64_t heads = heads_of(role, sizes_);
    if (role == kOutput || c.tensor.dim() != 3 || c.tensor.size(0) != heads) {
      return std::nullopt;
    }
    const int64_t width = shared_width(role, c.tensor.select(0, 0));
    if (width == 0) return std::nullopt;
    std::vector<at::Tensor> blocks;
    std::optional<OrientedMatrix> first;
    for (const at::Tensor& block : c.tensor.unbind(0)) {
      const auto matrix = orient(block, {1, width, width}, hint);
      if (!matrix) return std::nullopt;
      if (!first) first = matrix;
      blocks.push_back(matrix->weight);
    }
    return OrientedMatrix{at::block_diag(blocks), first->orientation};
  }

  Candidates named(Role role, bool biases) const {
    Candidates found = candidates_;
    std::erase_if(found, [&](const Candidate& c) {
      return c.parsed.role != role || !(biases ? c.is_bias : c.is_matrix());
    });
    return stack_heads(found, heads_of(role, sizes_));
  }

  std::optional<Match> find(Role role) const {
    Candidates found = named(role, false);
    std::erase_if(found,
                  [&](const Candidate& c) { return !oriented(role, c); });
    prefer_strong_names(found);
    check_single(found, role, "matrix");
    if (found.empty()) return std::nullopt;
    return Match{found[0], *oriented(role, found[0])};
  }

  std::string width_text(Role role) const {
    if (role != kOutput && head_dim_ > 0) return "any width";
    const int64_t embed_dim = sizes_.embed_dim, out_dim = sizes_.out_dim;
    const bool two = role == kOutput && out_dim > 0 && out_dim != embed_dim;
    return c10::str("width ", embed_dim, two ? c10::str(" or ", out_dim) : "");
  }

  // Says why there is none, unless it may be missing.
  void check_found(Role role, bool may_be_missing) const {
    Candidates misfits = named(role, false);
    std::erase_if(misfits, [](const Candidate& c) { return c.parsed.is_weak; });
    if (misfits.empty() && may_be_missing) return;
    Candidates matrices = candidates_;
    std::erase_if(matrices, [](const Candidate& c) { return !c.is_matrix(); });
    TORCH_CHECK_VALUE(!misfits.empty(), "explain: weights must have one ",
                      role_text(role),
                      " matrix, got none under a name that says so (",
                      list_text(matrices, ", "), ")");
    check_heads_divide(role, misfits);
    const Candidate& first = misfits[0];
    const int64_t head_dim = role == kOutput ? value_dim_ : head_dim_;
    TORCH_CHECK_VALUE(
        false, "explain: weights must have one ", role_text(role),
        " matrix between ", width_text(role), " and ", heads_of(role, sizes_),
        " heads of ", head_dim > 0 ? c10::str("width ", head_dim) : "one width",
        ", got ", list_text(misfits, " and "),
        first.declared == Orientation::kUnknown ? "" : text(first.declared));
  }

  // The likeliest reason why nothing fits: with this number of heads, neither
  // size of the matrix can be cut into heads of one width.
  void check_heads_divide(Role role, const Candidates& misfits) const {
    if (role == kKey || role == kValue || role == kKeyValue) return;
    const int64_t heads = sizes_.num_heads;
    const bool divides = std::ranges::any_of(misfits, [&](const Candidate& c) {
      return std::ranges::any_of(
          c.tensor.sizes(), [&](int64_t size) { return size % heads == 0; });
    });
    TORCH_CHECK_VALUE(divides,
                      "explain: num_heads must divide the width of the heads "
                      "together, a size of ",
                      list_text(misfits, " or "), ", got ", heads);
  }

  Matrix& matrix_of(Role role) {
    return role == kQuery   ? aligned_.query
           : role == kKey   ? aligned_.key
           : role == kValue ? aligned_.value
                            : aligned_.output;
  }

  void use(const Candidate& candidate, const std::string& what) {
    used_.insert(candidate.names.begin(), candidate.names.end());
    aligned_.matched.push_back(what +
                               (candidate.by_place ? ", by its place" : ""));
  }

  // The parts of a fused matrix, or the one that it is.
  void take(Role role, const Match& match) {
    const auto& [weight, orientation] = match.matrix;
    const std::string name = match.candidate.name();
    const char* order = "";
    if (is_fused(role)) {
      aligned_.fused = order_;
      order = text(order_);
      const auto parts = cut_as(role, weight, order_);
      for (size_t i = 0; i < parts.size(); ++i) {
        const Role part = kInputs[3 - parts.size() + i];
        if (const auto other = find(part)) {
          check_single({match.candidate, other->candidate}, part, "matrix");
        }
        matrix_of(part) = {parts[i], {}, orientation, name};
      }
    } else {
      const bool shared =
          role != kOutput && shared_width(role, match.candidate.tensor) > 0;
      aligned_.shared = aligned_.shared || shared;
      if (shared) order = ", the same for each head";
      matrix_of(role) = {weight, {}, orientation, name};
    }
    use(match.candidate,
        c10::str(role_text(role), ": ", name, text(orientation), order));
  }

  void take(Role role, bool may_be_missing = false) {
    if (const auto match = find(role)) {
      take(role, *match);
    } else {
      check_found(role, may_be_missing);
    }
  }

  void check_letters() const {
    TORCH_CHECK_VALUE(
        std::ranges::is_permutation(sizes_.fused_parts,
                                    std::string_view("qkv")),
        "explain: fused_parts must be q, k and v in some order, got ",
        sizes_.fused_parts);
  }

  // Query, key and value, or the last two, of parts that may lie otherwise.
  std::vector<at::Tensor> in_order(const std::vector<at::Tensor>& parts) const {
    std::string letters(sizes_.fused_parts), usual = "qkv";
    if (parts.size() == 2) {
      std::erase(letters, 'q');
      std::erase(usual, 'q');
    }
    std::vector<at::Tensor> ordered;
    for (const char letter : usual)
      ordered.push_back(parts[letters.find(letter)]);
    return ordered;
  }

  std::vector<at::Tensor> cut_as(Role role, const at::Tensor& fused,
                                 FusedOrder order) const {
    const int64_t queries =
        role == kFused ? sizes_.num_heads / sizes_.num_kv_heads : 0;
    check_letters();
    auto parts =
        cut(fused, queries, sizes_.num_kv_heads, order, sizes_.fused_parts);
    TORCH_CHECK_VALUE(!parts.empty(),
                      "explain: weights must have as many key/value heads as "
                      "query heads where they are cut so");
    return in_order(parts);
  }

  void take_weights() {
    if (const auto fused = find(kFused)) {
      head_dim_ = fused->matrix.weight.size(0) / heads_of(kFused, sizes_);
      take(kFused, *fused);
    } else {
      if (!find(kQuery)) check_found(kFused, true);
      take(kQuery);
      head_dim_ = aligned_.query.weight.size(0) / sizes_.num_heads;
      if (const auto key_value = find(kKeyValue)) {
        take(kKeyValue, *key_value);
      } else {
        if (!find(kKey)) check_found(kKeyValue, true);
        take(kKey);
        take(kValue);
      }
    }
    value_dim_ = aligned_.value.weight.size(0) / sizes_.num_kv_heads;
    take(kOutput, true);
  }

  // Beside a matrix of the same name that is not attention's.
  bool is_of_another_layer(const Candidate& bias) const {
    return std::ranges::any_of(candidates_, [&](const Candidate& c) {
      return !c.is_bias && c.parsed.stem == bias.parsed.stem &&
             !used_.contains(c.names[0]);
    });
  }

  // At most one. More than two axes: nn.MultiheadAttention's bias_k, a key.
  Candidates bias_for(Role role) const {
    Candidates found = named(role, true);
    std::erase_if(found, [&](const Candidate& c) {
      return c.tensor.dim() > 2 || is_of_another_layer(c);
    });
    prefer_strong_names(found);
    check_single(found, role, "bias");
    const int64_t size = bias_size(role);
    if (aligned_.shared && role != kOutput && !found.empty() &&
        found[0].tensor.numel() * heads_of(role, sizes_) == size) {
      found[0].tensor =
          found[0].tensor.reshape(-1).repeat(heads_of(role, sizes_));
    }
    TORCH_CHECK_VALUE(found.empty() || found[0].tensor.numel() == size,
                      "explain: weights must have one ", role_text(role),
                      " bias of ", size, " numbers, got ",
                      list_text(found, ""));
    return found;
  }

  int64_t bias_size(Role role) const {
    const at::Tensor& output = aligned_.output.weight;
    if (role == kOutput) {
      return output.defined() ? output.size(0) : sizes_.embed_dim;
    }
    return heads_of(role, sizes_) * (role == kValue ? value_dim_ : head_dim_);
  }

  void use_bias(Role role, const Candidate& bias) {
    use(bias, c10::str(role_text(role), " bias: ", bias.name()));
  }

  void take_fused_bias(Role role) {
    const Candidates fused = bias_for(role);
    if (fused.empty()) return;
    // nn.MultiheadAttention has one bias for three separate weights.
    const bool is_alone = aligned_.fused == FusedOrder::kNotFused;
    const auto parts = cut_as(role, fused[0].tensor.reshape(-1),
                              is_alone ? FusedOrder::kPartByPart : order_);
    for (size_t i = 0; i < parts.size(); ++i) {
      const Role part = kInputs[3 - parts.size() + i];
      Candidates all = bias_for(part);
      all.insert(all.begin(), fused[0]);
      check_single(all, part, "bias");
      matrix_of(part).bias = parts[i];
    }
    use_bias(role, fused[0]);
  }

  void take_biases() {
    take_fused_bias(kFused);
    take_fused_bias(kKeyValue);
    for (const Role role : {kQuery, kKey, kValue, kOutput}) {
      Matrix& matrix = matrix_of(role);
      const Candidates bias = bias_for(role);
      if (bias.empty() || !matrix.weight.defined()) continue;
      matrix.bias = bias[0].tensor.reshape(-1);
      use_bias(role, bias[0]);
    }
  }

  Candidates candidates_;
  const LayerSizes sizes_;
  const FusedOrder order_;
  // Of queries and keys, and of values; 0: not known yet.
  int64_t head_dim_ = 0, value_dim_ = 0;
  std::set<std::string> used_;
  AlignedWeights aligned_;
};

}  // namespace

AlignedWeights align_weights(
    const std::map<std::string, at::Tensor>& weights,
    const std::map<std::string, Orientation>& orientations,
    const LayerSizes& sizes, FusedOrder order) {
  const auto& [embed_dim, num_heads, num_kv_heads, vdim, out_dim, parts] =
      sizes;
  TORCH_CHECK_VALUE(embed_dim > 0 && num_heads > 0 && num_kv_heads > 0,
                    "explain: embed_dim, num_heads and num_kv_heads must be "
                    "positive, got ",
                    embed_dim, ", ", num_heads, " and ", num_kv_heads);
  if (order == FusedOrder::kNotFused) order = FusedOrder::kPartByPart;
  return Aligner(candidates_of(weights, orientations), sizes, order).align();
}

}  // namespace multihead::diagnosis
