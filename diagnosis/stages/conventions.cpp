// SPDX-License-Identifier: MIT
//
// What implementations choose without being wrong: how what they are given is
// read.
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <array>
#include <string>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// ---- How what is given is read ---------------------------------------------

template <FusedOrder order>
Concern fused_otherwise(const ObservedCall& call) {
  if (!call.weights_by_order.contains(order)) return Concern::kNo;
  // The others are rare: without a trace, only code that is right has them.
  return order == FusedOrder::kHeadByHead ? Concern::kMaybe : Concern::kAlone;
}

template <FusedOrder order>
void fused_as(Recipe& r) {
  r.fused = order;
}

// Whether the outputs of an item's padded positions, whichever these are, are
// all the same, or NaN. One alone says nothing.
bool has_rows_that_see_nothing(const ObservedCall& call) {
  const Tensor& numbers = call.padding.numbers;
  const Tensor out =
      call.out.dim() == 4 ? call.out.transpose(1, 2).flatten(2) : call.out;
  if (numbers.size(0) != out.size(0) || numbers.size(2) != 1 ||
      numbers.size(3) != out.size(1)) {
    return false;
  }
  const auto are_same = [&](const Tensor& padded) {
    bool any = false;
    for (int64_t item = 0; item < out.size(0); ++item) {
      const Tensor rows = out[item].index({padded[item][0][0]});
      if (rows.size(0) < 2) continue;
      const Tensor first = rows.slice(0, 0, 1).expand_as(rows);
      const double allowed = 1e-5 * largest_finite(out);
      if (!(largest_difference(rows, first) <= allowed)) return false;
      any = true;
    }
    return any;
  };
  return are_same(numbers.ne(0)) || are_same(numbers.eq(0));
}

bool shows_sums_of_columns(const ObservedCall& call) {
  const auto are_one = [](const Tensor& weights, int64_t axis) {
    return (weights.sum(axis) - 1).abs().lt(1e-4).all().item<bool>();
  };
  return std::ranges::any_of(call.trace, [&](const Tensor& tensor) {
    if (!tensor.is_floating_point() || tensor.dim() < 2 ||
        tensor.size(-1) != call.sizes.keys ||
        tensor.size(-2) != call.sizes.queries) {
      return false;
    }
    const Tensor x = tensor.to(at::kDouble);
    return x.ge(0).all().item<bool>() && are_one(x, -2) && !are_one(x, -1);
  });
}

// Of one sequence, by matrices of its own: names alone say which of the two
// asks. With a softmax over the queries it is the keys, for which the weights
// stand the other way.
Concern queries_called_keys(const ObservedCall& call) {
  if (call.sizes.queries != call.sizes.keys || !call.owns_weights ||
      call.same_as != std::array{0, 0, 0} || call.sizes.keys < 2) {
    return Concern::kNo;
  }
  if (!call.has_sums_of_columns)
    call.has_sums_of_columns = shows_sums_of_columns(call);
  return maybe(*call.has_sums_of_columns);
}

bool shows_empty_diagonal(const ObservedCall& call) {
  const int64_t keys = call.sizes.keys;
  return std::ranges::any_of(call.trace, [&](const Tensor& tensor) {
    if (!tensor.is_floating_point() || tensor.dim() < 2 ||
        tensor.size(-1) != keys || tensor.size(-2) != keys) {
      return false;
    }
    const Tensor x = tensor.to(at::kDouble);
    return x.diagonal(0, -2, -1).eq(0).all().item<bool>() &&
           x.triu(1).gt(0).any().item<bool>() && x.ge(0).all().item<bool>() &&
           (x.sum(-1) - 1).abs().lt(1e-4).all().item<bool>();
  });
}

Concern mask_opens(const ObservedCall& call) {
  const bool may_be = call.is_masked() && call.facts.contains("opens_keys");
  return may_be ? Concern::kAlone : Concern::kNo;
}

Concern own_key_seen(const ObservedCall& call) {
  const bool may_be = call.sizes.queries == call.sizes.keys && call.is_masked();
  return may_be && call.facts.contains("sees_itself") ? Concern::kAlone
                                                      : Concern::kNo;
}

