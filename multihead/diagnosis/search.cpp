// SPDX-License-Identifier: MIT
//
// Tensors of a check are tiny, so a recipe costs some 100 µs and all single
// faults some 20 ms. Of the thousands of pairs most are ruled out without being
// run: on a run that attention itself does not explain, a fault that changes
// nothing cannot be part of the reason, so its partner must be all of it.
#include "multihead/diagnosis/search.h"

#include <algorithm>
#include <array>

#include "multihead/diagnosis/compare.h"

namespace multihead::diagnosis {
namespace {

struct Choice {
  Pick pick;
  Recipe recipe;
};

// The recipe with both changes; nullopt where one undoes the other.
std::optional<Recipe> both(const Recipe& start, const Pick& a, const Pick& b) {
  if (a.fault == b.fault) return std::nullopt;
  Recipe ab = start, ba = start, only_a = start, only_b = start;
  a.way->apply(ab);
  b.way->apply(ab);
  b.way->apply(ba);
  a.way->apply(ba);
  a.way->apply(only_a);
  b.way->apply(only_b);
  if (!(ab == ba) || ab == only_a || ab == only_b) return std::nullopt;
  return ab;
}

class Search {
 public:
  Search(std::span<const Run> runs, bool in_float)
      : runs_(runs), in_float_(in_float) {
    for (const Convention& convention : all_conventions()) {
      const bool concerns =
          std::any_of(runs.begin(), runs.end(),
                      [&](const Run& run) { return convention.concerns(run); });
      if (concerns) conventions_.push_back(&convention);
    }
    for (const Fault& fault : all_faults()) {
      for (const Way& way : fault.ways) picks_.push_back({&fault, &way});
    }
  }

  // Explanations by so many faults, with the fewest conventions.
  std::vector<Explanation> with_faults(int count) const {
    constexpr auto kLevels =
        std::to_array({&Search::none, &Search::single, &Search::pairs});
    for (const auto& subsets : by_size()) {
      std::vector<Explanation> found;
      for (const auto& subset : subsets) (this->*kLevels[count])(subset, found);
      if (!found.empty()) return found;
    }
    return {};
  }

 private:
  using Conventions = std::vector<const Convention*>;

  // Sets of conventions, the empty one first.
  std::vector<std::vector<Conventions>> by_size() const {
    std::vector<std::vector<Conventions>> sets(conventions_.size() + 1);
    for (uint32_t bits = 0; bits < 1U << conventions_.size(); ++bits) {
      Conventions set;
      for (size_t i = 0; i < conventions_.size(); ++i) {
        if (bits >> i & 1U) set.push_back(conventions_[i]);
      }
      sets[set.size()].push_back(set);
    }
    return sets;
  }

  bool fits(const Run& run, const Recipe& recipe) const {
    const auto precision =
        in_float_ && run.dtype == at::kDouble ? at::kFloat : run.dtype;
    return misfit(run, recipe, precision) <= 1;
  }

  // Index of the first run that the recipe does not explain.
  size_t first_failure(const Recipe& recipe) const {
    size_t i = 0;
    while (i < runs_.size() && fits(runs_[i], recipe)) ++i;
    return i;
  }

  bool fits_all(const Recipe& recipe) const {
    return first_failure(recipe) == runs_.size();
  }

  static Recipe with(const Conventions& conventions) {
    Recipe recipe;
    for (const auto* convention : conventions) convention->apply(recipe);
    return recipe;
  }

  void none(const Conventions& conventions,
            std::vector<Explanation>& found) const {
    const Recipe recipe = with(conventions);
    if (fits_all(recipe)) found.push_back({conventions, {}, recipe, in_float_});
  }

  void single(const Conventions& conventions,
              std::vector<Explanation>& found) const {
    const Recipe start = with(conventions);
    for (const Pick& pick : picks_) {
      Recipe recipe = start;
      pick.way->apply(recipe);
      if (recipe == start || !fits_all(recipe)) continue;
      found.push_back({conventions, {pick}, recipe, in_float_});
    }
  }

  void pairs(const Conventions& conventions,
             std::vector<Explanation>& found) const {
    const Recipe start = with(conventions);
    const size_t failing = first_failure(start);
    if (failing == runs_.size()) return;
    const Run& run = runs_[failing];
    const std::optional<Stages> plain = run_recipe(run, start);

    std::vector<Pick> fitting, changing, idle;
    for (const Pick& pick : picks_) {
      Recipe recipe = start;
      pick.way->apply(recipe);
      const std::optional<Stages> stages = run_recipe(run, recipe);
      if (fits(run, recipe)) {
        fitting.push_back(pick);
      } else if (plain && stages && same(*plain, *stages)) {
        idle.push_back(pick);
      } else {
        changing.push_back(pick);
      }
    }
    const auto attempt = [&](const Pick& a, const Pick& b) {
      const std::optional<Recipe> recipe = both(start, a, b);
      if (!recipe || !fits(run, *recipe) || !fits_all(*recipe)) return;
      found.push_back({conventions, {a, b}, *recipe, in_float_});
    };
    for (size_t i = 0; i < fitting.size(); ++i) {
      for (const Pick& other : idle) attempt(fitting[i], other);
      for (const Pick& other : changing) attempt(fitting[i], other);
      for (size_t j = i + 1; j < fitting.size(); ++j) {
        attempt(fitting[i], fitting[j]);
      }
    }
    for (size_t i = 0; i < changing.size(); ++i) {
      for (size_t j = i + 1; j < changing.size(); ++j) {
        attempt(changing[i], changing[j]);
      }
    }
  }

  // Two recipes that nothing in this run tells apart.
  static bool same(const Stages& a, const Stages& b) {
    return largest_difference(a.out, b.out) == 0 &&
           largest_difference(a.dropped, b.dropped) == 0;
  }

  std::span<const Run> runs_;
  bool in_float_;
  std::vector<const Convention*> conventions_;
  std::vector<Pick> picks_;
};

}  // namespace

std::vector<Explanation> search(std::span<const Run> runs) {
  const bool wide = std::any_of(runs.begin(), runs.end(), [](const Run& run) {
    return run.dtype == at::kDouble;
  });
  const Search strict(runs, /*in_float=*/false), loose(runs, /*in_float=*/true);
  // A small leak in float64 looks like rounding to float32: faults that explain
  // every digit are believed first.
  using Level = std::pair<const Search&, int>;
  for (const auto& [precision, faults] :
       {Level{strict, 0}, Level{strict, 1}, Level{loose, 0}, Level{strict, 2},
        Level{loose, 1}, Level{loose, 2}}) {
    if (&precision == &loose && !wide) continue;
    std::vector<Explanation> found = precision.with_faults(faults);
    if (!found.empty()) return found;
  }
  return {};
}

}  // namespace multihead::diagnosis
