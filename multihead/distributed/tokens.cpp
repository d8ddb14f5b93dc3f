// SPDX-License-Identifier: MIT
#include "multihead/distributed/tokens.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

namespace multihead {

TokenOrder token_order_from_name(std::string_view name) {
  if (name == "contiguous") return TokenOrder::kContiguous;
  if (name == "head_tail") return TokenOrder::kHeadTail;
  TORCH_CHECK_VALUE(false,
                    "order must be \"contiguous\" or "
                    "\"head_tail\", got \"",
                    name, "\"");
}

at::Tensor token_positions(int64_t length, int rank, int processes,
                           TokenOrder order) {
  TORCH_CHECK_VALUE(length >= 0,
                    "token_positions: length must be at least 0, "
                    "got ",
                    length);
  TORCH_CHECK_VALUE(processes > 0,
                    "token_positions: processes must be at "
                    "least 1, got ",
                    processes);
  TORCH_CHECK_VALUE(rank >= 0 && rank < processes,
                    "token_positions: rank must be between 0 and ",
                    processes - 1, ", got ", rank);
  const auto lengths = distributed::lengths_of(order, length, processes);
  std::vector<at::Tensor> pieces{at::empty({0}, at::kLong)};
  for (const auto& span : distributed::spans_of(order, lengths, rank)) {
    pieces.push_back(
        at::arange(span.position, span.position + span.length, at::kLong));
  }
  return at::cat(pieces);
}

namespace distributed {
namespace {

// Of 2·processes pieces of kHeadTail.
int64_t piece_length(int64_t length, int64_t pieces, int64_t piece) {
  return length / pieces + (piece < length % pieces ? 1 : 0);
}
int64_t piece_begin(int64_t length, int64_t pieces, int64_t piece) {
  return piece * (length / pieces) + std::min(piece, length % pieces);
}

}  // namespace

int64_t total(const Lengths& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

std::vector<Span> spans_of(TokenOrder order, const Lengths& lengths, int rank) {
  std::vector<Span> spans;
  int64_t row = 0;
  const auto add = [&](int64_t position, int64_t length) {
    if (length > 0) spans.push_back({row, position, length});
    row += length;
  };
  if (order == TokenOrder::kContiguous) {
    add(std::accumulate(lengths.begin(), lengths.begin() + rank, int64_t{0}),
        lengths[rank]);
    return spans;
  }
  const int64_t length = total(lengths);
  const auto pieces = static_cast<int64_t>(2 * lengths.size());
  for (const int64_t piece : {int64_t{rank}, pieces - 1 - rank}) {
    add(piece_begin(length, pieces, piece),
        piece_length(length, pieces, piece));
  }
  return spans;
}

std::vector<Span> cut(const std::vector<Span>& spans,
                      const std::vector<int64_t>& starts) {
  std::vector<Span> parts;
  for (const Span& span : spans) {
    const int64_t end = span.position + span.length;
    for (size_t n = 0; n + 1 < starts.size(); ++n) {
      const int64_t from = std::max(span.position, starts[n]);
      const int64_t to = std::min(end, starts[n + 1]);
      if (from >= to) continue;
      parts.push_back({.row = span.row + from - span.position,
                       .position = from - starts[n],
                       .length = to - from,
                       .document = n});
    }
  }
  return parts;
}

Lengths lengths_of(TokenOrder order, int64_t length, int processes) {
  Lengths lengths(processes);
  for (int64_t r = 0; r < processes; ++r) {
    if (order == TokenOrder::kContiguous) {
      const int64_t each = (length + processes - 1) / processes;
      lengths[r] = std::clamp<int64_t>(length - r * each, 0, each);
    } else {
      const int64_t pieces = 2 * int64_t{processes};
      lengths[r] = piece_length(length, pieces, r) +
                   piece_length(length, pieces, pieces - 1 - r);
    }
  }
  return lengths;
}

}  // namespace distributed
}  // namespace multihead
