// SPDX-License-Identifier: MIT
//
// Runs kernels on a call: every operand and the scratch in guarded memory, the
// tasks dealt out to threads as they come.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>

#include "multihead/kernels/cpu/dispatch.h"
#include "tests/cpp/kernels/call.h"

namespace kernel_test {

using kernels::Isa;

/// The kernels of one instruction set; `fuses`: its multiply-add rounds once,
/// so that float32 and float64 have the same bits as everywhere else.
struct Variant {
  std::string name;
  kernels::Kernels kernels;
  bool fuses = true;
};

/// Why the kernels of `isa` cannot be run here; empty: they can.
inline std::string why_not(Isa isa) {
  const char* wanted = getenv("MULTIHEAD_ISA");
  if (wanted && *wanted && std::string(wanted) != kernels::name_of(isa)) {
    return std::string("MULTIHEAD_ISA asks for ") + wanted;
  }
  if (!kernels::cpu_has(isa)) {
    return std::string("this CPU lacks ") + kernels::name_of(isa);
  }
  return "";
}

inline Variant variant_of(Isa isa, Dtype dtype) {
  return {kernels::name_of(isa), kernels::kernels_for(isa, dtype)};
}

/// Those that this CPU runs, the portable ones without FMA among them.
inline std::vector<Variant> variants(Dtype dtype) {
  std::vector<Variant> result;
  for (const Isa isa : kernels::kAllIsas) {
    if (!why_not(isa).empty()) continue;
    const Variant next = variant_of(isa, dtype);
    // Some instruction sets have kernels of their own for one dtype only.
    const auto run = [](const Variant& v) { return v.kernels.forward.run; };
    if (!result.empty() && run(result.back()) == run(next)) continue;
    result.push_back(next);
  }
#ifndef MULTIHEAD_ARM  // there all of them have it
  if (why_not(Isa::kPortable).empty()) {
    result.push_back(
        {"portable without FMA", kernels::kernels_portable(dtype), false});
  }
#endif
  return result;
}

/// Tests of each instruction set; they skip, with the reason, what this CPU
/// cannot run.
class EachIsa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    const std::string reason = why_not(GetParam());
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  static Variant variant(Dtype dtype) { return variant_of(GetParam(), dtype); }
};
inline std::string isa_name(const testing::TestParamInfo<Isa>& info) {
  return kernels::name_of(info.param);
}
#define FOR_EACH_ISA(suite)                                                  \
  INSTANTIATE_TEST_SUITE_P(Isa, suite, testing::ValuesIn(kernels::kAllIsas), \
                           isa_name)

struct Running {
  int threads = 1;
  std::optional<kernels::Plan> plan = {};  ///< instead of the kernel's own
  bool wants_logsumexp = true;
};

template <class Arguments>
void run_tasks(const kernels::Kernel<Arguments>& kernel,
               const Arguments& arguments, const kernels::Plan& plan,
               const Running& running) {
  std::atomic<int64_t> next = 0;
  const auto work = [&](Edge edge) {
    const Guarded scratch(plan.scratch_bytes, edge);
    scratch.forget();
    for (int64_t n; (n = next++) < plan.tasks;) {
      kernel.run(arguments, plan, n, n + 1, scratch.data());
    }
    EXPECT_TRUE(scratch.intact()) << "written beside the scratch";
  };
  if (running.threads == 1) return work(Edge::kEnd);
  std::vector<std::thread> threads;
  for (int n = 0; n < running.threads; ++n) {
    threads.emplace_back(work, n % 2 == 0 ? Edge::kEnd : Edge::kStart);
  }
  for (std::thread& thread : threads) thread.join();
}

template <class Arguments>
void run_tasks(const kernels::Kernel<Arguments>& kernel,
               const Arguments& arguments, const Running& running = {}) {
  run_tasks(
      kernel, arguments,
      running.plan ? *running.plan : kernel.plan(arguments, running.threads),
      running);
}

