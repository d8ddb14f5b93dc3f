// SPDX-License-Identifier: MIT
//
// Norms, residual connections, rotary positions and the like are many, and any
// of them may stand beside any other: too many sets to try. But code that has
// one computes a tensor that no other code would, so the trace tells, one after
// the other, in the order in which the data meet them.
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "diagnosis/search/cuts.h"
#include "diagnosis/search/search.h"
#include "diagnosis/search/signs.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

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

// The other cuts whose heads the trace shows, and whether it shows those of
// items and positions exchanged. What is done to heads that it does not show,
// it does not show either; without this, nearly all of evident() went into
// trying each norm and each turn on 47 cuts.
class OtherCuts {
 public:
  explicit OtherCuts(const ObservedCall& call) : call_(call) {}

  // Whether what leads from one to the other is done to heads of another cut.
  bool show(const Recipe& without, const Recipe& with) {
    look_for(without);
    return (exchanged_ && shows_exchanged(call_, without, with)) ||
           std::ranges::any_of(cuts_, [&](Cut cut) {
             return shows_convention(call_, Sign::kHeads, changed(without, cut),
                                     changed(with, cut));
           });
  }

 private:
  static Recipe changed(Recipe recipe, Cut cut) {
    cut(recipe);
    return recipe;
  }

  void look_for(const Recipe& recipe) {
    if (recipe_ == recipe) return;
    recipe_ = recipe;
    cuts_ = other_cuts(call_);
    std::erase_if(cuts_, [&](Cut cut) {
      return !shows_cut(call_, recipe, changed(recipe, cut));
    });
    exchanged_ =
        shows_cut(call_, recipe,
                  changed(recipe, [](Recipe& r) { r.batch_exchanged = true; }));
  }

  const ObservedCall& call_;
  std::optional<Recipe> recipe_;  // of which the following is known
  std::vector<Cut> cuts_;
  bool exchanged_ = false;
};

// A norm with gains of its own is another one before heads are turned.
void look_for_norm_after_turn(const ObservedCall& call, Conventions& found) {
  const Recipe without = with(found);
  if (without.head_norm != NormKind::kNone) return;
  const auto last = std::ranges::find(all_conventions(), "norm_after_turn",
                                      &Convention::name);
  for (const Convention& convention : all_conventions()) {
    Recipe recipe = without;
    if (!convention.concerns(call)) continue;
    convention.apply(recipe);
    if (recipe.head_norm == NormKind::kNone) continue;
    last->apply(recipe);
    if (!shows_convention(call, Sign::kHeads, without, recipe)) continue;
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
  for (const Convention*& convention : found) {
    for (const Convention& other : all_conventions()) {
      Recipe recipe = only_query;
      if (other.name == convention->name) other.apply(recipe);
      if (recipe.normed_inputs == NormedInputs::kWithItself &&
          recipe.input_norm == only_query.input_norm &&
          shows_keys(*alone, recipe) && !shows_keys(*alone, only_query)) {
        convention = &other;
        return;
      }
    }
  }
}

// What one call shows of a cap holds for all.
void hand_on_cap(std::span<const ObservedCall> calls,
                 const ObservedCall& shown) {
  for (const ObservedCall& call : calls) {
    call.cap_elsewhere = shown.cap;
    call.last_followed = {};
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
    if (std::ranges::any_of(calls, [&](const auto& call) {
          return convention.concern(call) == Concern::kShown;
        })) {
      found.push_back(&convention);
    }
  }
  return found;
}

Conventions evident(std::span<const ObservedCall> calls) {
  Conventions found = certain(calls);
  const auto shown = std::ranges::find_if(
      calls, [](const auto& call) { return !call.trace.empty(); });
  std::optional<OtherCuts> others;
  if (shown != calls.end()) others.emplace(*shown);
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
    if (shows_convention(*shown, convention.sign, without, recipe) ||
        (is_done_to_heads(without, recipe) && others->show(without, recipe))) {
      found.push_back(&convention);
    }
  };
  const auto look_for_all = [&](auto wanted) {
    for (const Convention& convention : all_conventions()) {
      const bool is_new = std::ranges::find(found, &convention) == found.end();
      if (is_new && wanted(convention.sign)) look_for(convention);
    }
  };
  const auto is_before_context = [](Sign sign) {
    return sign != Sign::kContext;
  };
  look_for_all(is_before_context);
  // How matrices lie shows once the norm of what they project is known, and
  // the rest once that is.
  if (const size_t known = found.size();
      with(found).input_norm != NormKind::kNone) {
    look_for_all([](Sign sign) { return sign == Sign::kProjected; });
    if (found.size() > known) look_for_all(is_before_context);
  }
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
  if (shown != calls.end()) hand_on_cap(calls, *shown);
  return found;
}

}  // namespace multihead::diagnosis
