// SPDX-License-Identifier: MIT
//
// Tensors of a check are tiny, so a recipe costs some 100 µs and all single
// faults some 20 ms. Of the thousands of pairs most are ruled out without being
// run: what stands in the trace as it should rules out the faults before it;
// and on a run that attention itself does not explain, a fault that changes
// nothing cannot be part of the reason, so its partner must be all of it.
#include "diagnosis/search/search.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "diagnosis/search/compare.h"
#include "diagnosis/search/first_stage.h"
#include "diagnosis/stages/effort.h"

namespace multihead::diagnosis {
namespace {

// Bits that an output must have in common with an explanation by so many
// faults: of some 2^8 faults and 2^15 pairs, one in 2^12 searches may find one
// by chance.
constexpr double kBitsNeeded[] = {0, 20, 27};

using Changes = std::vector<Pick>;
using Conventions = std::vector<const Convention*>;

Recipe with(const Conventions& conventions) {
  Recipe recipe;
  for (const auto* convention : conventions) convention->apply(recipe);
  return recipe;
}

// nullopt where a change has no effect, or undoes another.
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

// Whether what is left is little enough beside what there was without it.
bool explains_most(double left, double without) { return left <= without / 4; }

class Search {
 public:
  Search(std::span<const Run> runs, bool in_float, Effort& effort)
      : runs_(runs), in_float_(in_float), effort_(effort) {
    Conventions concerned;
    for (const Convention& convention : all_conventions()) {
      const bool concerns =
          std::any_of(runs.begin(), runs.end(),
                      [&](const Run& run) { return convention.concerns(run); });
      if (concerns) concerned.push_back(&convention);
    }
    sets_ = sets_by_size(concerned);
    for (const Fault& fault : all_faults()) {
      for (const Way& way : fault.ways) picks_.push_back({&fault, &way});
    }
  }

  // Explanations by so many faults, with the fewest conventions.
  std::vector<Explanation> with_faults(size_t count) {
    std::vector<Explanation> found;
    for (const auto& sets : sets_) {
      for (const Conventions& conventions : sets) {
        const Recipe start = with(conventions);
        const size_t failing = first_failure(start);
        if (failing == runs_.size()) {
          if (count == 0 && any_tells(start))
            found.push_back({conventions, {}, start, in_float_});
          continue;
        }
        if (count == 0) continue;
        for (const Changes& changes :
             explaining(runs_[failing], conventions, count)) {
          const std::optional<Recipe> recipe = changed(start, changes);
          if (!recipe || first_failure(*recipe) < runs_.size() ||
              !fault_explains_most(runs_[failing], start, *recipe)) {
            continue;
          }
          if (evidence(*recipe) < kBitsNeeded[count]) {
            by_chance_ = true;
            continue;
          }
          found.push_back({conventions, changes, *recipe, in_float_});
        }
      }
      if (!found.empty()) break;
    }
    return found;
  }

  // The conventions under which attention explains most runs, and stands on the
  // way of the first that it does not. Some always come a little nearer by
  // chance: one more must improve on fewer.
  Conventions nearest() const {
    Conventions best;
    Nearness nearest = nearness(with(best));
    for (const auto& sets : sets_) {
      const Nearness fewer = nearest;
      for (const Conventions& conventions : sets) {
        const Nearness near = nearness(with(conventions));
        if (!near.improves_on(fewer) || !(near > nearest)) continue;
        nearest = near;
        best = conventions;
      }
    }
    return best;
  }

  bool cut_short() const { return cut_short_; }
  bool by_chance() const { return by_chance_; }

 private:
  // Runs explained; how much of it another shows on its way, and how little its
  // output differs.
  struct Nearness {
    size_t explained, shown;
    double difference;

    bool operator>(const Nearness& other) const {
      return std::tuple(explained, shown, -difference) >
             std::tuple(other.explained, other.shown, -other.difference);
    }

    // By more than chance.
    bool improves_on(const Nearness& other) const {
      return std::tuple(explained, shown) >
                 std::tuple(other.explained, other.shown) ||
             (*this > other && explains_most(difference, other.difference));
    }
  };

