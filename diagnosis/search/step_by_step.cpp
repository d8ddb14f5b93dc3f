// SPDX-License-Identifier: MIT
//
// Three faults at once are far too many to try all of. But each may show by
// itself. A mask used wrongly shows only in calls with a mask, and where the
// trace holds the scores of code with two faults, these two give scores that
// stand there, whatever its softmax does then. So faults are found one by one:
// what a fault adds must explain one call more, or make one step more of the
// first call that is not explained stand in its trace.
#include <algorithm>
#include <array>

#include "diagnosis/search/search.h"

namespace multihead::diagnosis {
namespace {

// As many readings of what was given as the search tries together.
constexpr size_t kMostReadings = 3;

// Of what explains equally much, so many are followed up.
constexpr size_t kWidth = 8;

// From heads to what the heads return, merged.
constexpr size_t kSteps = 10;

const at::Tensor& step_of(const Stages& stages, size_t step) {
  constexpr at::Tensor Stages::* kWhole[] = {
      &Stages::products, &Stages::scores,  &Stages::masked_scores,
      &Stages::weights,  &Stages::dropped, &Stages::context,
      &Stages::merged};
  return step < 3 ? stages.heads[step] : stages.*kWhole[step - 3];
}

bool shows_step(const ObservedCall& call, const Stages& stages, size_t step,
                at::ScalarType precision) {
  if (step < 3) {
    return call.has_weights &&
           shows_heads(call, stages, static_cast<int>(step), precision);
  }
  return step == kSteps - 1
             ? shows_merged(call, stages, precision)
             : shows(call, stages, step_of(stages, step), precision);
}

struct State {
  Conventions conventions;
  Changes faults;
  Recipe recipe;
  size_t failing = 0;                 ///< the first call that is not explained
  std::optional<Stages> stages = {};  ///< of that call
  std::array<bool, kSteps> shown = {};  ///< in its trace

  // A step that does nothing is shown wherever the one before it is.
  bool tells(size_t step) const {
    return shown[step] &&
           (step < 4 || largest_difference(step_of(*stages, step),
                                           step_of(*stages, step - 1)) > 0);
  }

  auto progress() const {
    size_t steps = 0;
    for (size_t step = 0; step < kSteps; ++step) steps += tells(step);
    return std::pair(failing, steps);
  }
};

class StepByStep {
 public:
  StepByStep(std::span<const ObservedCall> calls, const Conventions& settled,
             bool in_float, double effort)
      : calls_(calls),
        settled_(settled),
        picks_(picks_for(calls)),
        in_float_(in_float),
        effort_(effort) {
    for (const Convention& convention : all_conventions()) {
      if (convention.name.starts_with("causal_"))
        causal_.push_back(&convention);
    }
  }

  std::vector<Explanation> explanations() {
    std::vector<State> states;
    take(settled_, {}, nullptr, states);
    if (states.empty() || states.front().failing == calls_.size()) return {};
    for (size_t step = 0; step < kMostSteps + kMostReadings; ++step) {
      std::vector<State> next;
      for (const State& state : states) expand(state, next);
      std::erase_if(next, [&](const State& state) {
        if (state.failing < calls_.size()) return false;
        add(state);
        return true;
      });
      if (!found_.empty() || next.empty()) break;
      std::ranges::stable_sort(next, std::ranges::greater(), &State::progress);
      if (next.size() > kWidth) next.resize(kWidth);
      states = std::move(next);
    }
    add_others();
    std::ranges::stable_sort(found_, {}, [&](const Explanation& one) {
      return places_of(one.faults);
    });
    return std::move(found_);
  }

 private:
  void expand(const State& state, std::vector<State>& next) {
    const ObservedCall& call = calls_[state.failing];
    for (const Convention& convention : all_conventions()) {
      const bool is_new = std::ranges::find(state.conventions, &convention) ==
                          state.conventions.end();
      if (!is_new || convention.is_structure() ||
          state.conventions.size() - settled_.size() == kMostReadings ||
          convention.concern(call) < Concern::kMaybe) {
        continue;
      }
      Conventions more = state.conventions;
      more.push_back(&convention);
      if (!is_redundant(more)) take(more, state.faults, &state, next);
    }
    if (state.faults.size() == kMostSteps) return;
    for (const Pick& pick : picks_) {
      const bool is_new = std::ranges::find(state.faults, pick.fault,
                                            &Pick::fault) == state.faults.end();
      if (!is_new) continue;
      Changes more = state.faults;
      more.push_back(pick);
      take(state.conventions, more, &state, next);
      // A mask that the code makes itself shows only with what is wrong with
      // it.
      if (pick.fault->stage != Stage::kMaskedScores) continue;
      for (const Convention* causal : causal_) {
        Conventions also = state.conventions;
        also.push_back(causal);
        const bool is_other = std::ranges::find(state.conventions, causal) ==
                                  state.conventions.end() &&
                              causal->concern(call) >= Concern::kMaybe &&
                              !is_redundant(also);
        if (is_other) take(also, more, &state, next);
      }
    }
  }

