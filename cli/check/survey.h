// SPDX-License-Identifier: MIT
//
// `multihead check FOLDER`: finds the attention of a checkout by its code, and
// checks each class and function in a process of its own, two at a time.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace cli {

struct SurveyOptions {
  std::string root;
  /// Starts Python on a check, less the words that say what to check.
  std::vector<std::string> command;
  std::vector<std::string> options = {};  ///< of every check: "--mask", "keep"
  double time_limit = 10;                 ///< seconds, of one check
  double budget = 55;                     ///< seconds, of all
  bool json = false;                      ///< print JSON instead of the table
  std::string sarif;                      ///< a file, "-" for standard output
};

/// Prints a table, or JSON; returns the exit status: 0 all that could be judged
/// is right, 1 something is wrong, 2 nothing could be judged. Throws where
/// there is no attention at all.
int survey(const SurveyOptions& options);

/// What a survey found, as `--json` prints it, in the format that code reviews
/// read: SARIF 2.1.0.
std::string to_sarif(const nlohmann::ordered_json& survey);

}  // namespace cli
