// SPDX-License-Identifier: MIT
#include "diagnosis/search/trace.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <memory>

#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {
namespace {

bool is_beyond(double x) { return std::isnan(x) || x == kInfinity; }

}  // namespace

std::span<const double> Traced::numbers() const {
  return {numbers_.const_data_ptr<double>(),
          static_cast<size_t>(numbers_.numel())};
}

void Traced::read() const {
  if (numbers_.defined()) return;
  numbers_ = tensor_.to(at::kDouble).contiguous();
  largest_ = -kInfinity, smallest_ = kInfinity;
  for (const double x : numbers()) {
    if (is_beyond(x)) {
      ++beyond_;
      continue;
    }
    finite_ += x > -kInfinity;
    largest_ = std::max(largest_, x);
    smallest_ = std::min(smallest_, x);
  }
}

const std::vector<double>& Traced::sorted() const {
  if (sorted_.empty()) {
    std::ranges::remove_copy_if(numbers(), std::back_inserter(sorted_),
                                is_beyond);
    std::ranges::sort(sorted_, std::greater<>());
  }
  return sorted_;
}

bool Traced::has_numbers_of(const Traced& wanted, double allowed) const {
  const int64_t count = wanted.tensor_.numel();
  if (tensor_.numel() != count) return false;
  wanted.read();
  // NaN alone is of any code.
  if (wanted.beyond_ == count) return false;
  read();
  if (wanted.finite_ == 0)
    return wanted.beyond_ == 0 || beyond_ == wanted.beyond_;
  const auto agree = [allowed](double x, double y) {
    return std::abs(x - y) <= allowed;
  };
  const bool has_blocked = wanted.finite_ + wanted.beyond_ < count;
  if (beyond_ != wanted.beyond_ || !agree(largest_, wanted.largest_) ||
      !(has_blocked || agree(smallest_, wanted.smallest_))) {
    return false;
  }
  return std::equal(wanted.sorted().begin(),
                    wanted.sorted().begin() + wanted.finite_, sorted().begin(),
                    agree);
}

bool Traced::has_matrix(const at::Tensor& matrix, double allowed) const {
  const int64_t length = matrix.size(0), width = matrix.size(1);
  const bool may_be = tensor_.dim() > 1 && tensor_.size(-1) == width &&
                      matrix.numel() > 0 && tensor_.numel() >= matrix.numel();
  if (!may_be) return false;
  const at::Tensor contiguous = matrix.contiguous();
  const double* const wanted = contiguous.const_data_ptr<double>();
  // Rows `step` numbers apart.
  const auto is_at = [&](const double* first, int64_t step) {
    for (int64_t i = 0; i < length; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        const double x = first[i * step + j], y = wanted[i * width + j];
        const bool agree = std::abs(x - y) <= allowed || x == y ||
                           (std::isnan(x) && std::isnan(y));
        if (!agree) return false;
      }
    }
    return true;
  };
  read();
  const std::span<const double> all = numbers();
  if (tensor_.dim() == 2) return is_at(all.data(), width);
  auto step = static_cast<int64_t>(all.size());
  for (int64_t kept = 0; kept < tensor_.dim() - 1; ++kept) {
    step /= tensor_.size(kept);
    if (tensor_.size(kept) != length) continue;
    // What is before `kept` lies `length` steps apart, what is between it and
    // the last dimension one width.
    for (size_t outer = 0; outer < all.size(); outer += length * step) {
      for (int64_t inner = 0; inner < step; inner += width) {
        if (is_at(&all[outer + inner], step)) return true;
      }
    }
  }
  return false;
}

const std::vector<Traced>& traced(const ObservedCall& call) {
  if (!call.traced) {
    call.traced = std::make_shared<const std::vector<Traced>>(
        call.trace.begin(), call.trace.end());
  }
  return *call.traced;
}

}  // namespace multihead::diagnosis
