// SPDX-License-Identifier: MIT
//
// Whose weight is whose: somebody's parameters, under names of their own, as
// the four matrices of multi-head attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace multihead::diagnosis {

/// How `matched` says that the sides of a matrix are not known.
inline constexpr std::string_view kEitherOrientation = "(out, in) or (in, out)";

/// How the numbers of a matrix are stored. kUnknown: only a trial can tell.
enum class Orientation { kUnknown, kOutIn, kInOut };

/// How a fused matrix holds its parts: [q; k; v], each with all heads, or head
/// by head, [q0 k0 v0 q1 ...] (with groups, [queries of group 0, k0 v0 ...]).
/// The others are known by their letters, the outermost first: part, head,
/// feature of a head. They have no groups.
enum class FusedOrder {
  kNotFused,
  kPartByPart,  ///< (part head feature)
  kHeadByHead,  ///< (head part feature)
  kHeadFeaturePart,
  kFeaturePartHead,
  kFeatureHeadPart,
  kPartFeatureHead
};

/// Sizes of the layer under test; num_heads is a multiple of num_kv_heads. vdim
/// and out_dim: features of values and of the output, 0 where nobody knows.
/// fused_parts: whose the parts of a fused matrix are, where that is told:
/// "kqv".
struct LayerSizes {
  int64_t embed_dim, num_heads, num_kv_heads;
  int64_t vdim = 0, out_dim = 0;
  std::string_view fused_parts = "qkv";
};

struct AlignedWeights {
  /// weight (out, in), unless its orientation is unknown: then as stored.
  /// bias (out,). Undefined: not there.
  struct Matrix {
    at::Tensor weight, bias;
    Orientation orientation = Orientation::kUnknown;
    std::string name;
  };
  Matrix query, key, value, output;
  std::array<const Matrix*, 4> matrices() const {
    return {&query, &key, &value, &output};
  }

  /// How query, key and value, or key and value, were cut.
  FusedOrder fused = FusedOrder::kNotFused;

  /// One small matrix projects every head: (H·D, H·D) with it on the diagonal.
  bool shared = false;

  /// For people: "query: attn.q_proj.weight (out, in)".
  std::vector<std::string> matched;

  /// What may be parameters and was not understood: norms, other layers.
  std::vector<std::string> unused;
};

/// weights: under the names of any framework. orientations: what is known of
/// them. order: how a fused matrix is to be read; its name does not tell.
/// Nothing is copied that can be a view. Throws c10::ValueError if a matrix is
/// missing, does not fit, or if several would do.
AlignedWeights align_weights(
    const std::map<std::string, at::Tensor>& weights,
    const std::map<std::string, Orientation>& orientations,
    const LayerSizes& sizes, FusedOrder order = FusedOrder::kPartByPart);

}  // namespace multihead::diagnosis
