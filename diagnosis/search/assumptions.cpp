// SPDX-License-Identifier: MIT
#include "diagnosis/search/assumptions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/eye.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <string_view>

#include "diagnosis/search/assumption_words.h"

namespace multihead::diagnosis {
namespace {

Finding finding(const Assumption& assumption, const std::string& said) {
  std::string sentence(assumption.sentence);
  const size_t at = sentence.find("{}");
  if (at != std::string::npos) sentence.replace(at, 2, said);
  return {std::string(assumption.name), "", sentence,
          std::string(assumption.remedy)};
}

// ---- Facts -----------------------------------------------------------------

std::string fact(const ObservedCall& call, const std::string& name) {
  const auto entry = call.facts.find(name);
  return entry == call.facts.end() ? "" : entry->second;
}

// Of the first call that has it; "" where none has.
std::string fact(std::span<const ObservedCall> calls, const std::string& name) {
  for (const ObservedCall& call : calls)
    if (std::string said = fact(call, name); !said.empty()) return said;
  return "";
}

bool is_identity(const at::Tensor& x) {
  return x.dim() == 2 && x.size(0) == x.size(1) &&
         x.equal(at::eye(x.size(0), x.options()));
}

// Several heads are projected in, and nothing is projected out.
bool lacks_output(const ObservedCall& call) {
  const at::Tensor& query = call.weights.query.weight;
  return call.has_weights && call.sizes.heads > 1 && query.defined() &&
         !is_identity(query) && !call.weights.output.weight.defined();
}

bool always(const ObservedCall&) { return true; }
bool has_mask(const ObservedCall& call) { return call.mask.numbers.defined(); }
bool has_padding(const ObservedCall& call) {
  return call.padding.numbers.defined();
}

// ---- A mask, and what the code's text says of it ---------------------------

struct Mask {
  std::string name;  // "mask", "padding"
  std::string words;
  GivenMask ObservedCall::* given;
  bool (*is_given)(const ObservedCall&);
  bool Recipe::* keeps_true;
  const Assumption& blocks;

  std::string keeps() const { return name + "_keeps"; }
};
const Mask kMasks[] = {{"mask", "The mask", &ObservedCall::mask, has_mask,
                        &Recipe::mask_keeps, kMaskBlocks},
                       {"padding", "The padding mask", &ObservedCall::padding,
                        has_padding, &Recipe::padding_keeps, kPaddingBlocks}};

std::string other(const std::string& meaning) {
  return meaning == "keep" ? "blocked" : "keep";
}

std::string in_words(const std::string& meaning) {
  return std::string("True (or 1) = ") +
         (meaning == "keep" ? "may be seen" : "blocked");
}

Finding by_text(const Mask& mask, const std::string& says,
                const std::string& text) {
  return {mask.name + (says == "keep" ? "_keeps" : "_blocks"), "",
          mask.words + " is read as " + in_words(says) +
              ", as its text says: \"" + text + "\".",
          "If that is not meant, say mask=\"" + other(says) + "\"."};
}

Finding against_text(const Mask& mask, const std::string& says,
                     const std::string& text) {
  return {mask.name + "_against_text", "",
          mask.words + " is not read as its text may say: \"" + text + "\".",
          "If " + in_words(says) + " is meant, say mask=\"" + says +
              "\": then it is inverted."};
}

// ---- What was made up ------------------------------------------------------

// Whether a fault may come of an argument that nobody understood and that was
// made up: a number in place of a size or a factor, nothing (None, 0, False) in
// place of a mask or a factor, a mask, a layer that does nothing, or sequences
// in a guessed order.
bool may_come_of(const std::string& made_up, const Pick& pick) {
  const Stage stage = *pick.fault->stage;
  if (made_up == "number")
    return stage == Stage::kHeads || stage == Stage::kScores ||
           stage == Stage::kMerge;
  if (made_up == "nothing")
    return stage == Stage::kScores || stage == Stage::kMaskedScores ||
           stage == Stage::kWeights;
  if (made_up == "mask") return stage == Stage::kMaskedScores;
  if (made_up == "layer") return true;
  if (made_up != "order") return false;
  Recipe faulty;
  pick.way->apply(faulty);
  const auto exchanges = [](std::array<int, 3> order) {
    const std::array<int, 3> given = {0, 1, 2};
    return order != given && std::ranges::is_permutation(order, given);
  };
  return exchanges(faulty.inputs) || exchanges(faulty.roles);
}

// Of calls with arguments of that kind: where nothing explains them, anything.
bool is_doubtful(std::span<const ObservedCall> calls, const Explanation* best) {
  if (best == nullptr &&
      std::ranges::any_of(calls, &ObservedCall::has_other_layers))
    return true;
  std::istringstream kinds(fact(calls, "made_up"));
  for (std::string kind; std::getline(kinds, kind, ',');) {
    if (best == nullptr) return true;
    if (std::ranges::any_of(best->faults, [&](const Pick& pick) {
          return may_come_of(kind, pick);
        }))
      return true;
  }
  return false;
}

// ---- What is assumed -------------------------------------------------------

class Assuming {
 public:
  Assuming(std::span<const ObservedCall> calls, const Conventions& conventions,
           const Explanation* best, Verdict& verdict)
      : calls_(calls),
        conventions_(conventions),
        attention_(with(conventions)),
        explained_(best != nullptr),
        right_(best != nullptr && best->faults.empty()),
        verdict_(verdict) {}

