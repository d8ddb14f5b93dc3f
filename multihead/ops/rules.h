// SPDX-License-Identifier: MIT
//
// The arguments that the fused operators share, written down once: as they
// stand in the schema, as C++ parameters, and as AttentionOptions.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "multihead/functional.h"

namespace multihead::ops {

/// From attn_mask on, in the order of the schema.
inline constexpr const char* kRulesSchema =
    "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
    "float? scale=None, bool enable_gqa=False, *, "
    "str causal_alignment=\"top_left\", Tensor? query_offset=None, "
    "int[]? window=None, Tensor? key_lengths=None, Tensor? key_mask=None, "
    "float? softcap=None, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "Tensor? dropout_state=None";

/// The same as a value. dropout_state: int64 (2), seed and offset of the
/// counter-based generator; needed when dropout_p > 0.
struct Rules {
  std::optional<at::Tensor> attn_mask = {};
  double dropout_p = 0.0;
  bool is_causal = false;
  std::optional<double> scale = {};
  bool enable_gqa = false;
  std::string_view causal_alignment = "top_left";
  std::optional<at::Tensor> query_offset = {};
  at::OptionalIntArrayRef window = {};
  std::optional<at::Tensor> key_lengths = {};
  std::optional<at::Tensor> key_mask = {};
  std::optional<double> softcap = {};
  std::optional<at::Tensor> alibi_slopes = {};
  std::optional<at::Tensor> sinks = {};
  std::optional<at::Tensor> dropout_state = {};
};

/// The same as parameter types: Operators<RuleTypes> in cpu.cpp and meta.cpp
/// turn them into a Rules.
template <class... T>
struct Types {};
using RuleTypes =
    Types<const std::optional<at::Tensor>&, double, bool, std::optional<double>,
          bool, std::string_view, const std::optional<at::Tensor>&,
          at::OptionalIntArrayRef, const std::optional<at::Tensor>&,
          const std::optional<at::Tensor>&, std::optional<double>,
          const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
          const std::optional<at::Tensor>&>;

/// Throws c10::ValueError where a name or the window's size is wrong.
AttentionOptions options_of(const Rules& rules);

}  // namespace multihead::ops
