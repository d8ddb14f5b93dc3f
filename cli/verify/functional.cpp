// SPDX-License-Identifier: MIT
//
// multihead::scaled_dot_product_attention and its gradients, rule by rule.
#include <ATen/TensorOperators.h>

#include <ranges>

#include "cli/cases/answers.h"
#include "cli/verify/verify.h"

namespace cli {
namespace {

using enum CallMask;
constexpr auto kBottomRight = multihead::CausalAlignment::kBottomRight;
const AttentionOptions kCausal{.is_causal = true};
const AttentionOptions kCausalFromEnd{.is_causal = true,
                                      .causal_alignment = kBottomRight};

// Bit for bit what PyTorch returns for the same arguments.
Comparison compare_call_exact(const AttentionCall& call, Random& random) {
  const AttentionInputs x = draw(call, random);
  const BackendGuard exact(Backend::kExact);
  return {
      .parts = {make_part("out", ours::attention(x), pytorch::attention(x))},
      .pytorch = Agreement::kBits};
}

// Whether a mask can say what the rules say.
bool mask_says(const AttentionInputs& x) {
  return !x.options.softcap && !x.options.sinks.defined();
}

// Within the error budget of plain float64 loops; PyTorch beside it where it
// can say the same with a mask.
Comparison compare_call_auto(const AttentionCall& call, Random& random) {
  const AttentionInputs x = draw(call, random);
  const BackendGuard automatic(Backend::kAuto);
  const GoldenAttention golden = golden_attention(x);
  const at::Tensor pytorch =
      mask_says(x) ? pytorch::attention_with_mask(x) : at::Tensor();
  if (!call.logsumexp)
    return {
        .parts = {make_part("out", ours::attention(x), pytorch, golden.out)}};
  const auto [out, logsumexp] =
      multihead::scaled_dot_product_attention_with_lse(x.query, x.key, x.value,
                                                       x.options);
  return {.parts = {make_part("out", out, pytorch, golden.out),
                    make_part("logsumexp", logsumexp, {}, golden.logsumexp)}};
}

// Of query, key and value; undefined without `attention`.
AttentionInputs gradients(const AttentionInputs& x, const at::Tensor& dout,
                          at::Tensor (*attention)(const AttentionInputs&)) {
  if (!attention) return {};
  const AttentionInputs y = leaves(x);
  attention(y).backward(dout);
  return {y.query.grad(), y.key.grad(), y.value.grad()};
}

Comparison compare_call_gradients(const AttentionCall& call, Random& random) {
  const AttentionInputs x = draw(call, random);
  const BackendGuard automatic(Backend::kAuto);
  const at::Tensor dout =
      random.normal({call.B, call.H, call.Lq, x.value.size(3)}, call.dtype);
  const AttentionInputs ours = gradients(x, dout, ours::attention),
                        pytorch = gradients(x, dout,
                                            mask_says(x)
                                                ? pytorch::attention_with_mask
                                                : nullptr);
  const GoldenAttention golden = golden_attention(x, dout);
  return {
      .parts = {make_part("d query", ours.query, pytorch.query, golden.query),
                make_part("d key", ours.key, pytorch.key, golden.key),
                make_part("d value", ours.value, pytorch.value, golden.value)}};
}

// Whether PyTorch's function has every rule of it.
bool pytorch_has(const AttentionCall& call) {
  const AttentionOptions& options = call.options;
  return !options.window && !options.softcap &&
         options.causal_alignment != kBottomRight &&
         !(options.is_causal && call.mask != kNone) && !call.query_offset &&
         !call.key_lengths && !call.key_mask && !call.alibi && !call.sinks &&
         !call.logsumexp;
}

std::vector<AttentionCall> size_calls() {
  std::vector<AttentionCall> calls{
      {.name = "values of another width", .Lq = 9, .Lk = 17, .D = 16, .Dv = 24},
      {.name = "one query, long cache", .Lq = 1, .Lk = 513},
      {.name = "one key", .Lq = 7, .Lk = 1},
      {.name = "no keys at all", .Lk = 0, .logsumexp = true},
      {.name = "grouped heads 4/2", .G = 2, .options = {.enable_gqa = true}},
      {.name = "one shared head 8/1",
       .H = 8,
       .G = 1,
       .options = {.enable_gqa = true}},
      {.name = "(B, L, H, D) memory", .layout = Layout::kSequenceMajor},
      {.name = "gapped memory", .layout = Layout::kGapped},
      {.name = "inputs 6 times larger", .magnitude = 6},
      {.name = "scale", .options = {.scale = 0.3}},
      {.name = "negative scale", .options = {.scale = -0.2}},
      {.name = "scale 0", .options = {.scale = 0.0}},
  };
  for (int64_t width : {1, 3, 8, 40, 64, 96, 128, 256})
    calls.push_back({.name = "head width " + std::to_string(width),
                     .Lq = 9,
                     .Lk = 17,
                     .D = width});
  return calls;
}

std::vector<AttentionCall> mask_calls() {
  return {
      {.name = "bool mask per head", .mask = kKeepPerHead},
      {.name = "float mask per head, blocks", .mask = kFloatPerHead},
      {.name = "blocked rows", .mask = kBlockedRows},
      {.name = "rows without a key are 0",
       .mask = kBlockedRows,
       .logsumexp = true},
      {.name = "NaN behind the mask", .mask = kKeep, .poison = true},
      {.name = "causal, more queries than keys",
       .Lq = 65,
       .Lk = 33,
       .options = kCausal},
      {.name = "causal, bottom right", .options = kCausalFromEnd},
      {.name = "causal, bottom right, Lq > Lk",
       .Lq = 65,
       .Lk = 33,
       .options = kCausalFromEnd},
      {.name = "causal, from an offset",
       .B = 3,
       .options = kCausal,
       .query_offset = true,
       .logsumexp = true},
      {.name = "window (3, 0), from an offset, key lengths",
       .B = 3,
       .options = {.window = {{3, 0}}},
       .query_offset = true,
       .key_lengths = true},
      {.name = "causal and bool mask", .options = kCausal, .mask = kKeep},
      {.name = "window (3, 0)", .options = {.window = {{3, 0}}}},
      {.name = "window (-1, 2)", .options = {.window = {{-1, 2}}}},
      {.name = "window (4, 5), bottom right",
       .options = {.causal_alignment = kBottomRight, .window = {{4, 5}}}},
      {.name = "key lengths", .B = 3, .key_lengths = true, .logsumexp = true},
      {.name = "key mask", .key_mask = true, .logsumexp = true},
      {.name = "key mask and bool mask", .mask = kKeep, .key_mask = true},
      {.name = "key mask and float mask", .mask = kFloat, .key_mask = true},
      {.name = "key lengths, causal, bottom right",
       .B = 3,
       .options = kCausalFromEnd,
       .key_lengths = true},
  };
}

std::vector<AttentionCall> score_calls() {
  return {
      {.name = "softcap 1.5", .options = {.softcap = 1.5}},
      {.name = "softcap, causal",
       .options = {.is_causal = true, .softcap = 1.5}},
      {.name = "ALiBi", .alibi = true},
      {.name = "ALiBi, causal, bottom right",
       .options = kCausalFromEnd,
       .alibi = true},
      {.name = "ALiBi, from an offset",
       .B = 3,
       .query_offset = true,
       .alibi = true},
      {.name = "sinks", .sinks = true, .logsumexp = true},
      {.name = "sinks where no key is seen",
       .mask = kBlockedRows,
       .sinks = true,
       .logsumexp = true},
      {.name = "logsumexp", .logsumexp = true},
      {.name = "logsumexp, causal", .options = kCausal, .logsumexp = true},
  };
}

// Every rule, the plain ones in every dtype.
std::vector<AttentionCall> attention_calls() {
  std::vector<AttentionCall> calls;
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const size_t first = calls.size();
    calls.insert(calls.end(), {{.name = "no mask"},
                               {.name = "causal", .options = kCausal},
                               {.name = "bool mask", .mask = kKeep},
                               {.name = "float mask", .mask = kFloat},
                               {.name = "every rule at once",
                                .B = 3,
                                .G = 2,
                                .options = {.is_causal = true,
                                            .scale = 0.21,
                                            .enable_gqa = true,
                                            .window = {{20, 3}},
                                            .softcap = 2.0},
                                .mask = kFloatPerHead,
                                .query_offset = true,
                                .key_lengths = true,
                                .key_mask = true,
                                .alibi = true,
                                .sinks = true,
                                .logsumexp = true}});
    for (size_t i = first; i < calls.size(); ++i) calls[i].dtype = dtype;
  }
  for (const auto& list : {size_calls(), mask_calls(), score_calls()})
    calls.insert(calls.end(), list.begin(), list.end());
  return calls;
}

}  // namespace

std::vector<Case> functional_cases() {
  const std::vector<AttentionCall> calls = attention_calls();
  std::vector<Case> cases;
  add_cases(cases,
            "scaled_dot_product_attention, exact, against "
            "at::scaled_dot_product_attention",
            calls | std::views::filter(pytorch_has), compare_call_exact);
  add_cases(cases, "scaled_dot_product_attention, auto, against float64 loops",
            calls, compare_call_auto);
  add_cases(
      cases,
      "gradients of scaled_dot_product_attention, auto, against float64 loops",
      calls, compare_call_gradients);
  return cases;
}

}  // namespace cli
