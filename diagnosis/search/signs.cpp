// SPDX-License-Identifier: MIT
#include "diagnosis/search/signs.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "diagnosis/search/cuts.h"
#include "diagnosis/search/search.h"

namespace multihead::diagnosis {

using at::Tensor;

bool is_done_to_heads(const Recipe& without, const Recipe& with) {
  return with.head_norm != without.head_norm ||
         with.norm_is_wide != without.norm_is_wide ||
         with.rotary != without.rotary;
}

namespace {

class Signs {
 public:
  explicit Signs(const ObservedCall& call)
      : call_(call), precision_(precision_of(call, shows_float32(call))) {}

  // Whether the trace shows the convention that leads from one to the other.
  bool show(Sign sign, const Recipe& without, const Recipe& with) const try {
    if (sign == Sign::kNorm || sign == Sign::kSum) return shows_end(with);
    if (sign == Sign::kContext) return shows_context_norm(without, with);
    if (sign == Sign::kBias) {
      // In float32 what shows no cap may have one.
      if (with.softcapped && !without.softcapped)
        return shows_bias(with) && call_.cap.has_value();
      return with.position_bias == PositionBias::kShown
                 ? shows_unknown_bias(with)
                 : shows_bias(with);
    }
    if (with.mixed_scores != without.mixed_scores ||
        with.mixed_weights != without.mixed_weights) {
      return shows_mixed(without, with);
    }
    if (sign == Sign::kWeights) return shows_weights(without, with);
    const auto before = simulate_scores(call_, without);
    if (with.rotary == Rotary::kShown && without.rotary != with.rotary) {
      return before && shows_turn(*before);
    }
    if (with.turned != without.turned) {
      return with.rotary != Rotary::kNone && shows_turn_of_values(without);
    }
    const auto after = simulate(call_, with);
    if (!after) return false;
    if (!before) return true;
    if (with.learned_scale == LearnedScale::kOne &&
        (is_biased(without) || has_line(with) ||
         (call_.is_core() && !is_biased(with) && !call_.is_beside_bias()))) {
      return false;
    }
    switch (sign) {
      case Sign::kProjected:
        return shows_projected(*after) && !shows_projected(*before);
      case Sign::kInputs:
      case Sign::kKeys:
        return shows_all(*before, *after, &Stages::inputs);
      case Sign::kHeads:
        // ReLU leaves nothing below 0.
        if (with.activated == Activated::kInputsAndOutput &&
            !call_.out.ge(0).all().item<bool>()) {
          return false;
        }
        // Heads may be cut as no attention does.
        if (with.activated != without.activated &&
            shows_all(*before, *after, &Stages::projected)) {
          return true;
        }
        return shows_heads_of(*before, *after) &&
               (with.merge == without.merge || !shows_merge(with, without)) &&
               (with.fused == without.fused || shows_products(with, *after) ||
                shows_products_of_done(with));
      default:
        return after->scores.isfinite().all().item<bool>() &&
               !is_same(before->scores, after->scores) &&
               shows(call_, *after, after->scores, precision_) &&
               // They are computed, too, before they are scaled.
               !(with.learned_scale == LearnedScale::kOne &&
                 shows(call_, *after, before->scores, precision_));
    }
  } catch (const Impossible&) {
    return false;  // as of a norm over groups of features where there are none
  }

  bool show_keys(const Recipe& recipe) const {
    const auto stages = simulate(call_, recipe);
    return stages && is_shown(stages->projected[1]);
  }

  // Whether the cut that leads from one to the other changes queries or keys,
  // and the trace has what it makes of them.
  bool show_cut(const Recipe& without, const Recipe& with) const {
    const auto before = simulate_scores(call_, without);
    const auto after = simulate(call_, with);
    bool any = false;
    for (int role = 0; after && role < 2; ++role) {
      if (before && is_same(before->heads[role], after->heads[role])) continue;
      if (!shows_heads(call_, *after, role, precision_)) return false;
      any = true;
    }
    return any;
  }

  // Along which axis positions lie is not told by what is done to heads: by
  // scores of the batch's items it is.
  bool show_exchanged(Recipe without, Recipe with) const {
    without.batch_exchanged = with.batch_exchanged = true;
    if (call_.sizes.batch < 2 || !show(Sign::kHeads, without, with))
      return false;
    const auto stages = simulate(call_, with);
    return stages && (is_shown(stages->products) || is_shown(stages->scores));
  }

