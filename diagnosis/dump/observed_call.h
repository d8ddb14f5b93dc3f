// SPDX-License-Identifier: MIT
//
// One run of the code under test, put into shape: what went in, what came out.
// Everything is float64 and batch first, whatever it was; B = 1 where there was
// no batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "diagnosis/weights/alignment.h"
#include "multihead/diagnosis.h"

namespace multihead::diagnosis {

/// What the entries of a mask mean. kUnknown: blocked or keep.
enum class MaskMeaning { kUnknown, kBlocked, kKeep, kAdditive };

struct GivenMask {
  at::Tensor numbers;  ///< (B or 1, H or 1, Lq or 1, Lk); undefined: no mask
  int64_t rank = 4;    ///< as it was given
  MaskMeaning meaning = MaskMeaning::kUnknown;
};

/// Whether a query may see keys after its own position. kExpected: nobody
/// asked, but a triangle was made, or a name says so.
enum class CausalRequest { kNo, kYes, kUnknown, kExpected };

/// Which keys a query may see at most: as many to the left and to the right,
/// no limit where negative.
struct GivenWindow {
  int64_t left = -1, right = -1;
  bool is_open = false;  ///< nothing says what its one size, left + 1, means
};

/// A norm among the parameters: gain and shift (n,), either may be missing.
struct Norm {
  std::string name;
  at::Tensor weight, bias;  ///< (n), or (H, 1, n) of heads
  std::optional<double> eps;
  std::array<bool, 3> of_inputs = {};  ///< which it is seen to norm
  int64_t groups =
      0;  ///< of features, where statistics are taken over positions
};

/// What learned numbers make of all heads: (H, H), as a layer has it, and (H).
struct HeadMix {
  at::Tensor weight, bias;
};

/// Draws of dropout: 1 = kept, and how likely it is to drop. is_folded: items
/// and heads were one dimension, read here as (B·H, …).
struct Draws {
  at::Tensor kept;
  double p = 0.0;
  bool is_folded = false;

  bool defined() const { return kept.defined(); }
};

struct Sizes {
  int64_t batch = 1, heads = 1, kv_heads = 1, queries = 0, keys = 0, width = 0,
          value_width = 0, embed_dim = 0;  ///< of a head; of queries
};

/// How heads are turned by where they stand: pairs of features, (i, i + n) or
/// (2i, 2i + 1), times c + i·s.
struct Turn {
  bool halves = true;
  at::Tensor cosines, sines;  ///< (L, n), of each feature (L, 2n)
};

/// A bias of scores that is, in each row, a line of the position of the key or
/// of its distance: (B, H, Lq, Lk).
struct StraightBias {
  at::Tensor numbers;
  bool falls = true;        ///< with the distance
  bool of_keys = false;     ///< of their positions: of the distance if causal
  bool sees_ahead = false;  ///< its weights are seen not to be causal
};

struct FollowedRecipes;  // of simulate alone
class Traced;            // of what compares a trace

/// A copy of a call has followed nothing: it may be changed.
struct LastFollowed {
  LastFollowed() = default;
  LastFollowed(const LastFollowed&) {}
  LastFollowed& operator=(const LastFollowed&) {
    recipes.reset();
    return *this;
  }

  std::shared_ptr<FollowedRecipes> recipes;
};

struct ObservedCall {
  std::string name;
  /// All that was said of it, by name: also where a fact comes from.
  std::map<std::string, std::string> facts;
  at::ScalarType dtype = at::kDouble;  ///< of what went in
  Sizes sizes;

  /// query, key, value: (B, L, E); without weights heads (B, H, L, D).
  std::array<at::Tensor, 3> inputs;
  /// Inputs of one index are one tensor: {0, 0, 0} is self-attention.
  std::array<int, 3> same_as = {0, 1, 2};
  bool has_weights = false;
  AlignedWeights weights;
  /// A fused matrix read in other ways; empty without one.
  std::map<FusedOrder, AlignedWeights> weights_by_order;
  std::vector<Norm> norms;         ///< left over among the weights
  std::vector<HeadMix> mixes;      ///< likewise
  std::optional<double> norm_eps;  ///< of layer norms that say none
  /// What the code adds to means of squares, by how many of them there are.
  std::map<int64_t, double> eps_of_means;
  /// Learned numbers, (1,) or (H,), left over likewise, and one that was given
  /// as an argument.
  std::map<std::string, at::Tensor> numbers;
  bool has_tables = false;    ///< other parameters, of positions perhaps
  at::Tensor cosines, sines;  ///< of rotary positions, (L, n), n pairs
  /// The matrices are parameters of the code's own, which nobody hands to it.
  bool owns_weights = false;
  bool turns_heads = false;  ///< by their positions, as names of functions say
  /// Which matrix is whose follows from the order of its products alone.
  bool roles_by_order = false;
  GivenMask mask, padding;
  CausalRequest causal = CausalRequest::kNo;
  /// Queries are said to be the last of the keys: the last one sees all.
  bool queries_are_last = false;
  std::optional<double> scale;
  bool training = false;
  double dropout_p = 0.0;
  Draws kept_weights;  ///< (B, H, Lq, Lk), or (B, 1, Lq, Lk) of one head
  Draws kept_context;  ///< (B, H, Lq, D)
  Draws kept_output;   ///< shaped like out
  std::optional<GivenWindow> window;
  /// Matrices, as AlignedWeights has them, that took part and got no gradient.
  std::array<bool, 4> without_gradient = {};
  int64_t block = 0;  ///< keys at a time; 0: all, as far as anything tells
  /// Positions that attend among themselves alone, where a trace shows scores
  /// of such blocks; 0: none does.
  int64_t own_block = 0;
  int digits = 0;  ///< to which out is rounded; 0: it is not
  /// Whether numbers of float32, as a scale, met what is computed in float64.
  bool rounds_to_float = false;
  /// The share of what a search for faults may do, where less is left.
  double search_effort = 1;

