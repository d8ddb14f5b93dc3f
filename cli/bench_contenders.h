// SPDX-License-Identifier: MIT
//
// Who computes a case, ready to be called. Whatever a user would make once, a
// mask tensor or a module, is made here, outside the time.
#pragma once

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "cli/bench_case.h"
#include "cli/random.h"

namespace cli {

/// (output, weights); the weights are undefined where they are not asked for.
using Outputs = std::tuple<at::Tensor, at::Tensor>;
using Call = std::function<Outputs()>;

struct Contender {
  Who who;
  Call timed;
  /// The same without dropout, which is what float64 can judge.
  Call verified;
  /// With dropout: the same on values that are all 1. Each row of the output
  /// is then the sum of its weights after dropout, 1 on average. Else empty.
  Call sums;
  /// Why `out` is not what the case asks for; empty: it is within its budget.
  std::function<std::string(const Outputs& out)> fault;
};

/// One case with its inputs drawn.
struct Problem {
  std::vector<Contender> contenders;  ///< ours first
  double flop = 0;   ///< useful: of visible pairs, and of the linear layers
  double bytes = 0;  ///< of query, key, value and output, each once
};

Problem make_problem(const BenchCase& test, Random& random);

/// Multiply-adds count 2; pairs of query and key that are not visible, nothing.
double attention_flop(const AttentionInputs& inputs);

/// Why the rows' sums of weights after dropout are not 1 on average, or were
/// not dropped at all; empty: they are, within six standard errors.
std::string implausible_dropout(const at::Tensor& sums);

}  // namespace cli
