// SPDX-License-Identifier: MIT
//
// A c10d::ProcessGroup whose processes are threads of this one, for tests.
// A message is read out of the sender's own memory, when the receiver waits for
// it and not before: who overwrites what is on its way, or reads what has not
// come, has wrong numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace distributed_test {

inline constexpr auto kTimeout = std::chrono::seconds(20);

/// What the threads of a group share.
class Network {
 public:
  struct Address {
    int from, to, tag;
    auto operator<=>(const Address&) const = default;
  };
  struct Message {
    at::Tensor sent;
    bool taken = false;
  };

  explicit Network(int size) : sent_bytes_(size) {}

  std::shared_ptr<Message> post(const Address& address, const at::Tensor& x) {
    const std::lock_guard lock(mutex_);
    auto message = std::make_shared<Message>(Message{x});
    const bool is_new = messages_.emplace(address, message).second;
    TORCH_CHECK(is_new, "two messages at once from ", address.from, " to ",
                address.to, " with tag ", address.tag);
    if (address.tag >= 0) sent_bytes_[address.from] += x.nbytes();
    changed_.notify_all();
    return message;
  }
  void take(const Address& address, const at::Tensor& into) {
    std::unique_lock lock(mutex_);
    wait(lock, [&] { return messages_.contains(address); });
    const auto message = messages_.at(address);
    messages_.erase(address);
    into.copy_(message->sent);
    message->taken = true;
    changed_.notify_all();
  }
  void wait_until_taken(const Message& message) {
    std::unique_lock lock(mutex_);
    wait(lock, [&] { return message.taken; });
  }
  void wait_for_words_of(int rank) {
    std::unique_lock lock(mutex_);
    wait(lock, [&] {
      return messages_.lower_bound({rank, 0, -kMany}) !=
             messages_.lower_bound({rank + 1, 0, -kMany});
    });
  }
  /// Nobody waits any longer for what will not come.
  void fail() {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  }
  /// By send(), not by collectives.
  std::vector<int64_t> sent_bytes() const { return sent_bytes_; }

  static constexpr int kMany = 1 << 20;

 private:
  template <class F>
  void wait(std::unique_lock<std::mutex>& lock, const F& ready) {
    changed_.wait_for(lock, kTimeout, [&] { return ready() || failed_; });
    TORCH_CHECK(ready(), "another thread has failed, or nothing came in time");
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Address, std::shared_ptr<Message>> messages_;
  std::vector<int64_t> sent_bytes_;
  bool failed_ = false;
};

class LocalBackend : public c10d::Backend {
 public:
  LocalBackend(Network& network, int rank, int size)
      : Backend(rank, size), network_(network) {}

  const std::string getBackendName() const override { return "threads"; }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to,
                                      int tag) override {
    const auto message = network_.post({getRank(), to, tag}, tensors.at(0));
    return work([this, message] { network_.wait_until_taken(*message); });
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors,
                                      int from, int tag) override {
    const at::Tensor into = tensors.at(0);
    into.fill_(std::numeric_limits<double>::quiet_NaN());
    return work([this, into, address = Network::Address{from, getRank(), tag}] {
      network_.take(address, into);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) override {
    const int tag = ++collectives_ - Network::kMany;
    const at::Tensor mine = inputs.at(0).clone();
    for (int r = 0; r < getSize(); ++r)
      network_.post({getRank(), r, tag}, mine);
    for (int r = 0; r < getSize(); ++r) {
      network_.take({r, getRank(), tag}, outputs.at(0).at(r));
    }
    return work([] {});
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions&) override {
    const int tag = ++collectives_ - Network::kMany;
    const auto parts = input.clone().split_with_sizes(input_sizes);
    for (int r = 0; r < getSize(); ++r) {
      network_.post({getRank(), r, tag}, parts[r]);
    }
    const auto places = output.split_with_sizes(output_sizes);
    for (int r = 0; r < getSize(); ++r) {
      network_.take({r, getRank(), tag}, places[r]);
    }
    return work([] {});
  }

 private:
  struct Wait : c10d::Work {
    bool wait(std::chrono::milliseconds /*timeout*/) override {
      f();
      return true;
    }
    std::function<void()> f;
  };
  static c10::intrusive_ptr<c10d::Work> work(std::function<void()> f) {
    auto work = c10::make_intrusive<Wait>();
    work->f = std::move(f);
    return work;
  }
  Network& network_;
  int collectives_ = 0;
};

/// What a thread knows of itself.
struct Rank {
  int rank, world;
  std::string group;  ///< its name, under which this thread's own is registered
};

/// f on `world` threads at once; rethrows what the first of them has thrown.
/// Returns what each has sent in bytes. Other threads begin when the first has
/// said something, so the first draws its random numbers before them.
inline std::vector<int64_t> on_ranks(
    int world, const std::function<void(const Rank&)>& f) {
  static int groups = 0;
  const std::string name = "threads " + std::to_string(++groups) + ", rank ";
  Network network(world);
  std::vector<std::exception_ptr> thrown(world);
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> kept;  // not by the names
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(r, world);
    group->setBackend(c10::kCPU, c10d::ProcessGroup::CUSTOM,
                      c10::make_intrusive<LocalBackend>(network, r, world));
    c10d::register_process_group(name + std::to_string(r), group);
    kept.push_back(std::move(group));
  }
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      try {
        if (r > 0) network.wait_for_words_of(0);
        f({r, world, name + std::to_string(r)});
      } catch (...) {
        thrown[r] = std::current_exception();
        network.fail();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < world; ++r) {
    c10d::unregister_process_group(name + std::to_string(r));
  }
  for (const auto& error : thrown) {
    if (error) std::rethrow_exception(error);
  }
  return network.sent_bytes();
}

}  // namespace distributed_test
