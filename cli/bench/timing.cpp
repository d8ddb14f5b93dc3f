// SPDX-License-Identifier: MIT
#include "cli/bench/timing.h"

#include <malloc.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSlowCall = 0.5;  // seconds
constexpr int kFewestRounds = 3;
constexpr int kMostRounds = 200;
constexpr double kShortest = 200e-6;  // a single measurement, in seconds

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double seconds_for(const std::function<void()>& call, int64_t repeats) {
  const auto start = Clock::now();
  for (int64_t i = 0; i < repeats; ++i) call();
  return seconds_since(start);
}

// values sorted; share in [0, 1]
double quantile(const std::vector<double>& values, double share) {
  const double position = share * (values.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (position - below) * (values[above] - values[below]);
}

// Rounds of a call that takes so many seconds: fewer where it is slow.
int least_rounds(double seconds, int rounds) {
  const int in_time =
      static_cast<int>(rounds * std::min(1., kSlowCall / seconds));
  return std::max(in_time, std::min(kFewestRounds, rounds));
}

// A field of /proc/self/status in bytes, "VmRSS" or "VmHWM".
std::optional<int64_t> status(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(field + ":"))
      return std::stoll(line.substr(field.size() + 1)) * 1024;
  return std::nullopt;
}

// Forgets the largest resident size so far.
bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

}  // namespace

Statistics statistics(std::vector<double> values) {
  if (values.empty()) return {};
  std::ranges::sort(values);
  return {.best = values.front(),
          .lower = quantile(values, 0.25),
          .median = quantile(values, 0.5),
          .upper = quantile(values, 0.75),
          .count = static_cast<int64_t>(values.size())};
}

std::vector<std::vector<double>> interleave(
    const std::vector<std::function<void()>>& calls, const TimingPlan& plan) {
  struct Series {
    double warm;      // seconds of one call
    int64_t repeats;  // calls between two readings of the clock
    int rounds;
  };
  std::vector<Series> all;
  double round = 0;
  for (const auto& call : calls) {
    const double warm = std::max(seconds_for(call, 1), 1e-9);
    const auto repeats =
        std::max<int64_t>(1, std::llround(std::ceil(kShortest / warm)));
    all.push_back({warm, repeats, 0});
    round += warm * repeats;
  }
  const int affordable =
      static_cast<int>(std::min<double>(kMostRounds, plan.seconds / round));
  int last = 0;
  for (Series& series : all) {
    series.rounds =
        std::max(least_rounds(series.warm, plan.rounds), affordable);
    last = std::max(last, series.rounds);
  }
  std::vector<std::vector<double>> times(calls.size());
  for (int r = 0; r < last; ++r)
    for (size_t turn = 0; turn < calls.size(); ++turn) {
      const size_t i = (turn + r) % calls.size();
      if (r < all[i].rounds)
        times[i].push_back(seconds_for(calls[i], all[i].repeats) /
                           all[i].repeats);
    }
  return times;
}

Statistics paired_ratio(const std::vector<double>& theirs,
                        const std::vector<double>& ours) {
  std::vector<double> ratios;
  for (size_t r = 0; r < std::min(theirs.size(), ours.size()); ++r)
    ratios.push_back(theirs[r] / ours[r]);
  return statistics(std::move(ratios));
}

std::optional<int64_t> extra_memory(const std::function<void()>& call) {
  malloc_trim(0);  // what the process kept would hide what the call needs
  const bool reset = reset_peak();
  const auto before = status("VmRSS");
  call();
  const auto peak = status("VmHWM");
  if (!reset || !before || !peak) return std::nullopt;
  return std::max<int64_t>(0, *peak - *before);
}

// --- What this machine can do at most ----------------------------------------
// Every loop runs independent chains a ← factor·a + addend, more of them than
// a multiply-add's latency times the units of a core (at most 10 · 2). The
// operands make a alternate between two numbers for ever: no denormals, no
// infinities, and bits that toggle as they do in real work, because power and
// with it the clock depend on that.

