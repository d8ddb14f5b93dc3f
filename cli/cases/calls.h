// SPDX-License-Identifier: MIT
//
// Calls as data, and what is drawn at random for them: attention, a layer, and
// a transformer block around any form of attention.
#pragma once

#include <ATen/core/Generator.h>

#include <functional>
#include <string>
#include <vector>

#include "multihead/functional.h"

namespace cli {

using multihead::AttentionLayer;
using multihead::AttentionOptions;
using multihead::Backend;
using multihead::BackendGuard;
using multihead::ForwardOptions;

/// Inputs of one case, a function of the run's seed and the case's name: a case
/// sees the same numbers whatever else runs.
class Random {
 public:
  Random(uint64_t seed, const std::string& name);

  at::Tensor normal(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);
  at::Tensor uniform(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);
  /// bool; true with probability p.
  at::Tensor chance(at::IntArrayRef sizes, double p);
  /// (out, in), of a size that keeps the variance of what it multiplies.
  at::Tensor weight(int64_t out, int64_t in, at::ScalarType dtype);
  /// For what draws from torch's own generator, dropout for instance.
  uint64_t seed() const { return seed_; }

 private:
  uint64_t seed_;
  at::Generator generator_;
};

/// "f32", "f64", "bf16", "f16"
std::string short_name(at::ScalarType dtype);

/// A tensor that needs a gradient, with the strides of `tensor`; undefined
/// stays so.
at::Tensor leaf(const at::Tensor& tensor);

/// bool (queries, keys): true for keys after the query, as 0, 1, 2, …
at::Tensor later_keys(int64_t queries, int64_t keys);

// --- Attention ---------------------------------------------------------------

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

/// One call of scaled_dot_product_attention.
struct AttentionCall {
  std::string name;
  int64_t B = 2, H = 4, G = 0;               ///< G = 0: as many as H
  int64_t Lq = 33, Lk = 65, D = 32, Dv = 0;  ///< Dv = 0: as D
  at::ScalarType dtype = at::kFloat;
  AttentionOptions options = {};
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
  AttentionOptions options = {};
};

AttentionInputs draw(const AttentionCall& call, Random& random);

/// Query, key and value as leaves.
AttentionInputs leaves(const AttentionInputs& inputs);

/// "B2 H4 G2 L33 Lk65 D32 f32"
std::string shapes(const AttentionCall& call);

// --- Layers ------------------------------------------------------------------

/// Which of query, key and value are one tensor.
enum class Inputs { kDistinct, kKeyIsValue, kSelf };

/// Masks in the polarity of nn.MultiheadAttention: true = blocked.
enum class LayerMask {
  kNone,
  kBool,            ///< (Lq, Lk)
  kBoolPerHead,     ///< (B·H, Lq, Lk)
  kFloat,           ///< (Lq, Lk)
  kFloatPerHead,    ///< (B·H, Lq, Lk)
  kPadding,         ///< bool (B, Lk)
  kFloatPadding,    ///< (B, Lk), −inf and finite
  kBoolAndPadding,  ///< (Lq, Lk) and (B, Lk)
  kCausal,          ///< is_causal alone
  kCausalHint,      ///< the causal mask, and is_causal
  kBlockedRow,      ///< bool (Lq, Lk), query 1 sees nothing
};

/// One call of an attention layer.
struct LayerCall {
  std::string name = {};
  int64_t N = 2, Lq = 5, Lk = 7;      ///< self-attention: Lk = Lq
  int64_t E = 16, H = 4, G = 0;       ///< G > 0: grouped-query attention
  int64_t D = 0, kdim = 0, vdim = 0;  ///< 0: E / H, E, E
  at::ScalarType dtype = at::kFloat;
  Inputs inputs = Inputs::kDistinct;
  LayerMask mask = LayerMask::kNone;
  bool bias = true, bias_kv = false, zero_attn = false;
  bool batch_first = true, batched = true;
  double dropout = 0;  ///< > 0: in training
  bool need_weights = true, average = true;
};

struct LayerInputs {
  at::Tensor query, key, value;
  AttentionLayer layer;
  ForwardOptions options = {};
};

LayerInputs draw(const LayerCall& call, Random& random);

/// Sequences, parameters and a float mask as leaves; tensors that were one stay
/// one.
LayerInputs leaves(const LayerInputs& inputs);

/// "N2 L5 Lk7 E16 H4 f32"
std::string shapes(const LayerCall& call);

// --- Blocks ------------------------------------------------------------------

/// What a training step goes through.
struct BlockCall {
  int64_t N = 2, L = 7, E = 16, H = 4;
  at::ScalarType dtype = at::kFloat;
  double dropout = 0.1;  ///< on the attention weights
};

/// Parameters of a linear layer, weight (out, in), or of a layer norm.
struct Affine {
  at::Tensor weight, bias;
};

/// x + attention(norm(x)), then x + mlp(norm(x)), as GPT-2 has them; causal.
struct Block {
  at::Tensor input;                   ///< (N, L, E)
  Affine attention_norm, qkv, merge;  ///< (E), (3·E, E), (E, E)
  Affine mlp_norm, up, down;          ///< (E), (4·E, E), (E, 4·E)
  int64_t num_heads;
  double dropout_p;

  /// The input, then the parameters; they need gradients.
  std::vector<at::Tensor> leaves() const;
  /// The number of weights of the linear layers; biases do not count.
  int64_t num_weights() const;
};

Block draw(const BlockCall& call, Random& random);

/// (N, L, E); `attend` gets queries, keys and values as views of (N, L, 3·E).
at::Tensor forward(
    const Block& block,
    const std::function<at::Tensor(const AttentionInputs&)>& attend);

/// "N1 L1024 E768 H12 bf16"
std::string shapes(const BlockCall& call);

// --- Sequences and pages -----------------------------------------------------

/// Self-attention of sequences that lie one after the other.
struct RaggedCall {
  std::vector<int64_t> lengths = {3, 7, 1};
  int64_t H = 2, D = 8;
  at::ScalarType dtype = at::kFloat;
};

/// One query for each head against keys in pages.
struct PagedCall {
  int64_t H = 4, G = 2, Lk = 64, D = 8;
  int64_t page = 16;  ///< tokens; Lk is a multiple
  at::ScalarType dtype = at::kFloat;
};

/// One query for each head against the keys of a KVCache.
struct CachedCall {
  int64_t H = 4, G = 2, Lk = 64, D = 8;
  at::ScalarType dtype = at::kFloat;
  at::ScalarType storage = at::kBFloat16;  ///< the cache's dtype
};

/// "N8 L64-2048 H8 D64 f32", "H32 G8 Lk4096 D128 page16 f32",
/// "H32 G8 Lk4096 D128 int8 under f32"
std::string shapes(const RaggedCall& call);
std::string shapes(const PagedCall& call);
std::string shapes(const CachedCall& call);

}  // namespace cli
