// SPDX-License-Identifier: MIT
//
// The pure functions that say what a row sees and how work is cut, against
// brute force.
#include <map>

#include "multihead/kernels/cpu/blocking/key_blocks.h"
#include "multihead/kernels/cpu/blocking/tasks.h"
#include "tests/cpp/kernels/call.h"
#include "tests/cpp/kernels/run.h"

namespace kernel_test {
namespace {

using kernels::Interval;
using kernels::LaneVisibility;
using kernels::Segment;

kernels::AttentionArgs attention_of(const kernels::Visibility& visibility,
                                    int64_t queries, int64_t keys) {
  kernels::AttentionArgs a;
  a.B = a.H = a.G = 1;
  a.Lq = queries;
  a.Lk = keys;
  a.visibility = visibility;
  return a;
}

/// kernels.h's definition, in numbers that cannot overflow.
bool sees(const kernels::AttentionArgs& a, __int128 i, __int128 j) {
  const kernels::Visibility& v = a.visibility;
  const __int128 n = v.key_lengths ? v.key_lengths[0] : a.Lk;
  const __int128 at = i + (v.query_offsets ? v.query_offsets[0] : 0);
  return j >= 0 && j < n && !(v.is_causal && j > at) &&
         !(v.left >= 0 && j < at - v.left) &&
         !(v.right >= 0 && j > at + v.right);
}

TEST(VisibleKeys, AreThoseOfTheDefinition) {
  constexpr int64_t kFar = int64_t{1} << 62;
  const int64_t ends[] = {-1, 0, 1, 4, 100, INT64_MAX};
  const int64_t offsets[] = {0, 1, 6, 50, kFar, -1, -3, -kFar};
  for (int64_t number = 0; number < 6 * 6 * 8 * 2 * 8; ++number) {
    const int64_t queries = 1 + number % 8;
    kernels::Visibility v;
    v.is_causal = number / 8 % 2;
    v.query_offsets = &offsets[number / 16 % 8];
    v.left = ends[number / 128 % 6];
    v.right = ends[number / 768];
    for (int64_t length = 0; length <= 9; ++length) {
      v.key_lengths = &length;
      const auto a = attention_of(v, queries, 9);
      for (int64_t i = 0; i < queries; ++i) {
        const Interval keys = kernels::visible_keys(a, 0, i);
        EXPECT_LE(keys.begin, keys.end);
        for (int64_t j = 0; j < 9; ++j) {
          ASSERT_EQ(keys.begin <= j && j < keys.end, sees(a, i, j))
              << "query " << i << " of " << queries << ", key " << j << " of "
              << length << ", window " << v.left << ' ' << v.right
              << ", offset " << *v.query_offsets;
        }
      }
    }
  }
}

TEST(VisibleKeys, EndsAscendWithTheRows) {
  Rng rng(1);
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const int64_t length = uniform(rng, 0, 60), offset = uniform(rng, -70, 70);
    kernels::Visibility v{chance(rng, 0.5), uniform(rng, -1, 20),
                          uniform(rng, -1, 20), &offset, &length};
    const auto a = attention_of(v, uniform(rng, 1, 60), 60);
    for (int64_t i = 1; i < a.Lq; ++i) {
      const Interval before = kernels::visible_keys(a, 0, i - 1);
      const Interval here = kernels::visible_keys(a, 0, i);
      ASSERT_LE(before.begin, here.begin);
      ASSERT_LE(before.end, here.end);
    }
  }
}

/// Vectors of 4 rows with ascending ends, as a window makes them.
std::vector<LaneVisibility> random_views(Rng& rng,
                                         std::vector<Interval>& rows) {
  const int64_t vectors = uniform(rng, 1, kernels::kMaxVectors);
  int64_t begin = uniform(rng, 0, 60), end = begin + uniform(rng, 0, 60);
  for (int64_t r = 0; r < 4 * vectors; ++r) {
    rows.push_back({begin, std::max(begin, end)});
    begin += uniform(rng, 0, 6);
    end += uniform(rng, 0, 6);
  }
  std::vector<LaneVisibility> views;
  for (int64_t c = 0; c < vectors; ++c) {
    const Interval low = rows[4 * c], high = rows[4 * c + 3];
    views.push_back({{low.begin, high.end}, {high.begin, low.end}});
  }
  return views;
}

TEST(CutSegments, CoverWhatIsSeenAndNothingElse) {
  Rng rng(2);
  for (int repeat = 0; repeat < 20000; ++repeat) {
    std::vector<Interval> rows;
    const auto views = random_views(rng, rows);
    const int vectors = static_cast<int>(views.size());
    const int64_t step = chance(rng, 0.5) ? 8 : 32;
    const int64_t begin = 2 * uniform(rng, 0, 20);
    const Interval keys{begin, begin + uniform(rng, 0, 128)};
    Segment segments[kernels::kMaxSegments];
    const int count =
        kernels::cut_segments(keys, step, views.data(), vectors, segments);
    ASSERT_LE(count, kernels::kMaxSegments);
    std::map<std::pair<int64_t, int>, bool> computed;  // key, vector → plain
    int64_t at = keys.begin;
    for (int n = 0; n < count; ++n) {
      const Segment& s = segments[n];
      ASSERT_GE(s.keys.begin, at);
      ASSERT_LT(s.keys.begin, s.keys.end);
      ASSERT_TRUE(s.keys.begin == keys.begin || s.keys.begin % step == 0);
      ASSERT_LT(s.first, s.last);
      at = s.keys.end;
      for (int64_t j = s.keys.begin; j < s.keys.end; ++j) {
        for (int c = s.first; c < s.last; ++c)
          computed[{j, c}] = s.fully_visible;
      }
    }
    ASSERT_LE(at, keys.end);
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      for (int r = 0; r < 4 * vectors; ++r) {
        const bool seen = rows[r].begin <= j && j < rows[r].end;
        const auto found = computed.find({j, r / 4});
        ASSERT_TRUE(!seen || found != computed.end()) << "left out " << j;
        ASSERT_TRUE(seen || found == computed.end() || !found->second)
            << "not masked " << j;
      }
    }
  }
}

