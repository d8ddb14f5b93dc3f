// SPDX-License-Identifier: MIT
//
// Norms, residual connections, rotary positions and the like are many, and any
// of them may stand beside any other: too many sets to try. But code that has
// one computes a tensor that no other code would, so the trace tells, one after
// the other, in the order in which the data meet them.
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "diagnosis/search/cuts.h"
#include "diagnosis/search/search.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// A norm or a rotation of heads.
bool is_done_to_heads(const Recipe& without, const Recipe& with) {
  return with.head_norm != without.head_norm || with.rotary != without.rotary;
}

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
    if (sign == Sign::kWeights) return shows_weights(without, with);
    const auto before = simulate(call_, without);
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
                 shows(call_, *before, before->scores, precision_));
    }
  } catch (const Impossible&) {
    return false;  // as of a norm over groups of features where there are none
  }

  bool show_keys(const Recipe& recipe) const {
    const auto stages = simulate(call_, recipe);
    return stages && is_shown(stages->projected[1]);
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

  // Beside queries, which by fault may be what values should be.
  bool shows_turn_of_values(Recipe without) const {
    without.rotary = Rotary::kNone;
    const auto before = simulate(call_, without);
    return before && shown_turn(call_, before->heads[2]).has_value() &&
           shown_turn(call_, before->heads[0]).has_value();
  }

  bool shows_repeated(const Stages& stages, const Tensor& heads) const {
    if (heads.size(1) == call_.sizes.heads) return false;
    const Tensor all = expand_groups(heads, call_.sizes, repeat_groups);
    return shows(call_, stages, all, precision_);
  }

  // Keys may have been transposed as they were cut, or stand there once for
  // each query head.
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

  // Heads cut in one order and merged in another are no convention. Whether it
  // is causal by itself is not known yet.
  bool shows_merge(Recipe cut, const Recipe& merged) const {
    cut.merge = merged.merge;
    return std::ranges::any_of(std::array{false, true}, [&](bool causal) {
      cut.causal_by_itself = causal;
      const auto stages = simulate(call_, cut);
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

  // Whether it is causal by itself is not known yet.
  bool is_possible(Recipe recipe) const {
    return std::ranges::any_of(std::array{false, true}, [&](bool causal) {
      recipe.causal_by_itself = causal;
      return simulate(call_, recipe).has_value();
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

  // Whether it is causal by itself is not known yet. Beside a learned number
  // scores may be scaled wrongly; else that were too many guesses.
  bool shows_weights(const Recipe& without, const Recipe& with) const {
    const auto holds = [&](Recipe after) {
      Recipe before = after;
      before.sink = without.sink;
      before.sink_weight = without.sink_weight;
      return std::ranges::any_of(std::array{false, true}, [&](bool causal) {
        before.causal_by_itself = after.causal_by_itself = causal;
        const auto x = simulate(call_, before), y = simulate(call_, after);
        return x && y && !is_same(x->weights, y->weights) &&
               shows(call_, *y, y->context, precision_);
      });
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
    const std::vector<Tensor> heads = heads_to_norm(without);
    for (const int64_t width : {n.value_width, n.value_width * n.heads}) {
      for (const Tensor& tensor : call_.trace) {
        if (tensor.size(-1) != width ||
            tensor.numel() != n.batch * n.queries * n.heads * n.value_width) {
          continue;
        }
        const Tensor x = tensor.to(at::kDouble);
        const Tensor y =
            normalised(call_, with.context_norm, NormPlace::kContext, 2, x);
        if (is_same(x, y)) continue;  // as of zeros
        // That of the output, or of the input, is another.
        const bool of_end = is_numbers_of(y, call_.out) ||
                            (call_.out.sizes() == call_.inputs[0].sizes() &&
                             is_numbers_of(y, call_.out - call_.inputs[0]));
        // What has unit length on the way is normed by factors behind it, too.
        const bool of_heads = std::ranges::any_of(heads, [&](const Tensor& h) {
          return is_numbers_of(x, h) ||
                 (h.size(-1) == width &&
                  is_numbers_of(y, normalised(call_, with.context_norm,
                                              NormPlace::kContext, 2, h)));
        });
        if (is_shown(y) && !of_end && !of_heads &&
            !is_numbers_of(x, call_.inputs[0])) {
          return true;
        }
      }
    }
    return false;
  }

  // Queries and keys that meet a norm of their own, turned or not.
  std::vector<Tensor> heads_to_norm(Recipe recipe) const {
    std::vector<Tensor> found;
    if (recipe.head_norm == NormKind::kNone) return found;
    recipe.head_norm = NormKind::kNone;
    const std::vector<Cut> cuts = other_cuts(call_);
    std::vector<Recipe> recipes(cuts.size() + 1, recipe);
    for (size_t i = 0; i < cuts.size(); ++i) cuts[i](recipes[i]);
    for (Recipe& one : recipes) {
      for (const Rotary turn : {recipe.rotary, Rotary::kNone}) {
        one.rotary = turn;
        const auto stages = simulate(call_, one);
        if (!stages) continue;
        const auto& [query, key, value] = stages->heads;
        // Keys may be repeated before, for the queries that share them.
        const Tensor all = expand_groups(key, call_.sizes, repeat_groups);
        for (const Tensor& x : {query, key, all}) found.push_back(x);
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

bool is_of_end(const Convention& convention) {
  return convention.sign == Sign::kNorm || convention.sign == Sign::kSum;
}

bool is_of_bias(const Convention& convention) {
  Recipe recipe;
  convention.apply(recipe);
  return recipe.position_bias != PositionBias::kNone;
}

// Two of a kind: what one has decided, the other would decide again.
bool excludes(const Convention& a, const Convention& b) {
  return a.name == b.name || (is_of_end(a) && is_of_end(b)) ||
         (is_of_bias(a) && is_of_bias(b)) ||
         (a.sign == b.sign && a.sign == Sign::kInputs) ||
         (a.name.starts_with("fused_") && b.name.starts_with("fused_"));
}

// The same done to heads that are cut otherwise.
bool shows_of_other_heads(const ObservedCall& call, const Signs& signs,
                          Recipe without, Recipe with) {
  return signs.show_exchanged(without, with) ||
         std::ranges::any_of(other_cuts(call), [&](Cut cut) {
           Recipe before = without, after = with;
           cut(before), cut(after);
           return signs.show(Sign::kHeads, before, after);
         });
}

// A norm with gains of its own is another one before heads are turned.
void look_for_norm_after_turn(const ObservedCall& call, Conventions& found) {
  const Recipe without = with(found);
  if (without.head_norm != NormKind::kNone) return;
  const auto last = std::ranges::find(all_conventions(), "norm_after_turn",
                                      &Convention::name);
  const Signs signs(call);
  for (const Convention& convention : all_conventions()) {
    Recipe recipe = without;
    if (!convention.concerns(call)) continue;
    convention.apply(recipe);
    if (recipe.head_norm == NormKind::kNone) continue;
    last->apply(recipe);
    if (!signs.show(Sign::kHeads, without, recipe)) continue;
    found.insert(found.end(), {&convention, &*last});
    return;
  }
}

// What is normed beside the query input, a call that gives a context does not
// tell.
void look_at_what_is_normed(std::span<const ObservedCall> calls,
                            Conventions& found) {
  const Recipe only_query = with(found);
  if (only_query.normed_inputs != NormedInputs::kQuery) return;
  const auto alone = std::ranges::find_if(calls, [](const ObservedCall& call) {
    return !call.trace.empty() && !call.is_given_keys();
  });
  if (alone == calls.end()) return;
  const Signs signs(*alone);
  for (const Convention*& convention : found) {
    for (const Convention& other : all_conventions()) {
      Recipe recipe = only_query;
      if (other.name == convention->name) other.apply(recipe);
      if (recipe.normed_inputs == NormedInputs::kWithItself &&
          recipe.input_norm == only_query.input_norm &&
          signs.show_keys(recipe) && !signs.show_keys(only_query)) {
        convention = &other;
        return;
      }
    }
  }
}

// An order of a fused projection that heads do not show by themselves.
bool may_cut(const Convention& cut, const ObservedCall& call,
             const Conventions& known) {
  return cut.sign == Sign::kNone && cut.concerns(call) &&
         with({&cut}).fused != Recipe().fused &&
         std::ranges::none_of(
             known, [&](auto* other) { return excludes(*other, cut); });
}

}  // namespace

Conventions certain(std::span<const ObservedCall> calls) {
  Conventions found;
  for (const Convention& convention : all_conventions()) {
    const bool shown = std::ranges::any_of(calls, [&](const auto& call) {
      return convention.concern(call) == Concern::kShown;
    });
    if (shown) found.push_back(&convention);
  }
  return found;
}

Conventions evident(std::span<const ObservedCall> calls) {
  Conventions found = certain(calls);
  const auto shown = std::ranges::find_if(
      calls, [](const ObservedCall& call) { return !call.trace.empty(); });
  const auto look_for = [&](const Convention& convention) {
    if (convention.sign == Sign::kNone || shown == calls.end() ||
        !convention.concerns(*shown)) {
      return;
    }
    const Recipe without = with(found);
    Recipe recipe = without;
    convention.apply(recipe);
    const bool taken = std::ranges::any_of(found, [&](const Convention* other) {
      return excludes(*other, convention);
    });
    if (taken) return;
    const Signs signs(*shown);
    if (signs.show(convention.sign, without, recipe) ||
        (is_done_to_heads(without, recipe) &&
         shows_of_other_heads(*shown, signs, without, recipe))) {
      found.push_back(&convention);
    }
  };
  const auto look_for_all = [&](auto wanted) {
    for (const Convention& convention : all_conventions()) {
      const bool is_new = std::ranges::find(found, &convention) == found.end();
      if (is_new && wanted(convention.sign)) look_for(convention);
    }
  };
  look_for_all([](Sign sign) { return sign != Sign::kContext; });
  // A bias shows only beside heads as they are cut.
  for (const Convention& cut : all_conventions()) {
    if (shown == calls.end() || !may_cut(cut, *shown, found)) continue;
    found.push_back(&cut);
    const size_t known = found.size();
    look_for_all([](Sign sign) { return sign == Sign::kBias; });
    if (found.size() > known) break;
    found.pop_back();
  }
  look_at_what_is_normed(calls, found);
  // What is done to heads after they are turned shows once the turn is known.
  if (with(found).rotary != Rotary::kNone) {
    look_for_all([](Sign sign) { return sign == Sign::kHeads; });
    if (shown != calls.end()) look_for_norm_after_turn(*shown, found);
  }
  // A norm of anything but of heads.
  look_for_all([](Sign sign) { return sign == Sign::kContext; });
  if (shown != calls.end()) {
    for (const ObservedCall& call : calls) {
      call.cap_elsewhere = shown->cap;
      call.last_followed = {};
    }
  }
  return found;
}

}  // namespace multihead::diagnosis
