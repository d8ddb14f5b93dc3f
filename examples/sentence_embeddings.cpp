// SPDX-License-Identifier: MIT
//
// The attention layers of a real model in C++:
//   sentence_embeddings MODEL.safetensors LAYERS.safetensors
// MODEL is all-MiniLM-L6-v2 as it was published; LAYERS is what
// sentence_embeddings.py --cpp saves of a run of it: the padding (blocked), and
// for each layer N its input (hidden.N), its output (model.N), the same in
// float64 (truth.N) and what torch.nn.MultiheadAttention makes of the input
// (pytorch.N). Exits with 1 when a layer differs from the model's own by more
// than rounding, or by a bit from torch.nn.MultiheadAttention.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <multihead/multihead.h>

#include <cstdio>
#include <exception>
#include <string>

namespace {

constexpr int64_t kHeads = 12;

/// The attention of one layer with the weights of a BERT, which keeps the
/// projections of query, key and value apart.
multihead::MultiheadAttention load_layer(const multihead::Safetensors& model,
                                         const std::string& name) {
  const auto tensor = [&](const std::string& part) {
    return model.tensors.at(name + part);
  };
  const auto packed = [&](const std::string& part) {
    return at::cat({tensor(".self.query." + part), tensor(".self.key." + part),
                    tensor(".self.value." + part)});
  };
  const at::Tensor bias = tensor(".output.dense.bias");
  multihead::MultiheadAttention layer(
      multihead::MultiheadAttentionOptions(bias.numel(), kHeads)
          .batch_first(true));
  layer->in_proj_weight.copy_(packed("weight"));
  layer->in_proj_bias.copy_(packed("bias"));
  layer->out_proj->weight.copy_(tensor(".output.dense.weight"));
  layer->out_proj->bias.copy_(bias);
  layer->eval();
  return layer;
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

bool check_layers(const multihead::Safetensors& model,
                  const multihead::Safetensors& run) {
  const multihead::BackendGuard exact(multihead::Backend::kExact);
  const auto options = multihead::ForwardOptions()
                           .key_padding_mask(run.tensors.at("blocked"))
                           .need_weights(false);
  bool agrees = true;
  std::puts(
      "the same in C++  difference   rounding allows   nn.MultiheadAttention");
  for (int number = 0;; ++number) {
    const std::string suffix = '.' + std::to_string(number);
    if (!run.tensors.contains("hidden" + suffix)) return agrees && number > 0;
    auto layer = load_layer(model, "encoder.layer" + suffix + ".attention");
    const at::Tensor x = run.tensors.at("hidden" + suffix);
    const at::Tensor expected = run.tensors.at("model" + suffix);
    const auto [output, weights] = layer->forward(x, x, x, options);

    // Two outputs of which neither is further from the truth than the model's
    // own are at most twice that apart.
    const double difference = largest_difference(output, expected);
    const double rounding =
        2 * largest_difference(expected, run.tensors.at("truth" + suffix));
    const bool bits = output.equal(run.tensors.at("pytorch" + suffix));
    std::printf("  layer %d    %14.1e   %15.1e   %s\n", number, difference,
                rounding, bits ? "equal bits" : "OTHER BITS");
    agrees = agrees && bits && difference <= rounding;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs(
        "usage: sentence_embeddings MODEL.safetensors LAYERS.safetensors\n",
        stderr);
    return 2;
  }
  const at::NoGradGuard no_grad;
  try {
    const bool agrees = check_layers(multihead::read_safetensors(argv[1]),
                                     multihead::read_safetensors(argv[2]));
    return agrees ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sentence_embeddings: %s\n", error.what());
    return 2;
  }
}
