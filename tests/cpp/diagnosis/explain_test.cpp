// SPDX-License-Identifier: MIT
//
// The catalogue against itself: attention with each fault, on inputs that tell
// faults apart, must be explained by that fault and no other; attention by
// nothing. What people write is judged in Python (tests/python/check/attempts).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "multihead/diagnosis.h"
#include "tests/cpp/diagnosis/observations.h"

namespace multihead::diagnosis {
namespace {

struct Named {
  const Fault* fault;
  size_t way;
};

void PrintTo(const Named& named, std::ostream* out) {
  *out << named.fault->name << " " << named.way;
}

// Those that a recipe alone does not bring about are told by tests of their
// own.
std::vector<Named> all_ways() {
  std::vector<Named> all;
  for (const Fault& fault : all_faults()) {
    if (fault.name == "scale_of_another_number" ||
        fault.name == "rotary_misapplied" || fault.name == "sink_weight_kept") {
      continue;
    }
    for (size_t way = 0; way < fault.ways.size(); ++way) {
      // Only a trace shows a cap, or another number.
      if (changed(fault.ways[way].apply).sentinel_from == SentinelFrom::kRecipe)
        all.push_back({&fault, way});
    }
  }
  return all;
}

class EveryFault : public testing::TestWithParam<Named> {};

TEST_P(EveryFault, IsNamed) {
  at::manual_seed(0);
  const auto [fault, index] = GetParam();
  const std::string name(fault->name);
  const Recipe recipe = changed(fault->ways[index].apply);
  const bool grouped = name.starts_with("group") ||
                       name == "scale_by_group_count" ||
                       recipe.exchanges_groups;
  const int64_t groups = name == "group_size_wrong" && index == 0 ? 4
                         : grouped                                ? 2
                                                                  : kHeads;
  const int64_t width = kEmbed / kHeads;
  const bool per_head = name == "output_per_head";
  const bool one_head = name == "heads_averaged_together";
  const bool uneven = name == "scale_by_all_heads" ||
                      name == "scale_by_value_width" ||
                      (name == "scale_after_softmax" && index == 2);
  const bool blockwise =
      name.starts_with("online_") || name.starts_with("last_block_");
  Layer layer = uneven ? make_uneven_layer()
                : name == "fused_view_without_permute"
                    ? make_fused_layer()
                    : make_layer(groups, per_head || one_head ? width : kEmbed,
                                 per_head ? width : kEmbed);
  if (blockwise) layer.facts["block_size"] = "3";
  if (name == "causal_top_left") layer.facts["queries_are_last"] = "true";
  auto given = recipe.input_added == 0 ? calls_of_heads() : calls(layer);
  if (recipe.mask.effect == MaskEffect::kGivesWay ||
      recipe.padding.effect == MaskEffect::kGivesWay ||
      recipe.joined != MasksJoined::kEach) {
    given.push_back(call_with_both_masks(layer));
  }
  const auto observations = results(std::move(given), recipe);
  ASSERT_FALSE(observations.empty());
  const Verdict verdict = explain(observations);
  EXPECT_EQ(verdict.judgement, Judgement::kFault);
  EXPECT_EQ(names(verdict), name);
  // Where B = H, what is repeated item after item meets the same heads; that
  // the other calls failed is not among what came out.
  const std::vector<std::vector<std::string>> ties =
      name == "mask_batch_as_heads"
          ? std::vector<std::vector<std::string>>{{"mask_head_order"}}
          : std::vector<std::vector<std::string>>{};
  EXPECT_EQ(verdict.alternatives, ties);
  EXPECT_EQ(verdict.first_stage, name_of(*fault->stage));
}

// The index, for two faults of a stage may have one name.
std::string test_name(const testing::TestParamInfo<Named>& info) {
  std::string stage(name_of(*info.param.fault->stage));
  std::replace(stage.begin(), stage.end(), ' ', '_');
  return std::string(info.param.fault->name) + "_" + stage + "_" +
         std::to_string(info.index);
}

INSTANTIATE_TEST_SUITE_P(Catalogue, EveryFault, testing::ValuesIn(all_ways()),
                         test_name);

}  // namespace
}  // namespace multihead::diagnosis
