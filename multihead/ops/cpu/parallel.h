// SPDX-License-Identifier: MIT
//
// The tasks of a kernel on torch's threads, each thread with scratch memory of
// its own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "multihead/kernels/kernels.h"

namespace multihead::ops {

/// How many threads a call is worth.
int threads_for(const kernels::AttentionArgs& a);

/// Calls work(first, last, scratch) until each of the plan's tasks has run
/// once.
void run_tasks(const kernels::Plan& plan, int threads,
               c10::function_ref<void(int64_t, int64_t, void*)> work);

template <class Args>
void run(const kernels::Kernel<Args>& kernel, const Args& args,
         const kernels::Plan& plan, int threads) {
  run_tasks(plan, threads, [&](int64_t first, int64_t last, void* scratch) {
    kernel.run(args, plan, first, last, scratch);
  });
}
template <class Args>
void run(const kernels::Kernel<Args>& kernel, const Args& args, int threads) {
  run(kernel, args, kernel.plan(args, threads), threads);
}

/// The kernels of this CPU, or those that MULTIHEAD_ISA asks for.
kernels::Isa current_isa();
kernels::Kernels kernels_of(const kernels::AttentionArgs& a);

template <class Args>
void run(const kernels::Kernel<Args>& kernel, const Args& args) {
  run(kernel, args, threads_for(args.attention));
}
void run_forward(const kernels::ForwardArgs& args);
/// dalibi_slopes (H) or (B, H) and dsinks (H), where defined, are filled too:
/// summed in float64 and rounded once.
void run_backward(kernels::BackwardArgs args, const at::Tensor& dalibi_slopes,
                  const at::Tensor& dsinks);

}  // namespace multihead::ops
