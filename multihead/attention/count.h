// SPDX-License-Identifier: MIT
//
// Counting calls by source, way and reason (stats.h). A fused call is counted
// where its kernel starts, so that the count also holds for graphs, and for
// nothing that did not run; every other call where its way is chosen.
#pragma once

#include <cstdint>
#include <string_view>

#include "multihead/functional.h"

namespace multihead {

enum class Source : uint8_t { kOperator, kFunction, kModule, kInstalled };

/// Names the source of this thread's calls during its own lifetime, unless
/// another is alive: the outermost caller is the source.
class SourceGuard {
 public:
  explicit SourceGuard(Source source);
  ~SourceGuard();
  SourceGuard(const SourceGuard&) = delete;
  SourceGuard& operator=(const SourceGuard&) = delete;

 private:
  Source previous_;
};

/// A call of this thread's source whose kernel runs now.
void count_fused();

/// A call that goes another way, or none.
void count(const Route& route);

/// Where a matrix product goes: that of a layer, which is counted if it is
/// oneDNN's, and all of them while install({.linear = true}) holds.
enum class Product : uint8_t { kOneDnn, kSmall, kOther };

void count_product(Product product);

/// The reason of a route without what differs from call to call: shapes stand
/// in brackets, at its end.
std::string_view without_shapes(std::string_view reason);

}  // namespace multihead
