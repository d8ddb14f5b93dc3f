// SPDX-License-Identifier: MIT
//
// Before anything is computed, the processes compare their calls. So a shape or
// a rule that differs on one of them is an error on all, at once, instead of
// numbers that nobody asked for or a wait for tokens that never come.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <optional>

#include "multihead/distributed/exchange.h"
#include "multihead/distributed/tokens.h"

namespace multihead::distributed {

/// How the work is shared out: see ContextMethod.
enum class Method : uint8_t { kRing, kUlysses };

/// Which numbers dropout draws: the first process's seed and offset, and where
/// in a larger call this one begins, as dropout_state has it.
struct Drawn {
  int64_t seed = 0, offset = 0, first_batch = 0, first_head = 0,
          heads_in_all = 0;
};

/// What all processes know of a call.
struct Places {
  Lengths query_lengths, key_lengths;  ///< by process
  Drawn drawn;

  /// int64 (words(W)), as an operator returns it, and back.
  at::Tensor as_tensor() const;
  static int64_t words(int processes) { return 2 * processes + 5; }
  static Places from_tensor(const at::Tensor& words);
};

/// Tensors of this process's tokens.
struct OwnRows {
  const at::Tensor &query, &key, &value;
};
/// Where documents begin, as all processes have it; undefined: a batch.
struct Bounds {
  at::Tensor cu_seqlens_q, cu_seqlens_k;
};

/// Throws on every process where they do not agree, or where one of them has
/// `refused` its arguments: that one throws what it refused with.
Places agree(const Group& group, TokenOrder order, Method method,
             const OwnRows& rows, const AttentionOptions& options,
             const Bounds& bounds,
             const std::optional<at::Tensor>& dropout_state,
             const std::exception_ptr& refused);

}  // namespace multihead::distributed
