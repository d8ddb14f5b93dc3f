// SPDX-License-Identifier: MIT
#include "diagnosis/dump/observed_call.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <set>
#include <utility>

#include "diagnosis/dump/beside.h"
#include "multihead/text/shapes.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

constexpr const char* kInputs[] = {"query", "key", "value"};

// ---- Tensors and facts by name ---------------------------------------------
//
// What is not there is absent; what is there and cannot be read throws an error
// that names it.

const std::string* find_text(const Observation& from, const std::string& name) {
  const auto entry = from.metadata.find(name);
  return entry == from.metadata.end() ? nullptr : &entry->second;
}

// The whole text as a number that `holds`.
template <typename Number>
std::optional<Number> find_any(const Observation& from, const std::string& name,
                               bool (*holds)(Number), const char* condition) {
  const std::string* text = find_text(from, name);
  if (text == nullptr) return std::nullopt;
  Number number = 0;
  const char* whole = text->data() + text->size();
  const auto [end, error] = std::from_chars(text->data(), whole, number);
  TORCH_CHECK_VALUE(error == std::errc() && end == whole && holds(number),
                    "explain: ", name, " must be ", condition, ", got \"",
                    *text, "\"");
  return number;
}

// A number of heads; limited, so that products of sizes stay numbers.
std::optional<int64_t> find_count(const Observation& from, const char* name) {
  return find_any<int64_t>(
      from, name, [](int64_t n) { return n >= 1 && n <= 65536; },
      "a number from 1 to 65536");
}

std::optional<double> find_number(const Observation& from,
                                  const std::string& name) {
  return find_any<double>(
      from, name, [](double x) { return std::isfinite(x); }, "a number");
}

template <typename Value>
Value find_choice(
    const Observation& from, const std::string& name, Value absent,
    std::initializer_list<std::pair<const char*, Value>> choices) {
  const std::string* text = find_text(from, name);
  if (text == nullptr) return absent;
  std::string known;
  for (const auto& [choice, value] : choices) {
    if (*text == choice) return value;
    known += std::string(known.empty() ? "" : ", ") + choice;
  }
  TORCH_CHECK_VALUE(false, "explain: ", name, " must be one of ", known,
                    ", got \"", *text, "\"");
}

bool find_flag(const Observation& from, const std::string& name, bool absent) {
  return find_choice<bool>(from, name, absent,
                           {{"true", true}, {"false", false}});
}

// The first of these names, as it came; undefined if none is there.
Tensor find(const Observation& from, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto entry = from.tensors.find(name);
    if (entry != from.tensors.end()) return entry->second.detach();
  }
  return {};
}

bool is_floating(const Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  return type == at::kDouble || type == at::kFloat || type == at::kBFloat16 ||
         type == at::kHalf;
}

// Real numbers in float64, which holds every number of the types that may come;
// undefined of undefined.
Tensor numbers(const Tensor& x, const char* name) {
  if (!x.defined()) return x;
  TORCH_CHECK_VALUE(
      is_floating(x) ||
          at::isIntegralType(x.scalar_type(), /*includeBool=*/true),
      "explain: ", name, " must hold real numbers of 16 bits or more, got ",
      x.scalar_type());
  return x.to(at::kCPU, at::kDouble);
}

// numbers() of what goes into attention, or comes out of it: floating, not
// empty.
Tensor features(const Tensor& x, const char* name) {
  TORCH_CHECK_VALUE(is_floating(x), "explain: ", name,
                    " must be float64, float32, bfloat16 or float16, got ",
                    x.scalar_type());
  TORCH_CHECK_VALUE(x.numel() > 0, "explain: ", name,
                    " must hold an element, got shape ", shape_text(x));
  return numbers(x, name);
}

// ---- Shapes ----------------------------------------------------------------

// (L, E), (B, L, E) or (L, B, E) → (B, L, E).
Tensor sequence(const Tensor& x, bool batch_first, const char* name) {
  if (!x.defined()) return x;
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, "explain: ", name,
                    " must have 2 or 3 dimensions where there are weights, got "
                    "shape ",
                    shape_text(x));
  const Tensor y = features(x, name);
  if (x.dim() == 2) return y.unsqueeze(0);
  return batch_first ? y : y.transpose(0, 1).contiguous();
}

