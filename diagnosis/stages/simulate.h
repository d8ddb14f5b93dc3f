// SPDX-License-Identifier: MIT
//
// Attention by recipe: the exact path's steps, each with every way in which
// people get it wrong.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <vector>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

/// What attention computes on its way, float64.
struct Stages {
  std::array<at::Tensor, 3> inputs;     ///< as they are projected
  std::array<at::Tensor, 3> projected;  ///< (B, L, heads·D)
  std::array<at::Tensor, 3> heads;      ///< (B, H or G, L, D)
  at::Tensor products;                  ///< (B, H, Lq, Lk), not scaled yet
  double scale = 1;                     ///< of the products
  at::Tensor scores;                    ///< (B, H, Lq, Lk), scaled
  at::Tensor masked_scores;
  at::Tensor normalised;  ///< scores as they meet the softmax
  at::Tensor weights;     ///< before dropout
  at::Tensor dropped;     ///< weights after dropout; the same without any
  at::Tensor context;     ///< (B, H, Lq, D)
  at::Tensor merged;      ///< (B, Lq, H·D)
  at::Tensor out;         ///< as ObservedCall::out
  /// bool (B, H, Lq): queries whose keys are all blocked; undefined: none.
  at::Tensor fully_masked;
  /// What a division by sums near 0 makes of earlier rounding.
  double magnification = 1;
  bool blocks = false;  ///< some score is blocked
  /// Tensors that only code with this very fault would compute.
  std::vector<at::Tensor> distinguishing;
};

/// nullopt: with these shapes the recipe cannot be followed, as where a matrix
/// that is not square should be transposed.
std::optional<Stages> simulate(const ObservedCall& call, const Recipe& recipe);

/// The same up to the scores: no softmax, no output.
std::optional<Stages> simulate_scores(const ObservedCall& call,
                                      const Recipe& recipe);

// ---- Loops over tiny tensors -----------------------------------------------

/// A hash of its numbers, in their order.
uint64_t fingerprint(const at::Tensor& x);

/// x (B, H, M, K) times y (B, H, K, N), float64.
at::Tensor matrix_product(const at::Tensor& x, const at::Tensor& y);

/// Largest |x|, infinities and NaN left out; 0 of nothing.
/// rows: bool, leading dimensions of x, those that count; undefined: all.
double largest_finite(const at::Tensor& x, const at::Tensor& rows = {});

/// Largest |x − y|: 0 for two NaN or the same infinity, infinite for one NaN.
double largest_difference(const at::Tensor& x, const at::Tensor& y,
                          const at::Tensor& rows = {});

// ---- The steps, which throw Impossible -------------------------------------

/// (out, in) of the matrix of this index, and its bias, as the recipe has them.
AlignedWeights::Matrix matrix_by(const ObservedCall& call, const Recipe& recipe,
                                 int index);

/// input (…, in) → (…, out) by the matrix of this index; as it is without one.
at::Tensor project(const ObservedCall& call, const Recipe& recipe,
                   const at::Tensor& input, int index);

/// What is projected, (B, L, E) or heads: the inputs, behind a norm perhaps.
std::array<at::Tensor, 3> inputs_of(const ObservedCall& call,
                                    const Recipe& recipe);

/// Queries, keys and values: (B, L, heads·D), without weights heads.
std::array<at::Tensor, 3> project_inputs(
    const ObservedCall& call, const Recipe& recipe,
    const std::array<at::Tensor, 3>& inputs);

/// x (…, n) by the norm that the call has at this place, or by one without
/// parameters where it has none of this width. role: 0 to 2, of queries ….
at::Tensor normalised(const ObservedCall& call, NormKind kind, NormPlace place,
                      int role, const at::Tensor& x);

/// Whether the call has a norm with parameters for this width.
bool has_norm(const ObservedCall& call, int64_t width);

/// Heads (B, H, L, D) of a role turned by their positions. Impossible: the
/// trace was to show how, and does not.
at::Tensor rotated(const ObservedCall& call, const Recipe& recipe, int role,
                   const at::Tensor& heads);

/// How the trace shows these heads (B, H, L, D) to be turned, by their
/// positions or, `by_head`, by which head they are: a table (H, n). nullopt:
/// not at all.
std::optional<Turn> shown_turn(const ObservedCall& call,
                               const at::Tensor& heads, bool by_head = false);

/// Whether a query and a key of one position differ by one angle, wherever that
/// is.
bool belong_together(const Turn& query, const Turn& key);
/// Whether the trace has these heads, each turned by the same angles at all
/// positions, which cancel in the scores.
bool is_turned_alike(const ObservedCall& call, const at::Tensor& heads);

/// The learned number by which the scores are multiplied, (1 or H, 1, 1).
at::Tensor learned_factor(const ObservedCall& call, LearnedScale scale);

/// scores s (B, H, Lq, Lk), scaled, as c·tanh(s / c) where the trace shows such
/// numbers for some c. Impossible: it does not.
at::Tensor softcapped(const ObservedCall& call, const at::Tensor& scores);

/// x (B, H, Lq, Lk), each head a sum of all, with learned weights.
at::Tensor mixed(const ObservedCall& call, const MixedHeads& how,
                 const at::Tensor& x);

/// The score (1 or H, 1, 1) of a key that has no value.
at::Tensor sink_score(const ObservedCall& call, Sink sink);

