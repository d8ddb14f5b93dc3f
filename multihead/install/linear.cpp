// SPDX-License-Identifier: MIT
//
// aten::mm, addmm and _addmm_activation in float32 by oneDNN
// (multihead/linear): what torch.nn.functional.linear and its gradients of any
// order consist of, and so do the Conv1D of transformers, the feed-forward part
// of PyTorch's inference path, and graphs of torch.compile.
//
// The kernels are of the key CPU, below autograd, autocast, vmap and
// FakeTensor, which see PyTorch's operators as before. What is not taken goes
// to PyTorch's kernels as functions, and so do its errors.
#include <ATen/ops/_addmm_activation_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/relu.h>

#include "multihead/install.h"
#include "multihead/install/overrides.h"
#include "multihead/linear/onednn.h"

namespace multihead {
namespace overrides {
namespace {

using at::Scalar;
using at::Tensor;
using onednn::is_plain_float;

// Counts as well. The other arguments matter where a·b would be taken.
template <typename Condition>
bool is_taken(const Tensor& a, const Tensor& b, const Condition& others_fit) {
  Product way = onednn::way_of(a, b);
  if (way == Product::kOneDnn && !others_fit()) way = Product::kOther;
  count_product(way);
  return way == Product::kOneDnn;
}

bool is_result(const Tensor& out, const Tensor& a, const Tensor& b) {
  return is_plain_float(out) && out.is_contiguous() &&
         out.sizes().equals({a.size(0), b.size(1)}) && !out.is_alias_of(a) &&
         !out.is_alias_of(b);
}

bool is_addend(const Tensor& self, const Tensor& a, const Tensor& b,
               const Scalar& beta, const Scalar& alpha) {
  return onednn::is_addend(self, a, b) && beta.equal(1) && alpha.equal(1);
}

Tensor run_mm(const Tensor& self, const Tensor& mat2) {
  const auto nothing_else = [] { return true; };
  if (!is_taken(self, mat2, nothing_else)) return at::cpu::mm(self, mat2);
  return onednn::multiply(self, mat2);
}

Tensor& run_mm_out(const Tensor& self, const Tensor& mat2, Tensor& out) {
  const auto fits = [&] { return is_result(out, self, mat2); };
  if (!is_taken(self, mat2, fits)) {
    return at::cpu::mm_outf(self, mat2, out);
  }
  return onednn::multiply_into(self, mat2, out);
}

Tensor run_addmm(const Tensor& self, const Tensor& mat1, const Tensor& mat2,
                 const Scalar& beta, const Scalar& alpha) {
  const auto fits = [&] { return is_addend(self, mat1, mat2, beta, alpha); };
  if (!is_taken(mat1, mat2, fits)) {
    return at::cpu::addmm(self, mat1, mat2, beta, alpha);
  }
  return onednn::multiply_and_add(mat1, mat2, self);
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
  return onednn::multiply_into(mat1, mat2, out).add_(self);
}

Tensor run_addmm_activation(const Tensor& self, const Tensor& mat1,
                            const Tensor& mat2, const Scalar& beta,
                            const Scalar& alpha, bool use_gelu) {
  const auto fits = [&] { return is_addend(self, mat1, mat2, beta, alpha); };
  if (!is_taken(mat1, mat2, fits)) {
    return at::cpu::_addmm_activation(self, mat1, mat2, beta, alpha, use_gelu);
  }
  Tensor out = onednn::multiply_and_add(mat1, mat2, self);
  return use_gelu ? at::gelu_(out) : at::relu_(out);
}

// Only of a batch that shares its second matrix, as linear has it whose input
// is no view of one matrix.
Tensor run_bmm(const Tensor& self, const Tensor& mat2) {
  const bool is_shared =
      self.dim() == 3 && mat2.dim() == 3 && mat2.stride(0) == 0 &&
      self.size(0) == mat2.size(0) && self.size(2) == mat2.size(1) &&
      is_plain_float(self) && is_plain_float(mat2) &&
      self.numel() * mat2.size(2) >= onednn::kSmallestProduct;
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

std::string why_not_linear() { return std::string(onednn::why_not()); }

}  // namespace multihead