 private:
  double allowed(const Tensor& x) const {
    return (precision_ == at::kDouble ? 1e-10 : 1e-4) * largest_finite(x);
  }

  bool is_same(const Tensor& x, const Tensor& y) const {
    return largest_difference(x, y) <= allowed(x);
  }

  bool is_shown(const Tensor& x) const {
    return in_trace(call_, x, allowed(x));
  }

  // What changes of the three, at least one of them.
  bool shows_all(const Stages& before, const Stages& after,
                 std::array<Tensor, 3> Stages::* tensors) const {
    bool any = false;
    for (int role = 0; role < 3; ++role) {
      const Tensor& x = (after.*tensors)[role];
      if (is_same((before.*tensors)[role], x)) continue;
      if (!is_shown(x)) return false;
      any = true;
    }
    return any;
  }

  // Any of the three: the others may be wrong.
  bool shows_projected(const Stages& stages) const {
    return std::ranges::any_of(stages.projected,
                               [&](const Tensor& x) { return is_shown(x); });
  }

  // Queries that were scaled before something else was done to them.
  bool shows_scaled_queries(Stages stages) const {
    const auto width = static_cast<double>(stages.heads[0].size(-1));
    stages.heads[0] = stages.heads[0] / std::sqrt(width);
    return shows_heads(call_, stages, 0, precision_);
  }

  // Queries or keys: the others may be left as they were, by fault.
  bool shows_turn(const Stages& before) const {
    return shown_turn(call_, before.heads[0]).has_value() ||
           shown_turn(call_, before.heads[1]).has_value();
  }

  // Beside queries and keys, which by fault may be what values should be.
  bool shows_turn_of_values(Recipe without) const {
    without.rotary = Rotary::kNone;
    const auto before = simulate(call_, without);
    return before && std::ranges::all_of(before->heads, [&](const Tensor& x) {
             return shown_turn(call_, x).has_value();
           });
  }

  // Once for each query head; of all groups, or of the first alone, by fault.
  bool shows_repeated(const Stages& stages, const Tensor& heads) const {
    const int64_t count = call_.sizes.heads;
    if (heads.size(1) == count) return false;
    return std::ranges::any_of(
        std::array{expand_groups(heads, call_.sizes, repeat_groups),
                   heads.slice(1, 0, 1).expand({-1, count, -1, -1})},
        [&](const Tensor& x) { return shows(call_, stages, x, precision_); });
  }

  // Keys may have been transposed as they were cut.
  bool shows_heads_of(const Stages& before, const Stages& after) const {
    bool any = false;
    for (int role = 0; role < 3; ++role) {
      const Tensor& x = after.heads[role];
      if (is_same(before.heads[role], x)) continue;
      const bool shown = shows_heads(call_, after, role, precision_) ||
                         (any && shows(call_, after, x, precision_)) ||
                         (any && shows_repeated(after, x)) ||
                         (role == 0 && shows_scaled_queries(after));
      if (!shown) return false;
      any = true;
    }
    return any;
  }

  // Whether it is causal by itself is not known yet.
  template <typename Holds>
  static bool causal_or_not(Recipe recipe, Holds holds) {
    return std::ranges::any_of(std::array{false, true}, [&](bool causal) {
      recipe.causal_by_itself = causal;
      return holds(recipe);
    });
  }

  // Heads cut in one order and merged in another are no convention.
  bool shows_merge(Recipe cut, const Recipe& merged) const {
    cut.merge = merged.merge;
    return causal_or_not(cut, [&](const Recipe& recipe) {
      const auto stages = simulate(call_, recipe);
      return stages && shows_merged(call_, *stages, precision_);
    });
  }

  // With a bias that is added first, the scores are never scaled alone.
  bool is_biased(Recipe recipe) const {
    recipe.position_bias = PositionBias::kShown;
    return call_.sizes.batch > 1 && is_possible(recipe);
  }

  // Models with ALiBi scale their scores.
  bool has_line(Recipe recipe) const {
    using enum PositionBias;
    for (const auto kind : {kFalling, kRising, kLateKeys, kEarlyKeys}) {
      recipe.position_bias = kind;
      if (is_possible(recipe)) return true;
    }
    return false;
  }

  bool is_possible(const Recipe& recipe) const {
    return causal_or_not(recipe, [&](const Recipe& one) {
      return simulate(call_, one).has_value();
    });
  }