/// Whether the trace shows scores before and behind such a line or soft cap,
/// whatever the heads are that they are of.
bool shows_added_line_or_cap(const ObservedCall& call);

/// scores (B, H, Lq, Lk), scaled, and the bias that the trace shows to be added
/// to them; adds_mask: what an additive mask adds is none of it. Impossible: it
/// shows none of this kind.
at::Tensor with_position_bias(const ObservedCall& call, PositionBias kind,
                              const at::Tensor& scores, double scale,
                              bool adds_mask);

/// How many keys the code takes at a time, as the trace shows; 0: nothing
/// tells.
int64_t shown_block(const ObservedCall& call);

/// The size of blocks of positions whose scores the trace shows, block by block
/// and all of them; 0: there are none.
int64_t shown_blocks(const ObservedCall& call);

/// The learned factor of the output, (1,) or (E,); undefined: there is none.
at::Tensor output_gain(const ObservedCall& call);

/// The number of blocked scores. Impossible: the trace was to show it.
double sentinel_of(const ObservedCall& call, const Recipe& recipe);

/// scores (B, H, Lq, Lk), blocked by finite numbers, in float32 as that rounds
/// them. Impossible: two ways, and only one of the two blocks something.
at::Tensor with_sentinels(const ObservedCall& call, const Sentinels& how,
                          at::Tensor scores, const at::Tensor& blocked,
                          const at::Tensor& by_mask,
                          const at::Tensor& by_causal);

/// What the module adds to the output and does to it: (B, Lq, E).
at::Tensor finished_beside(const ObservedCall& call, const Recipe& recipe,
                           const Stages& stages, at::Tensor out);

/// (B, G, L, D) → (B, H, L, D): the key/value head of each query head.
at::Tensor expand_groups(const at::Tensor& x, const Sizes& sizes,
                         Groups groups);

/// (B, H, Lq, D) → (B, Lq, H·D).
at::Tensor merge_heads(const at::Tensor& context, const Recipe& recipe,
                       const Sizes& sizes);

struct Masked {
  at::Tensor scores = {};        ///< (B, H, Lq, Lk)
  at::Tensor fully_masked = {};  ///< as in Stages
  bool blocks = false;           ///< likewise
  at::Tensor keep_after = {};  ///< 0 or 1, for the weights; undefined: nothing
  at::Tensor unused = {};      ///< masked scores that are thrown away
};

/// scores (B, H, Lq, Lk), met by every mask of the call.
Masked mask_scores(const ObservedCall& call, const Recipe& recipe,
                   const at::Tensor& scores);

/// Whether this call drops something of what attention is made of. Dropout
/// takes the draws that the call made; Impossible: it made none of that shape.
bool drops(const ObservedCall& call, const Recipe& recipe);

/// The output, dropped where the module does so beside attention or by fault.
at::Tensor drop_output(const ObservedCall& call, const Recipe& recipe,
                       const at::Tensor& out);

/// Weights (B, H, Lq, Lk), as they meet the values.
at::Tensor drop_weights(const ObservedCall& call, const Recipe& recipe,
                        const at::Tensor& weights);

/// What comes before the weights or after them, where the recipe drops it
/// `where`.
at::Tensor drop_at(Dropout where, const ObservedCall& call,
                   const Recipe& recipe, const at::Tensor& x);

/// x, rounded where the recipe narrows `where` or everything.
at::Tensor narrowed(const at::Tensor& x, const Recipe& recipe,
                    Narrow where = Narrow::kEverywhere);

/// x, cut off from its gradient where the recipe detaches `what`.
at::Tensor detached(const at::Tensor& x, const Recipe& recipe, Detached what);

/// stages: all but `out`, which is returned.
at::Tensor finish(const ObservedCall& call, const Recipe& recipe,
                  const Stages& stages);

/// Scores that a mask has blocked are −inf, or anything very small: all −inf.
at::Tensor with_infinity(const at::Tensor& scores, const Stages& stages);

/// Weights (B, H, Lq, Lk) in the shape of `like`: as they are, or their mean or
/// sum over the heads; undefined: they do not have that shape.
at::Tensor in_shape_of(const at::Tensor& weights, const at::Tensor& like,
                       const Recipe& recipe, bool sum = false);

/// The weights that code with this recipe returns, in the shape of
/// call.returned; undefined: they do not have that shape.
at::Tensor returned_weights(const ObservedCall& call, const Recipe& recipe,
                            const Stages& stages);

// ---- The conventions of each file ------------------------------------------

constexpr Concern maybe(bool is_possible) {
  return is_possible ? Concern::kMaybe : Concern::kNo;
}

inline bool shows_its_way(const ObservedCall& call) {
  return !call.trace.empty();
}

/// Whether there may be a norm of one of these widths. Norms with a shift are
/// no RMS norms; those without parameters, only a trace shows.
Concern norm_of(const ObservedCall& call, NormKind kind,
                std::initializer_list<int64_t> widths);

/// How what is given is read; and what else stands in the same module, in the
/// order in which it meets the data.
extern const std::vector<Convention> kReadings, kStructure, kBehindHeads,
    kMixing;

// ---- The faults of each file -----------------------------------------------

extern const std::vector<Fault> kProjectionFaults, kHeadFaults, kScaleFaults,
    kMaskFaults, kWeightFaults, kOutputFaults;

}  // namespace multihead::diagnosis
