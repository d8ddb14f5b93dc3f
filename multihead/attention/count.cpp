// SPDX-License-Identifier: MIT
#include "multihead/attention/count.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "multihead/stats.h"

namespace multihead {
namespace {

constexpr std::array kSources{"operator", "function", "module", "installed"};

thread_local Source thread_source = Source::kOperator;

// The frequent case has a counter that is never locked.
std::array<std::atomic<int64_t>, kSources.size()> fused_calls{};

struct ProductName {
  const char *way, *reason;
};
constexpr std::array kProducts{
    ProductName{"onednn", ""}, ProductName{"blas", "a small product"},
    ProductName{"blas", "another dtype, or other arguments"}};

std::array<std::atomic<int64_t>, kProducts.size()> products{};

struct OtherCalls {
  std::mutex mutex;
  std::map<std::tuple<Source, Way, std::string>, int64_t, std::less<>> counts;
};

OtherCalls& other_calls() {
  // Not destroyed: threads may outlive the statics. A child that is forked
  // while another thread counts must find it unlocked.
  static auto* calls = [] {
    pthread_atfork([] { other_calls().mutex.lock(); },
                   [] { other_calls().mutex.unlock(); },
                   [] { other_calls().mutex.unlock(); });
    return new OtherCalls;
  }();
  return *calls;
}

}  // namespace

SourceGuard::SourceGuard(Source source) : previous_(thread_source) {
  if (previous_ == Source::kOperator) thread_source = source;
}

SourceGuard::~SourceGuard() { thread_source = previous_; }

void count_fused() {
  fused_calls[static_cast<size_t>(thread_source)].fetch_add(
      1, std::memory_order_relaxed);
}

void count(const Route& route) {
  if (route.way == Way::kFused) return;  // its kernel counts
  OtherCalls& calls = other_calls();
  const std::lock_guard lock(calls.mutex);
  ++calls.counts[{thread_source, route.way,
                  std::string(without_shapes(route.reason))}];
}

void count_product(Product product) {
  products[static_cast<size_t>(product)].fetch_add(1,
                                                   std::memory_order_relaxed);
}

std::string_view without_shapes(std::string_view reason) {
  return reason.substr(0, reason.find(" ("));
}

std::vector<CallCount> stats() {
  std::vector<CallCount> counts;
  for (size_t source = 0; source < kSources.size(); ++source) {
    const int64_t calls = fused_calls[source].load(std::memory_order_relaxed);
    if (calls) counts.push_back({kSources[source], "fused", "", calls});
  }
  OtherCalls& others = other_calls();
  const std::lock_guard lock(others.mutex);
  for (const auto& [key, calls] : others.counts) {
    const auto& [source, way, reason] = key;
    counts.push_back(
        {kSources[static_cast<size_t>(source)], name_of(way), reason, calls});
  }
  for (size_t product = 0; product < products.size(); ++product) {
    const int64_t calls = products[product].load(std::memory_order_relaxed);
    const auto& [way, reason] = kProducts[product];
    if (calls) counts.push_back({"linear", way, reason, calls});
  }
  return counts;
}

void reset_stats() {
  for (auto& calls : fused_calls) calls.store(0, std::memory_order_relaxed);
  for (auto& calls : products) calls.store(0, std::memory_order_relaxed);
  OtherCalls& others = other_calls();
  const std::lock_guard lock(others.mutex);
  others.counts.clear();
}

}  // namespace multihead