  Nearness nearness(const Recipe& recipe) const {
    Nearness near{0, 0, 0};
    const Run* failing = nullptr;
    for (const Run& run : runs_) {
      const bool fit = fits(run, recipe);
      near.explained += fit && tells(run, recipe);
      if (!fit && failing == nullptr) failing = &run;
    }
    const auto stages =
        failing ? run_recipe(*failing, recipe) : std::optional<Stages>();
    if (!stages) {
      if (failing) near.difference = std::numeric_limits<double>::infinity();
      return near;
    }
    near.shown = shown_in_trace(*failing, *stages, failing->dtype).size();
    near.difference = largest_difference(failing->out, stages->out);
    return near;
  }

  // All sets, the empty one first; of sets that come to the same, one.
  static std::vector<std::vector<Conventions>> sets_by_size(
      const Conventions& all) {
    std::vector<std::vector<Conventions>> sets(all.size() + 1);
    for (uint32_t bits = 0; bits < 1U << all.size(); ++bits) {
      Conventions set;
      for (size_t i = 0; i < all.size(); ++i) {
        if (bits >> i & 1U) set.push_back(all[i]);
      }
      const Recipe recipe = with(set);
      const bool redundant =
          std::any_of(set.begin(), set.end(), [&](const Convention* left_out) {
            Conventions others = set;
            std::erase(others, left_out);
            return with(others) == recipe;
          });
      if (!redundant) sets[set.size()].push_back(set);
    }
    return sets;
  }

  at::ScalarType precision_of(const Run& run) const {
    return in_float_ && run.dtype == at::kDouble ? at::kFloat : run.dtype;
  }

  bool fits(const Run& run, const Recipe& recipe) const {
    return errors(run, recipe, precision_of(run)).fit();
  }

  static bool tells(const Run& run, const Recipe& recipe) {
    const std::optional<Stages> stages = run_recipe(run, recipe);
    return stages && !sees_nothing(*stages);
  }

  bool any_tells(const Recipe& recipe) const {
    return std::any_of(runs_.begin(), runs_.end(),
                       [&](const Run& run) { return tells(run, recipe); });
  }

  // Within rounding is not enough where rounding is about all there is, as it
  // is for a fault whose numbers explode. Rounding alone is judged by what it
  // does.
  bool fault_explains_most(const Run& run, const Recipe& start,
                           const Recipe& recipe) const {
    Recipe rounded = start;
    rounded.narrow = recipe.narrow;
    rounded.narrow_type = recipe.narrow_type;
    if (recipe.narrow != Narrow::kNever && recipe == rounded) return true;
    const Errors before = errors(run, start, precision_of(run));
    const Errors after = errors(run, recipe, precision_of(run));
    const auto wrong = before.out.share > 1       ? &Errors::out
                       : before.weights.share > 1 ? &Errors::weights
                                                  : &Errors::gradients;
    return explains_most((after.*wrong).difference, (before.*wrong).difference);
  }

  double evidence(const Recipe& recipe) const {
    double bits = 0;
    for (const Run& run : runs_) bits += bits_in_common(run, recipe);
    return bits;
  }

  // Index of the first run that the recipe does not explain.
  size_t first_failure(const Recipe& recipe) const {
    size_t i = 0;
    while (i < runs_.size() && fits(runs_[i], recipe)) ++i;
    return i;
  }

  // Sets of `count` changes that explain one run, which attention does not.
  // Conventions that do not concern the run make no difference there.
  const std::vector<Changes>& explaining(const Run& run,
                                         Conventions conventions,
                                         size_t count) {
    std::erase_if(conventions, [&](const Convention* convention) {
      return !convention->concerns(run);
    });
    const auto key = std::tuple(&run, conventions, count);
    const auto known = explaining_.find(key);
    if (known != explaining_.end()) return known->second;
    const Recipe start = with(conventions);
    const Effects& all = effects(run, start, conventions);
    std::vector<Changes>& found = explaining_[key];
    // Two faults that only large tensors show are hardly two.
    if (count == 2 && is_large(run, runs_)) return found;
    if (count == 2) return found = pairs(run, start, all);
    for (const Pick& pick : all.fitting) found.push_back({pick});
    return found;
  }

  // What each fault alone does to a run: explains it, changes it, or nothing.
  struct Effects {
    Changes fitting, changing, idle;
  };

