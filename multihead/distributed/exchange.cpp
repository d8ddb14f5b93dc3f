// SPDX-License-Identifier: MIT
#include "multihead/distributed/exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace multihead::distributed {
namespace {

// What the group throws names sockets; who waits wants to know for whom.
template <class F>
auto named(const std::string& what, const F& f) {
  try {
    return f();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "ring_attention: ", what, ": ", error.what());
  }
}

}  // namespace

Group::Group(const std::string& name)
    : group_(c10d::resolve_process_group(name)),
      rank_(group_->getRank()),
      size_(group_->getSize()) {}

std::vector<at::Tensor> Group::all_gather(const at::Tensor& x) const {
  if (size_ == 1) return {x};
  std::vector<at::Tensor> input{x.contiguous()};
  std::vector<std::vector<at::Tensor>> output(1);
  for (int r = 0; r < size_; ++r) output[0].push_back(at::empty_like(input[0]));
  named("the processes of the group did not all answer process " +
            std::to_string(rank_),
        [&] { group_->allgather(output, input)->wait(); });
  return output[0];
}

std::vector<std::vector<int64_t>> Group::all_gather(
    const std::vector<int64_t>& words) const {
  std::vector<std::vector<int64_t>> all;
  for (const at::Tensor& x : all_gather(at::tensor(words, at::kLong))) {
    const auto* p = x.const_data_ptr<int64_t>();
    all.emplace_back(p, p + x.numel());
  }
  return all;
}

Shift::Shift(const Group& group, const at::Tensor& sent, at::Tensor received,
             int step)
    : from_((group.rank_ + group.size_ - 1) % group.size_),
      to_((group.rank_ + 1) % group.size_),
      received_(std::move(received)) {
  std::vector<at::Tensor> out{sent}, in{received_};
  named("process " + std::to_string(to_) + " cannot be reached", [&] {
    receiving_ = group.group_->recv(in, from_, step);
    sending_ = group.group_->send(out, to_, step);
  });
}

at::Tensor Shift::wait() {
  named("nothing came from process " + std::to_string(from_),
        [&] { receiving_->wait(); });
  named("process " + std::to_string(to_) + " took nothing",
        [&] { sending_->wait(); });
  return received_;
}

}  // namespace multihead::distributed