  void all() {
    for (const Convention* convention : conventions_) add(*convention);
    for (const Mask& mask : kMasks) add(mask);
    if (const std::string name = fact(calls_, "additive_name"); !name.empty())
      add(kAddedByName, has_mask, Stage::kMaskedScores, name);
    if (const std::string text = fact(calls_, "additive_text"); !text.empty())
      add(kAddedByText, has_mask, Stage::kMaskedScores, text);
    if (fact(calls_, "additive_guessed") == "true")
      add(kAddedByGuess, has_mask, Stage::kMaskedScores);
    if (fact(calls_, "order_guessed") == "true") add(kSequenceFirst);
    if (fact(calls_, "order_inside") == "true") add(kBatchFirst);
    if (fact(calls_, "keys_transposed") == "true") add(kKeysTransposed);
    const bool has_scale = !calls_.front().has_given_scores();
    if (has_scale && fact(calls_, "own_scale") == "true") add(kOwnScale);
    if (fact(calls_, "padding_of_rows") == "true") add(kPaddingOfRows);
    if (fact(calls_, "one_token_on_cache") == "true") add(kOneToken);
    if (fact(calls_, "masks_are_causal") == "true") add(kMasksAreCausal);
    if (fact(calls_, "bias_of_another_query") == "true") add(kBiasOfAnother);
    if (fact(calls_, "positions_unseen") == "true") add(kPositionsUnseen);
    if (fact(calls_, "one_window") == "true") add(kOneWindow);
    if (fact(calls_, "attentions_beside") == "true") add(kBeside);
    if (fact(calls_, "context_left") == "true") add(kContextLeft);
    if (fact(calls_, "mask_of_both") == "true") add(kMaskOfBoth);
    if (fact(calls_, "mask_left") == "true") add(kMaskLeft);
    if (fact(calls_, "turned_elsewhere") == "true") add(kTurnedElsewhere);
    if (fact(calls_, "positions_left_out") == "true") add(kPositionsLeftOut);
    if (fact(calls_, "other_arguments") == "true") add(kOtherArguments);
    if (fact(calls_, "sees_later_keys") == "true") add(kSeesLaterKeys);
    if (const std::string names = fact(calls_, "switched_off"); !names.empty())
      add(kSwitchedOff, always, Stage::kProjections, names);
    if (const std::string names = fact(calls_, "settings"); !names.empty())
      add(kSettings, always, Stage::kProjections, names);
    if (const std::string name = fact(calls_, "asked_to_scale"); !name.empty())
      add(kScaleArgument, always, Stage::kScores, name);
    add_turned_alike();
    add_core();
    add_heads();
    if (std::ranges::any_of(calls_, lacks_output)) add(kNoOutput, lacks_output);
    const std::string only = fact(calls_, "takes_only");
    if (only == "equal_lengths") add_refusal(kEqualLengths);
    if (only == "as_many_keys") add_refusal(kKeysLeft);
    if (only == "one_sequence") add_refusal(kOneSequence);
  }

 private:
  using Holds = bool (*)(const ObservedCall&);

