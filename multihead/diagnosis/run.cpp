// SPDX-License-Identifier: MIT
#include "multihead/diagnosis/run.h"

#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <charconv>

#include "multihead/shape_text.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// ---- Reading ---------------------------------------------------------------

const std::string* find_text(const Observation& from, const std::string& name) {
  const auto entry = from.metadata.find(name);
  return entry == from.metadata.end() ? nullptr : &entry->second;
}

// As it came; undefined if it is not there.
Tensor find(const Observation& from, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto entry = from.tensors.find(name);
    if (entry != from.tensors.end()) return entry->second.detach();
  }
  return {};
}

Tensor numbers(const Tensor& x) {
  return x.defined() ? x.to(at::kCPU, at::kDouble) : x;
}

std::optional<int64_t> find_count(const Observation& from,
                                  const std::string& name) {
  const std::string* text = find_text(from, name);
  if (text == nullptr) return std::nullopt;
  int64_t count = 0;
  const auto [end, error] =
      std::from_chars(text->data(), text->data() + text->size(), count);
  TORCH_CHECK_VALUE(
      error == std::errc() && end == text->data() + text->size() && count > 0,
      "explain: ", name, " must be a number above 0, got \"", *text, "\"");
  return count;
}

std::optional<double> find_number(const Observation& from,
                                  const std::string& name) {
  const std::string* text = find_text(from, name);
  if (text == nullptr) return std::nullopt;
  double number = 0;
  const auto [end, error] =
      std::from_chars(text->data(), text->data() + text->size(), number);
  TORCH_CHECK_VALUE(error == std::errc() && end == text->data() + text->size(),
                    "explain: ", name, " must be a number, got \"", *text,
                    "\"");
  return number;
}

template <typename Value>
using Choices = std::initializer_list<std::pair<const char*, Value>>;

template <typename Value>
Value find_choice(const Observation& from, const std::string& name,
                  Value absent, Choices<Value> choices) {
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

// ---- Shapes ----------------------------------------------------------------

// (L, E), (B, L, E) or (L, B, E) → (B, L, E).
Tensor sequence(const Tensor& x, bool batch_first, const char* name) {
  if (!x.defined()) return x;
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, "explain: ", name,
                    " must have 2 or 3 dimensions where there are weights, got "
                    "shape ",
                    shape_text(x));
  if (x.dim() == 2) return numbers(x).unsqueeze(0);
  return batch_first ? numbers(x) : numbers(x).transpose(0, 1).contiguous();
}

// (L, D), (B, L, D), (H, L, D) or (B, H, L, D) → (B, H, L, D).
Tensor heads_of(const Tensor& x, int64_t num_heads, const char* name) {
  if (!x.defined()) return x;
  TORCH_CHECK_VALUE(x.dim() >= 2 && x.dim() <= 4, "explain: ", name,
                    " must have 2, 3 or 4 dimensions, got shape ",
                    shape_text(x));
  const Tensor y = numbers(x);
  if (x.dim() == 4) return y;
  if (x.dim() == 2) return y.unsqueeze(0).unsqueeze(0);
  return num_heads > 1 && x.size(0) == num_heads ? y.unsqueeze(0)
                                                 : y.unsqueeze(1);
}

