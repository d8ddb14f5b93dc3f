// SPDX-License-Identifier: MIT
#include "diagnosis/report/headline.h"

#include <algorithm>

namespace multihead::diagnosis {

bool is_right(const std::string& verdict) {
  return verdict == "bits" || verdict == "rounding";
}

bool is_flaw_of_out(const Json& report) {
  return has_named(list_at(report, "findings"), {"wrong_shape", "not_finite"});
}

namespace {

// What code does that has a finding of this name.
constexpr std::pair<const char*, const char*> kPredicates[] = {
    {"raises", "raises an error"},
    {"hangs", "does not come to an end"},
    {"crashes", "ends the whole process"},
    {"returns_nothing", "returns nothing"},
    {"wrong_shape", "returns the wrong shape"},
    {"wrong_type", "returns the wrong type"},
    {"not_finite", "returns numbers that are not finite"},
    {"integer_output", "returns whole numbers"},
    {"missing_package", "needs a package that is not installed"},
    {"changes_inputs", "changes its inputs"},
    {"changes_global_state", "changes settings of the whole process"},
    {"random", "returns something else each time"},
    {"cache_differs", "returns something else on its cache than in one pass"},
    {"no_weights_found", "has weights that were not found"},
    {"not_called", "could not be called"},
    {"not_comparable", "cannot be compared with attention"},
    {"argument_guessed", "takes what is not known"},
    {"other_layers", "has layers of which nothing is known"},
    {"outside", "is attention of another kind"},
    {"pools", "pools all positions to one"},
    {"positions_unseen", "hides in NumPy what it makes of positions"},
    {"heads_alike", "has heads that compute the same"},
    {"bias_of_another_query", "adds a bias that follows another query"},
    {"layer_used_twice", "calls one layer twice, and another never"},
    {"normalised_over_heads", "normalises keys over the heads"},
    {"documents_mixed", "lets documents in one row read each other"},
    {"prefix_misread", "shows queries other keys than its prefix asks for"},
    {"windows_misplaced", "puts back its windows in other places"},
    {"wraps_around", "reads across the edges of its image"},
    {"shift_not_undone", "leaves its image shifted"},
    {"document_differs_alone", "returns something else for a document alone"},
    {"zero_scores_blocked", "blocks scores that are 0"},
    {"batch_size_counts", "returns something else for an item alone"},
    {"output_thrown_away", "throws away what a layer makes of its result"},
    {"mode_overwritten", "goes back into training by itself"},
    {"turned_alike", "turns all its positions alike"},
    {"batch_and_sequence_exchanged", "attends over the items of its batch"},
    {"causal_in_training_alone", "is causal in training alone"},
    {"residual_lost", "leaves out the residual around its attention"},
    {"input_returned", "returns its input"},
    {"input_unread", "reads nothing of its input"},
    {"residual_of_context", "adds what it reads to what it returns"},
    {"paths_disagree", "has two ways to attend, which differ"},
    {"bias_cancels", "adds a learned bias that no weight follows"},
    {"table_misread", "reads its table of relative positions wrongly"},
    {"values_averaged", "averages what it is to sum"},
    {"query_cancels", "weighs keys the same whatever the query is"},
    {"values_turned_too", "turns its values by their positions, too"},
    {"alibi_rises", "gives far keys more weight, which ALiBi does not"},
};

// "it ...": what a finding, which is no fault of attention, says of the code.
std::string predicate(const std::string& finding) {
  for (const auto& [name, words] : kPredicates)
    if (finding == name) return words;
  const std::string for_others = "_weight_for_";
  if (const size_t at = finding.find(for_others); at != finding.npos)
    return "projects " + finding.substr(at + for_others.size()) +
           " by the matrix of another";
  std::string words = "has a flaw: " + finding;
  std::replace(words.begin(), words.end(), '_', ' ');
  return words;
}

// "A", "A and B": what has to hold.
std::string condition_words(const Json& report) {
  std::vector<std::string> sentences;
  for (const Json& condition : list_at(report, "conditions"))
    append_new(sentences, text_at(condition, "sentence"));
  return listed(sentences);
}

std::string right_words(const Json& report, const std::string& verdict) {
  const Json& cases = list_at(report, "cases");
  const std::string all = "in " + all_cases(cases.size());
  const std::string conditions = condition_words(report);
  const std::string right =
      conditions.empty() ? "is right: " : "is right if " + conditions + ": ";
  if (verdict == "bits") return right + "PyTorch's, bit for bit, " + all;
  size_t bits = 0;
  for (const Json& c : cases) bits += is_true(c, "bits");
  std::string words = right + "within rounding of PyTorch " + all;
  if (bits > 0) words += ", bit for bit in " + std::to_string(bits);
  return words;
}

std::string fault_words(const Json& faults) {
  std::vector<std::string> stages;
  for (const Json& fault : faults) {
    append_new(stages, "the " + text_at(fault, "stage"));
  }
  const size_t count = faults.size();
  const bool together = count > 1 && stages.size() == 1;
  return "it has " + number_word(count) +
         (count == 1 ? " fault, " : " faults, ") +
         (!together    ? "in "
          : count == 2 ? "both in "
                       : "all in ") +
         listed(stages);
}

std::string unknown_words(const Json& report) {
  const std::string stage = text_at(report, "first_stage");
  const Json& remarks = list_at(report, "remarks");
  return (stage.empty() ? "" : "first in the " + stage + ", ") +
         std::string(has_named(remarks, {"search_cut_short"})
                         ? "and the search for its fault was cut short"
                         : "and no fault that is known here explains it");
}

bool is_unchecked(const Json& finding) {
  return text_at(finding, "kind") == "unchecked";
}

bool is_allowed(const Json& report) {
  const Json& allowed = list_at(report, "allowed");
  const Json& conditions = list_at(report, "conditions");
  const auto is = [&](const std::string& name) {
    return std::any_of(allowed.begin(), allowed.end(), [&](const Json& entry) {
      return entry.is_string() && entry.get<std::string>() == name;
    });
  };
  return std::all_of(conditions.begin(), conditions.end(),
                     [&](const Json& condition) {
                       return is("all") || is(text_at(condition, "name"));
                     });
}

// What is said after "is wrong".
std::string wrong_words(const Json& report, const std::string& verdict,
                        const std::vector<std::string>& flaws) {
  const std::string it_does = flaws.empty() ? "" : "it " + listed(flaws);
  if (is_right(verdict)) return ": it computes attention, but " + it_does;
  if (verdict == "unchecked") return ": " + it_does;
  if (verdict == "unknown" && is_flaw_of_out(report)) {
    const std::string stage = text_at(report, "first_stage");
    return ": " + it_does + (stage.empty() ? "" : ", first in the " + stage);
  }
  const std::string words = verdict == "fault"
                                ? ": " + fault_words(list_at(report, "faults"))
                                : ", " + unknown_words(report);
  return words + (flaws.empty() ? "" : "; and " + it_does);
}

}  // namespace

Outcome outcome_of(const Json& report) {
  const std::string verdict = text_at(report, "verdict");
  const Json& findings = list_at(report, "findings");
  const bool open = std::any_of(findings.begin(), findings.end(), is_unchecked);
  const bool failed =
      !std::all_of(findings.begin(), findings.end(), is_unchecked);
  // Rounding alone may have made these numbers.
  const bool lost = verdict == "unknown" &&
                    has_named(list_at(report, "remarks"), {"lost_in_rounding"});
  if (lost || is_true(report, "doubtful")) return Outcome::kNotJudged;
  if (failed) return Outcome::kWrong;
  if (open || verdict == "unchecked") return Outcome::kNotJudged;
  if (!is_right(verdict)) return Outcome::kWrong;
  return is_allowed(report) ? Outcome::kRight : Outcome::kRightIf;
}

Outcome outcome_of(const std::string& json) {
  return outcome_of(parsed_report(json));
}

Outcome outcome_of(const Verdict& verdict) {
  return outcome_of(to_json(verdict));
}

std::string_view name_of(Outcome outcome) {
  constexpr std::string_view kNames[] = {"right", "right_if", "wrong",
                                         "not_judged"};
  return kNames[static_cast<int>(outcome)];
}

int exit_status(Outcome outcome) {
  constexpr int kStatus[] = {0, 3, 1, 2};
  return kStatus[static_cast<int>(outcome)];
}

Span mark(bool good) {
  return good ? Span{"✓", Emphasis::kGood} : Span{"✗", Emphasis::kBad};
}

Block headline(const Json& report) {
  const std::string verdict = text_at(report, "verdict");
  std::vector<std::string> flaws;
  for (const Json& finding : list_at(report, "findings")) {
    append_new(flaws, predicate(text_at(finding, "name")));
  }
  const Outcome outcome = outcome_of(report);
  Span label = mark(outcome == Outcome::kRight);
  std::string words;
  switch (outcome) {
    case Outcome::kRight:
      words = right_words(report, verdict);
      break;
    case Outcome::kRightIf:
      label = {"!", Emphasis::kOpen};
      words = right_words(report, verdict);
      break;
    case Outcome::kWrong:
      words = "is wrong" + wrong_words(report, verdict, flaws);
      break;
    case Outcome::kNotJudged:
      label = {"?", Emphasis::kOpen};
      words = "is not judged";
      if (is_true(report, "doubtful"))
        words += ": too much of it is a guess";
      else if (verdict == "unknown")
        words += ": its numbers cannot tell";
      else if (!flaws.empty())
        words += ": it " + listed(flaws);
  }
  std::string subject = text_at(report, "target");
  if (subject.empty()) subject = "This attention";
  return {.kind = Block::Kind::kHeadline,
          .label = std::move(label),
          .text = {{subject + " " + words + ".", Emphasis::kStrong}}};
}

}  // namespace multihead::diagnosis
