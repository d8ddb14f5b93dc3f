// SPDX-License-Identifier: MIT
//
// aten::mm, addmm and _addmm_activation in float32 by oneDNN: what
// torch.nn.functional.linear and its gradients of any order consist of, and so
// do the Conv1D of transformers, the feed-forward part of PyTorch's inference
// path, and graphs of torch.compile. PyTorch gives these products to MKL,
// which runs code for AVX2 on processors of other makers than Intel.
//
// The kernels are of the key CPU, below autograd, autocast, vmap and
// FakeTensor, which see PyTorch's operators as before. What is not taken goes
// to PyTorch's kernels as functions, and so do its errors.
//
// Tried and left out: a cache of weights that oneDNN has packed once. On a
// Zen 4, beside packing in each call, they make a product 1.4 to 1.9 times as
// fast with 4 to 16 rows, 1.1 to 1.2 with 32 to 64, 1.05 with 128 to 512. But
// whether a weight has changed cannot be known: `weight.data += …`, with which
// LoRA is merged, a NumPy array or another process on the same memory do not
// raise its version.
#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_addmm_activation_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/relu.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "multihead/attention/count.h"
#include "multihead/install.h"
#include "multihead/install/overrides.h"

namespace at::native {

/// result = beta·result + alpha·mat1·mat2 by oneDNN. PyTorch exports it, but
/// installs no header of it; null in a PyTorch that lacks it.
[[gnu::weak]] TORCH_API void mkldnn_matmul(const Tensor& mat1,
                                           const Tensor& mat2,
                                           const Tensor& result, float beta,
                                           float alpha);

}  // namespace at::native

namespace multihead {
namespace overrides {
namespace {

using at::Scalar;
using at::Tensor;

// What is taken, measured on a Zen 4, on which least is gained. Multiply-adds:
// oneDNN has a fixed cost of about 15 µs, and of 0.5 to 0.8 ms when the three
// sizes come for the first time, for which it writes machine code.
constexpr int64_t kSmallest = int64_t{1} << 25;
// Any size, and elements of the second matrix: below, calls wait for memory.
constexpr int64_t kNarrowest = 8, kLeast = 4096;
// The inner size where something is added: below, the sums are too short.
constexpr int64_t kShortest = 128;

bool is_plain(const Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.is_cpu() &&
         tensor.layout() == at::kStrided;
}

// Small products, of any dtype, come first: they feel what is asked of them.
Product way_of(const Tensor& a, const Tensor& b) {
  if (a.dim() != 2 || b.dim() != 2) return Product::kOther;
  const int64_t rows = a.sizes()[0], inner = a.sizes()[1],
                columns = b.sizes()[1];
  if (rows * inner * columns < kSmallest || inner * columns < kLeast ||
      std::min({rows, inner, columns}) < kNarrowest) {
    return Product::kSmall;
  }
  const bool fits = b.sizes()[0] == inner && is_plain(a) && is_plain(b) &&
                    at::globalContext().userEnabledMkldnn();
  return fits ? Product::kOneDnn : Product::kOther;
}

// Counts as well. The other arguments matter where a·b would be taken.
template <typename Condition>
bool is_taken(const Tensor& a, const Tensor& b, const Condition& others_fit) {
  Product way = way_of(a, b);
  if (way == Product::kOneDnn && !others_fit()) way = Product::kOther;
  count_product(way);
  return way == Product::kOneDnn;
}

bool is_result(const Tensor& out, const Tensor& a, const Tensor& b) {
  return is_plain(out) && out.is_contiguous() &&
         out.sizes().equals({a.size(0), b.size(1)}) && !out.is_alias_of(a) &&
         !out.is_alias_of(b);
}

bool is_addend(const Tensor& self, const Tensor& a, const Tensor& b,
               const Scalar& beta, const Scalar& alpha) {
  return is_plain(self) && a.size(1) >= kShortest &&
         at::is_expandable_to(self.sizes(), {a.size(0), b.size(1)}) &&
         beta.equal(1) && alpha.equal(1);
}

Tensor empty_product(const Tensor& a, const Tensor& b) {
  return at::empty({a.size(0), b.size(1)}, a.options());
}

Tensor& multiply(const Tensor& a, const Tensor& b, Tensor& out) {
  at::native::mkldnn_matmul(a, b, out, /*beta=*/0, /*alpha=*/1);
  return out;
}

// oneDNN's own way of adding a bias spares a pass over the result, 7 % of the
// time where the inner size is 128; it wants the second matrix without gaps.
Tensor multiply_and_add(const Tensor& a, const Tensor& b,
                        const Tensor& addend) {
  const bool is_bias = addend.dim() == 1 && addend.size(0) == b.size(1) &&
                       addend.is_contiguous();
  const Tensor weight = b.t();
  if (!is_bias || !(b.is_contiguous() || weight.is_contiguous())) {
    Tensor out = empty_product(a, b);
    return multiply(a, b, out).add_(addend);
  }
  using Linear =
      Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&,
             std::string_view, c10::List<std::optional<Scalar>>,
             std::optional<std::string_view>);
  static const auto linear =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
          .typed<Linear>();
  return linear.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), a,
                           weight, addend, "none",
                           /*scalars=*/c10::List<std::optional<Scalar>>(),
                           /*algorithm=*/std::nullopt);
}

