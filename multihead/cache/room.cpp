// SPDX-License-Identifier: MIT
#include "multihead/cache/room.h"

#include <ATen/ops/empty.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace multihead {

at::Tensor empty_room(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor room = at::empty(sizes, options);
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  if (room.is_cpu()) {
    // Whole pages inside of the tensor: its neighbours in memory keep theirs.
    const auto begin = reinterpret_cast<uintptr_t>(room.mutable_data_ptr());
    const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
    const uintptr_t last = (begin + room.nbytes()) / kPage * kPage;
    // Refusals change only the speed. Small pages that malloc had handed out
    // before would stay small, so they are given back.
    if (first < last) {
      auto* whole = reinterpret_cast<void*>(first);
      if (madvise(whole, last - first, MADV_HUGEPAGE) == 0)
        madvise(whole, last - first, MADV_DONTNEED);
    }
  }
#endif
  return room;
}

}  // namespace multihead
