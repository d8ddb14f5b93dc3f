// SPDX-License-Identifier: MIT
#include "multihead/attention/layout.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace multihead {
namespace {

// Dimensions from the outermost in memory to the innermost, and its inverse.
struct MemoryOrder {
  c10::DimVector order, inverse;
};

// The last dimension stays last. A dimension of one element says nothing about
// memory, nor does a tensor that repeats itself: they keep their places.
MemoryOrder memory_order(const at::Tensor& query) {
  const int64_t rank = query.dim();
  MemoryOrder memory{c10::DimVector(rank), c10::DimVector(rank)};
  c10::DimVector sorted;
  bool repeats = query.is_contiguous();
  for (int64_t d = 0; d < rank; ++d) {
    memory.order[d] = d;
    if (d == rank - 1 || query.sym_size(d) == 1) continue;
    sorted.push_back(d);
    repeats = repeats || query.sym_stride(d) == 0;
  }
  if (!repeats) {
    const c10::DimVector places = sorted;
    std::stable_sort(sorted.begin(), sorted.end(), [&](int64_t a, int64_t b) {
      return query.sym_stride(a) > query.sym_stride(b);
    });
    for (size_t i = 0; i < places.size(); ++i) {
      memory.order[places[i]] = sorted[i];
    }
  }
  for (int64_t d = 0; d < rank; ++d) memory.inverse[memory.order[d]] = d;
  return memory;
}

}  // namespace

at::Tensor empty_in_layout_of(const at::Tensor& query,
                              c10::SymIntArrayRef sizes) {
  if (query.is_contiguous()) return at::empty_symint(sizes, query.options());
  const MemoryOrder memory = memory_order(query);
  c10::SymDimVector in_memory;
  for (const int64_t d : memory.order) in_memory.push_back(sizes[d]);
  return at::empty_symint(in_memory, query.options()).permute(memory.inverse);
}

at::Tensor empty_logsumexp(const at::Tensor& query) {
  const auto dtype =
      query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty_symint(query.sym_sizes().slice(0, query.dim() - 1),
                          query.options().dtype(dtype));
}

at::Tensor in_layout_of(const at::Tensor& query, const at::Tensor& out) {
  if (query.is_contiguous()) return out;
  const MemoryOrder memory = memory_order(query);
  return out.permute(memory.order).contiguous().permute(memory.inverse);
}

}  // namespace multihead
