// SPDX-License-Identifier: MIT
//
// How far a result may be from the golden one: the budget of each dtype.
#pragma once

#include <cmath>
#include <vector>

namespace reference {

using Values = std::vector<double>;

/// Rounding of a dtype: u = own + base·(4 + Λ).
struct Precision {
  double own;   ///< of storing a 16-bit result; 0 for wider types
  double base;  ///< of the arithmetic
  double tiny;  ///< absolute floor: results near the smallest numbers
  double forward, backward, backward_value;  ///< the factors c

  double unit(double lambda) const { return own + base * (4 + lambda); }
  /// The bound for each element of a result with this scale.
  Values allowed(const Values& scale, double lambda, double c) const {
    Values bound(scale.size());
    for (size_t i = 0; i < scale.size(); ++i)
      bound[i] = c * unit(lambda) * scale[i] + tiny;
    return bound;
  }
  /// The bound for each logsumexp, which is float32 for 16-bit types.
  Values allowed_logsumexp(const Values& lse, double lambda) const {
    Values bound(lse.size(), 4 * base * (4 + lambda));
    if (base < 0x1p-40)
      for (size_t i = 0; i < lse.size(); ++i)
        bound[i] = 1e-13 * (1 + std::abs(lse[i]) + lambda);
    return bound;
  }
};
inline constexpr Precision kFloat64{0, 0x1p-53, 1e-37, 8, 8, 8};
inline constexpr Precision kFloat32{0, 0x1p-24, 1e-37, 8, 8, 16};
inline constexpr Precision kBFloat16{0x1p-9, 0x1p-24, 0x1p-133, 6, 8, 8};
inline constexpr Precision kFloat16{0x1p-12, 0x1p-24, 0x1p-24, 6, 8, 8};

}  // namespace reference
