// SPDX-License-Identifier: MIT
#include "multihead/linear/onednn.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

namespace at::native {

/// result = beta·result + alpha·mat1·mat2 by oneDNN. PyTorch exports it, but
/// installs no header of it; null in a PyTorch that lacks it.
[[gnu::weak]] TORCH_API void mkldnn_matmul(const Tensor& mat1,
                                           const Tensor& mat2,
                                           const Tensor& result, float beta,
                                           float alpha);

}  // namespace at::native

namespace multihead::onednn {

using at::Scalar;
using at::Tensor;

namespace {

// Any size, and elements of the second matrix: below, calls wait for memory.
constexpr int64_t kNarrowest = 8, kLeast = 4096;
// The inner size where something is added: below, the sums are too short.
constexpr int64_t kShortest = 128;

std::string what_lacks() {
  if (!at::hasMKLDNN() || !at::native::mkldnn_matmul) {
    return "this PyTorch lacks oneDNN";
  }
  // PyTorch's function refuses every dtype then.
  for (const char* name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"}) {
    const char* const most = std::getenv(name);
    const std::string_view isa = most ? most : "";
    if (isa == "AVX" || isa.starts_with("AVX2") || isa.starts_with("SSE"))
      return std::string(name) + " holds oneDNN to less than AVX-512";
  }
  if (!at::hasMKL()) return "this PyTorch multiplies by another BLAS than MKL";
#ifdef __x86_64__
  if (!__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq")) {
    return "the processor has no AVX-512, and MKL needs none to be fast there";
  }
  return "";
#else
  return "it is for x86-64";
#endif
}

bool is_amd() {
#ifdef __x86_64__
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

Tensor empty_product(const Tensor& a, const Tensor& b) {
  return at::empty({a.size(0), b.size(1)}, a.options());
}

}  // namespace

std::string_view why_not() {
  static const std::string lacking = what_lacks();
  static const bool pays = is_amd();
  if (!lacking.empty()) return lacking;
  const char* const wish = std::getenv("MULTIHEAD_LINEAR");
  if (!wish) return pays ? "" : "MKL is fast on this processor";
  const std::string_view word = wish;
  TORCH_CHECK_VALUE(word == "always" || word == "never",
                    "MULTIHEAD_LINEAR must be always or never, got \"", word,
                    "\"");
  return word == "always" ? "" : "MULTIHEAD_LINEAR is never";
}

bool is_plain_float(const Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.is_cpu() &&
         tensor.layout() == at::kStrided;
}

// Small products, of any dtype, come first: they feel what is asked of them.
Product way_of(const Tensor& a, const Tensor& b) {
  if (a.dim() != 2 || b.dim() != 2) return Product::kOther;
  const int64_t rows = a.sizes()[0], inner = a.sizes()[1],
                columns = b.sizes()[1];
  if (rows * inner * columns < kSmallestProduct || inner * columns < kLeast ||
      std::min({rows, inner, columns}) < kNarrowest) {
    return Product::kSmall;
  }
  const bool fits = b.sizes()[0] == inner && is_plain_float(a) &&
                    is_plain_float(b) &&
                    at::globalContext().userEnabledMkldnn();
  return fits ? Product::kOneDnn : Product::kOther;
}

bool is_addend(const Tensor& addend, const Tensor& a, const Tensor& b) {
  return is_plain_float(addend) && a.size(1) >= kShortest &&
         at::is_expandable_to(addend.sizes(), {a.size(0), b.size(1)});
}

Tensor multiply(const Tensor& a, const Tensor& b) {
  Tensor out = empty_product(a, b);
  return multiply_into(a, b, out);
}

Tensor& multiply_into(const Tensor& a, const Tensor& b, Tensor& out) {
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
    return multiply_into(a, b, out).add_(addend);
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

}  // namespace multihead::onednn