// (L, D), (B, L, D), (H, L, D) or (B, H, L, D) → (B, H, L, D).
Tensor heads_of(const Tensor& x, int64_t num_heads, const char* name) {
  if (!x.defined()) return x;
  TORCH_CHECK_VALUE(x.dim() >= 2 && x.dim() <= 4, "explain: ", name,
                    " must have 2, 3 or 4 dimensions, got shape ",
                    shape_text(x));
  const Tensor y = features(x, name);
  if (x.dim() == 4) return y;
  if (x.dim() == 2) return y.unsqueeze(0).unsqueeze(0);
  return num_heads > 1 && x.size(0) == num_heads ? y.unsqueeze(0)
                                                 : y.unsqueeze(1);
}

Tensor shaped(const ObservedCall& call, const Observation& from,
              const Tensor& x, const char* name) {
  return call.has_weights
             ? sequence(x, find_flag(from, "batch_first", true), name)
             : heads_of(x, call.sizes.heads, name);
}

void need_shape(const Tensor& x, const Tensor& like, const char* name,
                const char* like_name) {
  TORCH_CHECK_VALUE(!x.defined() || x.sizes() == like.sizes(),
                    "explain: ", name, " must have the shape of ", like_name,
                    ", ", shape_text(like), ", got ", shape_text(x));
}

// Any rank → (B or 1, H or 1, Lq or 1, Lk).
Tensor mask_shape(const Tensor& mask, const Sizes& n) {
  const auto is = [](int64_t size, int64_t whole) {
    return size == 1 || size == whole;
  };
  switch (mask.dim()) {
    case 1:
      return mask.view({1, 1, 1, -1});
    case 2:
      if (is(mask.size(0), n.queries)) return mask.unsqueeze(0).unsqueeze(0);
      return mask.unsqueeze(1).unsqueeze(1);
    case 3:
      if (is(mask.size(0), n.batch)) return mask.unsqueeze(1);
      if (mask.size(0) == n.batch * n.heads) {
        return mask.view({n.batch, n.heads, mask.size(1), mask.size(2)});
      }
      return mask.unsqueeze(0);
    default:
      return mask;
  }
}

GivenMask find_mask(const Observation& from, const Tensor& given,
                    const char* name, const char* facts, const Sizes& n) {
  if (!given.defined()) return {};
  GivenMask mask{.numbers = mask_shape(numbers(given, name), n),
                 .rank = given.dim()};
  const Tensor& x = mask.numbers;
  const int64_t sizes[] = {n.batch, n.heads, n.queries, n.keys};
  TORCH_CHECK_VALUE(x.dim() == 4 && at::is_expandable_to(x.sizes(), sizes),
                    "explain: ", name, " must broadcast to (B, H, Lq, Lk)",
                    " = (", n.batch, ", ", n.heads, ", ", n.queries, ", ",
                    n.keys, "), got shape ", shape_text(given));
  mask.meaning =
      find_choice<MaskMeaning>(from, facts, MaskMeaning::kUnknown,
                               {{"blocked", MaskMeaning::kBlocked},
                                {"keep", MaskMeaning::kKeep},
                                {"additive", MaskMeaning::kAdditive}});
  // Numbers other than 0 and 1 can only be there to be added.
  if (mask.meaning == MaskMeaning::kUnknown && given.is_floating_point() &&
      x.ne(0).logical_and(x.ne(1)).any().item<bool>()) {
    mask.meaning = MaskMeaning::kAdditive;
  }
  return mask;
}

// ---- Parts of a call -------------------------------------------------------

struct NamedWeights {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, Orientation> orientations;
};

NamedWeights find_weights(const Observation& from) {
  NamedWeights found;
  for (const auto& [name, tensor] : from.tensors) {
    if (is_reserved(name)) continue;
    found.tensors[name] =
        is_floating(tensor) ? numbers(tensor.detach(), "") : tensor;
    found.orientations[name] = find_choice<Orientation>(
        from, "layout:" + name, Orientation::kUnknown,
        {{"out_in", Orientation::kOutIn}, {"in_out", Orientation::kInOut}});
  }
  return found;
}