Tensor run_mm(const Tensor& self, const Tensor& mat2) {
  const auto nothing_else = [] { return true; };
  if (!is_taken(self, mat2, nothing_else)) return at::cpu::mm(self, mat2);
  Tensor out = empty_product(self, mat2);
  return multiply(self, mat2, out);
}

Tensor& run_mm_out(const Tensor& self, const Tensor& mat2, Tensor& out) {
  const auto fits = [&] { return is_result(out, self, mat2); };
  if (!is_taken(self, mat2, fits)) {
    return at::cpu::mm_outf(self, mat2, out);
  }
  return multiply(self, mat2, out);
}

Tensor run_addmm(const Tensor& self, const Tensor& mat1, const Tensor& mat2,
                 const Scalar& beta, const Scalar& alpha) {
  const auto fits = [&] { return is_addend(self, mat1, mat2, beta, alpha); };
  if (!is_taken(mat1, mat2, fits)) {
    return at::cpu::addmm(self, mat1, mat2, beta, alpha);
  }
  return multiply_and_add(mat1, mat2, self);
}

Tensor& run_addmm_out(const Tensor& self, const Tensor& mat1,
                      const Tensor& mat2, const Scalar& beta,
                      const Scalar& alpha, Tensor& out) {
  const auto fits = [&] {
    return is_addend(self, mat1, mat2, beta, alpha) &&
           is_result(out, mat1, mat2) && !out.is_alias_of(self);
  };
  if (!is_taken(mat1, mat2, fits)) {
    return at::cpu::addmm_outf(self, mat1, mat2, beta, alpha, out);
  }
  return multiply(mat1, mat2, out).add_(self);
}

Tensor run_addmm_activation(const Tensor& self, const Tensor& mat1,
                            const Tensor& mat2, const Scalar& beta,
                            const Scalar& alpha, bool use_gelu) {
  const auto fits = [&] { return is_addend(self, mat1, mat2, beta, alpha); };
  if (!is_taken(mat1, mat2, fits)) {
    return at::cpu::_addmm_activation(self, mat1, mat2, beta, alpha, use_gelu);
  }
  Tensor out = multiply_and_add(mat1, mat2, self);
  return use_gelu ? at::gelu_(out) : at::relu_(out);
}

// Only of a batch that shares its second matrix, as linear has it whose input
// is no view of one matrix.
Tensor run_bmm(const Tensor& self, const Tensor& mat2) {
  const bool is_shared = self.dim() == 3 && mat2.dim() == 3 &&
                         mat2.stride(0) == 0 && self.size(0) == mat2.size(0) &&
                         self.size(2) == mat2.size(1) && is_plain(self) &&
                         is_plain(mat2) &&
                         self.numel() * mat2.size(2) >= kSmallest;
  if (!is_shared) return at::cpu::bmm(self, mat2);
  return run_mm(self.reshape({-1, self.size(2)}), mat2[0])
      .view({self.size(0), self.size(1), mat2.size(2)});
}

}  // namespace

void matrix_products(Registrations& all) {
  torch::Library& library = library_for(all, c10::DispatchKey::CPU);
  library.impl("mm", TORCH_FN(run_mm));
  library.impl("mm.out", TORCH_FN(run_mm_out));
  library.impl("addmm", TORCH_FN(run_addmm));
  library.impl("addmm.out", TORCH_FN(run_addmm_out));
  library.impl("_addmm_activation", TORCH_FN(run_addmm_activation));
  library.impl("bmm", TORCH_FN(run_bmm));
}

}  // namespace overrides

std::string why_not_linear() {
  if (!at::hasMKLDNN() || !at::native::mkldnn_matmul) {
    return "this PyTorch lacks oneDNN";
  }
  if (!at::hasMKL()) return "this PyTorch multiplies by another BLAS than MKL";
#ifdef __x86_64__
  if (!__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq")) {
    return "the processor has no AVX-512, and MKL needs none to be fast there";
  }
  const char* always = std::getenv("MULTIHEAD_LINEAR");
  if (always && std::string_view(always) == "always") return "";
  return __builtin_cpu_is("amd") ? "" : "MKL is fast on this processor";
#else
  return "it is for x86-64";
#endif
}

}  // namespace multihead