Concern own_key_blocked(const ObservedCall& call) {
  if (call.sizes.queries != call.sizes.keys || call.sizes.keys < 3)
    return Concern::kNo;
  if (!call.has_empty_diagonal)
    call.has_empty_diagonal = shows_empty_diagonal(call);
  return maybe(*call.has_empty_diagonal);
}

Concern window_size(const ObservedCall& call) {
  return maybe(call.window && call.window->is_open);
}

// Items and heads in one dimension: which of them comes first is not said.
Concern folds_heads(const ObservedCall& call) {
  const Sizes& n = call.sizes;
  const bool returned = call.returned.defined() && call.returned.dim() == 3 &&
                        call.returned.size(0) == n.batch * n.heads;
  return maybe(
      n.batch > 1 && n.heads > 1 &&
      (returned || call.kept_weights.is_folded || call.kept_context.is_folded));
}

// It has a layer for dropout of weights, and leaves it out.
bool forgets_weights(const ObservedCall& call) {
  return call.facts.contains("idle_dropout");
}

template <WindowReading reading>
void window_means(Recipe& r) {
  r.window_reading = reading;
}

// ---- Words -----------------------------------------------------------------

constexpr std::string_view kFusedCut =
    "The fused projection is cut into queries, keys and values in another "
    "order "
    "of features than PyTorch's, which the matrix has learned.";
}  // namespace

