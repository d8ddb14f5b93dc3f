// SPDX-License-Identifier: MIT
//
// The kernels: attention on pointers, sizes and strides. No torch below this
// line, no threads, no allocation. A kernel is a pure function of its
// arguments, a range of task numbers and scratch memory; who calls it decides
// on which threads.
//
// Letters: B batch, H query heads, G key/value heads, Lq and Lk lengths, D head
// width, Dv value head width. All strides are in elements and may be anything;
// rows of query, key, value and out are dense in their last dimension.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "multihead/kernels/cpu/isa.h"

namespace multihead::kernels {

/// The compiler's float16. g++ 12 has _Float16 on x86 only.
#ifdef __aarch64__
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

/// How query, key, value and out are stored. Products and softmax run in
/// float32, for kFloat64 in float64: the compute type.
enum class Dtype { kFloat32, kFloat64, kBFloat16, kFloat16 };

/// How key and value are stored where forward takes them narrower than query;
/// their strides are in elements of that.
enum class Storage {
  kAsQuery,
  kBFloat16,  ///< under kFloat32
  kMXInt8,    ///< bytes (mxint8.h), but not under kFloat64
};

constexpr size_t bytes_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}
constexpr size_t compute_bytes_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : 4;
}

/// (B, heads, L, width) in memory, in one of three forms:
///   padded   batch row b begins at b·batch
///   ragged   at row starts[b], B + 1 numbers that ascend; `batch` is 0, and
///            there are starts[b + 1] − starts[b] rows
///   paged    row j lies in page block_table[b·table_stride + j / page], as row
///            j % page; pages are `batch` apart
/// row_of (gemm/load_store.h) finds a row.
struct StridedRows {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
  const int64_t* starts = nullptr;
  const int32_t* block_table = nullptr;
  int64_t table_stride = 0, page = 0;
};
struct StridedOutRows {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
  const int64_t* starts = nullptr;
};

/// A tensor over (B, H, Lq, Lk); strides of broadcast dimensions are 0.
struct ScoreMask {
  enum class Kind { kNone, kKeep, kBias };
  Kind kind = Kind::kNone;
  /// kKeep: one byte each, not 0 = may attend. kBias: numbers of `dtype`, added
  /// to the scores; −inf blocks.
  const void* data = nullptr;
  /// kFloat64 in float64, any other one elsewhere.
  Dtype dtype = Dtype::kFloat32;
  int64_t batch = 0, head = 0, query = 0, key = 0;
};

/// A tensor over (B, Lk), one byte each: not 0 = any query may attend.
struct KeyMask {
  const uint8_t* data = nullptr;  ///< null: none
  int64_t batch = 0, key = 0;
};

/// The ends of the interval of keys that a query sees: key j is visible to
/// query i of batch row b when 0 ≤ j < n, and (is_causal) j ≤ i + offset, and
/// i + offset − left ≤ j ≤ i + offset + right where these are not −1; n is
/// key_lengths[b] or Lk, offset is query_offsets[b], from −2^62 to 2^62, or 0.
struct Visibility {
  bool is_causal = false;
  int64_t left = -1, right = -1;
  const int64_t* query_offsets = nullptr;  ///< (B), dense
  const int64_t* key_lengths = nullptr;    ///< (B), dense

  bool depends_on_query() const { return is_causal || left >= 0 || right >= 0; }
};

/// Dropout by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
/// as 1, 2, 3", 2011): whether a weight is kept depends on nothing but
/// (seed, offset, b, h, i, j). One call gives the 16-bit numbers of eight keys;
/// a weight is kept if its number is not below probability·2^16, so the
/// probability counts in steps of 2^-16. A call that is a part of another one
/// says where: (b, h, i, j) are then those of the whole call, so that its
/// parts, wherever they are computed, drop what it would drop.
struct Dropout {
  double probability = 0;
  uint64_t seed = 0, offset = 0;
  int64_t first_batch = 0, first_head = 0;  ///< of b and h
  int64_t heads = 0;                        ///< of the whole call; 0: as many
  int64_t first_query = 0, first_key = 0;   ///< of i and j
};

