// SPDX-License-Identifier: MIT
#include "multihead/distributed/agreement.h"

#include <ATen/ops/tensor.h>

#include <bit>
#include <cstring>
#include <string>

#include "multihead/attention/fields.h"

namespace multihead::distributed {
namespace {

// What one process says, in the order in which it is sent. All give as many
// words, whatever their arguments.
class Statement {
 public:
  /// `name` must be the same everywhere.
  void same(std::string name, int64_t word) {
    names_.push_back(std::move(name));
    words_.push_back(word);
  }
  /// This may differ. Returns where it stands.
  size_t own(int64_t word) {
    same({}, word);
    return words_.size() - 1;
  }

  const std::vector<int64_t>& words() const { return words_; }

  void check(const char* fn,
             const std::vector<std::vector<int64_t>>& all) const {
    for (size_t i = 0; i < names_.size(); ++i) {
      if (names_[i].empty()) continue;
      for (size_t r = 1; r < all.size(); ++r) {
        TORCH_CHECK(all[r][i] == all[0][i], fn, ": ", names_[i],
                    " must be the same on all processes, got ",
                    in_words(i, all[0][i]), " on process 0 and ",
                    in_words(i, all[r][i]), " on process ", r);
      }
    }
  }

 private:
  std::string in_words(size_t i, int64_t word) const {
    if (names_[i].find("the values") == 0) return "others";
    if (names_[i].find("dtype") != std::string::npos) {
      return c10::toString(static_cast<at::ScalarType>(word));
    }
    return std::to_string(word);
  }

