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
/// each head's rows one after the other, as KVCache has them.
PreparedCase prepare_paged(const PagedCall& call, bool cold, Random& random);
PreparedCase prepare_stored(const StoredCall& call, bool cold, Random& random);

}  // namespace cli
