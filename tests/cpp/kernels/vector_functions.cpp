// SPDX-License-Identifier: MIT
#include "tests/cpp/kernels/vector_functions.h"

#include "multihead/kernels/cpu/dispatch.h"
#include "multihead/kernels/cpu/simd/math.h"

namespace kernel_test {
namespace {

namespace kernels = multihead::kernels;

template <class F, class Function>
void map(const typename F::Scalar* x, typename F::Scalar* y, int64_t count,
         Function function) {
  for (int64_t i = 0; i < count; i += F::kLanes) {
    F::store(y + i, function(F::load(x + i)));
  }
}

}  // namespace

#define MULTIHEAD_DEFINE(name, F)                                         \
  void MULTIHEAD_FOR_TARGET(name)(const kernels::F::Scalar* x,            \
                                  kernels::F::Scalar* y, int64_t count) { \
    map<kernels::F>(x, y, count, [](kernels::F::Vector a) {               \
      return kernels::name<kernels::F>(a);                                \
    });                                                                   \
  }

MULTIHEAD_DEFINE(exp, Float32)
MULTIHEAD_DEFINE(exp, Float64)
MULTIHEAD_DEFINE(tanh, Float32)
MULTIHEAD_DEFINE(tanh, Float64)
MULTIHEAD_DEFINE(log, Float32)
MULTIHEAD_DEFINE(log, Float64)

}  // namespace kernel_test