  std::vector<std::string> names_;
  std::vector<int64_t> words_;
};

// FNV-1a of the bytes; 0 where there is no tensor.
int64_t digest(const at::Tensor& x) {
  if (!x.defined()) return 0;
  const at::Tensor dense = x.detach().contiguous();
  const auto* bytes = static_cast<const uint8_t*>(dense.const_data_ptr());
  uint64_t hash = 0xCBF29CE484222325;
  for (size_t i = 0; i < dense.nbytes(); ++i) {
    hash = (hash ^ bytes[i]) * 0x100000001B3;
  }
  return static_cast<int64_t>(hash | 1);
}

int64_t bits_of(const std::optional<double>& x) {
  return x ? std::bit_cast<int64_t>(*x) : -1;
}

Drawn drawn_by(const std::optional<at::Tensor>& dropout_state,
               int64_t num_heads) {
  if (!dropout_state) return {.heads_in_all = num_heads};
  const at::Tensor words = dropout_state->contiguous();
  const auto* p = words.const_data_ptr<int64_t>();
  if (words.numel() == 2) return {p[0], p[1], 0, 0, num_heads};
  return {p[0], p[1], p[2], p[3], p[4]};
}

constexpr int kMaskDims = 4;

// Where the parts of a statement stand that may differ.
struct Own {
  size_t query_length, key_length, seed, mask;
};

Own state(Statement& all, TokenOrder order, Method method, const OwnRows& rows,
          const AttentionOptions& options, const Bounds& bounds,
          const std::optional<at::Tensor>& dropout_state) {
  const auto& [query, key, value] = rows;
  const auto& [attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment,
               query_offset, window, key_lengths, key_mask, softcap,
               alibi_slopes, sinks] = options;
  all.same("the method", static_cast<int64_t>(method));
  all.same("order", static_cast<int64_t>(order));
  all.same("the dtype of query", static_cast<int64_t>(query.scalar_type()));
  all.same("the number of batch rows", query.size(0));
  all.same("the number of query heads", query.size(1));
  all.same("the width of query", query.size(3));
  all.same("the number of key heads", key.size(1));
  all.same("the width of value", value.size(3));
  all.same("is_causal", is_causal);
  all.same("the bits of dropout_p", bits_of(dropout_p));
  all.same("the bits of scale", bits_of(scale));
  all.same("the bits of softcap", bits_of(softcap));
  all.same("causal_alignment", static_cast<int64_t>(alignment));
  all.same("enable_gqa", enable_gqa);
  all.same("whether there is a window", window.has_value());
  all.same("the left side of window", window ? (*window)[0] : -1);
  all.same("the right side of window", window ? (*window)[1] : -1);
  all.same("whether there is an attn_mask", attn_mask.defined());
  all.same("whether there is a key_mask", key_mask.defined());
  all.same("the values of cu_seqlens_q", digest(bounds.cu_seqlens_q));
  all.same("the values of cu_seqlens_k", digest(bounds.cu_seqlens_k));
  all.same("the values of query_offset", digest(query_offset));
  all.same("the values of key_lengths", digest(key_lengths));
  all.same("the values of alibi_slopes", digest(alibi_slopes));
  all.same("the values of sinks", digest(sinks));
  Own own{};
  own.query_length = all.own(query.size(2));
  own.key_length = all.own(key.size(2));
  const Drawn drawn = drawn_by(dropout_state, query.size(1));
  all.same("the batch row at which dropout begins", drawn.first_batch);
  all.same("the head at which dropout begins", drawn.first_head);
  all.same("the number of heads of dropout", drawn.heads_in_all);
  own.seed = all.own(drawn.seed);
  all.own(drawn.offset);
  own.mask = all.own(attn_mask.defined() ? attn_mask.dim() : 0);
  for (int d = 0; d < kMaskDims; ++d) {
    const int64_t at =
        attn_mask.defined() ? attn_mask.dim() - kMaskDims + d : -1;
    all.own(at >= 0 ? attn_mask.size(at) : 1);
  }
  return own;
}

// On every process those of all: one that lacks keys must not leave the others
// waiting.
void check_masks(const char* fn, const std::vector<std::vector<int64_t>>& all,
                 const Own& own, const Places& places,
                 const at::Tensor& query) {
  const int64_t keys = total(places.key_lengths);
  for (size_t r = 0; r < all.size(); ++r) {
    const int64_t* sizes = &all[r][own.mask + 1];
    const int64_t whole[kMaskDims] = {query.size(0), query.size(1),
                                      places.query_lengths[r], keys};
    bool fits = all[r][own.mask] <= kMaskDims;
    for (int d = 0; d < kMaskDims; ++d) {
      fits = fits && (sizes[d] == 1 || sizes[d] == whole[d]);
    }
    TORCH_CHECK(fits, fn, ": attn_mask of process ", r,
                " must be broadcastable to (B, H, its queries, all keys), (",
                whole[0], ", ", whole[1], ", ", whole[2], ", ", whole[3],
                "), got sizes ", sizes[0], ", ", sizes[1], ", ", sizes[2], ", ",
                sizes[3], " of ", all[r][own.mask], " dimensions");
  }
}

void check_lengths(const char* fn, TokenOrder order, const char* of,
                   const Lengths& lengths) {
  if (order == TokenOrder::kContiguous) return;
  const auto processes = static_cast<int>(lengths.size());
  const Lengths expected = lengths_of(order, total(lengths), processes);
  for (int r = 0; r < processes; ++r) {
    TORCH_CHECK(lengths[r] == expected[r], fn, ": process ", r, " must have ",
                expected[r], " of the ", total(lengths), " ", of,
                " of a sequence in the order \"head_tail\", got ", lengths[r]);
  }
}

}  // namespace

at::Tensor Places::as_tensor() const {
  std::vector<int64_t> words = query_lengths;
  words.insert(words.end(), key_lengths.begin(), key_lengths.end());
  words.insert(words.end(), {drawn.seed, drawn.offset, drawn.first_batch,
                             drawn.first_head, drawn.heads_in_all});
  return at::tensor(words, at::kLong);
}

Places Places::from_tensor(const at::Tensor& words) {
  const auto* p = words.const_data_ptr<int64_t>();
  const int64_t processes = (words.numel() - Places::words(0)) / 2;
  Places places;
  places.query_lengths.assign(p, p + processes);
  p += processes;
  places.key_lengths.assign(p, p + processes);
  p += processes;
  places.drawn = {p[0], p[1], p[2], p[3], p[4]};
  return places;
}

Places agree(const Group& group, TokenOrder order, Method method,
             const OwnRows& rows, const AttentionOptions& options,
             const Bounds& bounds,
             const std::optional<at::Tensor>& dropout_state,
             const std::exception_ptr& refused) {
  const auto refusals =
      group.all_gather(std::vector<int64_t>{refused != nullptr});
  if (refused) std::rethrow_exception(refused);
  for (size_t r = 0; r < refusals.size(); ++r) {
    TORCH_CHECK(refusals[r][0] == 0, group.function(), ": process ", r,
                " has refused its arguments, and says why");
  }
  Statement mine;
  const Own own =
      state(mine, order, method, rows, options, bounds, dropout_state);
  const auto all = group.all_gather(mine.words());
  mine.check(group.function(), all);
  Places places;
  for (const auto& theirs : all) {
    places.query_lengths.push_back(theirs[own.query_length]);
    places.key_lengths.push_back(theirs[own.key_length]);
  }
  places.drawn = drawn_by(dropout_state, rows.query.size(1));
  places.drawn.seed = all[0][own.seed];
  places.drawn.offset = all[0][own.seed + 1];
  check_lengths(group.function(), order, "queries", places.query_lengths);
  check_lengths(group.function(), order, "keys", places.key_lengths);
  check_masks(group.function(), all, own, places, rows.query);
  return places;
}

}  // namespace multihead::distributed
