// SPDX-License-Identifier: MIT
#include "multihead/distributed/exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace multihead::distributed {
namespace {

// What the group throws names sockets; who waits wants to know for whom.
template <class F>
auto named(const char* function, const std::string& what, const F& f) {
  try {
    return f();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, function, ": ", what, ": ", error.what());
  }
}

// A view of dense memory.
at::Tensor as_bytes(const at::Tensor& x) {
  return x.view({-1}).view(at::kByte);
}

}  // namespace

Group::Group(const char* function, std::string_view name)
    : function_(function),
      group_(c10d::resolve_process_group(std::string(name))),
      rank_(group_->getRank()),
      size_(group_->getSize()) {}

std::vector<at::Tensor> Group::all_gather(const at::Tensor& x) const {
  if (size_ == 1) return {x};
  std::vector<at::Tensor> input{x.contiguous()};
  std::vector<std::vector<at::Tensor>> output(1);
  for (int r = 0; r < size_; ++r) output[0].push_back(at::empty_like(input[0]));
  named(function_,
        "the processes of the group did not all answer process " +
            std::to_string(rank_),
        [&] { group_->allgather(output, input)->wait(); });
  return output[0];
}

std::vector<std::vector<at::Tensor>> Group::all_to_all(
    const std::vector<std::vector<at::Tensor>>& parts,
    const std::vector<std::vector<std::vector<int64_t>>>& sizes) const {
  // As bytes in one piece of memory, which every backend takes.
  std::vector<at::Tensor> bytes;
  std::vector<int64_t> sent_bytes, received_bytes;
  std::vector<std::vector<at::Tensor>> results(parts.size());
  for (size_t r = 0; r < parts.size(); ++r) {
    sent_bytes.push_back(0);
    received_bytes.push_back(0);
    for (size_t i = 0; i < parts[r].size(); ++i) {
      bytes.push_back(as_bytes(parts[r][i].contiguous()));
      sent_bytes[r] += bytes.back().numel();
      results[r].push_back(at::empty(sizes[r][i], parts[r][i].options()));
      received_bytes[r] += static_cast<int64_t>(results[r][i].nbytes());
    }
  }
  at::Tensor sent = at::cat(bytes);
  at::Tensor received =
      at::empty({c10::sum_integers(received_bytes)}, sent.options());
  const auto exchange = [&] {
// The name that replaces it came with PyTorch 2.13.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    group_->alltoall_base(received, sent, received_bytes, sent_bytes)->wait();
#pragma GCC diagnostic pop
  };
  named(function_,
        "the processes of the group did not all exchange with process " +
            std::to_string(rank_),
        exchange);
  // Copied: in their midst tensors of several dtypes are not aligned.
  int64_t first = 0;
  for (const auto& of_process : results) {
    for (const at::Tensor& result : of_process) {
      const auto size = static_cast<int64_t>(result.nbytes());
      as_bytes(result).copy_(received.narrow(0, first, size));
      first += size;
    }
  }
  return results;
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
    : function_(group.function_),
      from_((group.rank_ + group.size_ - 1) % group.size_),
      to_((group.rank_ + 1) % group.size_),
      received_(std::move(received)) {
  std::vector<at::Tensor> out{sent}, in{received_};
  named(function_, "process " + std::to_string(to_) + " cannot be reached",
        [&] {
          receiving_ = group.group_->recv(in, from_, step);
          sending_ = group.group_->send(out, to_, step);
        });
}

at::Tensor Shift::wait() {
  named(function_, "nothing came from process " + std::to_string(from_),
        [&] { receiving_->wait(); });
  named(function_, "process " + std::to_string(to_) + " took nothing",
        [&] { sending_->wait(); });
  return received_;
}

}  // namespace multihead::distributed