// With as many key/value heads as query heads or, where that does not fit, the
// most that do; num_kv_heads becomes their number. key_width: of what is
// projected to keys.
AlignedWeights align_any_groups(const NamedWeights& found, int64_t key_width,
                                LayerSizes& sizes) {
  const int64_t heads = sizes.num_heads;
  for (int64_t groups = heads; groups > 0; --groups) {
    if (heads % groups != 0) continue;
    sizes.num_kv_heads = groups;
    try {
      auto aligned = align_weights(found.tensors, found.orientations, sizes);
      const Tensor &query = aligned.query.weight, &key = aligned.key.weight;
      const bool both = query.defined() && key.defined();
      const bool fits =
          !both || (query.size(0) / heads == key.size(0) / groups &&
                    key.size(1) == key_width);
      if (fits) return aligned;
    } catch (const c10::ValueError&) {
      // What is wrong with all of them is said of the first.
    }
  }
  sizes.num_kv_heads = heads;
  return align_weights(found.tensors, found.orientations, sizes);
}

// A fused matrix in every order in which people cut one.
void read_other_orders(const NamedWeights& found, const LayerSizes& sizes,
                       ObservedCall& call) {
  using enum FusedOrder;
  if (call.weights.fused == kNotFused) return;
  for (const FusedOrder order :
       {kHeadByHead, kHeadFeaturePart, kFeaturePartHead, kFeatureHeadPart,
        kPartFeatureHead}) {
    const bool has_groups = sizes.num_heads != sizes.num_kv_heads;
    if (has_groups && order != kHeadByHead) continue;
    call.weights_by_order[order] =
        align_weights(found.tensors, found.orientations, sizes, order);
  }
}

void read_layer(const Observation& from, const NamedWeights& found,
                const Tensor& out, ObservedCall& call) {
  const auto heads = find_count(from, "num_heads");
  TORCH_CHECK_VALUE(heads.has_value(),
                    "explain: num_heads must be among the facts where there "
                    "are weights, got none");
  Sizes& n = call.sizes;
  n.heads = *heads;
  n.kv_heads = find_count(from, "num_kv_heads").value_or(n.heads);
  TORCH_CHECK_VALUE(n.heads % n.kv_heads == 0,
                    "explain: num_kv_heads must divide num_heads = ", n.heads,
                    ", got ", n.kv_heads);
  const auto features_of = [](const Tensor& x) {
    return x.dim() == 0 ? 0 : x.size(-1);
  };
  n.embed_dim = features_of(find(from, {"query", "x"}));
  LayerSizes sizes{
      .embed_dim = n.embed_dim,
      .num_heads = n.heads,
      .num_kv_heads = n.kv_heads,
      .vdim = features_of(find(from, {"value", "key", "query", "x"})),
      .out_dim = features_of(out)};
  if (const auto* told = find_text(from, "fused_parts"))
    sizes.fused_parts = *told;
  call.weights =
      find_count(from, "num_kv_heads")
          ? align_weights(found.tensors, found.orientations, sizes)
          : align_any_groups(
                found, features_of(find(from, {"key", "query", "x"})), sizes);
  n.kv_heads = sizes.num_kv_heads;
  read_other_orders(found, sizes, call);
  call.has_weights = true;
  const Tensor& matrix = call.weights.query.weight;
  const int64_t features =
      matrix.defined() ? matrix.numel() / n.embed_dim : n.embed_dim;
  TORCH_CHECK_VALUE(features % n.heads == 0,
                    "explain: num_heads must divide the ", features,
                    " features of the queries, got ", n.heads);
  n.width = features / n.heads;
  const Tensor& values = call.weights.value.weight;
  n.value_width = values.defined() ? values.size(0) / n.kv_heads : n.width;
}

