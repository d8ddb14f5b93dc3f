// SPDX-License-Identifier: MIT
//
// One call of scaled_dot_product_attention as data: what to draw at random.
#pragma once

#include <string>

#include "cli/cases/random.h"
#include "multihead/functional.h"

namespace cli {

enum class CallMask {
  kNone,
  kKeep,          ///< bool (Lq, Lk)
  kKeepPerHead,   ///< bool (B, H, Lq, Lk)
  kFloat,         ///< (Lq, Lk)
  kFloatPerHead,  ///< (B, H, Lq, Lk), a quarter of it −inf
  kBlockedRows,   ///< bool (Lq, Lk), every third row sees nothing
  kHalfKeys,      ///< bool (B, 1, 1, Lk), the second half blocked
  kTriangle,      ///< bool (Lq, Lk), causal but as a tensor
};

/// How (B, H, L, D) lies in memory.
enum class Layout {
  kContiguous,
  kSequenceMajor,  ///< (B, L, H, D), as projections leave it
  kGapped,         ///< every second row of a longer tensor
};

struct AttentionCall {
  std::string name;
  int64_t B = 2, H = 4, G = 0;               ///< G = 0: as many as H
  int64_t Lq = 33, Lk = 65, D = 32, Dv = 0;  ///< Dv = 0: as D
  at::ScalarType dtype = at::kFloat;
  multihead::AttentionOptions options = {};
  CallMask mask = CallMask::kNone;
  Layout layout = Layout::kContiguous;
  double magnitude = 1;       ///< of query and key
  bool poison = false;        ///< NaN in a key and value that no row sees
  bool query_offset = false;  ///< per batch row: 7, -1, -9, …
  bool key_lengths = false;   ///< from the shortest up to Lk
  int64_t shortest = 0;
  bool key_mask = false;  ///< a quarter of the keys of each batch row blocked
  bool alibi = false;     ///< slopes 2^-1, 2^-2, … as published
  bool sinks = false;
  bool logsumexp = false;  ///< compared too
};

struct AttentionInputs {
  at::Tensor query, key, value;
  multihead::AttentionOptions options;
};

AttentionInputs draw(const AttentionCall& call, Random& random);

/// A tensor that needs a gradient, with the strides of `tensor`; undefined
/// stays so.
at::Tensor leaf(const at::Tensor& tensor);

/// Query, key and value as leaves.
AttentionInputs leaves(const AttentionInputs& inputs);

/// "B2 H4 G2 L33 Lk65 D32 f32"
std::string shapes(const AttentionCall& call);

}  // namespace cli
