// SPDX-License-Identifier: MIT
//
// multihead::scaled_dot_product_attention, rule by rule.
#include <ATen/TensorOperators.h>

#include "cli/cases/attention_call.h"
#include "cli/cases/case.h"
#include "cli/cases/golden.h"
#include "cli/cases/pytorch.h"

namespace cli {
namespace {

using multihead::Backend;
using multihead::BackendGuard;
constexpr auto kBottomRight = multihead::CausalAlignment::kBottomRight;

// Bit for bit what PyTorch returns for the same arguments.
Comparison compare_exact(const AttentionCall& call, Random& random) {
  const AttentionInputs x = draw(call, random);
  const BackendGuard exact(Backend::kExact);
  const at::Tensor ours = multihead::scaled_dot_product_attention(
      x.query, x.key, x.value, x.options);
  const at::Tensor pytorch =
      pytorch::attention(x.query, x.key, x.value, x.options);
  return {.parts = {make_part("out", ours, pytorch)},
          .pytorch = Agreement::kBits};
}

// Within the error budget of plain float64 loops; PyTorch beside it where it
// can say the same with a mask.
Comparison compare_auto(const AttentionCall& call, Random& random) {
  const AttentionInputs x = draw(call, random);
  const BackendGuard automatic(Backend::kAuto);
  const GoldenAttention golden =
      golden_attention(x.query, x.key, x.value, x.options);
  const bool expressible = !x.options.softcap && !x.options.sinks.defined();
  const at::Tensor pytorch =
      expressible
          ? pytorch::attention_with_mask(x.query, x.key, x.value, x.options)
          : at::Tensor();
  if (!call.logsumexp) {
    const at::Tensor out = multihead::scaled_dot_product_attention(
        x.query, x.key, x.value, x.options);
    return {.parts = {make_part("out", out, pytorch, golden.out)}};
  }
  const auto [out, logsumexp] =
      multihead::scaled_dot_product_attention_with_lse(x.query, x.key, x.value,
                                                       x.options);
  return {.parts = {make_part("out", out, pytorch, golden.out),
                    make_part("logsumexp", logsumexp, {}, golden.logsumexp)}};
}

// What PyTorch has as well.
std::vector<AttentionCall> exact_calls() {
  std::vector<AttentionCall> calls;
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    calls.push_back({.name = "no mask", .dtype = dtype});
    calls.push_back(
        {.name = "causal", .dtype = dtype, .options = {.is_causal = true}});
    calls.push_back(
        {.name = "bool mask", .dtype = dtype, .mask = CallMask::kKeep});
    calls.push_back(
        {.name = "float mask", .dtype = dtype, .mask = CallMask::kFloat});
  }
  calls.push_back({.name = "one query", .Lq = 1, .Lk = 129});
  calls.push_back({.name = "scale", .options = {.scale = 0.3}});
  calls.push_back(
      {.name = "grouped heads", .G = 2, .options = {.enable_gqa = true}});
  calls.push_back({.name = "blocked rows", .mask = CallMask::kBlockedRows});
  calls.push_back(
      {.name = "(B, L, H, D) memory", .layout = Layout::kSequenceMajor});
  calls.push_back({.name = "gapped memory", .layout = Layout::kGapped});
  return calls;
}

std::vector<AttentionCall> dtype_and_size_calls() {
  std::vector<AttentionCall> calls;
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    calls.push_back({.name = "no mask", .dtype = dtype});
  for (int64_t width : {1, 3, 8, 40, 64, 96, 128, 256})
    calls.push_back({.name = "head width " + std::to_string(width),
                     .Lq = 9,
                     .Lk = 17,
                     .D = width});
  calls.push_back({.name = "values of another width",
                   .Lq = 9,
                   .Lk = 17,
                   .D = 16,
                   .Dv = 24});
  calls.push_back({.name = "one query, long cache", .Lq = 1, .Lk = 513});
  calls.push_back({.name = "one key", .Lq = 7, .Lk = 1});
  calls.push_back({.name = "no keys at all", .Lk = 0, .logsumexp = true});
  calls.push_back(
      {.name = "grouped heads 4/2", .G = 2, .options = {.enable_gqa = true}});
  calls.push_back({.name = "one shared head 8/1",
                   .H = 8,
                   .G = 1,
                   .options = {.enable_gqa = true}});
  calls.push_back(
      {.name = "(B, L, H, D) memory", .layout = Layout::kSequenceMajor});
  calls.push_back({.name = "gapped memory", .layout = Layout::kGapped});
  calls.push_back({.name = "inputs 6 times larger", .magnitude = 6});
  calls.push_back({.name = "negative scale", .options = {.scale = -0.2}});
  calls.push_back({.name = "scale 0", .options = {.scale = 0.0}});
  return calls;
}

std::vector<AttentionCall> mask_calls() {
  return {
      {.name = "bool mask", .mask = CallMask::kKeep},
      {.name = "bool mask per head", .mask = CallMask::kKeepPerHead},
      {.name = "float mask", .mask = CallMask::kFloat},
      {.name = "float mask per head, blocks", .mask = CallMask::kFloatPerHead},
      {.name = "rows without a key are 0",
       .mask = CallMask::kBlockedRows,
       .logsumexp = true},
      {.name = "NaN behind the mask", .mask = CallMask::kKeep, .poison = true},
      {.name = "causal", .options = {.is_causal = true}},
      {.name = "causal, more queries than keys",
       .Lq = 65,
       .Lk = 33,
       .options = {.is_causal = true}},
      {.name = "causal, bottom right",
       .options = {.is_causal = true, .causal_alignment = kBottomRight}},
      {.name = "causal, bottom right, Lq > Lk",
       .Lq = 65,
       .Lk = 33,
       .options = {.is_causal = true, .causal_alignment = kBottomRight}},
      {.name = "causal, from an offset",
       .B = 3,
       .options = {.is_causal = true},
       .query_offset = true,
       .logsumexp = true},
      {.name = "window (3, 0), from an offset, key lengths",
       .B = 3,
       .options = {.window = {{3, 0}}},
       .query_offset = true,
       .key_lengths = true},
      {.name = "causal and bool mask",
       .options = {.is_causal = true},
       .mask = CallMask::kKeep},
      {.name = "window (3, 0)", .options = {.window = {{3, 0}}}},
      {.name = "window (-1, 2)", .options = {.window = {{-1, 2}}}},
      {.name = "window (4, 5), bottom right",
       .options = {.causal_alignment = kBottomRight, .window = {{4, 5}}}},
      {.name = "key lengths", .B = 3, .key_lengths = true, .logsumexp = true},
      {.name = "key mask", .key_mask = true, .logsumexp = true},
      {.name = "key mask and bool mask",
       .mask = CallMask::kKeep,
       .key_mask = true},
      {.name = "key mask and float mask",
       .mask = CallMask::kFloat,
       .key_mask = true},
      {.name = "key lengths, causal, bottom right",
       .B = 3,
       .options = {.is_causal = true, .causal_alignment = kBottomRight},
       .key_lengths = true},
  };
}

std::vector<AttentionCall> score_calls() {
  std::vector<AttentionCall> calls{
      {.name = "softcap 1.5", .options = {.softcap = 1.5}},
      {.name = "softcap, causal",
       .options = {.is_causal = true, .softcap = 1.5}},
      {.name = "ALiBi", .alibi = true},
      {.name = "ALiBi, causal, bottom right",
       .options = {.is_causal = true, .causal_alignment = kBottomRight},
       .alibi = true},
      {.name = "ALiBi, from an offset",
       .B = 3,
       .query_offset = true,
       .alibi = true},
      {.name = "sinks", .sinks = true, .logsumexp = true},
      {.name = "sinks where no key is seen",
       .mask = CallMask::kBlockedRows,
       .sinks = true,
       .logsumexp = true},
      {.name = "logsumexp", .logsumexp = true},
      {.name = "logsumexp, causal",
       .options = {.is_causal = true},
       .logsumexp = true},
  };
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    calls.push_back({.name = "every rule at once",
                     .B = 3,
                     .G = 2,
                     .dtype = dtype,
                     .options = {.is_causal = true,
                                 .scale = 0.21,
                                 .enable_gqa = true,
                                 .window = {{20, 3}},
                                 .softcap = 2.0},
                     .mask = CallMask::kFloatPerHead,
                     .query_offset = true,
                     .key_lengths = true,
                     .key_mask = true,
                     .alibi = true,
                     .sinks = true,
                     .logsumexp = true});
  return calls;
}

}  // namespace

std::vector<Case> functional_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* group, const auto& calls, auto compare) {
    for (const AttentionCall& call : calls)
      cases.push_back(
          {group, call.name, shapes(call),
           [call, compare](Random& random) { return compare(call, random); }});
  };
  add("scaled_dot_product_attention, exact, against "
      "at::scaled_dot_product_attention",
      exact_calls(), compare_exact);
  constexpr const char* kAuto =
      "scaled_dot_product_attention, auto, against float64 loops";
  add(kAuto, dtype_and_size_calls(), compare_auto);
  add(kAuto, mask_calls(), compare_auto);
  add(kAuto, score_calls(), compare_auto);
  return cases;
}

}  // namespace cli