void read_inputs(const Observation& from, ObservedCall& call) {
  Tensor given[] = {find(from, {"query", "x"}), find(from, {"key"}),
                    find(from, {"value"})};
  // Keys and values are mostly one tensor.
  if (!given[1].defined()) given[1] = given[2];
  for (int role = 1; role < 3; ++role) {
    if (!given[role].defined()) given[role] = given[role - 1];
    for (int other = role - 1; other >= 0; --other) {
      if (given[role].is_alias_of(given[other]) &&
          given[role].sizes() == given[other].sizes()) {
        call.same_as[role] = other;
      }
    }
  }
  for (int role = 0; role < 3; ++role) {
    call.inputs[role] = shaped(call, from, given[role], kInputs[role]);
  }
  Sizes& n = call.sizes;
  const Tensor& query = call.inputs[0];
  n.batch = query.size(0);
  n.queries = query.size(-2);
  n.keys = call.inputs[1].size(-2);
  if (!call.has_weights) {
    n.heads = query.size(1);
    n.kv_heads = call.inputs[1].size(1);
    n.width = query.size(-1);
    n.value_width = call.inputs[2].size(-1);
    n.embed_dim = find_count(from, "embed_dim").value_or(n.heads * n.width);
    TORCH_CHECK_VALUE(n.heads % n.kv_heads == 0,
                      "explain: key must have a number of heads that divides "
                      "that of query, ",
                      n.heads, ", got ", n.kv_heads);
  }
  for (int role = 1; role < 3; ++role) {
    TORCH_CHECK_VALUE(call.inputs[role].size(0) == n.batch &&
                          call.inputs[role].size(-2) == n.keys,
                      "explain: query, key and value must have one batch size, "
                      "key and value one length, got ",
                      kInputs[role], " of shape ", shape_text(given[role]),
                      " beside query ", shape_text(given[0]));
  }
}

// Draws in the shape of out, which a layer may make while the other of batch
// and sequence comes first; undefined: they are none.
Tensor draws_of_output(const ObservedCall& call, const Observation& from,
                       const Tensor& kept, const char* name) {
  const bool is_of_heads = call.has_weights && kept.dim() > 3;
  if (kept.numel() != call.out.numel() || kept.dim() < 2 || is_of_heads)
    return {};
  const Tensor as_given = shaped(call, from, kept, name);
  if (!call.has_weights || kept.dim() != 3) return as_given;
  const Tensor turned = as_given.transpose(0, 1);
  return as_given.sizes() != call.out.sizes() &&
                 turned.sizes() == call.out.sizes()
             ? turned
             : as_given;
}

// Draws of dropout, told apart by their number: weights or the context, of all
// heads or head by head, and the output.
class DropoutReader {
 public:
  DropoutReader(const Observation& from, ObservedCall& call)
      : from_(from), call_(call), n_(call.sizes) {}

  void read() {
    for (const std::string& name : draws_in_order()) {
      const Tensor& tensor = from_.tensors.at(name);
      const double p = find_number(from_, "dropout_p" + name.substr(12))
                           .value_or(call_.dropout_p);
      take(numbers(tensor, name.c_str()), p, name.c_str());
    }
    join_heads(weights_of_heads_, call_.kept_weights);
    join_heads(context_of_heads_, call_.kept_context);
    // One head may attend with all features.
    if (!call_.kept_weights.defined() && weights_of_heads_.size() == 1) {
      call_.kept_weights = {weights_of_heads_[0].unsqueeze(1), head_p_};
    }
    // Without a matrix after them, what the heads return is the output.
    if (!call_.kept_output.defined() && call_.kept_context.defined() &&
        call_.has_weights && !call_.weights.output.weight.defined()) {
      const Tensor merged = call_.kept_context.kept.transpose(1, 2).flatten(2);
      if (merged.sizes() == call_.out.sizes())
        call_.kept_output = {merged, call_.kept_context.p};
    }
  }