/// One call of attention:
///   s = scale·q·k;  s = softcap·tanh(s / softcap);  s += bias;
///   s −= slope·|i + offset − j|;
///   out = Σ dropout(exp(s − m))·v / (Σ exp(s − m) + exp(sink − m))
/// over the visible keys, m the largest s. Rows that see none give 0, and
/// logsumexp −inf (the sink where there is one).
/// Query head h reads key/value head h / (H / G).
/// Query, key and value may be ragged, key and value also paged (then for
/// forward only); a ragged key has its key_lengths too. Lq and Lk are then
/// those of the longest batch row. What is (B, H, Lq) here is (H, T) of ragged
/// queries, T = starts[B] rows in all, and everything shaped like query is
/// ragged alike.
struct AttentionArgs {
  Dtype dtype = Dtype::kFloat32;
  Storage storage = Storage::kAsQuery;  ///< else for forward only
  int64_t B = 0, H = 0, G = 0, Lq = 0, Lk = 0, D = 0, Dv = 0;
  StridedRows query;       ///< (B, H, Lq, D)
  StridedRows key, value;  ///< (B, G, Lk, D), (B, G, Lk, Dv)
  double scale = 1;
  double softcap = 0;  ///< 0: none
  Visibility visibility;
  ScoreMask mask;
  KeyMask key_mask;                         ///< both masks apply
  const double* alibi_slopes = nullptr;     ///< (B, H)
  int64_t alibi_batch = 0, alibi_head = 0;  ///< its strides
  const double* sinks = nullptr;            ///< (H), dense
  Dropout dropout;
};

/// Attention forward. out (B, H, Lq, Dv); logsumexp (B, H, Lq), dense, compute
/// type, may be null: not wanted.
struct ForwardArgs {
  AttentionArgs attention;
  StridedOutRows out;
  void* logsumexp = nullptr;
  void* workspace = nullptr;  ///< of Plan::workspace_bytes (run_forward)
};

/// A gradient of a tensor over (B, H, Lq, Lk), compute type; what is added up
/// over a dimension has the stride 0 there. Null: not wanted.
struct ScoreGradients {
  void* data = nullptr;
  int64_t batch = 0, head = 0, query = 0, key = 0;
};

/// Attention backward: gradients of Σ out·dout + Σ logsumexp·dlogsumexp. What
/// has no data is not wanted, and not computed.
struct BackwardArgs {
  AttentionArgs attention;
  StridedRows out, dout;  ///< (B, H, Lq, Dv); out as forward returned it
  const void* logsumexp = nullptr;   ///< (B, H, Lq), dense, compute type
  const void* dlogsumexp = nullptr;  ///< the same, or null: 0
  /// Keys and values are some of those that out and logsumexp are of: nothing
  /// can be made again from them that is of all keys.
  bool is_part = false;
  StridedOutRows dquery, dkey, dvalue;  ///< like query, key, value
  ScoreGradients dbias;                 ///< of a mask that is a bias
  double* dalibi_slopes = nullptr;      ///< (B, H), dense
  double* dsinks = nullptr;             ///< (B, H), dense
};

/// A backward call on its way through its stages (run_backward). Keys are cut
/// into splits; a wave is some splits of every head at once.
struct BackwardRun {
  BackwardArgs args;
  bool split_parallel = false;  ///< splits are tasks of their own, else heads
  int64_t splits_per_wave = 0, first_split = 0;  ///< first_split: of this wave
  void* workspace = nullptr;                     ///< shared by the stages
};

/// From here on a logsumexp of float32 is off by 4e-6 and more: where its
/// magnitude is larger, the softmax is computed again.
inline constexpr double kLargeLogsumexp = 64;

/// The weights that a forward call used, after dropout, recomputed from its
/// logsumexp: per head (B, H, Lq, Lk), or averaged over heads (B, Lq, Lk, the
/// head stride is ignored). dtype as attention's. Value is not read.
struct WeightsArgs {
  AttentionArgs attention;
  const void* logsumexp = nullptr;  ///< (B, H, Lq), dense, compute type
  StridedOutRows weights;
  bool average = false;
};

/// Per query row: the `count` largest weights, before dropout, in descending
/// order (of equal ones the lower key first) with their keys, −1 where the row
/// sees fewer keys, weights NaN where a score is; the entropy −Σ w·ln w; all
/// dense, numbers of compute type.
struct SummaryArgs {
  AttentionArgs attention;
  const void* logsumexp = nullptr;  ///< (B, H, Lq)
  int64_t count = 0;
  void* weights = nullptr;  ///< (B, H, Lq, count)
  int64_t* keys = nullptr;  ///< (B, H, Lq, count)
  void* entropy = nullptr;  ///< (B, H, Lq)
};

