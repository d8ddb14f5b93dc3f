// SPDX-License-Identifier: MIT
//
// Tensors of a check are tiny, so a recipe costs some 30 µs and all single
// faults some 10 ms. Several faults are first looked for step by step, which
// takes a few hundred recipes for each step. Most of the thousands of pairs
// are ruled out without being run: what stands in the trace as it should rules
// out the faults before it; and on a call that attention itself does not
// explain, a fault that changes nothing cannot be part of the reason, so its
// partner must be all of it.
#include "diagnosis/search/search.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace multihead::diagnosis {
namespace {

// ---- How much a search may do ----------------------------------------------

// Where candidates look among all that a call computed, or turn heads.
double slowness_of(const Recipe& settled) {
  return settled.position_bias == PositionBias::kShown ? 4
         : settled.rotary != Rotary::kNone             ? 2
                                                       : 1;
}

// What a search may do, and one that only counts faults. That is counted, not
// timed: a verdict is the same on every machine, however busy that is.
constexpr double kMostEffort = 1.1e10, kMostForCounting = 1e9,
                 kMostForSteps = 3.5e9;

// Whoever allows as much has the whole code judged: three faults and more are
// found step by step alone.
constexpr double kWholeSearch = 0.2;

// Beside layers of which nothing is known, faults are hardly the reason.
constexpr double kShareBesideLayers = 0.03;

// Of what a search may do, the share that its caller allows.
double share_allowed(std::span<const ObservedCall> calls) {
  double share = 1;
  for (const ObservedCall& call : calls) {
    if (call.has_other_layers()) share = std::min(share, kShareBesideLayers);
    share = std::min(share, call.search_effort);
  }
  return share;
}

// How many conventions are tried together, beside those that leave no doubt:
// for one call of code that is right, for all calls of code with a fault.
constexpr size_t kMostConventions = 3;

// ---- Explanations ----------------------------------------------------------

class Search {
 public:
  /// settled: conventions of every explanation. effort: what is left to be
  /// spent, also by others.
  Search(std::span<const ObservedCall> calls, const Conventions& settled,
         bool in_float, double& effort)
      : calls_(calls),
        settled_(settled),
        slowness_(slowness_of(with(settled))),
        in_float_(in_float),
        effort_(effort),
        picks_(picks_for(calls)) {
    for (const Convention& convention : all_conventions()) {
      const bool known =
          std::ranges::find(settled_, &convention) != settled_.end();
      if (!known && is_open(convention, Concern::kMaybe)) {
        open_.push_back(&convention);
      }
    }
    sets_ = sets_by_size(open_);
  }

  // Attention as it should be, by the fewest conventions.
  std::vector<Explanation> right() {
    std::vector<Conventions> found;
    add_right(settled_, found);
    if (found.empty()) return {};
    const size_t fewest =
        std::ranges::min(found, {}, &Conventions::size).size();
    std::vector<Explanation> explanations;
    for (const Conventions& conventions : found) {
      if (conventions.size() > fewest) continue;
      const Recipe recipe = with(conventions);
      if (!tells_any(recipe) || !improves_by_structure(conventions)) continue;
      explanations.push_back({conventions, {}, recipe, in_float_});
    }
    return explanations;
  }

  // Explanations by so many faults, with the fewest conventions.
  std::vector<Explanation> with_faults(size_t count) {
    std::vector<Explanation> found;
    for (const auto& sets : sets_) {
      for (const Conventions& conventions : sets) {
        // Two faults beside what only might be there are too many guesses.
        if (count == 2 && guesses_structure(conventions)) continue;
        if (is_spent()) return found;
        const Recipe start = with(conventions);
        const size_t failing = first_failure(start);
        if (failing == calls_.size()) continue;
        for (const Changes& changes :
             explaining(calls_[failing], conventions, count)) {
          const std::optional<Recipe> recipe = changed(start, changes);
          if (!recipe || first_failure(*recipe) < calls_.size() ||
              undoes_some(conventions, changes) ||
              !improves(start, *recipe, count)) {
            continue;
          }
          found.push_back({conventions, changes, *recipe, in_float_});
        }
      }
      if (!found.empty()) break;
    }
    return found;
  }