  const Effects& effects(const Run& run, const Recipe& start,
                         const Conventions& conventions) {
    const auto [entry, is_new] = effects_.try_emplace({&run, conventions});
    Effects& effects = entry->second;
    if (!is_new) return effects;
    const std::optional<Stages> plain = run_recipe(run, start);
    const std::vector<Shown> shown =
        plain ? shown_in_trace(run, *plain, precision_of(run))
              : std::vector<Shown>();
    for (const Pick& pick : picks_) {
      const std::optional<Recipe> recipe = changed(start, {pick});
      if (!recipe || is_late(run)) continue;
      if (fits(run, *recipe)) {
        effects.fitting.push_back(pick);
        continue;
      }
      const std::optional<Stages> stages = run_recipe(run, *recipe);
      const bool same =
          plain && stages && is_same(run, start, *plain, *recipe, *stages);
      // No fault lies before what stands in the trace as it should.
      const bool ruled_out =
          stages &&
          std::any_of(shown.begin(), shown.end(), [&](const Shown& right) {
            return pick.fault->stage < right.stage && right.differs_in(*stages);
          });
      if (ruled_out) continue;
      (same ? effects.idle : effects.changing).push_back(pick);
    }
    return effects;
  }

  std::vector<Changes> pairs(const Run& run, const Recipe& start,
                             const Effects& effects) {
    const auto& [fitting, changing, idle] = effects;
    std::vector<Changes> found;
    const auto attempt = [&](const Pick& a, const Pick& b) {
      if (a.fault == b.fault) return;
      const std::optional<Recipe> recipe = changed(start, {a, b});
      if (!recipe || is_late(run)) return;
      if (fits(run, *recipe)) found.push_back({a, b});
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

  bool is_late(const Run& run) {
    cut_short_ = cut_short_ || effort_.is_spent();
    if (!cut_short_) effort_.spend(run);
    return cut_short_;
  }

  // Nothing that leaves a run tells the two apart.
  static bool is_same(const Run& run, const Recipe& a, const Stages& of_a,
                      const Recipe& b, const Stages& of_b) {
    return largest_difference(of_a.out, of_b.out) == 0 &&
           largest_difference(of_a.dropped, of_b.dropped) == 0 &&
           (a.returned == b.returned || !run.returned.defined()) &&
           (a.detached == b.detached || !run.dout.defined());
  }

  std::span<const Run> runs_;
  bool in_float_;
  Effort& effort_;
  bool cut_short_ = false, by_chance_ = false;
  std::vector<std::vector<Conventions>> sets_;
  Changes picks_;
  std::map<std::tuple<const Run*, Conventions, size_t>, std::vector<Changes>>
      explaining_;
  std::map<std::tuple<const Run*, Conventions>, Effects> effects_;
};

bool shows_float32(const Run& run) {
  return run.dtype == at::kDouble &&
         std::any_of(run.trace.begin(), run.trace.end(),
                     [](const at::Tensor& tensor) {
                       return tensor.scalar_type() == at::kFloat;
                     });
}

}  // namespace

SearchResult search(std::span<const Run> runs) {
  const bool wide = std::any_of(runs.begin(), runs.end(), [](const Run& run) {
    return run.dtype == at::kDouble;
  });
  // Pairs take too long to be searched for a scale in float32, which leaves no
  // trace.
  const bool narrow = std::any_of(runs.begin(), runs.end(), [](const Run& run) {
    return run.dtype == at::kDouble &&
           (run.trace.empty() || shows_float32(run));
  });
  Effort effort;
  Search strict(runs, /*in_float=*/false, effort);
  Search loose(runs, /*in_float=*/true, effort);
  // A small leak in float64 looks like rounding to float32: faults that explain
  // every digit are believed first, two of them too unless float32 is seen.
  const bool seen = std::any_of(runs.begin(), runs.end(), shows_float32);
  using Level = std::pair<Search&, size_t>;
  const Level pairs{strict, 2}, single{loose, 1};
  for (const auto& [precision, faults] :
       {Level{strict, 0}, Level{strict, 1}, Level{loose, 0},
        seen ? single : pairs, seen ? pairs : single, Level{loose, 2}}) {
    if (&precision == &loose && !(faults == 2 ? narrow : wide)) continue;
    std::vector<Explanation> found = precision.with_faults(faults);
    if (!found.empty()) return {.explanations = std::move(found)};
  }
  return {.nearest = strict.nearest(),
          .cut_short = strict.cut_short() || loose.cut_short(),
          .by_chance = strict.by_chance() || loose.by_chance()};
}

}  // namespace multihead::diagnosis