namespace {

constexpr double kSeconds = 0.02;
constexpr int64_t kIterations = 100'000;  // between two looks at the clock

/// A loop: runs `iterations` times, returns the FLOP of one iteration.
using Loop = double (*)(int64_t iterations);

// The chains of any compiler and processor. What it cannot know, it cannot
// fold: operands come from and results go to volatile objects.
template <typename T>
double portable_chains(int64_t iterations) {
  typedef T Vector __attribute__((vector_size(16)));
  constexpr size_t kChains = 12;
  static volatile T given[] = {-1, 3, 1};
  [[maybe_unused]] static volatile T taken;
  const Vector factor = Vector{} + given[0], addend = Vector{} + given[1];
  [&]<size_t... I>(std::index_sequence<I...>) {
    Vector a[kChains] = {((void)I, Vector{} + given[2])...};
    for (int64_t i = 0; i < iterations; ++i)
      ((a[I] = factor * a[I] + addend), ...);
    taken = (a[I] + ...)[0];
  }(std::make_index_sequence<kChains>());
  return 2.0 * kChains * (16 / sizeof(T));
}

#if defined(__x86_64__)

// operand[0]: factors, operand[1]: addends, operand[2]: where chains start.
template <typename T, size_t N>
struct alignas(64) Operands {
  constexpr Operands(std::array<T, 2> factor, T addend, T start) {
    for (size_t i = 0; i < N; ++i) {
      at[0][i] = factor[i % 2];
      at[1][i] = addend;
      at[2][i] = start;
    }
  }
  T at[3][N];
};
constexpr Operands<float, 16> kFloats({-1, -1}, 3, 1);
constexpr Operands<double, 8> kDoubles({-1, -1}, 3, 1);
// bfloat16 1 and −1 against 1 and 1: their dot product is 0.
constexpr Operands<uint16_t, 32> kPairs({0x3F80, 0xBF80}, 0x3F80, 0x3F80);

// In assembly, so that no compiler has a say in it, nor in registers above 15,
// which it knows nothing of when it compiles for the baseline.
#define MULTIHEAD_CHAINS(registers, prefix, factor, addend, instruction)    \
  asm volatile("vmovups (%1), %%" prefix factor                             \
               "\n vmovups 64(%1), %%" prefix addend "\n .irp r," registers \
               "\n vmovups 128(%1), %%" prefix                              \
               "\\r\n .endr\n 1:\n .irp r," registers "\n " instruction     \
               " %%" prefix addend ", %%" prefix factor ", %%" prefix       \
               "\\r\n .endr\n dec %0\n jnz 1b\n vzeroupper"                 \
               : "+r"(iterations)                                           \
               : "r"(operands)                                              \
               : "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4",    \
                 "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",  \
                 "xmm12", "xmm13", "xmm14", "xmm15")

// A function of one instruction on so many chains; flop: of one instruction.
#define MULTIHEAD_LOOP(name, registers, chains, prefix, factor, addend, \
                       instruction, data, flop)                         \
  double name(int64_t iterations) {                                     \
    const void* operands = &data;                                       \
    MULTIHEAD_CHAINS(registers, prefix, factor, addend, instruction);   \
    return chains * flop;                                               \
  }
#define MULTIHEAD_YMM(name, instruction, data, flop)                       \
  MULTIHEAD_LOOP(name, "0,1,2,3,4,5,6,7,8,9,10,11,12,13", 14, "ymm", "14", \
                 "15", instruction, data, flop)
#define MULTIHEAD_ZMM(name, instruction, data, flop)                         \
  MULTIHEAD_LOOP(                                                            \
      name, "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23", \
      24, "zmm", "30", "31", instruction, data, flop)

MULTIHEAD_YMM(ymm_floats, "vfmadd213ps", kFloats, 8 * 2)
MULTIHEAD_YMM(ymm_doubles, "vfmadd213pd", kDoubles, 4 * 2)
MULTIHEAD_ZMM(zmm_floats, "vfmadd213ps", kFloats, 16 * 2)
MULTIHEAD_ZMM(zmm_doubles, "vfmadd213pd", kDoubles, 8 * 2)
MULTIHEAD_ZMM(zmm_pairs, "vdpbf16ps", kPairs, 16 * 4)

#undef MULTIHEAD_ZMM
#undef MULTIHEAD_YMM
#undef MULTIHEAD_LOOP
#undef MULTIHEAD_CHAINS

// Six chains of (16, 32) × (32, 16) tiles.
double tiles(int64_t iterations) {
  struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static constexpr Configuration kConfiguration;
  // Every row of a tile is the same 64 bytes: stride 0.
  asm volatile(
      "ldtilecfg (%1)\n"
      ".irp r,0,1,2,3,4,5\n tilezero %%tmm\\r\n .endr\n"
      "tileloadd (%2,%3,1), %%tmm6\n tileloadd 64(%2,%3,1), %%tmm7\n"
      "1:\n .irp r,0,1,2,3,4,5\n"
      " tdpbf16ps %%tmm7, %%tmm6, %%tmm\\r\n .endr\n"
      "dec %0\n jnz 1b\n tilerelease"
      : "+r"(iterations)
      : "r"(&kConfiguration), "r"(&kPairs), "r"(int64_t{0})
      : "cc", "memory");
  return 6 * 16 * 16 * 32 * 2;
}

