// SPDX-License-Identifier: MIT
//
// Is it attention, and if not, what is wrong with it? From tensors that
// somebody's attention took and returned, the fault by name: the one change
// that makes attention return the same. And the report of it for people: its
// words are written here once, for the command, for Python and for notebooks.
// Link multihead::diagnosis, a library of its own.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "multihead/safetensors.h"

namespace multihead {
namespace [[gnu::visibility("default")]] diagnosis {

/// One run of the code under test, as a safetensors file holds it: tensors by
/// name (query, key, value, out, the weights by any usual names, mask, …) and
/// facts about them (num_heads, mask = "blocked", …). docs/explain.md has the
/// list.
using Observation = Safetensors;

/// A thing that can be wrong, or worth knowing.
struct Finding {
  std::string name;        ///< "mask_inverted"
  std::string stage = {};  ///< where in attention it happens: "masked scores"
  std::string sentence = {};  ///< what is wrong
  std::string remedy = {};    ///< what repairs it, and why
  std::string detail = {};    ///< which of several ways it was done
};

/// One tensor of one observation beside the reference.
struct ComparedCase {
  std::string name, dtype, tensor;
  std::vector<int64_t> shape;
  bool agrees = false;       ///< with attention, within `allowed`
  bool explained = false;    ///< with attention that has the faults found
  bool bits = false;         ///< PyTorch's, every one
  bool exercise = false;     ///< allclose(atol=1e-8, rtol=1e-5) with PyTorch's
  double error = 0;          ///< largest, against float64
  double pytorch_error = 0;  ///< the same of PyTorch's own result
  double allowed = 0;        ///< what rounding may do
  double unexplained = 0;    ///< what the faults found leave of the error
};

/// The first element that differs at the first stage that does.
struct Place {
  std::string observation, tensor;
  std::vector<int64_t> index = {};
  double got = 0, expected = 0;
};

/// What has to hold where an attention is right only if something is meant that
/// nothing states: "True in the mask means blocked".
struct Condition {
  std::string name;         ///< "mask_blocks", for `multihead check --allow`
  std::string sentence;     ///< goes after "right if"
  std::string remedy = {};  ///< how to state it
};

enum class Judgement {
  kBits,      ///< attention, PyTorch's bits
  kRounding,  ///< attention
  kFault,     ///< `faults` says why not
  kUnknown    ///< not attention, and nothing in the catalogue explains it
};

struct Verdict {
  Judgement judgement = Judgement::kUnknown;
  std::vector<Finding> faults;
  /// Other explanations, by names, that these observations cannot tell apart.
  std::vector<std::vector<std::string>> alternatives;
  /// Of an unknown fault, what out itself shows: "wrong_shape", "not_finite".
  std::vector<Finding> findings;
  std::vector<Finding> assumptions;  ///< what nobody said and the numbers show
  /// The assumptions that decide, where it is right: it is only if they hold.
  std::vector<Condition> conditions;
  std::vector<Finding> remarks;  ///< right, but worth knowing
  /// What is wrong may come of arguments that were made up for the call.
  bool doubtful = false;
  std::optional<std::string> first_stage;
  std::optional<Place> where;
  std::vector<ComparedCase> cases;
  std::vector<std::string> weights;  ///< "query: q_proj.weight (out, in)"
  std::vector<std::string> unused;   ///< tensors that were not understood
  /// What was spent of the effort that a search for faults may take, 0 to 1:
  /// what is left is a later call's, as its observation's "search_effort".
  double effort = 0;
};

/// The verdict that fits every observation; all are of one implementation.
/// float64 tells faults apart best, float32 shows rounding. It computes on one
/// thread, for which it sets PyTorch's number of threads to 1 until it returns:
/// the tensors are tiny. Calls in several threads take turns. Throws
/// c10::ValueError where observations lack something or contradict themselves.
Verdict explain(std::span<const Observation> observations);

/// With how many faults, up to `most` (0 or 1), attention explains the
/// observations; most + 1 stands for more or for something else. What explain()
/// tells first, a hundred times cheaper than pairs of faults; of large tensors
/// it may miss the one. Throws as explain() does, and where most is another.
int fewest_faults(std::span<const Observation> observations, int most = 1);

/// The verdict as one JSON object.
std::string to_json(const Verdict& verdict);

/// Everything that has a name as a JSON list, ordered by code: [{code: "MH301",
/// name: "scale_missing", hurts: what it does to those who do not notice,
/// places: [{stage, sentence, remedy, details}]}]. Codes are stable. Sentences
/// have {B} {H} {G} {Lq} {Lk} {D} {E} for the sizes of a call.
std::string fault_catalogue();

/// Code may be called and read in several ways, each of which has its verdict,
/// as JSON: whether a less likely way is to be believed instead of a likelier.
/// It is if it needs fewer faults; what nothing explains comes last. Throws
/// c10::ValueError where one is no verdict.
bool is_better_reading(const std::string& later, const std::string& earlier);

/// Every condition that a verdict may have, for those who allow some of them.
std::vector<Condition> all_conditions();

// ---- Reports ---------------------------------------------------------------

enum class ReportFormat {
  kText,  ///< plain
  kAnsi,  ///< with the escape codes of a terminal's colours
  kHtml,  ///< a fragment with its own style, for light and dark pages
  kSvg,   ///< a picture of the coloured text
};

/// "text", "ansi", "html" or "svg"; throws c10::ValueError otherwise.
ReportFormat report_format_from_name(std::string_view name);

/// Renders a verdict, a JSON object to which these may be added:
///   target      string, whose attention it is: "attention.py: attend"
///   findings    [{name, sentence, remedy, detail}], what kept the code from
///               being right beside faults of attention: raises, hangs ...
///   understood  [string], how the code was called
///   command     string, a command line to be shown above
///   allowed     [string], names of conditions that hold, or "all"
/// A verdict of "unchecked" says that it never came to one. Lines of at most
/// `width` columns (HTML breaks its own). Ends in a newline. Throws
/// c10::ValueError where `json` is none, or lacks a verdict.
std::string render_report(const std::string& json, ReportFormat format,
                          int width = 80);

/// What such a report comes to.
enum class Outcome {
  kRight,
  kRightIf,   ///< its conditions hold, which nothing states and nobody allows
  kWrong,     ///< as attention, or as a program
  kNotJudged  ///< it could not be called, or its numbers tell nothing of it
};
Outcome outcome_of(const std::string& json);
Outcome outcome_of(const Verdict& verdict);
/// "right", "right_if", "wrong" or "not_judged".
std::string_view name_of(Outcome outcome);
/// Of a command that reports it: 0 right, 1 wrong, 2 not judged, 3 right if.
int exit_status(Outcome outcome);

/// A verdict as plain text: what render_report makes of its to_json. For the
/// other formats: render_report(to_json(verdict), ReportFormat::kHtml).
std::string to_text(const Verdict& verdict, int width = 80);

}  // namespace diagnosis
}  // namespace multihead
