// SPDX-License-Identifier: MIT
//
// Implementation computes a case, ready to be called. Whatever a user would
// make once, a mask tensor or a module, is made here, outside the time.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/bench/case.h"
#include "cli/cases/golden.h"

namespace cli {

/// What one call returns, in the order of its reference; more is not judged.
using Outputs = std::vector<at::Tensor>;
using Call = std::function<Outputs()>;

struct Contender {
  Implementation who;
  /// Comes before `timed`: of a backward, the forward. Throws where ours would
  /// not take the fused kernels.
  std::function<void()> prepare = {};
  Call timed = {};
  /// The same without dropout, which is what float64 can judge.
  Call verified = {};
  /// Judges dropout by the sums that it leaves: returns why they are
  /// implausible, or "". An empty function for cases without dropout.
  std::function<std::string()> dropout_fault = {};
  /// Why `out` is not what the case asks for; empty: it is within its budget.
  std::function<std::string(const Outputs& out)> fault = {};
};

/// One case with its inputs drawn.
struct PreparedCase {
  std::vector<Contender> contenders;  ///< ours first
  double flop = 0;   ///< useful: of visible pairs, and of the linear layers
  double bytes = 0;  ///< of query, key, value and output, each once
};

PreparedCase prepare_case(const BenchCase& test, Random& random);

/// Multiply-adds count 2; pairs of query and key that are not visible, nothing.
/// Forward has two products, backward five: the scores again, and the gradients
/// of weights, query, key and value.
double attention_flop(const AttentionInputs& inputs, Pass pass);

/// The same with the linear layers of self-attention.
double layer_flop(const LayerInputs& inputs, Pass pass);

/// The same of linear layers of so many weights together, on so many rows:
/// backward has one product for the weights' gradient, one for the input's.
double linear_flop(double rows, double weights, Pass pass);

/// Throws unless Backend::kAuto takes the kernels for that call.
void expect_fused(const AttentionInputs& inputs);
void expect_fused(const LayerInputs& inputs);

/// Why the rows' sums of weights after dropout are not 1 on average, or were
/// not dropped at all; empty: they are, within six standard errors.
std::string implausible_dropout(const at::Tensor& sums);

/// Where values and the output's gradient are all 1, out (B, H, Lq, Dv) and
/// dvalue (B, G, Lk, Dv) are the sums of the rows and of the columns of the
/// same weights. Why they are not; empty: of each value head they add up to the
/// same, within `unit` of the whole.
std::string implausible_gradient(const at::Tensor& out,
                                 const at::Tensor& dvalue, double unit);

}  // namespace cli
