// SPDX-License-Identifier: MIT
//
// Checks side by side. Each lane is a process of its own: what it starts and
// leaves behind is its own to end.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/check/survey.h"

namespace cli {

/// What became of one target: `report` as check --json prints it, null where
/// there is none; `seconds`; `why` there is none: "late", "reached" (the
/// budget was), or what Python said.
struct CheckedTarget {
  bool reached = false;
  double seconds = 0;
  std::string why;
  nlohmann::ordered_json report;
};

class Lanes {
 public:
  /// Starts them; they import while the caller looks for targets.
  Lanes(int count, const SurveyOptions& options);
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  /// Checks all of them until `seconds` are over, and says after a while on
  /// standard error how far it is.
  std::vector<CheckedTarget> check(const std::vector<std::string>& targets,
                                   double seconds);

 private:
  struct Lane {
    pid_t process;
    int tasks, results;
  };
  std::vector<Lane> lanes_;
};

}  // namespace cli