// The processor has AMX for bfloat16, and Linux lets this process use it.
bool may_use_tiles() {
  unsigned a, b, c, d = 0;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kBf16) || !(d & kTile))
    return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif

Loop loop_of(Unit unit, int bits) {
  const bool single = unit == Unit::kFloat32;
#if defined(__x86_64__)
  if (unit == Unit::kBFloat16Tiles) return may_use_tiles() ? tiles : nullptr;
  if (unit == Unit::kBFloat16Pairs)
    return bits == 512 && __builtin_cpu_supports("avx512bf16") ? zmm_pairs
                                                               : nullptr;
  if (bits == 512 && __builtin_cpu_supports("avx512f"))
    return single ? zmm_floats : zmm_doubles;
  if (bits == 256 && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma"))
    return single ? ymm_floats : ymm_doubles;
#endif
  if (bits != 128 || !(single || unit == Unit::kFloat64)) return nullptr;
  return single ? portable_chains<float> : portable_chains<double>;
}

// task(thread) in `threads` threads, which all start together.
void run_together(int threads, const std::function<void(int)>& task) {
  std::barrier start(threads);
  std::vector<std::jthread> team;
  for (int t = 1; t < threads; ++t)
    team.emplace_back([&, t] {
      start.arrive_and_wait();
      task(t);
    });
  start.arrive_and_wait();
  task(0);
}

// Loads of one cache line at a time; to the second-level cache ahead of use,
// which is where prefetching from memory helps.
uint64_t read(const uint64_t* from, const uint64_t* to) {
  typedef uint64_t Vector __attribute__((vector_size(16), may_alias));
  constexpr int64_t kLine = 64 / sizeof *from, kAhead = 16384 / sizeof *from;
  Vector a{}, b{}, c{}, d{};
  for (; from + kLine <= to; from += kLine) {
    __builtin_prefetch(from + kAhead, /*rw=*/0, /*locality=*/2);
    const Vector* line = reinterpret_cast<const Vector*>(from);
    a |= line[0];
    b |= line[1];
    c |= line[2];
    d |= line[3];
  }
  const Vector all = a | b | c | d;
  return all[0] | all[1];
}

}  // namespace

std::optional<Rate> measure_arithmetic(Unit unit, int bits, int threads) {
  const Loop loop = loop_of(unit, bits);
  if (!loop) return std::nullopt;
  std::vector<Rate> rates(threads);
  run_together(threads, [&](int thread) {
    double best = 0, flop = 0, seconds = 0;
    const auto start = Clock::now();
    do {
      const auto chunk = Clock::now();
      const double done = loop(kIterations) * kIterations;
      best = std::max(best, done / seconds_since(chunk));
      flop += done;
      seconds = seconds_since(start);
    } while (seconds < kSeconds);
    rates[thread] = {best * 1e-9, flop / seconds * 1e-9};
  });
  Rate sum;
  for (const Rate& rate : rates) {
    sum.best += rate.best;
    sum.mean += rate.mean;
  }
  return sum;
}

int64_t last_level_cache() {
  const int64_t size = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return size > 0 ? size : int64_t{32} << 20;
}

MemoryReader::MemoryReader()
    : memory_(std::clamp(2 * last_level_cache(), int64_t{512} << 20,
                         int64_t{1} << 30) /
                  sizeof(uint64_t),
              1) {}

Rate MemoryReader::measure(int threads) const {
  constexpr int kPasses = 3;
  const size_t share = memory_.size() / threads;
  const double bytes = static_cast<double>(share) * threads * 8;
  double shortest = std::numeric_limits<double>::infinity(), total = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    std::vector<uint64_t> sums(threads);
    const auto start = Clock::now();
    run_together(threads, [&](int thread) {
      const uint64_t* from = memory_.data() + thread * share;
      sums[thread] = read(from, from + share);
    });
    const double seconds = seconds_since(start);
    [[maybe_unused]] volatile uint64_t taken =
        std::accumulate(sums.begin(), sums.end(), uint64_t{0});
    shortest = std::min(shortest, seconds);
    total += seconds;
  }
  return {bytes / shortest * 1e-9, kPasses * bytes / total * 1e-9};
}

}  // namespace cli