  void put(Finding assumption, std::string_view condition) {
    if (right_ && !condition.empty())
      verdict_.conditions.push_back(
          {assumption.name, std::string(condition), assumption.remedy});
    verdict_.assumptions.push_back(std::move(assumption));
  }

  // How far a call goes with a recipe: to its end, and what it shows of it on
  // the way, from a stage on.
  std::pair<bool, size_t> followed(const ObservedCall& call,
                                   const Recipe& recipe,
                                   Stage from = Stage::kProjections) const {
    const bool fits = errors(call, recipe, call.dtype).fit();
    const std::optional<Stages> stages = simulate(call, recipe);
    if (!stages) return {fits, 0};
    // Where no query sees a key, anything fits.
    const at::Tensor& unseeing = stages->fully_masked;
    if (unseeing.defined() && unseeing.all().item<bool>()) return {false, 0};
    const auto shown = shown_in_trace(call, *stages, call.dtype);
    return {fits, std::ranges::count_if(shown, [&](const Shown& one) {
              return one.stage >= from;
            })};
  }

  // Whether some call of a kind goes further with attention as it is assumed
  // than with the other recipe, or goes some way at all. Where everything is
  // explained, it is.
  bool supported(const auto& concerns, const Recipe& other) const {
    return explained_ || std::ranges::any_of(calls_, [&](const auto& call) {
             return concerns(call) &&
                    followed(call, attention_) > followed(call, other);
           });
  }
  bool supported(Holds concerns, Stage from) const {
    return explained_ || std::ranges::any_of(calls_, [&](const auto& call) {
             return concerns(call) && followed(call, attention_, from) >
                                          std::pair<bool, size_t>(false, 0);
           });
  }

  bool is_among(std::string_view convention) const {
    return std::ranges::any_of(conventions_, [&](const Convention* one) {
      return one->name == convention;
    });
  }

  bool has_fault(std::string_view name) const {
    return std::ranges::find(verdict_.faults, name, &Finding::name) !=
           verdict_.faults.end();
  }

  // A convention, unless no call needs it.
  void add(const Convention& convention) {
    Conventions others = conventions_;
    std::erase(others, &convention);
    const auto concerns = [&](const ObservedCall& call) {
      return convention.concerns(call);
    };
    if (!supported(concerns, with(others))) return;
    Finding assumption{std::string(convention.name), "",
                       std::string(convention.sentence),
                       std::string(convention.remedy)};
    std::string_view condition = convention.condition;
    const std::string text = fact(calls_, "causal_text");
    const bool is_stepwise = fact(calls_, "stepwise") == "true";
    if (convention.name == "causal_by_itself" &&
        (is_stepwise || !text.empty())) {
      assumption.sentence = is_stepwise
                                ? kCausalByStep
                                : finding({"", kCausalByText}, text).sentence;
      condition = "";
    }
    put(std::move(assumption), condition);
  }

  // An assumption on calls of a kind, from a stage on.
  void add(const Assumption& assumption, Holds concerns = always,
           Stage from = Stage::kProjections, const std::string& said = "") {
    if (supported(concerns, from))
      put(finding(assumption, said), assumption.condition);
  }

  // What a mask means, if nobody stated it, or if the text did.
  void add(const Mask& mask) {
    const std::string says = fact(calls_, mask.name + "_says");
    const std::string text = fact(calls_, mask.name + "_text");
    const bool keeps = is_among(mask.keeps());
    Recipe inverted = attention_;
    inverted.*mask.keeps_true = !keeps;
    const bool is_supported = supported(mask.is_given, inverted);
    bool believed = false;
    const bool open =
        std::ranges::any_of(calls_, [&](const ObservedCall& call) {
          return mask.is_given(call) &&
                 (call.*mask.given).meaning == MaskMeaning::kUnknown;
        });
    for (const ObservedCall& call : calls_) {
      believed = believed || fact(call, mask.name) == says;
      // Masks that are used as padding mean what is said of the mask.
      const bool only = fact(calls_, "padding_text").empty();
      believed = believed || (only && fact(call, "padding") == says);
    }
    if (!text.empty() && believed) {
      if (supported(mask.is_given, Stage::kMaskedScores))
        put(by_text(mask, says, text), "");
      quote_in_faults(mask, text);
    } else if (!text.empty() && open && says == (keeps ? "blocked" : "keep")) {
      if (is_supported) put(against_text(mask, says, text), "");
    }
    if (!open || !is_supported || keeps || has_fault(mask.name + "_ignored"))
      return;
    Finding assumption = finding(mask.blocks, "");
    if (has_fault("mask_added") && mask.name == "mask")
      assumption.remedy =
          "If 0 and -inf are meant, which are added, say mask=\"additive\".";
    put(std::move(assumption), mask.blocks.condition);
  }

