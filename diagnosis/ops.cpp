// SPDX-License-Identifier: MIT
//
// The operators of this library, in the namespace of attention's:
// torch.ops.multihead.explain and render_report. No kernel has a part in them.
#include <torch/library.h>

#include <algorithm>

#include "multihead/diagnosis.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// Runs of somebody's attention, tensors and facts by name, as diagnosis.h
// has them; the verdict as JSON.
std::string explain_op(
    const c10::List<c10::Dict<std::string, Tensor>>& observations,
    const c10::List<c10::Dict<std::string, std::string>>& metadata) {
  TORCH_CHECK_VALUE(observations.size() == metadata.size(),
                    "explain: metadata must have one entry for each of the ",
                    observations.size(), " observations, got ",
                    metadata.size());
  std::vector<Observation> all(observations.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const auto tensors = observations.get(i);
    const auto facts = metadata.get(i);
    for (const auto& entry : tensors) {
      all[i].tensors[entry.key()] = entry.value();
    }
    for (const auto& entry : facts) {
      all[i].metadata[entry.key()] = entry.value();
    }
  }
  return to_json(explain(all));
}

std::string render_report_op(const std::string& report, std::string_view format,
                             int64_t width) {
  return render_report(report, report_format_from_name(format),
                       static_cast<int>(std::clamp<int64_t>(width, 0, 1000)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(multihead, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "explain(Dict(str, Tensor)[] observations, Dict(str, str)[] metadata) "
      "-> str",
      tags);
  m.def("render_report(str report, str format=\"text\", int width=80) -> str",
        tags);
}

TORCH_LIBRARY_IMPL(multihead, CompositeImplicitAutograd, m) {
  m.impl("explain", &explain_op);
  m.impl("render_report", &render_report_op);
}

}  // namespace multihead::diagnosis
