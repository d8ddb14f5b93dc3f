// SPDX-License-Identifier: MIT
//
// Two runs side by side: what became faster or slower, beside PyTorch in both.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/runner.h"

namespace cli {

/// A case of a record at one number of threads.
struct RecordedCase {
  struct Rival {
    std::string name;   ///< "SDPA"
    double best = 0;    ///< its best time over ours
    Statistics paired;  ///< the same round by round
  };
  std::string group, name;
  std::string title;  ///< "group: name sizes", unique
  int threads = 1;
  double seconds = 0;              ///< of our best call
  std::vector<Rival> rivals = {};  ///< those that are right; none where
                                   ///< ours is not
};

/// What `bench --json` wrote.
struct Record {
  std::string file;
  BenchRun run;  ///< without measurements
  std::vector<RecordedCase> cases;

  /// Numbers of threads of that case; empty: it is not in the record.
  std::vector<int> threads_of(const std::string& title) const;
  /// Leaves out what `filter`, part of a title, does not match, and other
  /// numbers of threads, if there are any.
  void keep(const std::string& filter, const std::vector<int>& threads);
};

/// Throws std::invalid_argument where `text` is no record; `file` is what the
/// error names.
Record parse_record(std::string_view text, const std::string& file);
/// The same of a file, which may be missing.
Record read_record(const std::string& file);

enum class Change { kFaster, kSlower, kNoise };

/// A case that is in both, beside one contender that is right in both.
struct Comparison {
  const RecordedCase *then, *now;
  const RecordedCase::Rival *rival_then, *rival_now;
  Change change;

  double ratio() const {
    return rival_now->paired.median / rival_then->paired.median;
  }
  /// The larger one of both runs.
  double spread() const {
    return std::max(rival_now->paired.spread(), rival_then->paired.spread());
  }
};

/// Noise is where the quartiles of both runs overlap, what is less than 2 %,
/// and where the best calls say the opposite.
Change judge_change(const RecordedCase::Rival& then,
                    const RecordedCase::Rival& now);

/// In the order of `now`. PyTorch's contender is taken where there is one.
std::vector<Comparison> compare(const Record& then, const Record& now);

/// Whether times, and not only ratios, may be compared.
bool same_processor(const Record& then, const Record& now);

/// Prints both head lines, a table, and what is in one of them only.
void show_comparison(const Record& then, const Record& now);

/// What the table of comparisons says, for --help.
std::string describe_comparison();

}  // namespace cli