Tensor shaped(const Run& run, const Observation& from, const Tensor& x,
              const char* name) {
  return run.has_weights
             ? sequence(x, find_flag(from, "batch_first", true), name)
             : heads_of(x, run.sizes.heads, name);
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
  GivenMask mask{.numbers = mask_shape(numbers(given), n), .rank = given.dim()};
  const Tensor& x = mask.numbers;
  const int64_t sizes[] = {n.batch, n.heads, n.queries, n.keys};
  bool fits = x.dim() == 4;
  for (int64_t d = 0; fits && d < 4; ++d) {
    fits = x.size(d) == 1 || x.size(d) == sizes[d];
  }
  TORCH_CHECK_VALUE(fits, "explain: ", name,
                    " must broadcast to (B, H, Lq, Lk)", " = (", n.batch, ", ",
                    n.heads, ", ", n.queries, ", ", n.keys, "), got shape ",
                    shape_text(given));
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

// ---- Parts of a run --------------------------------------------------------

// What names no weight.
bool is_reserved(const std::string& name) {
  static const char* const kNames[] = {"query",
                                       "key",
                                       "value",
                                       "x",
                                       "mask",
                                       "attn_mask",
                                       "key_padding_mask",
                                       "out",
                                       "output",
                                       "weights",
                                       "attn_weights",
                                       "attention_weights",
                                       "dout",
                                       "dquery",
                                       "dkey",
                                       "dvalue",
                                       "dx",
                                       "scores",
                                       "masked_scores",
                                       "context",
                                       "merged",
                                       "projected_query",
                                       "projected_key",
                                       "projected_value"};
  for (const char* reserved : kNames) {
    if (name == reserved) return true;
  }
  return name.starts_with("trace.") || name.starts_with("dropout_keep");
}

struct NamedWeights {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, Orientation> orientations;
};

NamedWeights find_weights(const Observation& from) {
  NamedWeights found;
  for (const auto& [name, tensor] : from.tensors) {
    if (is_reserved(name)) continue;
    found.tensors[name] =
        tensor.is_floating_point() ? numbers(tensor.detach()) : tensor;
    const auto orientation = find_choice<Orientation>(
        from, "layout:" + name, Orientation::kUnknown,
        {{"out_in", Orientation::kOutIn}, {"in_out", Orientation::kInOut}});
    if (orientation != Orientation::kUnknown) {
      found.orientations[name] = orientation;
    }
  }
  return found;
}

void read_layer(const Observation& from, const NamedWeights& found,
                const Tensor& query, Run& run) {
  const auto heads = find_count(from, "num_heads");
  TORCH_CHECK_VALUE(heads.has_value(),
                    "explain: num_heads must be among the facts where there "
                    "are weights, got none");
  Sizes& n = run.sizes;
  n.heads = *heads;
  n.kv_heads = find_count(from, "num_kv_heads").value_or(n.heads);
  TORCH_CHECK_VALUE(n.heads % n.kv_heads == 0,
                    "explain: num_kv_heads must divide num_heads = ", n.heads,
                    ", got ", n.kv_heads);
  n.embed_dim = query.size(-1);
  const LayerSizes sizes{n.embed_dim, n.heads, n.kv_heads};
  run.weights = align_weights(found.tensors, found.orientations, sizes);
  run.weights_head_by_head =
      run.weights.fused == FusedOrder::kNotFused
          ? run.weights
          : align_weights(found.tensors, found.orientations, sizes,
                          FusedOrder::kHeadByHead);
  run.has_weights = true;
  const Tensor& matrix = run.weights.query.weight;
  const int64_t features =
      matrix.defined() ? matrix.numel() / n.embed_dim : n.embed_dim;
  TORCH_CHECK_VALUE(features % n.heads == 0,
                    "explain: num_heads must divide the ", features,
                    " features of the queries, got ", n.heads);
  n.width = features / n.heads;
}

void read_inputs(const Observation& from, Run& run) {
  Tensor given[] = {find(from, {"query", "x"}), find(from, {"key"}),
                    find(from, {"value"})};
  for (int role = 1; role < 3; ++role) {
    if (!given[role].defined()) given[role] = given[role - 1];
    for (int other = role - 1; other >= 0; --other) {
      if (given[role].is_alias_of(given[other]) &&
          given[role].sizes() == given[other].sizes()) {
        run.same_as[role] = other;
      }
    }
  }
  constexpr const char* kNames[] = {"query", "key", "value"};
  for (int role = 0; role < 3; ++role) {
    run.inputs[role] = shaped(run, from, given[role], kNames[role]);
  }
  Sizes& n = run.sizes;
  const Tensor& query = run.inputs[0];
  n.batch = query.size(0);
  n.queries = query.size(-2);
  n.keys = run.inputs[1].size(-2);
  if (!run.has_weights) {
    n.heads = query.size(1);
    n.kv_heads = run.inputs[1].size(1);
    n.width = query.size(-1);
    n.embed_dim = n.heads * n.width;
    TORCH_CHECK_VALUE(n.heads % n.kv_heads == 0,
                      "explain: key must have a number of heads that divides "
                      "that of query, ",
                      n.heads, ", got ", n.kv_heads);
  }
  for (int role = 1; role < 3; ++role) {
    TORCH_CHECK_VALUE(run.inputs[role].size(0) == n.batch &&
                          run.inputs[role].size(-2) == n.keys,
                      "explain: query, key and value must have one batch size, "
                      "key and value one length, got ",
                      kNames[role], " of shape ", shape_text(given[role]),
                      " beside query ", shape_text(given[0]));
  }
}

// Draws of dropout, told apart by their number: weights, of all heads or head
// by head, or the output.
void read_dropout(const Observation& from, Run& run) {
  run.training = find_flag(from, "training", false);
  run.dropout_p = find_number(from, "dropout_p").value_or(0.0);
  TORCH_CHECK_VALUE(run.dropout_p >= 0.0 && run.dropout_p < 1.0,
                    "explain: dropout_p must be from 0 to below 1, got ",
                    run.dropout_p);
  const Sizes& n = run.sizes;
  const int64_t of_a_head = n.batch * n.queries * n.keys;
  std::vector<Tensor> heads;
  for (const auto& [name, tensor] : from.tensors) {
    if (!name.starts_with("dropout_keep")) continue;
    if (tensor.numel() == of_a_head * n.heads && !run.kept_weights.defined()) {
      run.kept_weights =
          numbers(tensor).reshape({n.batch, n.heads, n.queries, n.keys});
    } else if (tensor.dim() == 4 && run.has_weights &&
               tensor.numel() == of_a_head / n.keys * n.heads * n.width) {
      run.kept_context =
          numbers(tensor).reshape({n.batch, n.heads, n.queries, n.width});
    } else if (tensor.numel() == run.out.numel() &&
               !run.kept_output.defined()) {
      run.kept_output = shaped(run, from, tensor, "dropout_keep");
    } else if (tensor.numel() == of_a_head) {
      heads.push_back(numbers(tensor).reshape({n.batch, n.queries, n.keys}));
    }
  }
  if (!run.kept_weights.defined() &&
      static_cast<int64_t>(heads.size()) == n.heads) {
    run.kept_weights = at::stack(heads, 1);
  }
}

void read_results(const Observation& from, const Tensor& out, Run& run) {
  run.out = shaped(run, from, out, "out");
  run.returned =
      numbers(find(from, {"weights", "attn_weights", "attention_weights"}));
  run.dout = shaped(run, from, find(from, {"dout"}), "dout");
  const Tensor gradients[] = {find(from, {"dquery", "dx"}),
                              find(from, {"dkey"}), find(from, {"dvalue"})};
  for (int role = 0; role < 3; ++role) {
    run.gradients[role] = shaped(run, from, gradients[role], "gradients");
  }
  for (const char* name :
       {"projected_query", "projected_key", "projected_value", "scores",
        "masked_scores", "context", "merged"}) {
    const Tensor stage = find(from, {name});
    if (stage.defined()) run.stages[name] = numbers(stage);
  }
  for (int64_t i = 0;; ++i) {
    const auto entry = from.tensors.find("trace." + std::to_string(i));
    if (entry == from.tensors.end()) break;
    run.trace.push_back(entry->second.detach());
  }
}

}  // namespace

