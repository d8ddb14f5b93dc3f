// SPDX-License-Identifier: MIT
//
// Contenders for sequences of different lengths and for keys in pages.
#pragma once

#include "cli/bench/contenders.h"

namespace cli {

/// One call for all sequences (ours), a call for each, and padded calls, ours
/// and PyTorch's; forward, or forward and backward.
PreparedCase prepare_ragged(const RaggedCall& call, Pass pass, Random& random);

/// Keys in pages of random order (ours), the same rows one after the other, and
/// in a KVCache.
PreparedCase prepare_paged(const PagedCall& call, bool cold, Random& random);

/// Keys in a KVCache (ours); beside it tensors of the same numbers, ours and
/// PyTorch's, or where the cache is narrower than query, a cache that is not.
PreparedCase prepare_cached(const CachedCall& call, bool cold, Random& random);

}  // namespace cli