  // Beside scores that are scaled as they should be, or wrongly.
  bool shows_unknown_bias(const Recipe& with) const {
    return scaled_in_some_way(with, [&](auto& x) { return is_possible(x); });
  }

  // A cap, or a line: no other numbers look like one. So beside heads that are
  // wrong, too; these are many ways, tried only where the trace shows a pair.
  bool shows_bias(const Recipe& with) const {
    Recipe exchanged = with;
    exchanged.batch_exchanged = true;
    return shows_unknown_bias(with) ||
           (call_.sizes.batch > 1 && is_possible(exchanged)) ||
           (shows_added_line_or_cap(call_) &&
            in_some_way(kHeadFaults, with, [&](const Recipe& recipe) {
              return is_possible(recipe);
            }));
  }

  // Whether the trace shows a tensor of a recipe, which changes another than
  // the recipe had before `undo`, however it is causal.
  template <typename Undo>
  bool shows_change(const Recipe& recipe, Undo undo, Tensor Stages::* changed,
                    Tensor Stages::* shown) const {
    return causal_or_not(recipe, [&](const Recipe& after) {
      Recipe before = after;
      undo(before);
      const auto x = simulate(call_, before), y = simulate(call_, after);
      return x && y && !is_same((*x).*changed, (*y).*changed) &&
             shows(call_, *y, (*y).*shown, precision_);
    });
  }

  // Heads that are mixed: other scores, or another context.
  bool shows_mixed(const Recipe& without, const Recipe& with) const {
    const bool in_scores = with.mixed_scores != without.mixed_scores;
    const auto seen = in_scores ? &Stages::scores : &Stages::context;
    const auto undo = [&](Recipe& before) {
      before.mixed_scores = without.mixed_scores;
      before.mixed_weights = without.mixed_weights;
    };
    const auto holds = [&](const Recipe& recipe) {
      return shows_change(recipe, undo, seen, seen);
    };
    return scaled_in_some_way(with, holds) ||
           (!in_scores && in_some_way(kWeightFaults, with, holds));
  }

  // Beside a learned number scores may be scaled wrongly; else that were too
  // many guesses.
  bool shows_weights(const Recipe& without, const Recipe& with) const {
    const auto undo = [&](Recipe& before) {
      before.sink = without.sink;
      before.sink_weight = without.sink_weight;
    };
    const auto holds = [&](const Recipe& recipe) {
      return shows_change(recipe, undo, &Stages::weights, &Stages::context);
    };
    if (with.sink == Sink::kZero) return holds(with);
    Recipe first = with, last = with;
    first.sink_weight = SinkWeight::kFirst;
    last.sink_weight = SinkWeight::kLast;
    return scaled_in_some_way(with, holds) || holds(first) || holds(last);
  }

  template <typename Condition>
  static bool scaled_in_some_way(const Recipe& recipe, Condition holds) {
    return holds(recipe) || in_some_way(kScaleFaults, recipe, holds);
  }

  template <typename Condition>
  static bool in_some_way(const std::vector<Fault>& faults,
                          const Recipe& recipe, Condition holds) {
    return std::ranges::any_of(faults, [&](const Fault& fault) {
      return std::ranges::any_of(fault.ways, [&](const Way& way) {
        Recipe changed = recipe;
        way.apply(changed);
        return holds(changed);
      });
    });
  }

  // Cut in another order, the same heads stand in other places: queries have to
  // meet their keys, scaled or not, or all comes out as it should.
  bool shows_products(const Recipe& recipe, const Stages& stages) const {
    const Tensor products =
        matrix_product(stages.heads[0], stages.heads[1].transpose(-2, -1));
    return shows(call_, stages, products, precision_) ||
           shows(call_, stages, stages.scores, precision_) ||
           errors(call_, recipe, precision_).fit();
  }

  // The same of heads that are normed, turned, or both.
  bool shows_products_of_done(const Recipe& with) const {
    std::vector<Recipe> recipes = {with};
    for (const Convention& convention : all_conventions()) {
      if (convention.sign != Sign::kHeads || !convention.concerns(call_)) {
        continue;
      }
      for (size_t i = 0, known = recipes.size(); i < known; ++i) {
        Recipe recipe = recipes[i];
        convention.apply(recipe);
        if (!is_done_to_heads(recipes[i], recipe)) continue;
        const auto stages = simulate(call_, recipe);
        if (!stages) continue;
        if (shows_products(recipe, *stages)) return true;
        recipes.push_back(recipe);
      }
    }
    return false;
  }

