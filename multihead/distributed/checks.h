// SPDX-License-Identifier: MIT
//
// A call whose tokens lie on several processes, before anything is computed:
// what each process can say by itself, and what only all of them know.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "multihead/attention/varlen.h"
#include "multihead/distributed/agreement.h"
#include "multihead/functional.h"

namespace multihead::distributed {

/// Where documents begin; neither: a batch.
struct Documents {
  const std::optional<at::Tensor>& cu_seqlens_q;
  const std::optional<at::Tensor>& cu_seqlens_k;
};

/// A call of this process: rows are (B, heads, L, D).
struct OwnCall {
  const at::Tensor &query, &key, &value;
  const AttentionOptions& options;
  Documents documents;
  const std::optional<at::Tensor>& dropout_state;
};

/// Checks the call, here and against those of the other processes. Throws on
/// every process what one of them refuses.
Places agree_on(const Group& group, TokenOrder order, Method method,
                const OwnCall& call);

/// What is the same everywhere, and is of all tokens. Where documents begin,
/// as numbers; nothing for a batch.
VarlenPlaces check_of_all(const OwnCall& call, const Places& places);

/// A mask (…, Lk) of all keys, in the order of the sequence, from those that
/// the processes have of theirs; undefined if they have none.
at::Tensor mask_of_all_keys(const Group& group, TokenOrder order,
                            const Lengths& key_lengths, const at::Tensor& mask);

}  // namespace multihead::distributed
