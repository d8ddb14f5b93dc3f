// SPDX-License-Identifier: MIT
//
// A layer of attention learns from a sequence that lies on several processes,
// on one machine or many:
//
//   export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
//   RANK=0 ring_attention [TOKENS [STEPS]] & RANK=1 ring_attention ...
//
// or torchrun --no-python --nproc-per-node 2 ring_attention. Whatever the
// number of processes, the losses are the same within rounding.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "multihead/distributed.h"
#include "multihead/modules.h"

namespace {

using at::Tensor;

constexpr int64_t kWidth = 64, kHeads = 4;
constexpr auto* kGroup = "ring";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  if (!value) throw std::runtime_error(std::string(name) + " is not set");
  return value;
}

// The processes, connected, and registered under a name: that is how
// ring_attention finds them.
c10::intrusive_ptr<c10d::ProcessGroup> connect() {
  const int rank = std::stoi(variable("RANK")),
            size = std::stoi(variable("WORLD_SIZE"));
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(variable("MASTER_PORT")));
  options.isServer = rank == 0 && !std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const auto store =
      c10::make_intrusive<c10d::TCPStore>(variable("MASTER_ADDR"), options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::GLOO,
                    c10::make_intrusive<c10d::ProcessGroupGloo>(
                        store, rank, size,
                        c10d::ProcessGroupGloo::Options::create_default()));
  c10d::register_process_group(kGroup, group);
  return group;
}

// (B, tokens of the sequence, …) → (B, tokens of this process, …): one piece
// from the front and one from the back, so that under a causal mask all have
// the same work.
Tensor mine(const Tensor& x, const c10d::ProcessGroup& group) {
  const int rank = group.getRank(), size = group.getSize();
  const auto pieces = x.tensor_split(2 * size, 1);
  return at::cat({pieces[rank], pieces[2 * size - 1 - rank]}, 1);
}

struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    in = register_module("in", multihead::Projection(kWidth, 3 * kWidth, true));
    out = register_module("out", multihead::Projection(kWidth, kWidth, true));
  }

  // (B, tokens of this process, kWidth) → likewise.
  Tensor forward(const Tensor& x) {
    const auto heads =
        in(x).unflatten(-1, {3 * kHeads, -1}).transpose(1, 2).chunk(3, 1);
    const Tensor y = multihead::ring_attention(
        heads[0], heads[1], heads[2], kGroup, {.is_causal = true},
        multihead::TokenOrder::kHeadTail);
    return out(y.transpose(1, 2).flatten(2));
  }

  multihead::Projection in = nullptr, out = nullptr;
};
TORCH_MODULE(Layer);

// Over all processes.
void sum(c10d::ProcessGroup& group, const Tensor& x) {
  std::vector<Tensor> tensors{x};
  group.allreduce(tensors)->wait();
}

void train(c10d::ProcessGroup& group, int64_t tokens, int steps) {
  at::manual_seed(0);  // the same layer and the same data everywhere
  Layer layer;
  torch::optim::AdamW optimizer(layer->parameters(), 1e-2);
  const Tensor input = at::randn({1, tokens, kWidth});
  const Tensor mean = input.cumsum(1) /
                      at::arange(1, tokens + 1).unsqueeze(-1);  // to be learnt
  const Tensor x = mine(input, group), target = mine(mean, group);
  for (int step = 1; step <= steps; ++step) {
    optimizer.zero_grad();
    // The mean of all tokens is the sum of what the processes have.
    Tensor loss = (layer(x) - target).square().sum() / (tokens * kWidth);
    loss.backward();
    for (const Tensor& parameter : layer->parameters()) {
      sum(group, parameter.grad());
    }
    optimizer.step();
    const at::NoGradGuard no_grad;
    sum(group, loss);
    if (group.getRank() == 0) {
      std::printf("step %d  loss %.7f\n", step, loss.item<double>());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto group = connect();
    train(*group, argc > 1 ? std::stoll(argv[1]) : 4096,
          argc > 2 ? std::stoi(argv[2]) : 10);
    c10d::unregister_process_group(kGroup);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "ring_attention: " << error.what() << "\n";
    return 1;
  }
}
