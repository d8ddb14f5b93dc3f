// SPDX-License-Identifier: MIT
//
// Uses what the library installs: a module, a function, a file. Exits with 0
// when a layer that was saved and loaded gives the bits of the first.
#include <ATen/ops/rand.h>
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
  return output.equal(expected) ? 0 : 1;
}