  // The conventions under which attention explains most calls, and stands on
  // the way of the first that it does not. Some always come a little nearer by
  // chance: one more must improve on fewer.
  Conventions nearest() const {
    Conventions best = settled_;
    Nearness nearest = nearness(with(best));
    while (true) {
      const Nearness fewer = nearest;
      const Conventions start = best;
      for (const Convention* convention : open_) {
        Conventions more = start;
        more.push_back(convention);
        if (std::ranges::find(start, convention) != start.end() ||
            is_redundant(more)) {
          continue;
        }
        const Nearness near = nearness(with(more));
        if (!near.improves_on(fewer) || !(near > nearest)) continue;
        nearest = near;
        best = more;
      }
      if (best.size() == start.size()) return best;
    }
  }

  bool cut_short() const { return cut_short_; }
  bool by_chance() const { return by_chance_; }

 private:
  // Runs explained; how much of it another shows on its way, and how little its
  // output differs, below 0.
  struct Nearness {
    size_t explained = 0, shown = 0;
    double closeness = 0;

    auto operator<=>(const Nearness& other) const = default;

    // By more than chance.
    bool improves_on(const Nearness& other) const {
      return std::pair(explained, shown) >
                 std::pair(other.explained, other.shown) ||
             (*this > other && explains_most(-closeness, -other.closeness));
    }
  };

  Nearness nearness(const Recipe& recipe) const {
    Nearness near;
    const ObservedCall* failing = nullptr;
    for (const ObservedCall& call : calls_) {
      const bool fit = fits(call, recipe);
      near.explained += fit && tells(call, recipe);
      if (!fit && failing == nullptr) failing = &call;
    }
    const auto stages =
        failing ? simulate(*failing, recipe) : std::optional<Stages>();
    if (!stages) {
      if (failing) near.closeness = -kInfinity;
      return near;
    }
    near.shown = shown_in_trace(*failing, *stages, failing->dtype).size();
    near.closeness = -largest_difference(failing->out, stages->out);
    return near;
  }

  // Whether some call leaves it open, so that a set without it is one, too.
  bool is_open(const Convention& convention, Concern least) const {
    return std::ranges::any_of(calls_, [&](const ObservedCall& call) {
      return concern_of(convention, call) >= least;
    });
  }

  // Where a call shows its way, evident() knows.
  static Concern concern_of(const Convention& convention,
                            const ObservedCall& call) {
    if (convention.is_structure() && !call.trace.empty()) return Concern::kNo;
    return convention.concern(call);
  }

  // All sets of a few, beside what is settled, the empty one first; of sets
  // that come to the same, one.
  std::vector<std::vector<Conventions>> sets_by_size(
      const Conventions& all) const {
    std::vector<std::vector<Conventions>> sets = {{settled_}};
    // Each set of `size` once: its members in their order.
    const auto append = [&](const Conventions& set, size_t last) {
      for (size_t i = last; i < all.size(); ++i) {
        Conventions more = set;
        more.push_back(all[i]);
        if (is_redundant(more)) continue;
        sets.back().push_back(more);
      }
    };
    for (size_t size = 0; size < kMostConventions; ++size) {
      const std::vector<Conventions> smaller = sets.back();
      sets.emplace_back();
      for (const Conventions& set : smaller) {
        const size_t last =
            set.size() == settled_.size()
                ? 0
                : std::ranges::find(all, set.back()) - all.begin() + 1;
        append(set, last);
      }
    }
    return sets;
  }

  // Adds the sets of conventions with which attention explains all calls, that
  // hold `set`: what the first call that it does not explain may need more,
  // which the calls before leave open.
  void add_right(const Conventions& set, std::vector<Conventions>& found) {
    const size_t failing = first_failure(with(set));
    if (failing == calls_.size()) return found.push_back(set);
    if (set.size() >= settled_.size() + 2 * kMostConventions) return;
    const ObservedCall& call = calls_[failing];
    Conventions open;
    for (const Convention& convention : all_conventions()) {
      if (std::ranges::find(set, &convention) == set.end() &&
          concern_of(convention, call) != Concern::kNo) {
        open.push_back(&convention);
      }
    }
    std::vector<Conventions> sets = {set};
    for (size_t size = 0; size < kMostConventions; ++size) {
      std::vector<Conventions> larger;
      bool fitting = false;
      for (const Conventions& smaller : sets) {
        for (const Convention* convention : open) {
          // In their order, each set once.
          if (smaller.size() > set.size() && convention <= smaller.back()) {
            continue;
          }
          Conventions more = smaller;
          more.push_back(convention);
          if (is_redundant(more) || is_late(call)) continue;
          larger.push_back(more);
          const Recipe recipe = with(more);
          if (!fits(call, recipe) || first_failure(recipe) < failing) continue;
          fitting = true;
          add_right(more, found);
        }
      }
      if (fitting) return;
      sets = std::move(larger);
    }
  }

