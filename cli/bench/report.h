// SPDX-License-Identifier: MIT
//
// Everything that shows a run: the table of a terminal, and texts for files.
#pragma once

#include <string>
#include <vector>

#include "cli/bench/runner.h"
#include "cli/terminal/text.h"

namespace cli {

/// The lines "  title  help" of the metrics that the terminal shows.
std::string describe_metrics();

/// Three significant digits: "1.28", "12.8", "128".
std::string three_digits(double value);

/// "12.8 µs", "1.28 ms", "1.28 s"
std::string duration(double seconds);

/// "61 %", "×1.28"
std::string percent(double share);
std::string times(double ratio);

/// Versions, processor, kernels and date of a run, in one line.
std::string headline(const BenchRun& run);

/// The table of a terminal, as it grows.
class BenchTable {
 public:
  explicit BenchTable(const std::vector<BenchCase>& cases);
  void opening(const BenchRun& run);
  void add(const Measurement& measurement);
  void closing(const BenchRun& run, double seconds);

 private:
  Table table_;
  std::string group_;
};

/// One object: environment, plan, measurements with entries and demands.
std::string to_json(const BenchRun& run);

/// One line for each contender of each measurement.
std::string to_csv(const BenchRun& run);

/// README's table: the headline cases at one thread.
std::string to_markdown(const BenchRun& run);

/// A picture: of each case at the fewest threads, how many times faster ours is
/// than PyTorch, and both shares of the peak. No external fonts or scripts;
/// follows the light or dark scheme of whoever looks.
std::string to_svg(const BenchRun& run);

}  // namespace cli
