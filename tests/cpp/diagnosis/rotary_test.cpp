// SPDX-License-Identifier: MIT
//
// Rotary positions by tables that only a trace shows: heads before and after.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>

#include "tests/cpp/diagnosis/observations.h"

namespace multihead::diagnosis {
namespace {

constexpr int64_t kWidth = kEmbed / kHeads;

struct Tables {
  double base = 5e5, sign = 1;
  int64_t pairs = kWidth / 2;
  bool halves = true;
  at::ScalarType kept_in = at::kDouble;
  /// Of the positions from this one on.
  int64_t first = 0;
};

Turn turn_by(const Tables& of, int64_t length) {
  const Tensor index = at::arange(of.pairs, at::kDouble) * 2 / kWidth;
  const Tensor position =
      at::arange(of.first, of.first + length, at::kDouble).unsqueeze(-1);
  const Tensor angle = of.sign * position * (-std::log(of.base) * index).exp();
  const auto rounded = [&](const Tensor& table) {
    return table.to(of.kept_in).to(at::kDouble);
  };
  return {of.halves, rounded(angle.cos()), rounded(angle.sin())};
}

// The same tables, written once for (i, i + D/2) and used for (2i, 2i + 1).
Turn mixed_up(const Turn& turn) {
  return {false, at::cat({turn.cosines, turn.cosines}, -1),
          at::cat({turn.sines, turn.sines}, -1)};
}

Recipe turned() {
  return changed([](Recipe& r) { r.rotary = Rotary::kShown; });
}

Stages followed(const ObservedCall& call, const Recipe& recipe) {
  const std::optional<Stages> stages = simulate(call, recipe);
  TORCH_CHECK(stages.has_value());
  return *stages;
}

// A call of code that turns heads by such tables, and shows what it computes.
// keys: where these are others than those of queries and values.
Observation observed(const Recipe& recipe, const Tables& tables,
                     const Tables& keys, int64_t query_count = kQueries,
                     int64_t kv_heads = kHeads) {
  at::manual_seed(30);
  const int64_t key_count = kQueries;
  Observation o = observe(make_layer(kv_heads), "turned",
                          {{"query", random({kBatch, query_count, kEmbed})},
                           {"key", random({kBatch, key_count, kEmbed})},
                           {"value", random({kBatch, key_count, kEmbed})}});
  o.tensors["out"] = o.tensors["query"];
  const ObservedCall call = read_dump(o);
  call.turns = {turn_by(tables, query_count), turn_by(keys, key_count),
                turn_by(tables, key_count)};
  call.mixed_turns = {mixed_up(*call.turns[0]), mixed_up(*call.turns[1])};
  call.head_turns = {turn_by(tables, kHeads), turn_by(tables, kv_heads)};
  Recipe plain = recipe;
  plain.rotary = Rotary::kNone;
  plain.turned = Recipe{}.turned;
  plain.turned_apart = false;
  const Stages before = followed(call, plain);
  const Stages after = followed(call, recipe);
  std::vector<Tensor> trace(before.heads.begin(), before.heads.end());
  // (B, L, H, D), as most code has them.
  for (const Tensor& x : after.heads) trace.push_back(x.transpose(1, 2));
  trace.insert(trace.end(), {after.scores, after.weights, after.merged});
  for (size_t i = 0; i < trace.size(); ++i) {
    o.tensors["trace." + std::to_string(i)] = trace[i].contiguous();
  }
  o.tensors["out"] = after.out;
  return o;
}

Verdict verdict_of(const Recipe& recipe, const Tables& tables) {
  return explain(std::array{observed(recipe, tables, tables)});
}

TEST(Rotary, AnyAnglesAreAttention) {
  for (const Tables& tables :
       {Tables{}, Tables{.sign = -1}, Tables{.pairs = 2},
        Tables{.pairs = 1, .halves = false}, Tables{.halves = false},
        Tables{.kept_in = at::kBFloat16}, Tables{.first = 11}}) {
    const Verdict verdict = verdict_of(turned(), tables);
    EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
    EXPECT_TRUE(assumes(verdict, "rotary_positions"));
    EXPECT_TRUE(verdict.conditions.empty());
  }
}

TEST(Rotary, TheLastQueriesStandAtTheLastKeys) {
  const Tables keys, queries{.first = 2};
  const Verdict verdict =
      explain(std::array{observed(turned(), queries, keys, kQueries - 2)});
  EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
}

TEST(Rotary, ValuesThatAreTurnedMayBeMeant) {
  Recipe recipe = turned();
  recipe.turned[2] = true;
  const Verdict verdict = verdict_of(recipe, {});
  EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
  ASSERT_EQ(verdict.conditions.size(), 1);
  EXPECT_EQ(verdict.conditions[0].name, "values_turned");
}

TEST(Rotary, EachMistakeIsNamed) {
  const Fault& fault =
      *std::ranges::find(all_faults(), "rotary_misapplied", &Fault::name);
  for (const Way& way : fault.ways) {
    Recipe recipe = turned();
    way.apply(recipe);
    const Tables keys{.sign = recipe.turned_apart ? -1.0 : 1.0};
    // Of as many keys as queries, turns by head have no effect.
    const bool by_head = recipe.rotary == Rotary::kByHead;
    const int64_t kv_heads = by_head ? kHeads / 2 : kHeads;
    const Verdict verdict =
        explain(std::array{observed(recipe, {}, keys, kQueries, kv_heads)});
    EXPECT_EQ(names(verdict), "rotary_misapplied") << way.detail;
    ASSERT_FALSE(verdict.faults.empty());
    EXPECT_EQ(verdict.faults[0].detail, way.detail);
    EXPECT_EQ(verdict.first_stage, "heads");
  }
}

TEST(Rotary, AnotherFaultBesideThemIsNamed) {
  Recipe recipe = turned();
  recipe.scale = faulty("scale_by_embed_dim").scale;
  EXPECT_EQ(names(verdict_of(recipe, {})), "scale_by_embed_dim");
}

// Each head by one angle, as of tables along the wrong dimension: no score
// shows it, so that it is attention, without positions.
TEST(Rotary, TurnsByHeadHaveNoEffect) {
  Observation o = observed(turned(), {}, {});
  const ObservedCall call = read_dump(o);
  const Stages plain = followed(call, Recipe{});
  o.tensors["out"] = plain.out;
  for (int role = 0; role < 3; ++role) {
    Tensor heads = plain.heads[role];
    if (role < 2) {
      ObservedCall turning = call;
      turning.turns[role] = turn_by({}, kHeads);
      heads = rotated(turning, turned(), role, heads.transpose(1, 2))
                  .transpose(1, 2);
    }
    o.tensors["trace." + std::to_string(3 + role)] = heads.contiguous();
  }
  const Verdict verdict = explain(std::array{o});
  EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
  EXPECT_EQ(
      std::ranges::count(verdict.remarks, "rotary_by_head", &Finding::name), 1);
}

// A quarter of a circle for all positions, as of a half that is exchanged with
// the other, and heads that something else was done to, are no turn by them.
TEST(Rotary, OtherTensorsAreNoTurn) {
  at::manual_seed(31);
  const Tensor heads = random({kBatch, kHeads, kQueries, kWidth});
  const auto halves = heads.chunk(2, -1);
  for (const Tensor& other : {at::cat({-halves[1], halves[0]}, -1), heads * 0.5,
                              at::zeros_like(heads), heads + 1.0,
                              heads.flip(-1), random(heads.sizes())}) {
    ObservedCall call;
    call.trace = {heads, other};
    for (const bool by_head : {false, true}) {
      EXPECT_FALSE(shown_turn(call, heads, by_head).has_value());
    }
  }
}

}  // namespace
}  // namespace multihead::diagnosis
