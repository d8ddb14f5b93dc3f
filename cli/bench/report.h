// SPDX-License-Identifier: MIT
//
// Everything that shows a run: the table of a terminal as it grows, and texts
// for files.
#pragma once

#include <string>
#include <vector>

#include "cli/bench/result.h"
#include "cli/terminal/table.h"

namespace cli {

class BenchTable {
 public:
  BenchTable(const std::vector<BenchCase>& cases, Terminal terminal);
  void opening(const BenchRun& run);
  void add(const Measurement& measurement);
  void closing(const BenchRun& run, double seconds);

 private:
  void note(const Measurement& measurement);

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

/// The entry of PyTorch that ours is compared with first: SDPA, nn.MHA,
/// torch::nn; nullptr: none is right.
const Entry* baseline(const Measurement& measurement);

/// "AMD EPYC 9754, 1 thread, torch 2.13.0 with MKL 2024.0, 2026-11-21"
std::string where_and_when(const BenchRun& run, int threads);

}  // namespace cli
