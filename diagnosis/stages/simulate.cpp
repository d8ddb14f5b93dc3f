// SPDX-License-Identifier: MIT
#include "diagnosis/stages/simulate.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace multihead::diagnosis {

struct FollowedRecipes {
  struct Followed {
    Recipe recipe;
    std::optional<Stages> stages;
  };
  // A third of all recipes is followed twice in a row: first to see whether it
  // fits, then to see what it changes, perhaps beside the one that is compared.
  std::array<std::optional<Followed>, 2> last;
  size_t oldest = 0;
  // Most recipes differ only behind the scores: what comes before, by
  // up_to_scores() of the recipe.
  std::unordered_map<Recipe, Stages, size_t (*)(const Recipe&)> scored;
};

namespace {

using at::Tensor;

// A learned number may stand in the place of 1/sqrt(D).
double scale_of(const Recipe& recipe, const Scaling& scaling) {
  using enum LearnedScale;
  const LearnedScale learned = recipe.learned_scale;
  const bool replaced = learned == kTimes || learned == kOver ||
                        learned == kExp || learned == kOne;
  return replaced && recipe.scale == scale_by_width ? 1.0
                                                    : recipe.scale(scaling);
}

// Heads (B, H or G, L, D) of queries, keys and values.
std::array<Tensor, 3> split_heads(const ObservedCall& call,
                                  const Recipe& recipe,
                                  const std::array<Tensor, 3>& projected) {
  if (!call.has_weights) return projected;
  if (recipe.fused_view) {
    require(call.weights.fused == FusedOrder::kPartByPart &&
            call.weights.query.name == call.weights.value.name &&
            call.sizes.heads == call.sizes.kv_heads &&
            call.sizes.queries == call.sizes.keys);
    return recipe.fused_view(
        at::cat({projected[0], projected[1], projected[2]}, -1), call.sizes);
  }
  std::array<Tensor, 3> heads;
  for (int role = 0; role < 3; ++role) {
    const int64_t count = role == 0 ? call.sizes.heads : call.sizes.kv_heads;
    require(projected[role].size(2) % count == 0);
    heads[role] = recipe.split[role](projected[role], count);
  }
  return heads;
}

// (B, H, Lq, Lk)
Tensor products_of(const Recipe& recipe, const Tensor& query,
                   const Tensor& key) {
  const Tensor keys =
      recipe.keys_reshaped
          ? key.reshape({key.size(0), key.size(1), key.size(3), key.size(2)})
          : key.transpose(-2, -1);
  return recipe.product(query, keys);
}

// Before any mask.
Tensor scores_of(const ObservedCall& call, const Recipe& recipe,
                 const Tensor& products, double scale) {
  Tensor scores = narrowed(products * scale, recipe);
  if (recipe.floored) scores = scores.floor();
  if (recipe.learned_scale != LearnedScale::kNone) {
    scores = scores * learned_factor(call, recipe.learned_scale);
  }
  if (recipe.softcapped) scores = softcapped(call, scores);
  scores = mixed(call, recipe.mixed_scores, scores);
  if (recipe.position_bias != PositionBias::kNone) {
    const bool adds_mask = recipe.mask.effect != MaskEffect::kIgnored;
    const bool adds_padding = recipe.padding.effect != MaskEffect::kIgnored;
    // What is shown would hold the mask, too, as of a True that is added.
    require(recipe.position_bias != PositionBias::kShown ||
            ((adds_mask || !call.has_mask_in_scores()) &&
             (adds_padding || !call.has_padding_in_scores())));
    scores = with_position_bias(call, recipe.position_bias, scores, scale,
                                adds_mask);
  }
  return scores;
}

// With one more score in each row, whose weight is then left out, or by fault a
// key's is.
Tensor normalise_beside_sink(const ObservedCall& call, const Recipe& recipe,
                             const Tensor& scores) {
  std::vector<int64_t> column = scores.sizes().vec();
  column.back() = 1;
  const Tensor sink = sink_score(call, recipe.sink).expand(column);
  const bool is_first = recipe.sink_weight == SinkWeight::kFirst;
  const Tensor weights = recipe.normalise(
      is_first ? at::cat({sink, scores}, -1) : at::cat({scores, sink}, -1));
  const int64_t begin = recipe.sink_weight == SinkWeight::kLast ? 1 : 0;
  return weights.slice(-1, begin, begin + scores.size(-1));
}

// Masked scores to weights, before any is dropped. width: of a head.
Tensor weigh(const ObservedCall& call, const Recipe& recipe,
             const Masked& masked, Tensor scores, int64_t width,
             Stages& stages) {
  require(recipe.sink != Sink::kNone ||
          recipe.sink_weight == SinkWeight::kLeftOut);
  scores = narrowed(scores, recipe, Narrow::kSoftmax);
  stages.normalised = scores;
  const int64_t block = call.block > 0 ? call.block : scores.size(-1);
  Tensor weights = recipe.blockwise ? recipe.blockwise(scores, block)
                   : recipe.sink != Sink::kNone
                       ? normalise_beside_sink(call, recipe, scores)
                       : recipe.normalise(scores);
  if (masked.fully_masked.defined() &&
      recipe.fully_masked == FullyMasked::kZero &&
      recipe.normalise == softmax_over_keys && !recipe.blockwise) {
    weights = weights.masked_fill(masked.fully_masked.unsqueeze(-1), 0.0);
  }
  weights = mixed(call, recipe.mixed_weights, weights);
  weights = narrowed(weights, recipe, Narrow::kSoftmax);
  if (masked.keep_after.defined()) weights = weights * masked.keep_after;
  if (recipe.scale == scale_weights) {
    weights = weights / std::sqrt(static_cast<double>(width));
  } else if (recipe.scale == scale_weights_by_embed_dim) {
    weights = weights / std::sqrt(static_cast<double>(call.sizes.embed_dim));
  } else if (recipe.scale == scale_weights_by_all_heads) {
    weights = weights / std::sqrt(static_cast<double>(width * weights.size(1)));
  }
  return weights;
}

// Whether no query sees a key behind its own position.
bool blocks_later(const Tensor& scores) {
  const int64_t ahead = scores.size(3) - scores.size(2);
  const Tensor later = at::ones({scores.size(2), scores.size(3)}, at::kBool)
                           .triu(std::max<int64_t>(ahead, 0) + 1);
  return !scores.gt(-1e4).logical_and(later).any().item<bool>();
}

// Queries meet keys.
void score(const ObservedCall& call, const Recipe& recipe, Stages& stages) {
  const Tensor& query = stages.heads[recipe.roles[0]];
  const Tensor key = expand_groups(stages.heads[recipe.roles[1]], call.sizes,
                                   recipe.groups[0]);
  require(query.size(-1) == key.size(-1) && query.size(1) == key.size(1) &&
          query.size(0) == key.size(0));
  stages.scale = scale_of(recipe, {call, query, key});
  stages.products = products_of(recipe, query, key);
  stages.scores = scores_of(call, recipe, stages.products, stages.scale);
}

// Scores meet masks and values.
void attend(const ObservedCall& call, const Recipe& recipe, Stages& stages) {
  const Tensor& query = stages.heads[recipe.roles[0]];
  const Tensor value = expand_groups(stages.heads[recipe.roles[2]], call.sizes,
                                     recipe.groups[1]);
  require(value.size(1) == query.size(1) && value.size(0) == query.size(0) &&
          value.size(2) == stages.scores.size(3));

  Tensor scores = drop_at(Dropout::kBeforeMask, call, recipe, stages.scores);
  const Masked masked = mask_scores(call, recipe, scores);
  require(!is_of_distance(recipe.position_bias) || !call.line ||
          !call.line->of_keys || blocks_later(masked.scores));
  stages.fully_masked = masked.fully_masked;
  stages.blocks = masked.blocks;
  stages.masked_scores = masked.scores;
  scores = drop_at(Dropout::kBeforeSoftmax, call, recipe, masked.scores);

  Tensor weights = weigh(call, recipe, masked, scores, query.size(-1), stages);
  const auto average = [&](Tensor& x, Averaged when) {
    if (recipe.averaged == when) x = x.mean(1, /*keepdim=*/true).expand_as(x);
  };
  average(weights, Averaged::kBeforeDropout);
  if (recipe.normalise == divide_by_sum) {
    stages.magnification += weights.abs().nan_to_num().max().item<double>();
  }
  stages.weights = detached(weights, recipe, Detached::kWeights);
  if (call.is_masked())
    stages.weights = detached(stages.weights, recipe, Detached::kMaskedWeights);
  stages.dropped = drop_weights(call, recipe, stages.weights);
  average(stages.dropped, Averaged::kAfterDropout);

  const Tensor used = recipe.weights_transposed
                          ? stages.dropped.transpose(-2, -1)
                          : stages.dropped;
  require(used.size(-1) == value.size(2));
  stages.context = drop_at(Dropout::kOnContext, call, recipe,
                           narrowed(recipe.mix(used, value), recipe));
  stages.context = normalised(call, recipe.context_norm, NormPlace::kContext,
                              /*role=*/2, stages.context);
  if (masked.unused.defined()) stages.distinguishing = {masked.unused};
  if (recipe.scale == scale_twice) {
    stages.distinguishing = {query * std::sqrt(stages.scale),
                             stages.scores / std::sqrt(stages.scale)};
  }
}

// Queries and keys by their positions, if that is what the recipe does.
void turn(const ObservedCall& call, const Recipe& recipe,
          std::array<Tensor, 3>& heads) {
  const bool shown = recipe.rotary == Rotary::kShown;
  require(shown || !recipe.turned_apart);
  if (recipe.rotary == Rotary::kNone) {
    return require(recipe.turned == Recipe{}.turned);
  }
  for (int role = 0; role < 3; ++role) {
    if (recipe.turned[role])
      heads[role] = rotated(call, recipe, role, heads[role]);
  }
  if (!shown || !recipe.turned[0] || !recipe.turned[1]) return;
  require(belong_together(*call.turns[0], *call.turns[1]) !=
          recipe.turned_apart);
}

// Up to the scores, which no mask has met.
Stages follow_to_scores(const ObservedCall& call, const Recipe& recipe) {
  Stages stages;
  stages.inputs = inputs_of(call, recipe);
  stages.projected = project_inputs(call, recipe, stages.inputs);
  require(!recipe.norm_is_wide || !recipe.norm_after_turn);
  const auto norm = [&](std::array<Tensor, 3>& x) {
    for (int role = 0; role < 2; ++role)
      x[role] =
          normalised(call, recipe.head_norm, NormPlace::kHeads, role, x[role]);
  };
  if (recipe.norm_is_wide) norm(stages.projected);
  if (recipe.rotary == Rotary::kPairsOfAll) {
    require(call.has_weights);
    Recipe of_all = recipe;
    of_all.rotary = Rotary::kPairs;
    for (Tensor& x : stages.projected) x = x.unsqueeze(1);
    turn(call, of_all, stages.projected);
    for (Tensor& x : stages.projected) x = x.squeeze(1);
  }
  stages.heads = split_heads(call, recipe, stages.projected);
  if (!recipe.norm_is_wide && !recipe.norm_after_turn) norm(stages.heads);
  if (recipe.rotary != Rotary::kPairsOfAll) turn(call, recipe, stages.heads);
  if (recipe.norm_after_turn) norm(stages.heads);
  score(call, recipe, stages);
  return stages;
}

// ---- What recipes share ----------------------------------------------------

// With all choices of later steps as attention has them: recipes that differ in
// these alone make the same scores.
Recipe up_to_scores(Recipe recipe) {
  const Recipe plain;
  const auto reset = [&](auto... members) {
    ((recipe.*members = plain.*members), ...);
  };
  reset(&Recipe::mask_keeps, &Recipe::padding_keeps, &Recipe::padding_of_pairs,
        &Recipe::causal_by_itself, &Recipe::causal_unless_masked,
        &Recipe::joined, &Recipe::heads_before_items, &Recipe::window_reading,
        &Recipe::own_key_seen, &Recipe::own_key_blocked, &Recipe::within_blocks,
        &Recipe::fully_masked, &Recipe::sentinels, &Recipe::output_dropout,
        &Recipe::context_norm, &Recipe::merged_norm, &Recipe::output_norm,
        &Recipe::residual, &Recipe::output_gain, &Recipe::sink,
        &Recipe::sink_weight, &Recipe::rounded);
  reset(&Recipe::merge, &Recipe::mask, &Recipe::padding, &Recipe::causal,
        &Recipe::window, &Recipe::sentinel, &Recipe::sentinel_added,
        &Recipe::sentinel_of_mask, &Recipe::sentinel_from, &Recipe::normalise,
        &Recipe::blockwise, &Recipe::averaged, &Recipe::weights_transposed,
        &Recipe::mix, &Recipe::returned_transposed, &Recipe::dropout,
        &Recipe::output, &Recipe::input_added, &Recipe::returned,
        &Recipe::frozen);
  recipe.groups[1] = plain.groups[1];
  return recipe;
}

// Of the choices up to the scores that most faults differ in.
size_t hash_of(const Recipe& recipe) {
  size_t hash = 0;
  const auto add = [&](auto... values) {
    ((hash = (hash ^ (size_t)values) * 0x9e3779b97f4a7c15 + (hash >> 29)), ...);
  };
  for (int i = 0; i < 4; ++i) add(recipe.transposed[i], recipe.without_bias[i]);
  for (int i = 0; i < 3; ++i) {
    add(recipe.matrices[i], recipe.inputs[i], recipe.unprojected[i],
        recipe.roles[i], recipe.turned[i], recipe.split[i]);
  }
  add(recipe.fused_view, recipe.groups[0], recipe.product, recipe.scale,
      recipe.keys_reshaped, recipe.floored, recipe.narrow, recipe.rotary);
  return hash;
}

FollowedRecipes& followed_by(const ObservedCall& call) {
  auto& followed = call.last_followed.recipes;
  if (!followed) {
    followed = std::make_shared<FollowedRecipes>();
    followed->scored = decltype(followed->scored)(0, hash_of);
  }
  return *followed;
}

// How many numbers a call keeps for recipes to come.
constexpr int64_t kMostKept = 1 << 20;

// What is not possible is tried again: a later recipe may have found in the
// trace what this one needs. So is a cap that was not found.
Stages scored(const ObservedCall& call, const Recipe& recipe) {
  if (recipe.softcapped && !call.cap) return follow_to_scores(call, recipe);
  const Recipe key = up_to_scores(recipe);
  auto& known = followed_by(call).scored;
  if (const auto entry = known.find(key); entry != known.end())
    return entry->second;
  Stages stages = follow_to_scores(call, recipe);
  int64_t numbers = 2 * stages.scores.numel();
  for (const Tensor& heads : stages.heads) numbers += heads.numel();
  if (numbers > kMostKept) return stages;
  if (static_cast<int64_t>(known.size()) * numbers > kMostKept) known.clear();
  known.emplace(key, stages);
  return stages;
}

Stages follow(const ObservedCall& call, const Recipe& recipe) {
  // Without projections, whose input it is and whose role it plays are one.
  require(call.has_weights || recipe.inputs == Recipe{}.inputs);
  // Known before anything is computed: pairs of faults try it often.
  require(!recipe.sentinel_of_mask || call.window ||
          call.causal != CausalRequest::kNo);
  Stages stages = scored(call, recipe);
  attend(call, recipe, stages);
  stages.merged =
      drop_at(Dropout::kOnMerged, call, recipe,
              call.has_weights ? merge_heads(stages.context, recipe, call.sizes)
                               : merge_by_head(stages.context));
  stages.merged = normalised(call, recipe.merged_norm, NormPlace::kContext,
                             /*role=*/2, stages.merged);
  stages.out = finish(call, recipe, stages);
  return stages;
}

// Attention over the batch: first and second dimension exchanged, on the way
// in and on the way out.
Stages follow_exchanged(const ObservedCall& call, const Recipe& recipe) {
  require(call.has_weights && !drops(call, recipe) &&
          call.sizes.queries == call.sizes.keys);
  // What is (L, B, E) by a guess is (B, L, E) once exchanged: another guess.
  require(!call.facts.contains("order_guessed"));
  ObservedCall exchanged = call;
  exchanged.projections.clear();
  exchanged.normed_inputs.clear();
  exchanged.turns = {};
  exchanged.mixed_turns = {};
  exchanged.head_turns = {};
  exchanged.cap.reset();
  exchanged.cap_elsewhere.reset();
  exchanged.line.reset();
  for (Tensor& input : exchanged.inputs) {
    input = input.transpose(0, 1).contiguous();
  }
  std::swap(exchanged.sizes.batch, exchanged.sizes.queries);
  exchanged.sizes.keys = exchanged.sizes.queries;
  Recipe within = recipe;
  if (exchanged.sizes.keys == 1 && recipe.sink == Sink::kNone) {
    // The one key's weight is 1, whatever turns heads or is added to its score,
    // which a trace of one position does not show.
    within.rotary = Rotary::kNone;
    within.turned = Recipe{}.turned;
    within.position_bias = PositionBias::kNone;
  }
  Stages stages = follow(exchanged, within);
  stages.out = stages.out.transpose(0, 1);
  if (stages.fully_masked.defined())
    stages.fully_masked = stages.fully_masked.transpose(0, 2);
  return stages;
}

template <typename Follow>
std::optional<Stages> if_possible(Follow follow) try {
  return follow();
} catch (const Impossible&) {
  return std::nullopt;
} catch (const c10::Error&) {
  // Shapes that two faults together bring about, and no guard above foresees.
  return std::nullopt;
}

}  // namespace

std::optional<Stages> simulate_scores(const ObservedCall& call,
                                      const Recipe& recipe) {
  if (recipe.batch_exchanged) return simulate(call, recipe);
  return if_possible([&] { return scored(call, recipe); });
}

std::optional<Stages> simulate(const ObservedCall& call, const Recipe& recipe) {
  FollowedRecipes& followed = followed_by(call);
  for (const auto& known : followed.last) {
    if (known && known->recipe == recipe) return known->stages;
  }
  std::optional<Stages> stages = if_possible([&] {
    return recipe.batch_exchanged ? follow_exchanged(call, recipe)
                                  : follow(call, recipe);
  });
  followed.last[followed.oldest] = {recipe, stages};
  followed.oldest = 1 - followed.oldest;
  return stages;
}

}  // namespace multihead::diagnosis