 private:
  // dropout_keep.2 before dropout_keep.10: those of heads come one by one.
  std::vector<std::string> draws_in_order() const {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : from_.tensors)
      if (name.starts_with("dropout_keep")) names.push_back(name);
    std::ranges::stable_sort(names, {}, &std::string::size);
    return names;
  }

  void take(const Tensor& kept, double p, const char* name) {
    const int64_t count = kept.numel();
    const int64_t of_a_head = n_.batch * n_.queries * n_.keys;
    const int64_t of_results = n_.batch * n_.queries * n_.value_width;
    // Code that takes keys from the queries has as many.
    const bool of_queries =
        n_.queries != n_.value_width &&
        count * n_.keys == of_a_head * n_.heads * n_.queries;
    // Where D = Lk, both have as many: then three dimensions are the output's.
    const Tensor drawn = draws_of_output(call_, from_, kept, name);
    const bool like_output = n_.heads > 1 && kept.dim() == 3 &&
                             drawn.defined() &&
                             drawn.sizes() == call_.out.sizes();
    const bool of_both =
        kept.sizes() ==
        at::IntArrayRef{n_.batch, n_.heads, n_.queries, n_.queries + n_.keys};
    const bool of_weights = !like_output && (count == of_a_head * n_.heads ||
                                             of_queries || of_both);
    const bool is_folded = kept.dim() == 3 && n_.heads > 1 && n_.batch > 1 &&
                           kept.size(0) == n_.batch * n_.heads;
    // Of heads that were left (B, L, H, d), and attend to each other.
    const bool of_heads = kept.sizes() == at::IntArrayRef{n_.batch, n_.queries,
                                                          n_.heads, n_.heads};
    if (of_heads && !of_weights && !call_.kept_weights.defined()) {
      call_.kept_weights = {kept, p};
    } else if (of_weights && !call_.kept_weights.defined()) {
      call_.kept_weights = {kept.reshape({n_.batch, n_.heads, n_.queries, -1}),
                            p, is_folded};
    } else if ((kept.dim() == 4 || is_folded) && call_.has_weights &&
               count == of_results * n_.heads) {
      call_.kept_context = {as_context(kept), p, is_folded};
    } else if (drawn.defined() && !call_.kept_output.defined()) {
      call_.kept_output = {drawn, p};
    } else if (drawn.defined() && call_.has_weights &&
               !call_.kept_weights.defined() && !call_.kept_context.defined() &&
               call_.kept_output.kept.numel() == of_results * n_.heads) {
      // The first of two were drawn for the heads' results, as they are merged.
      call_.kept_context = {
          call_.kept_output.kept.unflatten(2, {n_.heads, -1}).transpose(1, 2),
          call_.kept_output.p};
      call_.kept_output = {drawn, p};
    } else if (count == of_a_head) {
      weights_of_heads_.push_back(
          kept.reshape({n_.batch, n_.queries, n_.keys}));
      head_p_ = p;
    } else if (count == of_results && kept.dim() == 3) {
      context_of_heads_.push_back(
          kept.reshape({n_.batch, n_.queries, n_.value_width}));
      head_p_ = p;
    }
  }

  Tensor as_context(const Tensor& kept) const {
    return kept.reshape({n_.batch, n_.heads, n_.queries, n_.value_width});
  }

  // Draws that were made one head after the other.
  void join_heads(const std::vector<Tensor>& heads, Draws& draws) const {
    if (!draws.defined() && static_cast<int64_t>(heads.size()) == n_.heads) {
      draws = {at::stack(heads, 1), head_p_};
    }
  }

  const Observation& from_;
  ObservedCall& call_;
  const Sizes& n_;
  std::vector<Tensor> weights_of_heads_, context_of_heads_;
  double head_p_ = 0.0;
};

void read_dropout(const Observation& from, ObservedCall& call) {
  call.training = find_flag(from, "training", false);
  call.dropout_p = find_number(from, "dropout_p").value_or(0.0);
  TORCH_CHECK_VALUE(call.dropout_p >= 0.0 && call.dropout_p < 1.0,
                    "explain: dropout_p must be from 0 to below 1, got ",
                    call.dropout_p);
  DropoutReader(from, call).read();
}

void read_results(const Observation& from, const Tensor& out,
                  ObservedCall& call) {
  call.out = shaped(call, from, out, "out");
  call.returned = numbers(
      find(from, {"weights", "attn_weights", "attention_weights"}), "weights");
  call.dout = shaped(call, from, find(from, {"dout"}), "dout");
  need_shape(call.dout, call.out, "dout", "out");
  const Tensor gradients[] = {find(from, {"dquery", "dx"}),
                              find(from, {"dkey"}), find(from, {"dvalue"})};
  constexpr const char* kNames[] = {"dquery", "dkey", "dvalue"};
  for (int role = 0; role < 3; ++role) {
    call.gradients[role] = shaped(call, from, gradients[role], kNames[role]);
    need_shape(call.gradients[role], call.inputs[role], kNames[role],
               kInputs[role]);
  }
  for (const char* name :
       {"projected_query", "projected_key", "projected_value", "scores",
        "masked_scores", "context", "merged"}) {
    const Tensor stage = find(from, {name});
    if (stage.defined()) call.stages[name] = numbers(stage, name);
  }
  for (int64_t i = 0;; ++i) {
    const auto entry = from.tensors.find("trace." + std::to_string(i));
    if (entry == from.tensors.end()) break;
    call.trace.push_back(entry->second.detach());
  }
}

}  // namespace

