// SPDX-License-Identifier: MIT
//
// What a source that is compiled once per instruction set exports: one function
// per kernel, its name ending in that of the target. The build defines
// MULTIHEAD_TARGET and the compiler's flags.
#pragma once

#include "multihead/kernels/exports.h"
#include "multihead/kernels/product.h"
#include "multihead/kernels/storage.h"

#define MULTIHEAD_JOIN(a, b) a##_##b
#define MULTIHEAD_NAME(a, b) MULTIHEAD_JOIN(a, b)
#define MULTIHEAD_FOR_TARGET(name) MULTIHEAD_NAME(name, MULTIHEAD_TARGET)

namespace multihead::kernels {
namespace {

/// The kernel K<M, S> for a dtype: how products multiply, how it is stored.
template <template <class, class> class K>
inline auto visit(Dtype dtype) {
  using Single = FusedMultiplyAdd<Float32>;
  using Double = FusedMultiplyAdd<Float64>;
  const auto kernel = [](auto k) {
    using Entry = decltype(k);
    return typename Entry::Type{&Entry::plan, &Entry::run};
  };
  // What these two targets are for; they are asked for nothing else.
#if defined(__AMX_BF16__)
  return kernel(K<BFloat16Tiles, Stored<Dtype::kBFloat16>>{});
#elif defined(__AVX512BF16__)
  return kernel(K<BFloat16Dot, Stored<Dtype::kBFloat16>>{});
#endif
  switch (dtype) {
    case Dtype::kFloat64:
      return kernel(K<Double, Stored<Dtype::kFloat64>>{});
    case Dtype::kBFloat16:
      return kernel(K<Single, Stored<Dtype::kBFloat16>>{});
    case Dtype::kFloat16:
      return kernel(K<Single, Stored<Dtype::kFloat16>>{});
    default:
      return kernel(K<Single, Stored<Dtype::kFloat32>>{});
  }
}

}  // namespace
}  // namespace multihead::kernels
