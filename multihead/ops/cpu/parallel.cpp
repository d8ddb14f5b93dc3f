// SPDX-License-Identifier: MIT
#include "multihead/ops/cpu/parallel.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

namespace multihead::ops {
namespace {

// Scratch of a thread: grows, and stays for the next call unless it is large.
class Scratch {
 public:
  /// Null where there is not so much memory.
  void* get(size_t bytes) {
    if (size_ < bytes || !block_) {
      release();
      block_ = std::aligned_alloc(64, bytes / 64 * 64 + 64);
      if (block_) size_ = bytes;
    }
    return block_;
  }
  void release_if_large() {
    constexpr size_t kLarge = size_t{16} << 20;
    if (size_ > kLarge) release();
  }
  ~Scratch() { release(); }

 private:
  void release() {
    std::free(block_);
    block_ = nullptr;
    size_ = 0;
  }
  void* block_ = nullptr;
  size_t size_ = 0;
};

thread_local Scratch scratch;

// Below this many multiply-adds, waking a thread costs more than it saves.
constexpr double kWorthThreads = 1e6;
// Reading a number of a key or value is worth so many: what few queries wait
// for. 12 heads that read 512 keys of width 64 with one query each take 63 µs
// (Zen 4), and are no million multiply-adds.
constexpr double kPerNumberRead = 4;

void* allocate(size_t bytes, at::Tensor& workspace) {
  workspace = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  return workspace.mutable_data_ptr();
}

}  // namespace

int threads_for(const kernels::AttentionArgs& a) {
  auto keys = static_cast<double>(a.B * a.Lk);
  double pairs = keys * static_cast<double>(a.Lq);
  if (const int64_t* starts = a.query.starts) {
    keys = pairs = 0;
    for (int64_t b = 0; b < a.B; ++b) {
      const auto length = static_cast<double>(a.visibility.key_lengths[b]);
      keys += length;
      pairs += length * static_cast<double>(starts[b + 1] - starts[b]);
    }
  }
  const double work = (pairs * static_cast<double>(a.H) +
                       kPerNumberRead * keys * static_cast<double>(a.G)) *
                      static_cast<double>(a.D + a.Dv);
  const bool alone = work < kWorthThreads || at::in_parallel_region();
  return alone ? 1 : at::get_num_threads();
}

void run_tasks(const kernels::Plan& plan, int threads,
               c10::function_ref<void(int64_t, int64_t, void*)> work) {
  if (plan.tasks == 0) return;
  std::atomic<int64_t> next{0};
  std::atomic<bool> starved{false};
  const int64_t workers = std::min<int64_t>(threads, plan.tasks);
  // Several tasks at once where there are many, for a kernel prepares the next
  // one; few enough that the last ones end together.
  const int64_t batch = workers == 1
                            ? plan.tasks
                            : std::max<int64_t>(1, plan.tasks / (workers * 16));
  const auto take_tasks = [&] {
    void* memory = scratch.get(plan.scratch_bytes);
    if (!memory) {
      starved = true;
      return;
    }
    for (int64_t n; (n = next.fetch_add(batch)) < plan.tasks;) {
      work(n, std::min(n + batch, plan.tasks), memory);
    }
    scratch.release_if_large();
  };
  if (workers == 1) {
    take_tasks();
  } else {
    // Not at::parallel_for, which counts threads by itself.
#pragma omp parallel num_threads(static_cast<int>(workers))
    take_tasks();
  }
  TORCH_CHECK(!starved, "fused attention: cannot allocate ", plan.scratch_bytes,
              " bytes of scratch memory for each thread");
}

void run_forward(const kernels::ForwardArgs& args) {
  at::Tensor workspace;
  const int threads = threads_for(args.attention);
  kernels::run_forward(
      kernels_of(args.attention), args, threads,
      [&](size_t bytes) { return allocate(bytes, workspace); },
      [&](const auto& kernel, const kernels::ForwardArgs& given,
          const kernels::Plan& plan) { run(kernel, given, plan, threads); });
}

void run_backward(kernels::BackwardArgs args, const at::Tensor& dalibi_slopes,
                  const at::Tensor& dsinks) {
  const kernels::AttentionArgs& a = args.attention;
  const auto sums_of = [&](const at::Tensor& gradient) {
    return gradient.defined() ? at::empty({a.B, a.H}, at::kDouble)
                              : at::Tensor();
  };
  const at::Tensor slopes = sums_of(dalibi_slopes), sinks = sums_of(dsinks);
  if (slopes.defined()) args.dalibi_slopes = slopes.mutable_data_ptr<double>();
  if (sinks.defined()) args.dsinks = sinks.mutable_data_ptr<double>();
  at::Tensor workspace;
  const int threads = threads_for(args.attention);
  kernels::run_backward(
      kernels_of(args.attention).backward, args, threads,
      [&](size_t bytes) { return allocate(bytes, workspace); },
      [&](const auto& stage, const kernels::BackwardRun& run_now) {
        run(stage, run_now, threads);
      });
  if (slopes.defined()) {
    dalibi_slopes.copy_(dalibi_slopes.dim() == 1 ? slopes.sum(0) : slopes);
  }
  if (sinks.defined()) dsinks.copy_(sinks.sum(0));
}

}  // namespace multihead::ops
