// SPDX-License-Identifier: MIT
//
// The fewest changes of attention that give what came out, in every call; and
// what is needed to find them, and to say more of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

// ---- Whether what came out is what a recipe gives, but for rounding --------

/// What rounding to `precision` may do to a tensor of attention whose largest
/// element is `largest`.
double rounding_allowed(at::ScalarType precision, const Stages& stages,
                        double largest);

/// Whether that is so much that a result tells nothing: scores are too large.
bool is_lost_in_rounding(at::ScalarType precision, const Stages& stages);

/// The rows of out, (B, Lq) or (B, H, Lq), in which some key was seen;
/// undefined: all of them.
at::Tensor seeing_rows(const ObservedCall& call, const Stages& stages);

/// Gradients of Σ out·dout for query, key and value where the call has them.
std::array<at::Tensor, 3> gradients(const ObservedCall& call,
                                    const Recipe& recipe);

/// What remains of a tensor, and as a share of what rounding may do.
struct Error {
  double difference = kInfinity, share = kInfinity;
};

/// Errors of what a call returned, judged in the order of the members; 0 for
/// what it did not return. The first that is beyond rounding ends it: where out
/// is wrong, the errors of weights and gradients stay infinite. So do all three
/// where the recipe cannot be followed.
struct Errors {
  Error out, weights, gradients;

  bool fit() const {
    return out.share <= 1 && weights.share <= 1 && gradients.share <= 1;
  }
};
Errors errors(const ObservedCall& call, const Recipe& recipe,
              at::ScalarType precision);

/// Whether a call in float64 was rounded to float32 on its way.
bool shows_float32(const ObservedCall& call);

/// The dtype to whose rounding a call is held; in_float: float32 for float64.
at::ScalarType precision_of(const ObservedCall& call, bool in_float);

/// Whether what is left is little enough beside what there was without it.
bool explains_most(double left, double without);

enum class Improvement { kLittle, kMayBeChance, kEnough };

/// Whether a recipe that fits every call may be called an explanation of what
/// `start`, attention, does not fit. It must explain most of what `start`
/// leaves, and more digits of it than one of as many recipes would by chance.
/// To fit is not enough where rounding may do much: of 16 bits, or in numbers
/// that explode. faults: how many the recipe has, 1 to 4.
Improvement improvement(std::span<const ObservedCall> calls,
                        const Recipe& start, const Recipe& recipe,
                        size_t faults, bool in_float = false);

/// Whether something stands beside attention, for which PyTorch has no call.
bool has_structure(const Recipe& recipe);

/// out as ObservedCall::out, in the call's dtype, of PyTorch's paths with
/// weights and without. Empty where PyTorch has no such call, as without an
/// output matrix, or draws numbers of its own. `recipe`: conventions only.
std::vector<at::Tensor> pytorch_results(const ObservedCall& call,
                                        const Recipe& recipe);

// ---- Where calls leave attention -------------------------------------------

/// A tensor of attention that the trace of a call shows.
struct Shown {
  Stage stage;
  at::Tensor Stages::* tensor;
  at::Tensor right;
  double allowed;

  bool differs_in(const Stages& others) const {
    return !(largest_difference(others.*tensor, right) <= allowed);
  }
};
std::vector<Shown> shown_in_trace(const ObservedCall& call,
                                  const Stages& reference,
                                  at::ScalarType precision);

/// Whether the first and the last head of queries (0), keys (1) or values (2)
/// stand in the trace, as they are.
bool shows_heads(const ObservedCall& call, const Stages& reference, int role,
                 at::ScalarType precision);

/// Whether the merged heads do.
bool shows_merged(const ObservedCall& call, const Stages& reference,
                  at::ScalarType precision);

/// Whether the numbers of a stage do, whole or head by head.
bool shows(const ObservedCall& call, const Stages& reference,
           const at::Tensor& wanted, at::ScalarType precision);

/// Whether some tensor of the trace holds the numbers of `wanted`, in any order
/// of dimensions.
bool in_trace(const ObservedCall& call, const at::Tensor& wanted,
              double allowed);

struct Difference {
  std::optional<Stage> stage;
  std::optional<Place> place;
};

/// The first of each that a call shows, outputs before what is returned beside
/// them. attention: conventions only; calls that tell most come first.
Difference locate(std::span<const ObservedCall> calls, const Recipe& attention);

// ---- What leaves no doubt --------------------------------------------------

using Conventions = std::vector<const Convention*>;

/// Attention with these conventions.
Recipe with(const Conventions& conventions);

/// Whether some of them change nothing beside the others.
bool is_redundant(const Conventions& conventions);

/// Those that what is given leaves no doubt of.
Conventions certain(std::span<const ObservedCall> calls);

/// Those that need no search: what is given says so, or the trace of the first
/// call that has one shows what only they compute. Calls that tell most first.
Conventions evident(std::span<const ObservedCall> calls);

// ---- The search ------------------------------------------------------------

struct Pick {
  const Fault* fault;
  const Way* way;
};

using Changes = std::vector<Pick>;

/// nullopt where a change has no effect, or undoes another.
std::optional<Recipe> changed(const Recipe& start, const Changes& changes);

struct Explanation {
  Conventions conventions;
  Changes faults;  ///< none: it is attention
  Recipe recipe;
  /// float32 for float64 calls that round to it on the way.
  bool in_float = false;
  double left = 0;  ///< of the largest result, where several fit
};

struct SearchResult {
  /// All explanations with the fewest faults, at most two, or kMostSteps where
  /// the calls show them one by one; and among them the fewest conventions: the
  /// likeliest first, one for each set of names. Empty: nothing in the
  /// catalogue gives what came out.
  std::vector<Explanation> explanations = {};
  /// Where there is none: the conventions under which attention comes nearest.
  Conventions nearest = {};
  bool cut_short = false;  ///< not all candidates were tried
  /// Some fit, but to so small an output that many would.
  bool by_chance = false;
  double effort = 0;  ///< the share spent of what a search may do
};

/// The faults of an explanation, sorted by name.
std::vector<std::string> names_of(const Explanation& explanation);

/// Explanations that fit every call, the likelier first, one for each set of
/// names, without those whose way the trace of a call contradicts.
std::vector<Explanation> ranked(std::span<const ObservedCall> calls,
                                std::vector<Explanation> found);

/// All faults that calls may have, each in every way.
Changes picks_for(std::span<const ObservedCall> calls);

/// What one candidate costs beside a call, in nanoseconds or so.
double cost(const ObservedCall& call);

/// How many faults are looked for where each shows by itself.
constexpr size_t kMostSteps = 4;

/// Explanations by up to kMostSteps faults beside `settled`, found one by one:
/// each explains one more call, or gives a step that the trace of a call shows
/// and that the faults before do not give. effort: what may be spent.
std::vector<Explanation> step_by_step(std::span<const ObservedCall> calls,
                                      const Conventions& settled, bool in_float,
                                      double effort);

/// Whether a call costs many times what the cheapest does. Such calls come
/// last: what smaller ones show is looked for there.
bool is_large(const ObservedCall& call, std::span<const ObservedCall> among);

/// With how many faults, up to `most`, attention explains all calls; most + 1:
/// with no so few. Never a search for pairs.
size_t fewest_faults(std::span<const ObservedCall> calls, int most);

/// Calls that tell most come first.
SearchResult search(std::span<const ObservedCall> calls);

}  // namespace multihead::diagnosis