  bool guesses_structure(const Conventions& conventions) const {
    return std::ranges::any_of(conventions, [&](const Convention* convention) {
      return convention->is_structure() &&
             std::ranges::find(settled_, convention) == settled_.end();
    });
  }

  // Whether faults only take back what a convention brought.
  bool undoes_some(const Conventions& conventions,
                   const Changes& changes) const {
    return std::ranges::any_of(conventions, [&](const Convention* convention) {
      if (std::ranges::find(settled_, convention) != settled_.end())
        return false;
      Conventions others = conventions;
      std::erase(others, convention);
      const auto recipe = changed(with(others), changes);
      return recipe && first_failure(*recipe) == calls_.size();
    });
  }

  bool tells_any(const Recipe& recipe) const {
    return std::ranges::any_of(
        calls_, [&](const ObservedCall& call) { return tells(call, recipe); });
  }

  // What stands beside attention is believed as a fault is: not by chance.
  bool improves_by_structure(const Conventions& conventions) {
    Conventions readings = conventions;
    std::erase_if(readings, [](const Convention* convention) {
      return convention->is_structure();
    });
    return readings.size() == conventions.size() ||
           improves(with(readings), with(conventions), 1);
  }

  bool fits(const ObservedCall& call, const Recipe& recipe) const {
    return errors(call, recipe, precision_of(call, in_float_)).fit();
  }

  // Where no query sees a key, nothing can be compared.
  static bool tells(const ObservedCall& call, const Recipe& recipe) {
    const std::optional<Stages> stages = simulate(call, recipe);
    return stages && !(stages->fully_masked.defined() &&
                       stages->fully_masked.all().item<bool>());
  }

  bool improves(const Recipe& start, const Recipe& recipe, size_t faults) {
    const Improvement found =
        improvement(calls_, start, recipe, faults, in_float_);
    by_chance_ = by_chance_ || found == Improvement::kMayBeChance;
    return found == Improvement::kEnough;
  }

  // Index of the first call that the recipe does not explain.
  size_t first_failure(const Recipe& recipe) const {
    for (size_t i = 0; i < calls_.size(); ++i) {
      spend_on(calls_[i]);
      if (!fits(calls_[i], recipe)) return i;
    }
    return calls_.size();
  }

  // Sets of `count` changes that explain one call, which attention does not.
  // Conventions that do not concern the call make no difference there.
  const std::vector<Changes>& explaining(const ObservedCall& call,
                                         Conventions conventions,
                                         size_t count) {
    std::erase_if(conventions, [&](const Convention* convention) {
      return !convention->concerns(call) &&
             std::ranges::find(settled_, convention) == settled_.end();
    });
    const auto key = std::tuple(&call, conventions, count);
    const auto known = explaining_.find(key);
    if (known != explaining_.end()) return known->second;
    const Recipe start = with(conventions);
    const Effects& all = effects(call, start, conventions);
    std::vector<Changes>& found = explaining_[key];
    // Two faults that only large tensors show are hardly two.
    if (count == 2 && is_large(call, calls_)) return found;
    if (count == 2) return found = pairs(call, start, all);
    for (const Pick& pick : all.fitting) found.push_back({pick});
    return found;
  }

  // What each fault alone does to a call: explains it, changes it, or nothing.
  struct Effects {
    Changes fitting, changing, idle;
  };

  const Effects& effects(const ObservedCall& call, const Recipe& start,
                         const Conventions& conventions) {
    const auto [entry, is_new] = effects_.try_emplace({&call, conventions});
    Effects& effects = entry->second;
    if (!is_new) return effects;
    const std::optional<Stages> plain = simulate(call, start);
    const std::vector<Shown> shown =
        plain ? shown_in_trace(call, *plain, precision_of(call, in_float_))
              : std::vector<Shown>();
    for (const Pick& pick : picks_) {
      const std::optional<Recipe> recipe = changed(start, {pick});
      if (!recipe || is_late(call)) continue;
      if (fits(call, *recipe)) {
        effects.fitting.push_back(pick);
        continue;
      }
      const std::optional<Stages> stages = simulate(call, *recipe);
      const bool same =
          plain && stages && is_same(call, start, *plain, *recipe, *stages);
      // No fault lies before what stands in the trace as it should.
      const bool ruled_out =
          stages && std::ranges::any_of(shown, [&](const Shown& right) {
            return pick.fault->stage < right.stage && right.differs_in(*stages);
          });
      if (ruled_out) continue;
      (same ? effects.idle : effects.changing).push_back(pick);
    }
    return effects;
  }