bool ObservedCall::has_other_layers() const {
  return std::ranges::any_of(weights.unused, [&](const std::string& weight) {
    const auto meets = facts.find("meets_data:" + weight);
    return meets != facts.end() && meets->second == "true";
  });
}

bool is_reserved(std::string_view name) {
  static const std::set<std::string_view> kNames = {
      // clang-format off
      "query", "key", "value", "x", "mask", "attn_mask", "attention_mask",
      "key_padding_mask", "out", "output", "weights", "attn_weights",
      "attention_weights", "dout", "dquery", "dkey", "dvalue", "dx", "scores",
      "masked_scores", "context", "merged", "projected_query", "projected_key",
      "projected_value", "cos", "sin"
      // clang-format on
  };
  return kNames.contains(name) || name.starts_with("trace.") ||
         name.starts_with("dropout_keep");
}

ObservedCall read_dump(const Observation& from) {
  ObservedCall call;
  call.facts.insert(from.metadata.begin(), from.metadata.end());
  if (const std::string* name = find_text(from, "name")) call.name = *name;
  const Tensor query = find(from, {"query", "x"});
  const Tensor out = find(from, {"out", "output"});
  TORCH_CHECK_VALUE(query.defined(),
                    "explain: an observation must hold the input, query or x, "
                    "got none");
  TORCH_CHECK_VALUE(out.defined(),
                    "explain: an observation must hold what came out, out, got "
                    "none");
  TORCH_CHECK_VALUE(features(query, "query").isfinite().any().item<bool>(),
                    "explain: query must hold a finite number, got none");
  TORCH_CHECK_VALUE(query.dim() >= 2,
                    "explain: query must have 2 dimensions or more, got shape ",
                    shape_text(query));
  call.sizes.heads = find_count(from, "num_heads").value_or(1);
  call.dtype = query.scalar_type();
  const NamedWeights weights = find_weights(from);
  if (!weights.tensors.empty()) read_layer(from, weights, out, call);
  read_inputs(from, call);
  read_results(from, out, call);
  call.mask =
      find_mask(from, find(from, {"mask", "attn_mask", "attention_mask"}),
                "mask", "mask", call.sizes);
  call.padding = find_mask(
      from, find(from, {"key_padding_mask"}), "key_padding_mask",
      find_text(from, "padding") != nullptr ? "padding" : "mask", call.sizes);
  if (Tensor& padding = call.padding.numbers; padding.defined()) {
    // (B, Lk) where B = Lq.
    if (call.padding.rank == 2 && padding.size(2) == call.sizes.batch) {
      padding = padding.transpose(0, 2);
    }
    TORCH_CHECK_VALUE(padding.size(2) == 1,
                      "explain: key_padding_mask must be (B, Lk) = (",
                      call.sizes.batch, ", ", call.sizes.keys,
                      ") or broadcast so, got a row for each query");
  }
  call.causal =
      find_choice<CausalRequest>(from, "is_causal", CausalRequest::kNo,
                                 {{"true", CausalRequest::kYes},
                                  {"false", CausalRequest::kNo},
                                  {"infer", CausalRequest::kUnknown},
                                  {"expected", CausalRequest::kExpected}});
  call.queries_are_last = find_flag(from, "queries_are_last", false);
  call.roles_by_order = find_choice<bool>(from, "roles", /*otherwise=*/false,
                                          {{"by_order", true}});
  call.rounds_to_float = find_choice<bool>(
      from, "rounds_to", /*otherwise=*/false, {{"float32", true}});
  call.scale = find_number(from, "scale");
  call.search_effort =
      find_any<double>(
          from, "search_effort", [](double x) { return x > 0 && x <= 1; },
          "a number above 0, 1 at most")
          .value_or(1);
  read_dropout(from, call);
  read_beside(from, call);
  return call;
}

}  // namespace multihead::diagnosis