  at::Tensor out;       ///< (B, Lq, E), without weights (B, H, Lq, D)
  at::Tensor returned;  ///< weights that it returned, any shape
  at::Tensor dout;
  std::array<at::Tensor, 3> gradients;       ///< of query, key, value
  std::map<std::string, at::Tensor> stages;  ///< known by name
  std::vector<at::Tensor> trace;             ///< in order, of any dtype

  /// The trace as it is compared.
  mutable std::shared_ptr<const std::vector<Traced>> traced;
  /// Projections that recipes share, kept by simulate: they are most of the
  /// work where tensors are large.
  mutable std::map<std::array<int, 9>, at::Tensor> projections;
  /// Inputs behind a norm, likewise.
  mutable std::map<std::array<int, 3>, at::Tensor> normed_inputs;
  /// j − i of query i and key j, of some lengths (Lq, Lk), likewise.
  mutable std::map<std::array<int64_t, 2>, at::Tensor> distances;
  /// What the trace has that may be heads of some size (B, H, L, D), likewise.
  mutable std::map<std::array<int64_t, 4>, std::vector<at::Tensor>> like_heads;
  /// Turns of queries, keys and values that the trace shows, likewise.
  mutable std::array<std::optional<Turn>, 3> turns;
  /// Fingerprints of heads that the trace shows no turn of, and of scores that
  /// it shows no line and no cap of: recipes share them.
  mutable std::set<uint64_t> unturned, unlined, uncapped;
  /// Of queries and keys, those that are turned by tables for other pairs, and
  /// along the heads; looked for once.
  mutable std::array<std::optional<std::optional<Turn>>, 2> mixed_turns,
      head_turns;
  /// The c of scores c·tanh(s / c) that the trace shows, likewise, and the bias
  /// that is a straight line.
  mutable std::optional<double> cap;
  /// That of another call of the code, whose scores are large enough to tell.
  mutable std::optional<double> cap_elsewhere;
  mutable std::optional<StraightBias> line;
  mutable std::optional<bool> has_line_or_cap;
  /// Whether the trace shows weights of which columns add up to 1, not rows.
  mutable std::optional<bool> has_sums_of_columns;
  /// Whether the trace shows weights by which no query sees its own key, but
  /// later ones.
  mutable std::optional<bool> has_empty_diagonal;
  /// The number that the trace shows in the place of blocked scores, likewise.
  mutable std::optional<std::optional<double>> sentinel;
  /// What simulate made of the last recipes. Whoever changes a call forgets it.
  mutable LastFollowed last_followed;

  bool is_masked() const {
    return mask.numbers.defined() || padding.numbers.defined();
  }

  /// Whether keys are given beside the query input, be they the same.
  bool is_given_keys() const {
    return same_as[1] != 0 || facts.contains("is_given_keys");
  }

  /// Whether the data meet a matrix that attention has no use for, as those of
  /// a layer beside it, of which nothing is known.
  bool has_other_layers() const;

  /// Whether this is only a part of what the code does: from its heads, which
  /// are the inputs, to what comes of them.
  bool is_core() const { return facts.contains("core_beside"); }
  // Its queries and keys are made of scores, which are taken as they are.
  bool has_given_scores() const { return facts.contains("scores_given"); }

  /// Whether a mask is known to have a part in the scores.
  bool has_mask_in_scores() const { return facts.contains("mask_in_scores"); }
  bool has_padding_in_scores() const {
    return facts.contains("key_padding_mask_in_scores");
  }

  // Its heads attend to something else than the positions of the inputs.
  bool is_elsewhere() const { return facts.contains("attends_elsewhere"); }
  bool may_have_bias() const {
    return has_tables || (is_core() && !has_given_scores());
  }

  /// Whether another attention of its block has a bias and does not scale.
  bool is_beside_bias() const { return facts.contains("beside_bias"); }
};

/// Whether explain takes a tensor of this name for something else than a
/// weight.
bool is_reserved(std::string_view name);

/// Throws c10::ValueError that names what is missing or does not fit. `show`
/// reads its dumps by it.
[[gnu::visibility("default")]] ObservedCall read_dump(
    const Observation& observation);

}  // namespace multihead::diagnosis
