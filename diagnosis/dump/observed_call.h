// SPDX-License-Identifier: MIT
//
// One run of the code under test, put into shape: what went in, what came out.
// Everything is float64 and batch first, whatever it was; B = 1 where there was
// no batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "diagnosis/weights/alignment.h"
#include "multihead/diagnosis.h"

namespace multihead::diagnosis {

/// What the entries of a mask mean. kUnknown: blocked or keep.
enum class MaskMeaning { kUnknown, kBlocked, kKeep, kAdditive };

struct GivenMask {
  at::Tensor numbers;  ///< (B or 1, H or 1, Lq or 1, Lk); undefined: no mask
  int64_t rank = 4;    ///< as it was given
  MaskMeaning meaning = MaskMeaning::kUnknown;
};

/// Whether a query may see keys after its own position.
enum class CausalRequest { kNo, kYes, kUnknown };

struct Sizes {
  int64_t batch = 1, heads = 1, kv_heads = 1, queries = 0, keys = 0, width = 0,
          value_width = 0, embed_dim = 0;  ///< of a head; of queries
};

struct ObservedCall {
  std::string name;
  /// All that was said of it, by name: also where a fact comes from.
  std::map<std::string, std::string> facts;
  at::ScalarType dtype = at::kDouble;  ///< of what went in
  Sizes sizes;

  /// query, key, value: (B, L, E); without weights heads (B, H, L, D).
  std::array<at::Tensor, 3> inputs;
  /// Inputs of one index are one tensor: {0, 0, 0} is self-attention.
  std::array<int, 3> same_as = {0, 1, 2};
  bool has_weights = false;
  AlignedWeights weights;
  /// A fused matrix read the other way; equal to `weights` without one.
  AlignedWeights weights_head_by_head;
  /// Which matrix is whose follows from the order of its products alone.
  bool roles_by_order = false;
  GivenMask mask, padding;
  CausalRequest causal = CausalRequest::kNo;
  std::optional<double> scale;
  bool training = false;
  double dropout_p = 0.0;
  at::Tensor kept_weights;  ///< draws of dropout, (B, H, Lq, Lk), 1 = kept
  at::Tensor kept_context;  ///< likewise, (B, H, Lq, D)
  at::Tensor kept_output;   ///< likewise, shaped like out

  at::Tensor out;       ///< (B, Lq, E), without weights (B, H, Lq, D)
  at::Tensor returned;  ///< weights that it returned, any shape
  at::Tensor dout;
  std::array<at::Tensor, 3> gradients;       ///< of query, key, value
  std::map<std::string, at::Tensor> stages;  ///< known by name
  std::vector<at::Tensor> trace;             ///< in order, of any dtype

  /// Projections that recipes share, kept by simulate: they are most of the
  /// work where tensors are large.
  mutable std::map<std::array<int, 6>, at::Tensor> projections;
};

/// Whether explain takes a tensor of this name for something else than a
/// weight.
bool is_reserved(std::string_view name);

/// Throws c10::ValueError that names what is missing or does not fit. `show`
/// reads its dumps by it.
[[gnu::visibility("default")]] ObservedCall read_dump(
    const Observation& observation);

}  // namespace multihead::diagnosis