  // Some tensor of the trace and the same behind the norm.
  bool shows_context_norm(const Recipe& without, const Recipe& with) const {
    const Sizes& n = call_.sizes;
    const bool of_merged = with.merged_norm != without.merged_norm;
    const NormKind kind = of_merged ? with.merged_norm : with.context_norm;
    const int64_t width = n.value_width * (of_merged ? n.heads : 1);
    const auto [heads, normed] = heads_of_norm(without);
    for (const Tensor& tensor : call_.trace) {
      if (tensor.size(-1) != width ||
          tensor.numel() != n.batch * n.queries * n.heads * n.value_width) {
        continue;
      }
      const Tensor x = tensor.to(at::kDouble);
      const Tensor y = normalised(call_, kind, NormPlace::kContext, 2, x);
      if (is_same(x, y)) continue;  // as of zeros
      // That of the output, or of the input, is another.
      const bool of_end = is_numbers_of(y, call_.out) ||
                          (call_.out.sizes() == call_.inputs[0].sizes() &&
                           is_numbers_of(y, call_.out - call_.inputs[0]));
      // What has unit length on the way is normed by factors behind it, too,
      // and what is normed and scaled by the same norm again.
      const bool of_normed = std::ranges::any_of(
          normed, [&](const Tensor& h) { return is_numbers_of(y, h); });
      const bool of_heads = std::ranges::any_of(heads, [&](const Tensor& h) {
        return is_before_norm(x, h) ||
               (h.size(-1) == width &&
                is_numbers_of(
                    y, normalised(call_, kind, NormPlace::kContext, 2, h)));
      });
      if (is_shown(y) && !of_end && !of_heads && !of_normed &&
          !is_of_input(x, y, kind)) {
        return true;
      }
    }
    return false;
  }

  // A norm that is written out centres what it gets first.
  bool is_before_norm(const Tensor& x, const Tensor& given) const {
    return is_numbers_of(x, given) ||
           is_numbers_of(x, given - given.mean(-1, /*keepdim=*/true));
  }

  // Whether x is an input, or y what the norm makes of one: its gain may follow
  // in a step of its own.
  bool is_of_input(const Tensor& x, const Tensor& y, NormKind kind) const {
    for (int role = 0; role < 3; ++role) {
      const Tensor& input = call_.inputs[role];
      if (is_before_norm(x, input)) return true;
      if (x.size(-1) == input.size(-1) &&
          is_numbers_of(
              y, normalised(call_, kind, NormPlace::kInput, role, input)))
        return true;
    }
    return false;
  }

  // Queries and keys that meet a norm of their own, turned or not: before it,
  // and behind it.
  std::array<std::vector<Tensor>, 2> heads_of_norm(Recipe recipe) const {
    std::array<std::vector<Tensor>, 2> found;
    const NormKind kind = recipe.head_norm;
    if (kind == NormKind::kNone) return found;
    const std::vector<Cut> cuts = other_cuts(call_);
    std::vector<Recipe> recipes(cuts.size() + 1, recipe);
    for (size_t i = 0; i < cuts.size(); ++i) cuts[i](recipes[i]);
    for (Recipe& one : recipes) {
      for (const Rotary turn : {recipe.rotary, Rotary::kNone}) {
        one.rotary = turn;
        for (const bool is_normed : {false, true}) {
          one.head_norm = is_normed ? kind : NormKind::kNone;
          const auto stages = simulate(call_, one);
          if (!stages) continue;
          std::vector<Tensor>& some = found[is_normed];
          for (int role = 0; role < 2 && one.norm_is_wide; ++role)
            some.push_back(stages->projected[role]);
          const auto& [query, key, value] = stages->heads;
          // Keys may be repeated before, for the queries that share them.
          const Tensor all = expand_groups(key, call_.sizes, repeat_groups);
          some.insert(some.end(), {query, key, all});
        }
      }
    }
    return found;
  }