Run make_run(const Observation& from) {
  Run run;
  if (const std::string* name = find_text(from, "name")) run.name = *name;
  const Tensor query = find(from, {"query", "x"});
  const Tensor out = find(from, {"out", "output"});
  TORCH_CHECK_VALUE(query.defined(),
                    "explain: an observation must hold the input, query or x, "
                    "got none");
  TORCH_CHECK_VALUE(out.defined(),
                    "explain: an observation must hold what came out, out, got "
                    "none");
  TORCH_CHECK_VALUE(out.is_floating_point() && query.is_floating_point(),
                    "explain: query and out must be floating, got ",
                    query.scalar_type(), " and ", out.scalar_type());
  run.sizes.heads = find_count(from, "num_heads").value_or(1);
  run.dtype = query.scalar_type();
  const NamedWeights weights = find_weights(from);
  if (!weights.tensors.empty()) read_layer(from, weights, query, run);
  read_inputs(from, run);
  read_results(from, out, run);
  run.mask = find_mask(from, find(from, {"mask", "attn_mask"}), "mask", "mask",
                       run.sizes);
  run.padding = find_mask(
      from, find(from, {"key_padding_mask"}), "key_padding_mask",
      find_text(from, "padding") != nullptr ? "padding" : "mask", run.sizes);
  if (run.padding.numbers.defined() && run.padding.numbers.size(2) != 1) {
    run.padding.numbers =
        run.padding.numbers.view({run.sizes.batch, 1, 1, run.sizes.keys});
  }
  run.causal = find_choice<CausalRequest>(from, "is_causal", CausalRequest::kNo,
                                          {{"true", CausalRequest::kYes},
                                           {"false", CausalRequest::kNo},
                                           {"infer", CausalRequest::kUnknown}});
  run.scale = find_number(from, "scale");
  read_dropout(from, run);
  return run;
}

}  // namespace multihead::diagnosis