/// How a call is cut into tasks. Bits do not depend on it.
struct Plan {
  int64_t tasks = 0;          ///< independent; in any order, on any thread
  int64_t rows_per_task = 0;  ///< of the H/G·Lq rows of a key/value head
  size_t scratch_bytes = 0;   ///< per thread, aligned to 64
  bool pack_key = false, pack_value = false;  ///< copied to dense panels
  bool longest_first = false;  ///< causal: last rows of all heads first
  bool is_decoding = false;    ///< forward: few rows, each key read once
  int64_t splits = 0;  ///< decoding: of a head, which are tasks; 0: heads are
  size_t workspace_bytes = 0;  ///< shared by all tasks
};

/// A kernel: plan, then run tasks first ≤ n < last, on any thread, each with
/// scratch of its own.
template <class Call>
struct Kernel {
  Plan (*plan)(const Call&, int threads);
  void (*run)(const Call&, const Plan&, int64_t first, int64_t last,
              void* scratch);
};

/// In this order: prepare; keys and queries for each wave; heads; bias. A stage
/// that has nothing to do has no tasks.
struct BackwardStages {
  Kernel<BackwardRun> prepare, keys, queries, heads, bias;
};

/// Keys whose dK and dV one task sums up. The gradients' sums are cut at its
/// multiples, so it is part of the result.
inline constexpr int64_t kGradientSplit = 256;

/// Splits of so many keys. At least one: even without keys, queries have a
/// gradient, 0.
inline int64_t splits_of(int64_t keys) {
  const int64_t splits = (keys + kGradientSplit - 1) / kGradientSplit;
  return splits > 0 ? splits : 1;
}

/// Runs all stages on up to `threads` threads. allocate(bytes) gives the
/// workspace, aligned to 64 bytes, which must live until the end;
/// launch(kernel, run) plans with these threads, runs all tasks and returns
/// when they have ended.
template <class Allocate, class Launch>
void run_backward(const BackwardStages& stages, const BackwardArgs& args,
                  int threads, const Allocate& allocate, const Launch& launch) {
  BackwardRun run{args};
  const int64_t heads = args.attention.B * args.attention.G;
  const int64_t splits = splits_of(args.attention.Lk);
  // Four tasks to a thread end together; more would only take memory.
  const int64_t wanted = int64_t{4} * threads;
  run.split_parallel = threads > 1 && splits > 1 && heads < wanted;
  const int64_t width = heads > 0 ? (wanted + heads - 1) / heads : 1;
  run.splits_per_wave = run.split_parallel && width < splits ? width : splits;
  run.workspace = allocate(stages.prepare.plan(run, threads).workspace_bytes);
  launch(stages.prepare, run);
  for (; run.first_split < splits; run.first_split += run.splits_per_wave) {
    launch(stages.keys, run);
    launch(stages.queries, run);
  }
  launch(stages.heads, run);
  launch(stages.bias, run);
}

/// The kernels of one instruction set and dtype.
struct Kernels {
  Kernel<ForwardArgs> forward, merge;  ///< run_forward
  BackwardStages backward;
  Kernel<WeightsArgs> weights;
  Kernel<SummaryArgs> summary;
};

/// Runs a forward call. allocate(bytes) gives the workspace, aligned to 64
/// bytes, which must live until the end; launch(kernel, args, plan) runs all
/// tasks and returns when they have ended.
template <class Allocate, class Launch>
void run_forward(const Kernels& kernels, ForwardArgs args, int threads,
                 const Allocate& allocate, const Launch& launch) {
  const Plan plan = kernels.forward.plan(args, threads);
  if (plan.workspace_bytes > 0) args.workspace = allocate(plan.workspace_bytes);
  launch(kernels.forward, args, plan);
  if (plan.splits == 0) return;
  launch(kernels.merge, args, kernels.merge.plan(args, threads));
}

/// Those of `isa` for `dtype`; the CPU must have it.
Kernels kernels_for(Isa isa, Dtype dtype);

}  // namespace multihead::kernels