const std::vector<Convention> kReadings = {
    {"mask_keeps", "The mask is read as True (or 1) = may attend.",
     "If True is meant to block, say mask=\"blocked\".",
     [](const ObservedCall& call) {
       return maybe(call.mask.numbers.defined() &&
                    call.mask.meaning == MaskMeaning::kUnknown);
     },
     [](Recipe& r) { r.mask_keeps = true; }, Sign::kNone,
     "True in the mask means may attend"},
    {"padding_keeps", "The padding mask is read as True (or 1) = a real token.",
     "If True is meant to mark padding, say mask=\"blocked\".",
     [](const ObservedCall& call) {
       return maybe(call.padding.numbers.defined() &&
                    call.padding.meaning == MaskMeaning::kUnknown);
     },
     [](Recipe& r) { r.padding_keeps = true; }, Sign::kNone,
     "True in the padding mask means a real token"},
    {"padding_of_pairs",
     "Padded positions see nothing themselves, and what they get is not "
     "compared.",
     "",
     [](const ObservedCall& call) {
       return maybe(call.padding.numbers.defined() &&
                    call.sizes.queries == call.sizes.keys &&
                    has_rows_that_see_nothing(call));
     },
     [](Recipe& r) { r.padding_of_pairs = true; }},
    {"weights_in_out",
     "The matrices are read as (in, out): input @ W. nn.Linear stores "
     "(out, in).",
     "",
     [](const ObservedCall& call) {
       return maybe(
           std::ranges::any_of(call.weights.matrices(), [](const auto* m) {
             return m->weight.defined() &&
                    m->orientation == Orientation::kUnknown;
           }));
     },
     [](Recipe& r) { r.weights_in_out = true; }, Sign::kProjected},
    {"output_weight_otherwise",
     "The output matrix is stored the other way than the rest: as (out, in) "
     "beside (in, out), or the reverse.",
     "",
     [](const ObservedCall& call) {
       return maybe(
           call.owns_weights && call.weights.matrices()[3]->weight.defined() &&
           call.weights.matrices()[3]->orientation == Orientation::kUnknown);
     },
     [](Recipe& r) { r.output_weight_otherwise = true; }},
    {"fused_head_by_head",
     "The fused projection is cut head by head (q, k, v of head 0, then of "
     "head 1, …), not into all queries, all keys, all values.",
     "", fused_otherwise<FusedOrder::kHeadByHead>,
     fused_as<FusedOrder::kHeadByHead>},
    {"fused_head_feature_part", kFusedCut, "",
     fused_otherwise<FusedOrder::kHeadFeaturePart>,
     fused_as<FusedOrder::kHeadFeaturePart>, Sign::kHeads},
    {"fused_feature_part_head", kFusedCut, "",
     fused_otherwise<FusedOrder::kFeaturePartHead>,
     fused_as<FusedOrder::kFeaturePartHead>, Sign::kHeads},
    {"fused_feature_head_part", kFusedCut, "",
     fused_otherwise<FusedOrder::kFeatureHeadPart>,
     fused_as<FusedOrder::kFeatureHeadPart>, Sign::kHeads},
    {"fused_part_feature_head", kFusedCut, "",
     fused_otherwise<FusedOrder::kPartFeatureHead>,
     fused_as<FusedOrder::kPartFeatureHead>, Sign::kHeads},
    {"merged_by_feature",
     "Heads are merged feature by feature, as they are cut from the fused "
     "projection, an order that the output matrix has learned.",
     "",
     [](const ObservedCall& call) {
       return maybe(
           call.weights_by_order.contains(FusedOrder::kFeaturePartHead));
     },
     [](Recipe& r) {
       const bool is_cut_so = r.fused == FusedOrder::kFeaturePartHead ||
                              r.fused == FusedOrder::kFeatureHeadPart;
       if (is_cut_so) r.merge = merge_by_feature;
     },
     Sign::kNone, "its weights were learned in this order of features"},
    {"merged_by_feature_of_each",
     "Heads, each of which has matrices of its own, are merged feature by "
     "feature, an order that the output matrix has learned.",
     "",
     [](const ObservedCall& call) {
       return maybe(call.has_weights &&
                    call.weights.query.name.find('*') != std::string::npos);
     },
     [](Recipe& r) { r.merge = merge_by_feature; }, Sign::kNone,
     "its weights were learned in this order of features"},
    {"keys_multiplied_first",
     "Nothing names its matrices: the one whose product comes first in the "
     "scores is read as that of the keys.",
     "", [](const ObservedCall& call) { return maybe(call.roles_by_order); },
     [](Recipe& r) { r.matrices = {1, 0, 2}; }},
    {"queries_called_keys",
     "What its names call keys are the queries: the softmax runs over the "
     "other axis of its scores, and the weights meet the values accordingly.",
     "", queries_called_keys, [](Recipe& r) { r.matrices = {1, 0, 2}; },
     Sign::kNone,
     "its matrices called query and key are meant the other way round, as in "
     "SAGAN"},
    {"causal_by_itself",
     "It is causal by itself: no query sees a later key, without being "
     "asked.",
     "",
     [](const ObservedCall& call) {
       return maybe(call.causal == CausalRequest::kUnknown);
     },
     [](Recipe& r) { r.causal_by_itself = true; }, Sign::kNone,
     "it is meant to be causal"},
    {"causal_unless_masked",
     "It is causal where no mask is given: then no query sees a later key, "
     "without being asked.",
     "",
     // Not beside faults, for time.
     [](const ObservedCall& call) {
       return call.causal == CausalRequest::kUnknown ? Concern::kAlone
                                                     : Concern::kNo;
     },
     [](Recipe& r) { r.causal_unless_masked = true; }, Sign::kNone,
     "it is meant to be causal where no mask is given"},
    {"window_of_earlier_keys",
     "A window of w is read as the query's own key and w keys before it.", "",
     window_size, window_means<WindowReading::kOwnToo>},
    {"window_on_both_sides",
     "A window of w is read as w keys on each side of the query's own.", "",
     window_size, window_means<WindowReading::kBothSides>},
    {"window_of_nearer_keys",
     "A window of w is read as the keys nearer than w, on both sides of the "
     "query's own.",
     "", window_size, window_means<WindowReading::kNearer>},
    {"window_of_halves",
     "A window of w is read as half as many keys on each side of the query's "
     "own.",
     "", window_size, window_means<WindowReading::kHalves>},
    {"window_of_halves",
     "A window of w is read as half as many keys on each side of the query's "
     "own; where it is causal, as w keys, of which its own is the last.",
     "", window_size, window_means<WindowReading::kHalvesOrEarlier>},
    {"window_elsewhere",
     "Its window does not bind queries and keys of one call.",
     "Block what lies beyond the window: j < i - left and j > i + right.",
     [](const ObservedCall& call) {
       return maybe(call.window && call.facts.contains("window_elsewhere"));
     },
     window_means<WindowReading::kElsewhere>, Sign::kNone,
     "its window is that of its cache, or is in the masks that it is given"},
    {"mask_opens",
     "What its mask shows is seen by all queries, though something else hides "
     "it, as a prefix is in causal attention.",
     "nn.MultiheadAttention hides what any of its masks blocks.", mask_opens,
     [](Recipe& r) { r.joined = MasksJoined::kOpens; }, Sign::kNone,
     "its mask is meant to show keys that would be hidden, as a prefix"},
    {"own_key_seen",
     "Each query sees the key of its own position, whatever the mask says, as "
     "a "
     "node with a loop to itself.",
     "nn.MultiheadAttention hides what its mask blocks.", own_key_seen,
     [](Recipe& r) { r.own_key_seen = true; }, Sign::kNone},
    {"own_key_blocked", "No query sees its own key.",
     "nn.MultiheadAttention lets a query see its own key.", own_key_blocked,
     [](Recipe& r) { r.own_key_blocked = true; }, Sign::kNone,
     "no query is meant to see its own key, as in locality self-attention"},
    {"within_blocks",
     "The sequence is cut into blocks, and a query sees the keys of its own "
     "block alone.",
     "nn.MultiheadAttention sees the whole sequence.",
     [](const ObservedCall& call) { return maybe(call.own_block > 0); },
     [](Recipe& r) { r.within_blocks = true; }, Sign::kNone,
     "attention is meant to stay within blocks of the sequence"},
    {"heads_before_items",
     "Where heads and items share a dimension, as in weights that are "
     "returned, it is read as (H·B, …): all items of the first head come "
     "first.",
     "", folds_heads, [](Recipe& r) { r.heads_before_items = true; }},
    {"dot_product_attention",
     "The scores are not scaled: it says so or calls itself dot-product "
     "attention, is a block of images that has no scale, or is handed scaled "
     "queries.",
     "nn.MultiheadAttention divides them by the square root of the head width.",
     [](const ObservedCall& call) {
       return maybe(call.facts.contains("says_dot_product"));
     },
     [](Recipe& r) { r.learned_scale = LearnedScale::kOne; }, Sign::kNone,
     "scores without a scale are meant, as in dot-product attention and "
     "non-local blocks"},
    {"drops_output_too",
     "In training it drops elements of the output too, not only weights.", "",
     [](const ObservedCall& call) {
       return maybe(call.training && call.kept_output.defined() &&
                    (call.kept_weights.defined() || forgets_weights(call)));
     },
     [](Recipe& r) { r.output_dropout = OutputDropout::kToo; }},
    {"drops_merged_too",
     "In training it drops elements of the merged heads too, before the output "
     "projection, not only weights.",
     "",
     [](const ObservedCall& call) {
       return maybe(call.training && call.kept_output.defined() &&
                    call.kept_weights.defined() &&
                    call.weights.output.weight.defined());
     },
     [](Recipe& r) { r.output_dropout = OutputDropout::kMergedToo; }},
    {"drops_output_instead",
     "In training it drops elements of the output and no weights, as vision "
     "transformers often do.",
     "nn.MultiheadAttention drops weights.",
     [](const ObservedCall& call) {
       return maybe(call.training && call.kept_output.defined() &&
                    !call.kept_weights.defined() && !forgets_weights(call));
     },
     [](Recipe& r) { r.output_dropout = OutputDropout::kInstead; }},
    {"drops_context_and_output",
     "In training it drops elements of what the heads return and of the "
     "output, and no weights.",
     "nn.MultiheadAttention drops weights, after the softmax.",
     [](const ObservedCall& call) {
       return maybe(call.training && call.kept_output.defined() &&
                    call.kept_context.defined() &&
                    call.weights.output.weight.defined() &&
                    !call.kept_weights.defined());
     },
     [](Recipe& r) { r.output_dropout = OutputDropout::kWithContext; },
     Sign::kNone, "its dropout is meant for results, not for weights"},
};

std::span<const Convention> all_conventions() {
  static const std::vector<Convention> all = [] {
    std::vector<Convention> some = kReadings;
    for (const auto& others : {kStructure, kBehindHeads, kMixing})
      some.insert(some.end(), others.begin(), others.end());
    return some;
  }();
  return all;
}

}  // namespace multihead::diagnosis
