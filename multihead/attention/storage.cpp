// SPDX-License-Identifier: MIT
#include "multihead/attention/storage.h"

#include "multihead/kernels/mxint8.h"
#include "multihead/text/shapes.h"

namespace multihead {

bool is_stored(const at::Tensor& query, const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  return (dtype == at::kChar && query.is_floating_point()) ||
         (dtype == at::kBFloat16 && query.scalar_type() == at::kFloat);
}

c10::SymInt width_of(const at::Tensor& x) {
  const c10::SymInt elements = x.sym_size(-1);
  if (x.scalar_type() != at::kChar) return elements;
  // Every 33rd byte, and the last one, is a scale.
  constexpr int64_t kBytes = kernels::kMXGroup + 1;
  return elements - (elements + (kBytes - 1)) / kBytes;
}

void check_mxint8(const char* fn, const char* name, const at::Tensor& rows) {
  TORCH_CHECK_VALUE(
      rows.scalar_type() == at::kChar && rows.dim() > 0 &&
          kernels::mxint8_bytes(width_of(rows)) == rows.sym_size(-1),
      fn, name,
      " must be rows of MXINT8, int8 of D + ceil(D/32) bytes each, got ",
      rows.scalar_type(), " ", shape_text(rows));
}

void check_storage(const char* fn, const char* name, const at::Tensor& query,
                   const at::Tensor& x) {
  if (is_stored(query, x)) {
    if (x.scalar_type() == at::kChar) check_mxint8(fn, name, x);
    return;
  }
  TORCH_CHECK(x.is_floating_point(), fn, name, " must be floating point, got ",
              x.scalar_type());
  TORCH_CHECK(x.scalar_type() == query.scalar_type(), fn, name,
              " must have the dtype of query, got ", x.scalar_type(), " and ",
              query.scalar_type());
}

at::Tensor restored(const at::Tensor& query, const at::Tensor& x) {
  if (!is_stored(query, x)) return x;
  return x.scalar_type() == at::kChar ? from_mxint8(x, query.scalar_type())
                                      : x.to(query.scalar_type());
}

void check_not_stored(const char* function, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value) {
  for (const auto& [name, x] : {std::pair("key", &key), {"value", &value}}) {
    TORCH_CHECK(!is_stored(query, *x), function, ": ", name,
                " must have the dtype of query, got ", x->scalar_type(),
                " and ", query.scalar_type());
  }
}

}  // namespace multihead
