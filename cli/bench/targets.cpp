// SPDX-License-Identifier: MIT
#include "cli/bench/targets.h"

#include <fnmatch.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

namespace cli {
namespace {

using enum Implementation;

// `cases` is a pattern of names, as shells have them. A case takes the first
// row that matches, of each contender that it is compared with.
struct Row {
  const char* cases;
  double share;  // of the peak
  double times;  // their time over ours
  Implementation than = kSdpa;
  double share_of_two = 0;  // of the peak of two threads, by two
};

// Every family but "other", where its own table says nothing else.
constexpr Row kCommon[] = {
    {"half-masked keys *", 0, 2.2},
    {"tril as a tensor *", 0, 2.2},
    {"window 512 d64 * f32", 0, 5},
    {"window 512 d64 * bf16", 0, 10},
    {"full d[349]* f32", 0, 1.2},  // widths of 32, 40, 48 and 96
    {"full d[349]* bf16", 0, 1.2},
    // A step of generation is bound by memory, and grouped heads leave
    // PyTorch's fused path.
    {"decode 32/8 d64 * f32", 0, 1},
    {"decode 32/8 d64 *", 0, 17},
    {"decode 32/8 d128 L1x4096 f32", 0.60, 3},
    {"decode 32/8 * f32", 0.60, 7},
    {"decode 32/8 *", 0.65, 35},
    {"decode d64 *", 0, 1},
    {"decode 12/12 *", 0, 1},
    {"cache f32 * L1x4096", 0.65, 3, kSdpa, 0.85},
    {"cache f32 *", 0.65, 7, kSdpa, 0.85},
    {"cache *", 0.75, 35, kSdpa, 0.85},
    {"cache *", 0, 1, kContiguous},
    {"averaged weights", 0, 1.55, kNnModule},
    {"averaged weights", 0, 1.8, kTorchNn},
    {"no weights", 0, 1.5, kNnModule},
    {"no weights", 0, 1.8, kTorchNn},
    {"causal", 0, 1.55, kNnModule},
    {"causal", 0, 1.8, kTorchNn},
    {"small call*", 0, 2, kTorchNn},
    {"dropout 0.1, both ways *", 0, 3.2},
    {"window 512, both ways *", 0, 5},
    {"step, weights returned", 0, 1.4, kNnModule},
    {"step, no weights", 0, 1.4, kNnModule},
    {"step, causal", 0, 1.4, kNnModule},
    {"step, GPT-2 block*", 0, 1.9},
    {"step, GPT-2 block*", 0, 1.35, kByHand},
};

// AVX-512 without AMX: made on a Zen 5.
constexpr Row kAvx512[] = {
    {"full d[16]* L128 f32", 0.86, 1.35},
    {"full d64 * f32", 0.88, 1.25},
    {"full d128 * f32", 0.91, 1.15},
    {"causal d64 L128 f32", 0.68, 2.2},
    {"causal d64 L512 f32", 0.76, 2.2},
    {"causal d64 L1024 f32", 0.79, 1.7},
    {"causal d64 * f32", 0.82, 1.35},
    {"causal d128 L128 f32", 0.72, 2.2},
    {"causal d128 L512 f32", 0.82, 2.2},
    {"causal d128 L1024 f32", 0.85, 1.7},
    {"causal d128 * f32", 0.87, 1.35},
    {"full d64 L[!1]* bf16", 0.83, 2.4},
    {"full d64 L1024 bf16", 0.83, 2.4},
    {"full d128 L[!1]* bf16", 0.88, 2.3},
    {"full d128 L1024 bf16", 0.88, 2.3},
    {"causal d* L512 bf16", 0.77, 4.2},
    {"causal d* L1024 bf16", 0.80, 3.2},
    {"causal d* L[24]* bf16", 0.83, 2.7},
    {"full d[349]* bf16", 0, 2},
    {"512 heads * f32", 0.50, 1.6},
    {"512 heads * bf16", 0.50, 2.8},
    {"dropout 0.1 d64 * f32", 0, 6.5},
    {"dropout 0.1 d128 * f32", 0, 4},
    {"grouped * f32", 0, 1.7},
    {"grouped * bf16", 0, 3.2},
    {"backward d64 L512 f32", 0.85, 1.3},
    {"backward d64 L1024 f32", 0.87, 1.3},
    {"backward d64 L2048 f32", 0.90, 1.3},
    {"backward d128 L1024 f32", 0.88, 1.2},
    {"causal backward d64 L512 f32", 0.75, 2.3},
    {"causal backward d64 L1024 f32", 0.79, 1.65},
    {"causal backward d64 L2048 f32", 0.85, 1.5},
    {"backward d64 L512 bf16", 0.81, 2.2},
    {"backward d64 * bf16", 0.83, 1.65},
    {"causal backward d64 L512 bf16", 0.70, 4},
    {"causal backward d64 L1024 bf16", 0.75, 2.4},
    {"causal backward d64 L2048 bf16", 0.81, 2.1},
};

// What differs where MKL, which PyTorch projects with, runs code for AVX2.
constexpr Row kAvx512Amd[] = {
    {"no weights", 0, 2.8, kNnModule},
    {"step, no weights", 0, 2.1, kNnModule},
};

// AVX2 on both sides. Ratios without a share are a little below what a Granite
// Rapids that was held to AVX2 reached.
constexpr Row kAvx2[] = {
    {"full d64 L[!1]* f32", 0.86, 1.12},
    {"full d64 L1024 f32", 0.86, 1.12},
    {"full d128 L512 f32", 0.84, 1.12},
    {"full d128 L[!1]* f32", 0.92, 1.12},
    {"full d128 L1024 f32", 0.92, 1.12},
    {"causal d64 L128 f32", 0.70, 1.4},
    {"causal d64 L512 f32", 0.82, 1.4},
    {"causal d64 L1024 f32", 0.84, 1.4},
    {"causal d64 * f32", 0.86, 1.4},
    {"causal d128 L[!1]* f32", 0.80, 1.4},
    {"causal d128 L1024 f32", 0.80, 1.4},
    {"dropout 0.1 d64 * f32", 0, 4},
    {"dropout 0.1 d128 * f32", 0, 2.6},
    {"grouped * f32", 0, 1.35},
    {"grouped * bf16", 0, 1.5},
    {"512 heads * f32", 0, 1.2},
    {"512 heads * bf16", 0, 1.3},
    {"no weights", 0, 1.4, kNnModule},
    {"step, no weights", 0, 1.2, kNnModule},
    {"backward d64 L512 f32", 0.86, 0},
    {"causal backward d64 L512 f32", 0.80, 0},
};

// AMX on both sides: floors, a twentieth below what a Granite Rapids reached.
// Shares of bfloat16 would be of a peak without AMX, so there are none.
constexpr Row kAmx[] = {
    {"full d64 * f32", 0.60, 1.1},
    {"full d128 * f32", 0.58, 1.05},
    {"causal d64 L512 f32", 0.55, 2},
    {"causal d64 L1024 f32", 0.55, 1.5},
    {"causal d64 L[24]* f32", 0.57, 1.3},
    {"causal d128 L512 f32", 0.54, 1.75},
    {"causal d128 L1024 f32", 0.54, 1.3},
    {"causal d128 L[24]* f32", 0.56, 1.1},
    {"full d64 * bf16", 0, 1.15},
    {"full d128 * bf16", 0, 1},
    {"causal d64 L512 bf16", 0, 1.75},
    {"causal d64 L1024 bf16", 0, 1.6},
    {"causal d64 L[24]* bf16", 0, 1.35},
    {"causal d128 L512 bf16", 0, 1.4},
    {"causal d128 L1024 bf16", 0, 1.3},
    {"causal d128 L[24]* bf16", 0, 1.15},
    {"full d[349]* f32", 0, 1.05},
    {"512 heads * f32", 0.33, 1.25},
    {"512 heads * bf16", 0, 1.05},
    {"dropout 0.1 d64 * f32", 0, 5.8},
    {"dropout 0.1 d128 * f32", 0, 3.6},
    {"dropout 0.1 d64 * bf16", 0, 13.5},
    {"dropout 0.1 d128 * bf16", 0, 11},
    {"grouped * f32", 0, 1.4},
    {"grouped * bf16", 0, 1.3},
    {"tril as a tensor * bf16", 0, 1.95},
    {"window 512 d64 * bf16", 0, 8.4},
    {"backward d* f32", 0.62, 1.1},
    {"backward d64 * bf16", 0, 2.5},
    {"causal backward d64 L512 f32", 0.52, 1.95},
    {"causal backward d64 L1024 f32", 0.57, 1.5},
    {"causal backward d64 * f32", 0.60, 1.35},
    {"causal backward d64 L512 bf16", 0, 4},
    {"causal backward d64 * bf16", 0, 2.9},
    {"step, GPT-2 block*", 0, 3.3},
    {"step, GPT-2 block*", 0, 2.2, kByHand},
};

std::vector<std::span<const Row>> tables_of(Family family) {
  switch (family) {
    case Family::kAmx:
      return {kAmx, kCommon};
    case Family::kAvx512:
      return {kAvx512, kCommon};
    case Family::kAvx512Amd:
      return {kAvx512Amd, kAvx512, kCommon};
    case Family::kAvx2:
      return {kAvx2, kCommon};
    case Family::kOther:
      break;
  }
  return {};
}

}  // namespace

std::string name(Family family) {
  static constexpr const char* kNames[] = {"amx", "avx512", "avx512-amd",
                                           "avx2", "other"};
  return kNames[static_cast<int>(family)];
}

Family family_of(const std::string& isa, const std::string& cpu_id) {
  const Family family = facts_of(isa).family;
  return family == Family::kAvx512 && cpu_id.starts_with("AuthenticAMD")
             ? Family::kAvx512Amd
             : family;
}

void add_targets(Family family, BenchCase& test) {
  Target& target = test.target;
  for (const std::span<const Row> table : tables_of(family))
    for (const Row& row : table) {
      if (fnmatch(row.cases, test.name.c_str(), /*flags=*/0) != 0) continue;
      const auto same = [&](const auto& r) { return r.first == row.than; };
      if (std::ranges::any_of(target.ratios, same)) continue;
      if (target.share == 0) target.share = row.share;
      if (target.share_of_two == 0) target.share_of_two = row.share_of_two;
      if (row.times > 0) target.ratios.emplace_back(row.than, row.times);
    }
}

}  // namespace cli
