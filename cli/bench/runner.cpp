// SPDX-License-Identifier: MIT
#include "cli/bench/runner.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "cli/bench/case.h"
#include "cli/bench/contenders.h"

namespace cli {

std::string name(Status status) {
  static constexpr const char* kNames[] = {"ok", "wrong", "failed"};
  return kNames[static_cast<int>(status)];
}

const Entry* Measurement::find(Implementation who) const {
  const auto entry = std::ranges::find(entries, who, &Entry::who);
  return entry == entries.end() ? nullptr : &*entry;
}

std::vector<TargetResult> target_results(const Measurement& m) {
  std::vector<TargetResult> all;
  if (!m.right()) return all;
  const Target& target = m.test->target;
  if (m.threads == 2 && target.scaling > 0 && m.scaling)
    all.push_back({"two threads over one", Implementation::kOurs,
                   target.scaling, *m.scaling});
  const double share = m.threads == 1   ? target.share
                       : m.threads == 2 ? target.share_of_two
                                        : 0;
  if (share > 0)
    all.push_back({kShareOfPeak, Implementation::kOurs, share, m.ours().share});
  if (m.threads != 1) return all;
  for (const auto& [who, ratio] : target.ratios)
    if (const Entry* entry = m.find(who);
        entry && entry->status == Status::kRight)
      all.push_back({"times " + name(who), who, ratio, entry->ratio});
  const Entry* sdpa = m.find(Implementation::kSdpa);
  if (target.memory > 0 && sdpa && sdpa->memory && m.ours().memory)
    all.push_back({.what = "memory of SDPA over ours",
                   .who = Implementation::kSdpa,
                   .wanted = target.memory,
                   .reached = static_cast<double>(*sdpa->memory) /
                              std::max<int64_t>(1, *m.ours().memory),
                   .of_memory = true});
  return all;
}

namespace {

// Judges one contender by a call without dropout, which warms it up too, and
// by what dropout does to sums; measures the memory of its first real call.
Entry judge(const Contender& contender) {
  Entry entry{.who = contender.who};
  try {
    Outputs out;
    contender.prepare();
    entry.memory = extra_memory([&] { out = contender.timed(); });
    if (contender.dropout_fault) {
      entry.fault = contender.dropout_fault();
      out = contender.verified();
    }
    if (entry.fault.empty()) entry.fault = contender.fault(out);
    if (!entry.fault.empty()) entry.status = Status::kWrong;
  } catch (const std::exception& error) {
    const std::string what = error.what();
    entry.fault = what.substr(0, what.find('\n'));
    entry.status = Status::kFailed;
  }
  return entry;
}

// Times those that are right.
void time_all(const PreparedCase& prepared, const TimingPlan& plan,
              std::vector<Entry>& entries) {
  std::vector<std::function<void()>> calls;
  std::vector<Entry*> timed;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].status != Status::kRight) continue;
    timed.push_back(&entries[i]);
    calls.push_back([&call = prepared.contenders[i].timed] { call(); });
  }
  const auto times = interleave(calls, plan);
  const bool ours = !timed.empty() && timed[0]->who == Implementation::kOurs;
  for (size_t i = 0; i < timed.size(); ++i) {
    timed[i]->time = statistics(times[i]);
    if (!ours) continue;
    timed[i]->paired = paired_ratio(times[i], times[0]);
    timed[i]->ratio = timed[i]->time.best / timed[0]->time.best;
  }
}

}  // namespace

Runner::Runner(std::string isa, TimingPlan plan, uint64_t seed)
    : isa_(std::move(isa)),
      plan_(plan),
      seed_(seed),
      all_threads_(at::get_num_threads()) {}

std::pair<std::string, Rate> Runner::measure_limit(const BenchCase& test,
                                                   int threads) {
  // PyTorch's idle threads spin for some milliseconds before they sleep.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (test.memory_bound) {
    if (!reader_) reader_ = std::make_unique<MemoryReader>();
    return {"reading memory", reader_->measure(threads)};
  }
  const at::ScalarType dtype = dtype_of(test);
  const int bits = vector_bits(isa_);
  const bool wide = dtype == at::kDouble;
  const std::pair own{
      (wide ? "fp64 multiply-add, " : "fp32 multiply-add, ") + isa_,
      measure_arithmetic(wide ? Unit::kFloat64 : Unit::kFloat32, bits, threads)
          .value()};
  // Dot products of pairs count where our kernels are made of them.
  if (dtype != at::kBFloat16 || !facts_of(isa_).bfloat16_pairs) return own;
  const auto pairs = measure_arithmetic(Unit::kBFloat16Pairs, bits, threads);
  if (!pairs || pairs->best <= own.second.best) return own;
  return {"bf16 dot products, " + isa_, *pairs};
}

void Runner::run(const BenchCase& test, const std::vector<int>& threads,
                 const std::function<void(Measurement)>& done) {
  const at::NoGradGuard no_grad;
  Random random(seed_, test.name);
  at::set_num_threads(all_threads_);
  const PreparedCase prepared = prepare_case(test, random);
  std::optional<double> single;
  for (const int count : threads) {
    at::set_num_threads(count);
    Measurement m{.test = &test, .threads = count, .peak = {}, .entries = {}};
    for (const Contender& contender : prepared.contenders)
      m.entries.push_back(judge(contender));
    const auto [unit, before] = measure_limit(test, count);
    time_all(prepared, plan_, m.entries);
    m.peak = {unit, before, measure_limit(test, count).second};
    if (dtype_of(test) == at::kBFloat16 && !test.memory_bound)
      if (auto tiles = measure_arithmetic(Unit::kBFloat16Tiles, 512, count))
        m.peak.tiles = tiles->best;
    const double work = test.memory_bound ? prepared.bytes : prepared.flop;
    for (Entry& entry : m.entries)
      if (entry.status == Status::kRight) {
        entry.rate = work / entry.time.best * 1e-9;
        entry.share = entry.rate / m.peak.value();
      }
    if (m.right()) {
      if (count == 1) single = m.ours().time.best;
      if (count > 1 && single) m.scaling = *single / m.ours().time.best;
    }
    done(std::move(m));
  }
}

}  // namespace cli