TEST(CutSegments, LeaveOutWhatNobodySees) {
  const LaneVisibility view{{40, 60}, {40, 60}};
  Segment segments[kernels::kMaxSegments];
  ASSERT_EQ(kernels::cut_segments({0, 128}, 8, &view, 1, segments), 2);
  EXPECT_EQ(segments[0].keys.begin, 40);
  EXPECT_TRUE(segments[0].fully_visible);
  EXPECT_EQ(segments[1].keys.end, 64);
  EXPECT_FALSE(segments[1].fully_visible);
}

TEST(TaskGrid, MeetsEachRowOnce) {
  for (const int64_t rows : {0, 1, 5, 48, 49, 100}) {
    for (const int64_t chunk : {1, 7, 48}) {
      for (const bool longest_first : {false, true}) {
        const kernels::TaskGrid grid{2, 3, rows, chunk, longest_first};
        std::map<std::array<int64_t, 3>, int> met;
        int64_t last = INT64_MAX;
        for (int64_t n = 0; n < grid.tasks(); ++n) {
          const auto task = grid[n];
          if (longest_first) {
            EXPECT_LE(task.first, last);
          }
          last = task.first;
          for (int64_t r = 0; r < task.count; ++r) {
            ++met[{task.b, task.head, task.first + r}];
          }
        }
        EXPECT_EQ(met.size(), static_cast<size_t>(6 * rows));
        for (const auto& [row, times] : met) EXPECT_EQ(times, 1);
      }
    }
  }
}

class Plans : public EachIsa {};

TEST_P(Plans, AreAsTheCallNeedsThem) {
  Rng rng(3);
  for (int repeat = 0; repeat < 500; ++repeat) {
    const Dtype dtype = kAllDtypes[repeat % 4];
    Shape s;
    s.B = uniform(rng, 1, 9);
    s.G = uniform(rng, 1, 9);
    s.H = s.G * uniform(rng, 1, 9);
    s.Lq = uniform(rng, 0, 300);
    s.D = s.Dv = uniform(rng, 0, 64);
    kernels::ForwardArgs arguments{arguments_of(Call(dtype, s)), {}, nullptr};
    const auto kernel = variant(dtype).kernels.forward;
    for (const int threads : {1, 2, 64}) {
      const kernels::Plan plan = kernel.plan(arguments, threads);
      EXPECT_EQ(plan.scratch_bytes % 64, 0u);
      // Few rows have a task for each head, or for each split of one.
      EXPECT_LE(plan.is_decoding, s.Lq * (s.H / s.G) <= 24);
      EXPECT_EQ(plan.tasks,
                plan.is_decoding
                    ? s.B * s.G * std::max<int64_t>(plan.splits, 1)
                    : kernels::TaskGrid({s.B, s.G, s.Lq * (s.H / s.G),
                                         plan.rows_per_task, false})
                          .tasks());
      // Lengths of keys cost no scratch.
      arguments.attention.Lk = int64_t{1} << 40;
      EXPECT_EQ(kernel.plan(arguments, threads).scratch_bytes,
                plan.scratch_bytes);
    }
  }
}

FOR_EACH_ISA(Plans);

}  // namespace
}  // namespace kernel_test
