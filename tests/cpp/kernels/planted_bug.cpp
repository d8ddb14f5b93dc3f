// SPDX-License-Identifier: MIT
//
// Calls the kernels with a bug of its own, which the sanitizers and valgrind
// must see happen inside the kernels: proof that they look there.
//   planted_bug memory         says that there is a key more than there is
//   planted_bug uninitialised  never writes the queries (valgrind)
//   planted_bug arithmetic     asks for more heads than 64 bits can count
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "multihead/kernels/kernels.h"

namespace kernels = multihead::kernels;

namespace {

/// Attention of 4 queries over 4 keys of width 8, float32.
struct Call {
  std::unique_ptr<float[]> query{new float[32]}, key{new float[32]()},
      value{new float[32]()}, out{new float[32]};
  kernels::ForwardArgs arguments;

  Call() {
    kernels::AttentionArgs& a = arguments.attention;
    a.B = a.H = a.G = 1;
    a.Lq = a.Lk = 4;
    a.D = a.Dv = 8;
    a.query = {query.get(), 32, 32, 8};
    a.key = {key.get(), 32, 32, 8};
    a.value = {value.get(), 32, 32, 8};
    arguments.out = {out.get(), 32, 32, 8};
  }

  int run() {
    const char* error = nullptr;
    const auto isa = kernels::chosen_isa(&error);
    const auto kernel =
        kernels::kernels_for(isa, arguments.attention.dtype).forward;
    const kernels::Plan plan = kernel.plan(arguments, 1);
    std::vector<char> scratch(plan.scratch_bytes + 64);
    kernel.run(arguments, plan, 0, plan.tasks, scratch.data());
    return out[0] > 0;
  }
};

}  // namespace

int main(int count, char** arguments) {
  const char* bug = count > 1 ? arguments[1] : "";
  Call call;
  if (strcmp(bug, "uninitialised") != 0) memset(call.query.get(), 0, 128);
  if (strcmp(bug, "memory") == 0) call.arguments.attention.Lk = 5;
  if (strcmp(bug, "arithmetic") == 0) {
    call.arguments.attention.H = call.arguments.attention.G = int64_t{1} << 62;
    call.arguments.attention.B = 4;
    return kernels::kernels_for(kernels::Isa::kPortable,
                                kernels::Dtype::kFloat32)
               .forward.plan(call.arguments, 1)
               .tasks > 0;
  }
  return call.run();
}
