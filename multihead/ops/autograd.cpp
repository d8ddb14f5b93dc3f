// SPDX-License-Identifier: MIT
//
// The fused operators have no derivatives: functional.cpp takes the definition
// in ATen operations where one is needed, and who calls an operator itself is
// told so in backward.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace multihead::ops {

TORCH_LIBRARY_IMPL(multihead, Autograd, m) {
  for (const char* name : {"fused_attention", "fused_attention_backward",
                           "attention_weights", "attention_summary"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace multihead::ops
