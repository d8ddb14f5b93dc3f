// SPDX-License-Identifier: MIT
//
// Uses what the library installs: a module, a function, a file, a
// verdict. Exits with 0
// when a layer that was saved and loaded gives the bits of the first, and those
// are explained as attention.
#include <ATen/ops/rand.h>
#include <multihead/diagnosis.h>
#include <multihead/multihead.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: consumer FILE.safetensors\n";
    return 2;
  }
  const multihead::MultiheadAttentionOptions options(8, 2);
  multihead::MultiheadAttention first(options), second(options);
  multihead::save_safetensors(*first, argv[1]);
  multihead::load_safetensors(*second, argv[1]);

  const at::Tensor x = at::rand({5, 3, 8});
  const auto [expected, weights] = first->forward(x, x, x);
  const auto [output, _] = second->forward(x, x, x);

  const at::Tensor q = at::rand({1, 2, 4, 8});
  const at::Tensor attended = multihead::scaled_dot_product_attention(
      q, q, q, {.is_causal = true, .window = {{1, 0}}});

  std::cout << "multihead " MULTIHEAD_VERSION " on LibTorch "
            << MULTIHEAD_TORCH_VERSION << ", weights " << weights.sizes()
            << ", attended " << attended.sizes() << '\n';
  multihead::diagnosis::Observation call = multihead::read_safetensors(argv[1]);
  call.metadata = {{"num_heads", "2"}, {"batch_first", "false"}};
  call.tensors["x"] = x;
  call.tensors["out"] = output;
  const auto verdict = multihead::diagnosis::explain({&call, 1});
  return output.equal(expected) && verdict.faults.empty() ? 0 : 1;
}
