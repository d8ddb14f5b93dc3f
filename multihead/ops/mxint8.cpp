// SPDX-License-Identifier: MIT
//
// MXINT8 rows as operators, which compiled graphs contain.
#include "multihead/mxint8.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "multihead/attention/storage.h"
#include "multihead/kernels/mxint8.h"
#include "multihead/text/shapes.h"

namespace multihead {
namespace {

using at::Tensor;

Tensor result_of_to_mxint8(const Tensor& x) {
  TORCH_CHECK_VALUE(x.is_floating_point() && x.dim() > 0,
                    "to_mxint8: x must be floating point of at least one "
                    "dimension, got ",
                    x.scalar_type(), " ", shape_text(x));
  auto sizes = x.sym_sizes().vec();
  sizes.back() = kernels::mxint8_bytes(sizes.back());
  return at::empty_symint(sizes, x.options().dtype(at::kChar));
}

Tensor result_of_from_mxint8(const Tensor& rows, at::ScalarType dtype) {
  check_mxint8("from_mxint8: ", "rows", rows);
  TORCH_CHECK_VALUE(at::isFloatingType(dtype),
                    "from_mxint8: dtype must be floating point, got ", dtype);
  auto sizes = rows.sym_sizes().vec();
  sizes.back() = width_of(rows);
  return at::empty_symint(sizes, rows.options().dtype(dtype));
}

// Calls row(n) for each row of a tensor, `width` numbers each.
template <class Row>
void for_each_row(int64_t rows, int64_t width, const Row& row) {
  const int64_t grain =
      std::max<int64_t>(1, 32768 / std::max<int64_t>(width, 1));
  at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) row(n);
  });
}

Tensor to_mxint8_on_cpu(const Tensor& x) {
  Tensor rows = result_of_to_mxint8(x);
  const Tensor numbers = x.to(at::kFloat).contiguous();
  const int64_t width = x.size(-1), bytes = rows.size(-1);
  if (width == 0) return rows;
  const float* from = numbers.const_data_ptr<float>();
  auto* to = reinterpret_cast<uint8_t*>(rows.mutable_data_ptr<int8_t>());
  for_each_row(x.numel() / width, width, [&](int64_t n) {
    kernels::round_to_mxint8(from + n * width, width, to + n * bytes);
  });
  return rows;
}

Tensor from_mxint8_on_cpu(const Tensor& rows, at::ScalarType dtype) {
  const Tensor result = result_of_from_mxint8(rows, dtype);
  const Tensor dense = rows.contiguous();
  const Tensor numbers = at::empty(result.sizes(), at::kFloat);
  const int64_t width = result.size(-1), bytes = rows.size(-1);
  if (width == 0) return result;
  const auto* from =
      reinterpret_cast<const uint8_t*>(dense.const_data_ptr<int8_t>());
  float* to = numbers.mutable_data_ptr<float>();
  for_each_row(result.numel() / width, width, [&](int64_t n) {
    kernels::restore_mxint8(from + n * bytes, width, to + n * width);
  });
  return numbers.to(dtype);
}

}  // namespace

Tensor to_mxint8(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("multihead::to_mxint8", "")
                             .typed<Tensor(const Tensor&)>();
  return op.call(x);
}

Tensor from_mxint8(const Tensor& rows, at::ScalarType dtype) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("multihead::from_mxint8", "")
                             .typed<Tensor(const Tensor&, at::ScalarType)>();
  return op.call(rows, dtype);
}

TORCH_LIBRARY_FRAGMENT(multihead, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("to_mxint8(Tensor x) -> Tensor", tags);
  m.def("from_mxint8(Tensor rows, ScalarType dtype=float) -> Tensor", tags);
}
TORCH_LIBRARY_IMPL(multihead, CPU, m) {
  m.impl("to_mxint8", &to_mxint8_on_cpu);
  m.impl("from_mxint8", &from_mxint8_on_cpu);
}
TORCH_LIBRARY_IMPL(multihead, Meta, m) {
  m.impl("to_mxint8", &result_of_to_mxint8);
  m.impl("from_mxint8", &result_of_from_mxint8);
}

}  // namespace multihead