  std::vector<Changes> pairs(const ObservedCall& call, const Recipe& start,
                             const Effects& effects) {
    const auto& [fitting, changing, idle] = effects;
    std::vector<Changes> found;
    const auto attempt = [&](const Pick& a, const Pick& b) {
      if (a.fault == b.fault) return;
      const std::optional<Recipe> recipe = changed(start, {a, b});
      if (!recipe || is_late(call)) return;
      if (fits(call, *recipe)) found.push_back({a, b});
    };
    for (size_t i = 0; i < fitting.size(); ++i) {
      for (const Pick& other : idle) attempt(fitting[i], other);
      for (const Pick& other : changing) attempt(fitting[i], other);
      for (size_t j = 0; j < i; ++j) attempt(fitting[j], fitting[i]);
    }
    for (size_t i = 0; i < changing.size(); ++i) {
      for (size_t j = 0; j < i; ++j) attempt(changing[j], changing[i]);
    }
    return found;
  }

  void spend_on(const ObservedCall& call) const {
    effort_ -= slowness_ * cost(call);
  }

  bool is_spent() { return cut_short_ = cut_short_ || effort_ <= 0; }

  bool is_late(const ObservedCall& call) {
    if (!is_spent()) spend_on(call);
    return cut_short_;
  }

  // Nothing that leaves a call tells the two apart.
  static bool is_same(const ObservedCall& call, const Recipe& a,
                      const Stages& of_a, const Recipe& b, const Stages& of_b) {
    return largest_difference(of_a.out, of_b.out) == 0 &&
           largest_difference(of_a.dropped, of_b.dropped) == 0 &&
           (a.returned == b.returned || !call.returned.defined()) &&
           (a.detached == b.detached || !call.dout.defined());
  }

  std::span<const ObservedCall> calls_;
  Conventions settled_, open_;
  double slowness_;
  bool in_float_;
  double& effort_;
  bool cut_short_ = false, by_chance_ = false;
  std::vector<std::vector<Conventions>> sets_;
  Changes picks_;
  std::map<std::tuple<const ObservedCall*, Conventions, size_t>,
           std::vector<Changes>>
      explaining_;
  std::map<std::tuple<const ObservedCall*, Conventions>, Effects> effects_;
};

bool traces_float32(const ObservedCall& call) {
  return std::ranges::any_of(call.trace, [](const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat;
  });
}

// Pairs take too long to be searched for a scale in float32, which leaves no
// trace.
bool may_round_unseen(const ObservedCall& call) {
  return call.dtype == at::kDouble &&
         (call.trace.empty() || traces_float32(call));
}

bool shows_way_to_nan(const ObservedCall& call) {
  return !call.trace.empty() && call.out.isnan().any().item<bool>();
}

}  // namespace

bool shows_float32(const ObservedCall& call) {
  return call.dtype == at::kDouble &&
         (call.rounds_to_float || traces_float32(call));
}

std::optional<Recipe> changed(const Recipe& start, const Changes& changes) {
  Recipe forth = start, back = start;
  for (size_t i = 0; i < changes.size(); ++i) {
    changes[i].way->apply(forth);
    changes[changes.size() - 1 - i].way->apply(back);
  }
  if (!(forth == back)) return std::nullopt;
  for (const Pick& left_out : changes) {
    Recipe others = start;
    for (const Pick& pick : changes) {
      if (pick.way != left_out.way) pick.way->apply(others);
    }
    if (others == forth) return std::nullopt;
  }
  return forth;
}

Changes picks_for(std::span<const ObservedCall> calls) {
  Changes picks;
  const ObservedCall& call = calls.front();
  for (const Fault& fault : all_faults()) {
    if (call.is_core() && !call.has_weights && !is_of_core(fault)) continue;
    if (call.has_given_scores() && *fault.stage <= Stage::kScores) continue;
    for (const Way& way : fault.ways) picks.push_back({&fault, &way});
  }
  return picks;
}

// So much for any, and more for each score and for the products of large
// tensors; projections of inputs are kept.
double cost(const ObservedCall& call) {
  const Sizes& n = call.sizes;
  const double rows = static_cast<double>(n.batch) * n.queries;
  const double scores = rows * n.heads * n.keys;
  const double output =
      call.has_weights ? rows * n.embed_dim * n.embed_dim : 0.0;
  return 2e5 + 20 * scores + scores * (n.width + n.value_width) / 2 +
         output / 8;
}

