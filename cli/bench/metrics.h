// SPDX-License-Identifier: MIT
//
// The figures of a contender. One row of the table in metrics.cpp is one
// figure: the terminal, JSON, CSV and the help of the command follow from it.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "cli/bench/result.h"
#include "cli/terminal/table.h"

namespace cli {

/// A number or a text; null: not measured.
using Value = nlohmann::ordered_json;

struct Metric {
  const char* csv = nullptr;   ///< the column in a CSV file, if any
  const char* json = nullptr;  ///< the place in a contender's object, if any
  Value (*value)(const Measurement&, const Entry&);
  Column column = {};  ///< in the terminal; without a title: none
  std::string (*shown)(const Value&) = nullptr;  ///< there
  const char* help = nullptr;   ///< what a column of the terminal says
  Style style = Style::kPlain;  ///< in the terminal
  bool theirs = false;  ///< compares with ours, which the terminal leaves out
};

std::span<const Metric> metrics();

/// The lines "  title  help" of the metrics that the terminal shows.
std::string describe_metrics();

/// Three significant digits: "1.28", "12.8", "128".
std::string three_digits(double value);

/// "12.8 µs", "1.28 ms", "1.28 s"
std::string duration(double seconds);

/// "61 %"
std::string percent(double share);

/// "×1.28"
std::string times(double ratio);

/// "GFLOP/s", or "GB/s" of what memory limits
const char* rate_unit(const Measurement& measurement);

}  // namespace cli