  // before: what it must improve on; none: it is where the search starts.
  void take(const Conventions& conventions, const Changes& faults,
            const State* before, std::vector<State>& next) {
    const std::optional<Recipe> recipe = changed(with(conventions), faults);
    if (!recipe || effort_ <= 0 ||
        std::ranges::find(next, *recipe, &State::recipe) != next.end()) {
      return;
    }
    if (before && !improves_on(*before, *recipe)) return;
    State state{conventions, faults, *recipe, first_failure(*recipe)};
    if (before && state.failing < before->failing) return;
    if (state.failing < calls_.size()) {
      const ObservedCall& call = calls_[state.failing];
      state.stages = simulate(call, *recipe);
      for (size_t step = 0; state.stages && step < kSteps; ++step)
        state.shown[step] =
            shows_step(call, *state.stages, step, precision(call));
    }
    next.push_back(std::move(state));
  }

  // Mostly it does not, which one call tells: a step that its trace shows has
  // become another, or no other step has become one that it shows.
  bool improves_on(const State& before, const Recipe& recipe) {
    const ObservedCall& call = calls_[before.failing];
    effort_ -= 2 * cost(call);
    const std::optional<Stages> stages = simulate(call, recipe);
    if (!stages) return false;
    bool keeps = true, gains = false;
    for (size_t step = 0; keeps && step < kSteps; ++step) {
      const at::Tensor& now = step_of(*stages, step);
      if (before.stages &&
          largest_difference(now, step_of(*before.stages, step)) == 0) {
        continue;
      }
      keeps = !before.tells(step);
      gains = gains || (keeps && !before.shown[step] &&
                        shows_step(call, *stages, step, precision(call)));
    }
    return (keeps && gains) || fits(call, recipe);
  }

  void add(const State& state) {
    if (state.faults.empty() || !each_is_needed(state)) return;
    const Recipe start = with(state.conventions);
    if (improvement(calls_, start, state.recipe, state.faults.size(),
                    in_float_) == Improvement::kEnough) {
      found_.push_back(
          {state.conventions, state.faults, state.recipe, in_float_});
    }
  }

  // Where the catalogue has them, the last first: likelier ones come earlier.
  std::vector<std::ptrdiff_t> places_of(const Changes& faults) const {
    std::vector<std::ptrdiff_t> places;
    for (const Pick& pick : faults)
      places.push_back(std::ranges::find(picks_, pick.way, &Pick::way) -
                       picks_.begin());
    std::ranges::sort(places, std::ranges::greater());
    return places;
  }

  // What fits as well with one of the faults exchanged.
  void add_others() {
    if (found_.empty()) return;
    const Explanation first = found_.front();
    for (size_t i = 0; i < first.faults.size(); ++i) {
      for (const Pick& pick : picks_) {
        Changes faults = first.faults;
        if (pick.way == faults[i].way) continue;
        faults[i] = pick;
        const auto recipe = changed(with(first.conventions), faults);
        if (!recipe || effort_ <= 0 || first_failure(*recipe) < calls_.size())
          continue;
        add({first.conventions, faults, *recipe, calls_.size()});
      }
    }
  }

  // Faults, and readings that they do not only take back.
  bool each_is_needed(const State& state) {
    const auto explains = [&](const Conventions& conventions,
                              const Changes& faults) {
      const auto recipe = changed(with(conventions), faults);
      return recipe && first_failure(*recipe) == calls_.size();
    };
    for (size_t i = 0; i < state.faults.size(); ++i) {
      Changes others = state.faults;
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
      if (explains(state.conventions, others)) return false;
    }
    for (size_t i = settled_.size(); i < state.conventions.size(); ++i) {
      Conventions others = state.conventions;
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
      if (explains(others, state.faults)) return false;
    }
    return true;
  }

  at::ScalarType precision(const ObservedCall& call) const {
    return precision_of(call, in_float_);
  }

  bool fits(const ObservedCall& call, const Recipe& recipe) const {
    return errors(call, recipe, precision(call)).fit();
  }

  size_t first_failure(const Recipe& recipe) {
    for (size_t i = 0; i < calls_.size(); ++i) {
      effort_ -= cost(calls_[i]);
      if (!fits(calls_[i], recipe)) return i;
    }
    return calls_.size();
  }

  std::span<const ObservedCall> calls_;
  Conventions settled_, causal_;
  Changes picks_;
  bool in_float_;
  double effort_;
  std::vector<Explanation> found_;
};

}  // namespace

std::vector<Explanation> step_by_step(std::span<const ObservedCall> calls,
                                      const Conventions& settled, bool in_float,
                                      double effort) {
  return StepByStep(calls, settled, in_float, effort).explanations();
}

}  // namespace multihead::diagnosis
