// SPDX-License-Identifier: MIT
//
// The operators of this library, in the namespace of attention's:
// torch.ops.multihead.explain and others. No kernel has a part in them.
#include <torch/library.h>

#include <algorithm>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/recipe.h"
#include "multihead/diagnosis.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

using Observations = c10::List<c10::Dict<std::string, Tensor>>;
using Metadata = c10::List<c10::Dict<std::string, std::string>>;

// Runs of somebody's attention, tensors and facts by name, as diagnosis.h
// has them.
std::vector<Observation> joined(const Observations& observations,
                                const Metadata& metadata) {
  TORCH_CHECK_VALUE(observations.size() == metadata.size(),
                    "explain: metadata must have one entry for each of the ",
                    observations.size(), " observations, got ",
                    metadata.size());
  std::vector<Observation> all(observations.size());
  for (size_t i = 0; i < all.size(); ++i) {
    for (const auto& entry : observations.get(i)) {
      all[i].tensors[entry.key()] = entry.value();
    }
    for (const auto& entry : metadata.get(i)) {
      all[i].metadata[entry.key()] = entry.value();
    }
  }
  return all;
}

std::string explain_op(const Observations& observations,
                       const Metadata& metadata) {
  return to_json(explain(joined(observations, metadata)));
}

int64_t fewest_faults_op(const Observations& observations,
                         const Metadata& metadata, int64_t most) {
  return fewest_faults(joined(observations, metadata), static_cast<int>(most));
}

std::string render_report_op(const std::string& report, std::string_view format,
                             int64_t width) {
  return render_report(report, report_format_from_name(format),
                       static_cast<int>(std::clamp<int64_t>(width, 0, 1000)));
}

using Texts = std::vector<std::string>;

// Name, stage and headline of each fault of the catalogue, in its order. Two
// faults of different stages may share a name.
std::tuple<Texts, Texts, Texts> faults_op() {
  Texts names, stages, headlines;
  for (const Fault& fault : all_faults()) {
    names.emplace_back(fault.name);
    stages.emplace_back(name_of(*fault.stage));
    headlines.emplace_back(fault.sentence);
  }
  return {names, stages, headlines};
}

// "right", "right_if", "wrong" or "not_judged"; and the exit status of it.
std::tuple<std::string, int64_t> outcome_op(const std::string& report) {
  const Outcome outcome = outcome_of(report);
  return {std::string(name_of(outcome)), exit_status(outcome)};
}

// Name and sentence of each condition that a verdict may have.
std::tuple<Texts, Texts> conditions_op() {
  Texts names, sentences;
  for (const Condition& condition : all_conditions()) {
    names.push_back(condition.name);
    sentences.push_back(condition.sentence);
  }
  return {names, sentences};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(multihead, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "explain(Dict(str, Tensor)[] observations, Dict(str, str)[] metadata) "
      "-> str",
      &explain_op, tags);
  m.def(
      "fewest_faults(Dict(str, Tensor)[] observations, Dict(str, str)[] "
      "metadata, int most=1) -> int",
      &fewest_faults_op, tags);
  m.def("is_better_reading(str later, str earlier) -> bool", &is_better_reading,
        tags);
  m.def("render_report(str report, str format=\"text\", int width=80) -> str",
        &render_report_op, tags);
  m.def("faults() -> (str[] names, str[] stages, str[] headlines)", &faults_op,
        tags);
  m.def("fault_catalogue() -> str", &fault_catalogue, tags);
  m.def("outcome(str report) -> (str judgement, int exit_status)", &outcome_op,
        tags);
  m.def("conditions() -> (str[] names, str[] sentences)", &conditions_op, tags);
  // Whether explain() takes a tensor of this name for something else than a
  // weight.
  m.def("is_reserved(str name) -> bool", &is_reserved, tags);
}

}  // namespace multihead::diagnosis
