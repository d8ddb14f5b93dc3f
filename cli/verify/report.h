// SPDX-License-Identifier: MIT
//
// What `multihead verify` says: a line per case as it is done, at the end what
// failed and what that means; or all of it as JSON.
#pragma once

#include <string>
#include <vector>

#include "cli/cases/case.h"
#include "cli/cases/judge.h"
#include "cli/terminal/environment.h"
#include "cli/terminal/table.h"

namespace cli {

struct Outcome {
  const Case* test;
  Verdict verdict;
  double seconds;
};

class VerifyReport {
 public:
  /// Columns are as wide as these cases need.
  explicit VerifyReport(const std::vector<Case>& cases);

  void opening(const Environment& environment, uint64_t seed);
  void add(const Outcome& outcome);
  /// wrong_answers: sentences about what PyTorch itself gets wrong.
  void closing(const std::vector<Outcome>& outcomes, double seconds,
               const std::vector<std::string>& wrong_answers);

 private:
  void list_failures(const std::vector<Outcome>& outcomes);

  Table table_;
  std::string group_;
};

void print_json(const std::vector<Outcome>& outcomes, uint64_t seed,
                const std::vector<std::string>& wrong_answers);

}  // namespace cli
