// SPDX-License-Identifier: MIT
//
// The tensors of a trace as they are compared, thousands of times in a search.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "diagnosis/dump/observed_call.h"

namespace multihead::diagnosis {

/// A tensor of any dtype and layout, and what is known of its numbers: read
/// when they are first compared, sorted when their ends agree.
class Traced {
 public:
  explicit Traced(const at::Tensor& tensor) : tensor_(tensor) {}

  const at::Tensor& tensor() const { return tensor_; }

  /// Whether these are the numbers of `wanted`, in any order of dimensions.
  /// NaN and +inf are as many. Where `wanted` has −inf, as of blocked scores,
  /// any number may stand that is smaller than the others.
  bool has_numbers_of(const Traced& wanted, double allowed) const;

  /// Whether some matrix (L, n) of it is `matrix`, float64: with any one
  /// dimension beside the last, at any place of the others; or the first rows.
  bool has_matrix(const at::Tensor& matrix, double allowed) const;

 private:
  void read() const;
  std::span<const double> numbers() const;
  const std::vector<double>& sorted() const;

  at::Tensor tensor_;
  mutable at::Tensor numbers_;  // float64, contiguous; undefined: not read yet
  mutable int64_t beyond_ = 0, finite_ = 0;    // NaN and +inf; finite numbers
  mutable double largest_ = 0, smallest_ = 0;  // of the others than `beyond_`
  mutable std::vector<double> sorted_;  // these, downwards; empty: not yet
};

/// In order. Made once for each call.
const std::vector<Traced>& traced(const ObservedCall& call);

}  // namespace multihead::diagnosis
