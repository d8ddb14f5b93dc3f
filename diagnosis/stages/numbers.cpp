// SPDX-License-Identifier: MIT
//
// Loops of our own: on tensors as tiny as these, each call into PyTorch takes
// longer than all numbers do (4 µs for a difference, 13 µs for a product of 6
// positions), and every recipe is measured.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// In the order of its dimensions.
Tensor as_numbers(const Tensor& x) { return x.to(at::kDouble).contiguous(); }

// The largest of these, none of which is NaN or below 0. In lanes: each alone
// would wait for the one before.
template <typename Number>
double largest_of(int64_t first, int64_t last, Number number) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> most = {};
  const auto take = [&](int64_t i, int64_t lane) {
    const double x = number(i);
    most[lane] = x > most[lane] ? x : most[lane];
  };
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) take(i + lane, lane);
  }
  for (; i < last; ++i) take(i, 0);
  return std::ranges::max(most);
}

// Of x, contiguous, only the rows that count: bool, leading dimensions of x;
// undefined: all of them.
template <typename Number>
double largest_of_rows(const Tensor& x, const Tensor& rows, Number number) {
  if (!rows.defined()) return largest_of(0, x.numel(), number);
  const int64_t width = x.size(-1);
  const Tensor counts =
      rows.expand(x.sizes().slice(0, x.dim() - 1)).contiguous();
  const bool* counted = counts.const_data_ptr<bool>();
  double most = 0;
  for (int64_t row = 0; row < counts.numel(); ++row) {
    if (!counted[row]) continue;
    most = std::max(most, largest_of(row * width, row * width + width, number));
  }
  return most;
}

// Beyond so many products of numbers PyTorch's are faster.
constexpr int64_t kFewProducts = 1 << 15;

bool needs_gradient(const Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad();
}

}  // namespace

double largest_finite(const Tensor& x, const Tensor& rows) {
  if (!x.defined()) return 0;
  const Tensor numbers = as_numbers(x);
  const double* p = numbers.const_data_ptr<double>();
  return largest_of_rows(numbers, rows, [p](int64_t i) {
    const double size = std::abs(p[i]);
    return size < kInfinity ? size : 0.0;
  });
}

double largest_difference(const Tensor& x, const Tensor& y,
                          const Tensor& rows) {
  if (x.sizes() != y.sizes()) return kInfinity;
  const Tensor numbers = as_numbers(x), others = as_numbers(y);
  const double* p = numbers.const_data_ptr<double>();
  const double* q = others.const_data_ptr<double>();
  return largest_of_rows(numbers, rows, [p, q](int64_t i) {
    const double difference = std::abs(p[i] - q[i]);
    if (difference < kInfinity) return difference;
    const bool are_same =
        p[i] == q[i] || (std::isnan(p[i]) && std::isnan(q[i]));
    return are_same ? 0.0 : kInfinity;
  });
}

uint64_t fingerprint(const Tensor& x) {
  const Tensor numbers = as_numbers(x);
  const double* p = numbers.const_data_ptr<double>();
  uint64_t print = 0;
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    print = (print ^ std::bit_cast<uint64_t>(p[i])) * 0x9e3779b97f4a7c15;
    print ^= print >> 29;
  }
  return print;
}

Tensor matrix_product(const Tensor& x, const Tensor& y) {
  const int64_t batch = x.size(0), heads = x.size(1), rows = x.size(2),
                inner = x.size(3), columns = y.size(3);
  const bool fits =
      y.size(0) == batch && y.size(1) == heads && y.size(2) == inner;
  if (!fits || needs_gradient(x) || needs_gradient(y) ||
      batch * heads * rows * inner * columns > kFewProducts) {
    return x.matmul(y);
  }
  Tensor result = at::empty({batch, heads, rows, columns}, x.options());
  double* row = result.mutable_data_ptr<double>();
  const auto from = x.accessor<const double, 4>();
  const auto to = y.accessor<const double, 4>();
  std::vector<double> matrix(inner * columns);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t k = 0; k < inner; ++k) {
        for (int64_t j = 0; j < columns; ++j)
          matrix[k * columns + j] = to[b][h][k][j];
      }
      for (int64_t i = 0; i < rows; ++i, row += columns) {
        std::fill_n(row, columns, 0.0);
        for (int64_t k = 0; k < inner; ++k) {
          const double factor = from[b][h][i][k];
          for (int64_t j = 0; j < columns; ++j)
            row[j] += factor * matrix[k * columns + j];
        }
      }
    }
  }
  return result;
}

}  // namespace multihead::diagnosis