  // What is added, and what a norm makes, show at the end whatever came before.
  bool shows_end(const Recipe& with) const {
    const Tensor& out = call_.out;
    if (!out.isfinite().any().item<bool>()) return false;
    if (with.residual == Residual::kSetBlock) return shows_set_block(with);
    if (with.residual == Residual::kThenRelu) return shows_relu_of_sum();
    const Tensor added = what_is_added(with);
    const bool adds = with.residual != Residual::kNone;
    if (adds && added.sizes() != out.sizes()) return false;
    if (with.output_norm == NormKind::kNone) {
      const Tensor behind = adds ? out - added : out;
      return is_shown(with.output_gain ? behind / output_gain(call_) : behind);
    }
    if (with.residual == Residual::kAfterNorm) {
      return is_shown(out - added) && is_normed(out - added, with, {});
    }
    return is_normed(out, with, adds ? added : Tensor());
  }

  Tensor what_is_added(const Recipe& with) const {
    if (with.residual == Residual::kValues)
      return project_inputs(call_, with, inputs_of(call_, with))[2];
    return with.residual == Residual::kNormedInput ? inputs_of(call_, with)[0]
                                                   : call_.inputs[0];
  }

  // Some tensor O of the trace from which O + relu(O·W_o) follows.
  bool shows_set_block(const Recipe& with) const {
    return std::ranges::any_of(call_.trace, [&](const Tensor& tensor) {
      if (tensor.sizes() != call_.out.sizes()) return false;
      const Tensor x = tensor.to(at::kDouble);
      const Tensor projected = project(call_, with, x, 3);
      return projected.sizes() == x.sizes() &&
             projected.gt(0).any().item<bool>() &&
             is_same(call_.out, x + projected.relu());
    });
  }

  // Some tensor of the trace whose ReLU comes out, which is a sum.
  bool shows_relu_of_sum() const {
    return std::ranges::any_of(call_.trace, [&](const Tensor& tensor) {
      if (tensor.sizes() != call_.out.sizes()) return false;
      const Tensor x = tensor.to(at::kDouble);
      return x.lt(0).any().item<bool>() && is_same(call_.out, x.relu()) &&
             is_shown(x - call_.inputs[0]);
    });
  }

  // Whether `wanted` is the norm of a tensor seen, a sum with `added` if any.
  bool is_normed(const Tensor& wanted, const Recipe& with,
                 const Tensor& added) const {
    const bool of_groups = with.output_norm == NormKind::kGroup;
    return std::ranges::any_of(call_.trace, [&](const Tensor& tensor) {
      if (tensor.numel() != wanted.numel()) return false;
      Tensor x = tensor.to(at::kDouble);
      // (B, E, …), as an image has its channels.
      if (of_groups && x.dim() > 2 && x.size(1) == wanted.size(-1))
        x = x.flatten(2).transpose(1, 2);
      if (x.size(-1) != wanted.size(-1) || (of_groups && x.dim() != 3))
        return false;
      const Tensor y =
          normalised(call_, with.output_norm, NormPlace::kOutput, 2, x);
      return is_numbers_of(y, wanted) &&
             (!added.defined() || is_sum_with(x, added));
    });
  }

  bool is_sum_with(const Tensor& sum, const Tensor& added) const {
    if (sum.sizes() == added.sizes() && is_shown(sum - added)) return true;
    // The sequence may come first, or there may be no batch.
    const Tensor other = added.transpose(0, 1);
    if (sum.sizes() == other.sizes()) return is_shown(sum - other);
    return sum.numel() == added.numel() && sum.size(-1) == added.size(-1) &&
           is_shown(sum - added.reshape(sum.sizes()));
  }

  bool is_numbers_of(const Tensor& x, const Tensor& y) const {
    if (x.numel() != y.numel()) return false;
    if (largest_difference(x.max(), y.max()) > allowed(y)) return false;
    const auto sorted = [](const Tensor& t) {
      return std::get<0>(t.flatten().sort());
    };
    return largest_difference(sorted(x), sorted(y)) <= allowed(y);
  }

  const ObservedCall& call_;
  const at::ScalarType precision_;
};

}  // namespace

bool shows_convention(const ObservedCall& call, Sign sign,
                      const Recipe& without, const Recipe& with) {
  return Signs(call).show(sign, without, with);
}

bool shows_keys(const ObservedCall& call, const Recipe& recipe) {
  return Signs(call).show_keys(recipe);
}

bool shows_cut(const ObservedCall& call, const Recipe& without,
               const Recipe& with) {
  return Signs(call).show_cut(without, with);
}

bool shows_exchanged(const ObservedCall& call, const Recipe& without,
                     const Recipe& with) {
  return Signs(call).show_exchanged(without, with);
}

}  // namespace multihead::diagnosis