bool is_large(const ObservedCall& call, std::span<const ObservedCall> among) {
  return std::ranges::any_of(among, [&](const ObservedCall& other) {
    return cost(call) > 8 * cost(other);
  });
}

size_t fewest_faults(std::span<const ObservedCall> calls, int most) {
  double effort = kMostForCounting * share_allowed(calls);
  Search plain(calls, certain(calls), /*in_float=*/false, effort);
  if (!plain.right().empty()) return 0;
  const Conventions settled = evident(calls);
  Search strict(calls, settled, /*in_float=*/false, effort);
  Search loose(calls, settled, /*in_float=*/true, effort);
  if (!strict.right().empty() || !loose.right().empty()) return 0;
  if (most == 0) return 1;
  const bool one =
      !strict.with_faults(1).empty() || !loose.with_faults(1).empty();
  return one ? 1 : 2;
}

SearchResult search(std::span<const ObservedCall> calls) {
  const bool wide = std::ranges::any_of(calls, [](const ObservedCall& call) {
    return call.dtype == at::kDouble;
  });
  const bool narrow = std::ranges::any_of(calls, may_round_unseen);
  // Of zeros no fault explains a bit, of NaN what is to be seen on the way.
  const bool telling = std::ranges::any_of(calls, [](const ObservedCall& call) {
    return largest_finite(call.out) > 0;
  });
  const bool seen_on_the_way = std::ranges::any_of(calls, shows_way_to_nan);
  const size_t most_faults = telling ? 2 : seen_on_the_way ? 1 : 0;
  const double share = share_allowed(calls), allowed = kMostEffort * share;
  const double of_steps = share < kWholeSearch ? share : 1;
  double effort = allowed;
  const auto spent = [&] { return (allowed - effort) / kMostEffort; };
  // Most of what is right has nothing beside it: only what no reading of plain
  // attention explains is looked at more closely.
  Search plain(calls, certain(calls), /*in_float=*/false, effort);
  if (std::vector<Explanation> found = plain.right(); !found.empty()) {
    return {.explanations = ranked(calls, std::move(found)), .effort = spent()};
  }
  const Conventions settled = evident(calls);
  Search strict(calls, settled, /*in_float=*/false, effort);
  Search loose(calls, settled, /*in_float=*/true, effort);
  // A small leak in float64 looks like rounding to float32: faults that explain
  // every digit are believed first, two of them too unless float32 is seen.
  const bool seen = std::ranges::any_of(calls, shows_float32);
  using Level = std::pair<Search&, size_t>;
  const Level pairs{strict, 2}, single{loose, 1};
  // Where it is seen, a search for faults must not spend what this needs.
  std::vector<Explanation> rounded;
  for (const auto& [precision, faults] :
       {Level{strict, 0}, Level{strict, 1}, Level{loose, 0},
        seen ? single : pairs, seen ? pairs : single, Level{loose, 2}}) {
    const bool is_loose = &precision == &loose;
    const bool is_fit = !is_loose || (faults == 2 ? narrow : wide);
    if (!is_fit || faults > most_faults) continue;
    // What explains fewer digits comes after all else, or where it is seen.
    if (is_loose && strict.cut_short() && (!seen || faults > 0)) continue;
    if (seen && wide && !is_loose && faults == 1) rounded = loose.right();
    std::vector<Explanation> found;
    if (is_loose && faults == 0) found = std::move(rounded);
    if (faults == 2) {
      found = step_by_step(calls, settled, is_loose, kMostForSteps * of_steps);
    }
    if (found.empty())
      found = faults == 0 ? precision.right() : precision.with_faults(faults);
    if (!found.empty())
      return {.explanations = ranked(calls, std::move(found)),
              .effort = spent()};
  }
  return {.nearest = strict.nearest(),
          .cut_short = strict.cut_short() || loose.cut_short(),
          .by_chance = strict.by_chance() || loose.by_chance(),
          .effort = spent()};
}

Recipe with(const Conventions& conventions) {
  Recipe recipe;
  for (const Convention* convention : conventions) convention->apply(recipe);
  return recipe;
}

bool is_redundant(const Conventions& conventions) {
  const Recipe all = with(conventions);
  return std::ranges::any_of(conventions, [&](const Convention* left_out) {
    Conventions others = conventions;
    std::erase(others, left_out);
    return with(others) == all;
  });
}

}  // namespace multihead::diagnosis
