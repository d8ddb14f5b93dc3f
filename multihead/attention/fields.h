// SPDX-License-Identifier: MIT
//
// The one list of the fields of AttentionOptions. Schemas, the parameters of
// operators, packing and unpacking, what autograd saves and which gradients
// there are follow from it. An option that is missing here does not compile;
// nor does a path that computes by options (route.cpp, definition.cpp,
// ops/cpu/arguments.cpp), as long as it does not say what it does with each.
//
// A new option: its member in functional.h, its row in kFields, and what the
// compiler then asks for.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "multihead/functional.h"
#include "multihead/optional_tensor.h"

namespace multihead::fields {

// ---- Kinds of members -----------------------------------------------------

/// For each type of member: how a schema writes it, what the operator's C++
/// function takes for it, and the way there and back.
template <class T>
struct Kind;

template <class T>
struct PassedAsItIs {
  using Parameter = T;
  static T pack(const T& x) { return x; }
  static T unpack(const T& x) { return x; }
};

template <>
struct Kind<bool> : PassedAsItIs<bool> {
  static constexpr auto* kSchema = "bool";
};

template <>
struct Kind<double> : PassedAsItIs<double> {
  static constexpr auto* kSchema = "float";
};

template <>
struct Kind<std::optional<double>> : PassedAsItIs<std::optional<double>> {
  static constexpr auto* kSchema = "float?";
};

template <>
struct Kind<at::Tensor> {
  using Parameter = const std::optional<at::Tensor>&;
  static constexpr auto* kSchema = "Tensor?";
  static std::optional<at::Tensor> pack(const at::Tensor& x) {
    return optional(x);
  }
  static at::Tensor unpack(Parameter x) { return or_undefined(x); }
};

template <>
struct Kind<CausalAlignment> {
  using Parameter = std::string_view;
  static constexpr auto* kSchema = "str";
  static std::string_view pack(CausalAlignment x) {
    return x == CausalAlignment::kBottomRight ? "bottom_right" : "top_left";
  }
  static CausalAlignment unpack(std::string_view name) {
    return causal_alignment_from_name(name);
  }
};

using Window = std::optional<std::array<int64_t, 2>>;
template <>
struct Kind<Window> {
  using Parameter = at::OptionalIntArrayRef;
  static constexpr auto* kSchema = "int[]?";
  static at::OptionalIntArrayRef pack(const Window& x) {
    return x ? at::OptionalIntArrayRef(*x) : at::OptionalIntArrayRef();
  }
  /// Throws c10::ValueError unless there are two sizes.
  [[gnu::visibility("default")]] static Window unpack(
      at::OptionalIntArrayRef sizes);
};

// ---- The list -------------------------------------------------------------

template <class T>
struct Field {
  std::string_view name;
  T AttentionOptions::* member;
  std::string_view default_value;  ///< as a schema writes it
  bool is_differentiable = false;
};
template <class T>
Field(std::string_view, T AttentionOptions::*, std::string_view, bool = false)
    -> Field<T>;

inline constexpr bool kDifferentiable = true;

inline constexpr std::tuple kFields{
    Field{"attn_mask", &AttentionOptions::attn_mask, "None", kDifferentiable},
    Field{"dropout_p", &AttentionOptions::dropout_p, "0.0"},
    Field{"is_causal", &AttentionOptions::is_causal, "False"},
    Field{"scale", &AttentionOptions::scale, "None"},
    Field{"enable_gqa", &AttentionOptions::enable_gqa, "False"},
    Field{"causal_alignment", &AttentionOptions::causal_alignment,
          "\"top_left\""},
    Field{"query_offset", &AttentionOptions::query_offset, "None"},
    Field{"window", &AttentionOptions::window, "None"},
    Field{"key_lengths", &AttentionOptions::key_lengths, "None"},
    Field{"key_mask", &AttentionOptions::key_mask, "None"},
    Field{"softcap", &AttentionOptions::softcap, "None"},
    Field{"alibi_slopes", &AttentionOptions::alibi_slopes, "None",
          kDifferentiable},
    Field{"sinks", &AttentionOptions::sinks, "None", kDifferentiable}};

/// The first ones are those of PyTorch's function; the others are given by
/// name.
inline constexpr size_t kPositional = 5;

inline constexpr size_t kCount = std::tuple_size_v<decltype(kFields)>;

struct Anything {
  template <class T>
  operator T() const;
};
template <class Struct, size_t... i>
consteval bool has_members(std::index_sequence<i...>) {
  return requires { Struct{((void)i, Anything{})...}; };
}
static_assert(
    has_members<AttentionOptions>(std::make_index_sequence<kCount>{}) &&
        !has_members<AttentionOptions>(std::make_index_sequence<kCount + 1>{}),
    "each member of AttentionOptions must have its row in kFields");

// ---- What follows from it -------------------------------------------------

/// f(field) for each.
template <class F>
constexpr void for_each(F&& f) {
  std::apply([&](const auto&... field) { (f(field), ...); }, kFields);
}

/// f(field, tensor) for each tensor of `options`, absent ones among them.
template <class Options, class F>
constexpr void for_each_tensor(Options& options, F&& f) {
  for_each([&]<class T>(const Field<T>& field) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      f(field, options.*field.member);
    }
  });
}