  void quote_in_faults(const Mask& mask, const std::string& text) {
    const bool only = fact(calls_, "padding_text").empty();
    for (Finding& fault : verdict_.faults)
      if (fault.name == mask.name + "_inverted" ||
          (only && fault.name == "padding_inverted"))
        fault.detail = "Its text says: \"" + text + "\".";
  }

  // Where the calls are only a part of what the code does.
  // Angles that cancel leave no trace in the output.
  void add_turned_alike() {
    if (fact(calls_, "turned_alike") == "true") return add(kTurnedAlike);
    if (!right_ || attention_.rotary != Rotary::kNone) return;
    if (fact(calls_, "positions_left_out") == "true") return;
    const auto shown = std::ranges::find_if(calls_, [](const auto& call) {
      return !call.trace.empty() && call.sizes.queries > 1;
    });
    if (shown == calls_.end()) return;
    const std::optional<Stages> stages = simulate(*shown, attention_);
    if (stages && is_turned_alike(*shown, stages->heads[0]) &&
        is_turned_alike(*shown, stages->heads[1])) {
      put(finding(kTurnedAlike, ""), kTurnedAlike.condition);
    }
  }

  void add_core() {
    const std::string count = fact(calls_, "attentions");
    if (!count.empty())
      put(finding(kLaterAttentions, count), kLaterAttentions.condition);
    const std::string idle = fact(calls_, "idle_weights");
    if (!idle.empty()) put(finding(kIdleWeights, idle), kIdleWeights.condition);
    const auto part = calls_.front().facts.find("core_beside");
    if (part == calls_.front().facts.end()) return;
    const std::string others = fact(calls_, "attends_elsewhere");
    if (!others.empty()) put(finding(kElsewhere, others), kElsewhere.condition);
    if (calls_.front().has_given_scores()) {
      put(finding(kScoresGiven, ""), kScoresGiven.condition);
      if (part->second.empty()) return;
    }
    if (part->second.empty()) return put(finding(kHeadsOnly, ""), "");
    put(finding(kLayersBeside, part->second), kLayersBeside.condition);
  }

  // Where it is right, the number of heads is, too.
  void add_heads() {
    if (right_ || fact(calls_, "num_heads_guessed") != "true") return;
    const int64_t heads = calls_.front().sizes.heads;
    const std::string counted =
        heads == 1 ? "one head" : c10::str(heads, " heads");
    if (explained_) return put(finding(kHeads, counted), "");
    verdict_.remarks.push_back(finding(kHeads, counted));
  }

  void add_refusal(const Assumption& refusal) {
    Finding remark = finding(refusal, "");
    if (right_)
      verdict_.conditions.push_back(
          {remark.name, std::string(refusal.condition), remark.remedy});
    verdict_.remarks.push_back(std::move(remark));
  }

  std::span<const ObservedCall> calls_;
  const Conventions& conventions_;
  Recipe attention_;
  bool explained_, right_;
  Verdict& verdict_;
};

}  // namespace

void assume(std::span<const ObservedCall> calls, const Conventions& conventions,
            const Explanation* best, Verdict& verdict) {
  Assuming(calls, conventions, best, verdict).all();
  verdict.doubtful = is_doubtful(calls, best);
}

std::vector<Condition> all_conditions() {
  std::vector<Condition> all;
  for (const Convention& convention : all_conventions()) {
    const bool is_known = !all.empty() && all.back().name == convention.name;
    if (convention.condition.empty() || is_known) continue;
    all.push_back({std::string(convention.name),
                   std::string(convention.condition),
                   std::string(convention.remedy)});
  }
  for (const Assumption* assumption : kWithCondition)
    all.push_back({std::string(assumption->name),
                   std::string(assumption->condition),
                   std::string(assumption->remedy)});
  return all;
}

}  // namespace multihead::diagnosis