struct Result {
  Tensor out;        ///< (B, H, Lq, Dv)
  Tensor logsumexp;  ///< (1, B, H, Lq)
};

inline constexpr int kUnwritten = 0xFF;  ///< NaN, until something is written

/// A tensor for a kernel to write.
inline Tensor output(Storage storage, const Index& sizes,
                     const Index& strides) {
  Tensor x(storage, sizes, strides);
  if (x.memory().size() < size_t{1} << 28) x.fill_bytes(kUnwritten);
  return x;
}
inline Tensor output(Storage storage, const Index& sizes) {
  return output(storage, sizes, dense_strides(sizes));
}

inline Result forward(const Variant& variant, const Call& c,
                      const Running& running = {}) {
  const Shape& s = c.shape;
  Result result{
      output(storage_of(c.dtype), {s.B, s.H, s.Lq, s.Dv}, c.out_strides),
      output(compute_storage_of(c.dtype), {1, s.B, s.H, s.Lq})};
  const kernels::ForwardArgs arguments{
      arguments_of(c), out_rows_of(result.out),
      running.wants_logsumexp ? result.logsumexp.data() : nullptr};
  if (running.plan) {
    run_tasks(variant.kernels.forward, arguments, running);
  } else {
    std::optional<Guarded> workspace;
    kernels::run_forward(
        variant.kernels, arguments, running.threads,
        [&](size_t bytes) {
          workspace.emplace(bytes, Edge::kEnd);
          memset(workspace->data(), kUnwritten, bytes);
          return workspace->data();
        },
        [&](const auto& kernel, const auto& given, const kernels::Plan& plan) {
          run_tasks(kernel, given, plan, running);
        });
    EXPECT_TRUE(!workspace || workspace->intact())
        << "written beside the workspace";
  }
  EXPECT_TRUE(result.out.memory().intact() &&
              result.logsumexp.memory().intact())
      << "written beside the result";
  return result;
}

/// What a pass over the scores alone is given: no values.
inline kernels::AttentionArgs scores_of(const Call& c) {
  kernels::AttentionArgs a = arguments_of(c);
  a.value = {};
  return a;
}

/// (B, H, Lq, Lk), or (B, 1, Lq, Lk) averaged.
inline Tensor weights(const Variant& variant, const Call& c,
                      const Tensor& logsumexp, bool average = false,
                      const Running& running = {}) {
  const Shape& s = c.shape;
  Tensor result =
      output(storage_of(c.dtype), {s.B, average ? 1 : s.H, s.Lq, s.Lk});
  const kernels::WeightsArgs arguments{scores_of(c), logsumexp.data(),
                                       out_rows_of(result), average};
  run_tasks(variant.kernels.weights, arguments, running);
  EXPECT_TRUE(result.memory().intact()) << "written beside the weights";
  return result;
}

struct SummaryResult {
  Tensor weights, keys;  ///< (B, H, Lq, count)
  Tensor entropy;        ///< (1, B, H, Lq)
};

inline SummaryResult summary(const Variant& variant, const Call& c,
                             const Tensor& logsumexp, int64_t count,
                             const Running& running = {}) {
  const Shape& s = c.shape;
  const Storage number = compute_storage_of(c.dtype);
  SummaryResult result{output(number, {s.B, s.H, s.Lq, count}),
                       output(Storage::kInt64, {s.B, s.H, s.Lq, count}),
                       output(number, {1, s.B, s.H, s.Lq})};
  const kernels::SummaryArgs arguments{
      scores_of(c),
      logsumexp.data(),
      count,
      result.weights.data(),
      static_cast<int64_t*>(result.keys.data()),
      result.entropy.data()};
  run_tasks(variant.kernels.summary, arguments, running);
  EXPECT_TRUE(result.weights.memory().intact() &&
              result.keys.memory().intact() && result.entropy.memory().intact())
      << "written beside the summary";
  return result;
}

}  // namespace kernel_test