/// f(tensor) for each that can have a gradient.
template <class Options, class F>
constexpr void for_each_differentiable(Options& options, F&& f) {
  for_each_tensor(options, [&](const auto& field, auto& tensor) {
    if (field.is_differentiable) f(tensor);
  });
}

inline constexpr size_t kDifferentiableCount = [] {
  size_t count = 0;
  for_each([&](const auto& field) { count += field.is_differentiable; });
  return count;
}();

/// "Tensor? attn_mask=None, …, *, …, Tensor? sinks=None"
[[gnu::visibility("default")]] std::string schema();

template <class... T>
struct Types {};
template <class... A, class... B>
Types<A..., B...> operator+(Types<A...>, Types<B...>);

template <class P>
struct Parameters {
  using type = Types<P>;
};
template <>
struct Parameters<const AttentionOptions&> {
  using type = decltype(std::apply(
      []<class... T>(const Field<T>&...) {
        return Types<typename Kind<T>::Parameter...>{};
      },
      kFields));
};

template <class Result, class Arguments>
struct Function;
template <class Result, class... A>
struct Function<Result, Types<A...>> {
  using type = Result(A...);
};

/// Result(…, const AttentionOptions&, …) as the dispatcher has it: all fields
/// in the place of the options.
template <class Signature>
struct Flat;
template <class Result, class... P>
struct Flat<Result(P...)> {
  using Arguments =
      decltype((Types<>{} + ... + typename Parameters<P>::type{}));
  using type = typename Function<Result, Arguments>::type;
};

/// What the dispatcher takes for one parameter, as a tuple.
template <class P>
std::tuple<const P&> pack(const P& argument) {
  return {argument};
}
inline auto pack(const AttentionOptions& options) {
  return std::apply(
      [&]<class... T>(const Field<T>&... field) {
        return std::tuple<decltype(Kind<T>::pack(options.*field.member))...>(
            Kind<T>::pack(options.*field.member)...);
      },
      kFields);
}

/// The options that begin at argument `first`.
template <size_t first, class Arguments>
AttentionOptions unpack(const Arguments& arguments) {
  AttentionOptions options;
  [&]<size_t... i>(std::index_sequence<i...>) {
    const auto set = [&]<class T>(const Field<T>& field, const auto& argument) {
      options.*field.member = Kind<T>::unpack(argument);
    };
    (set(std::get<i>(kFields), std::get<first + i>(arguments)), ...);
  }(std::make_index_sequence<kCount>{});
  return options;
}

template <auto f, class Signature, class Arguments>
struct Implementation;
template <auto f, class Result, class... P, class... A>
struct Implementation<f, Result (*)(P...), Types<A...>> {
  static Result call(A... a) {
    constexpr bool is_options[] = {
        std::is_same_v<P, const AttentionOptions&>...};
    constexpr size_t first =
        std::find(std::begin(is_options), std::end(is_options), true) -
        std::begin(is_options);
    const auto arguments = std::forward_as_tuple(a...);
    return [&]<size_t... before, size_t... after>(
               std::index_sequence<before...>, std::index_sequence<after...>) {
      return f(std::get<before>(arguments)..., unpack<first>(arguments),
               std::get<first + kCount + after>(arguments)...);
    }(std::make_index_sequence<first>{},
           std::make_index_sequence<sizeof...(P) - first - 1>{});
  }
};
template <class Signature>
struct FlatPointer;
template <class Result, class... P>
struct FlatPointer<Result (*)(P...)> : Flat<Result(P...)> {};

/// f, which takes AttentionOptions, as an operator implements it.
template <auto f>
inline constexpr auto* implementation =
    &Implementation<f, decltype(f),
                    typename FlatPointer<decltype(f)>::Arguments>::call;

}  // namespace multihead::fields
