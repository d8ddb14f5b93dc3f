// SPDX-License-Identifier: MIT
#include "multihead/distributed/agreement.h"

#include <ATen/ops/tensor.h>

#include <bit>
#include <cstring>
#include <string>

#include "multihead/attention/fields.h"

namespace multihead::distributed {
namespace {

// How a word reads in an error.
using InWords = std::string (*)(int64_t);

std::string number(int64_t word) { return std::to_string(word); }
std::string yes_or_no(int64_t word) { return word != 0 ? "true" : "false"; }
std::string other_values(int64_t /*word*/) { return "others"; }
std::string real(int64_t word) {
  return word == -1 ? "none" : c10::str(std::bit_cast<double>(word));
}
std::string dtype(int64_t word) {
  return c10::toString(static_cast<at::ScalarType>(word));
}
std::string method(int64_t word) {
  return static_cast<Method>(word) == Method::kRing ? "the ring" : "Ulysses";
}
std::string order_of_tokens(int64_t word) {
  return static_cast<TokenOrder>(word) == TokenOrder::kContiguous
             ? "\"contiguous\""
             : "\"head_tail\"";
}
std::string alignment_of_masks(int64_t word) {
  return static_cast<CausalAlignment>(word) == CausalAlignment::kTopLeft
             ? "\"top_left\""
             : "\"bottom_right\"";
}

// What one process says, in the order in which it is sent. All give as many
// words, whatever their arguments.
class Statement {
 public:
  /// `name` must be the same everywhere.
  void same(const char* name, int64_t word, InWords in_words = &number) {
    names_.push_back(name);
    words_.push_back(word);
    in_words_.push_back(in_words);
  }
  /// This may differ. Returns where it stands.
  size_t own(int64_t word) {
    same("", word);
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
                    in_words_[i](all[0][i]), " on process 0 and ",
                    in_words_[i](all[r][i]), " on process ", r);
      }
    }
  }

 private:
  std::vector<std::string> names_;
  std::vector<int64_t> words_;
  std::vector<InWords> in_words_;
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

Own state(Statement& all, TokenOrder order, Method used, const OwnRows& rows,
          const AttentionOptions& options, const Bounds& bounds,
          const std::optional<at::Tensor>& dropout_state) {
  const auto& [query, key, value] = rows;
  const auto& [attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment,
               query_offset, window, key_lengths, key_mask, softcap,
               alibi_slopes, sinks] = options;
  all.same("the method", static_cast<int64_t>(used), &method);
  all.same("order", static_cast<int64_t>(order), &order_of_tokens);
  all.same("the dtype of query", static_cast<int64_t>(query.scalar_type()),
           &dtype);
  all.same("the number of batch rows", query.size(0));
  all.same("the number of query heads", query.size(1));
  all.same("the width of query", query.size(3));
  all.same("the number of key heads", key.size(1));
  all.same("the width of value", value.size(3));
  all.same("is_causal", is_causal, &yes_or_no);
  all.same("dropout_p", bits_of(dropout_p), &real);
  all.same("scale", bits_of(scale), &real);
  all.same("softcap", bits_of(softcap), &real);
  all.same("causal_alignment", static_cast<int64_t>(alignment),
           &alignment_of_masks);
  all.same("enable_gqa", enable_gqa, &yes_or_no);
  all.same("whether there is a window", window.has_value(), &yes_or_no);
  all.same("the left side of window", window ? (*window)[0] : -1);
  all.same("the right side of window", window ? (*window)[1] : -1);
  all.same("whether there is an attn_mask", attn_mask.defined(), &yes_or_no);
  all.same("whether there is a key_mask", key_mask.defined(), &yes_or_no);
  const auto same_values = [&](const char* name, const at::Tensor& x) {
    all.same(name, digest(x), &other_values);
  };
  same_values("the values of cu_seqlens_q", bounds.cu_seqlens_q);
  same_values("the values of cu_seqlens_k", bounds.cu_seqlens_k);
  same_values("the values of query_offset", query_offset);
  same_values("the values of key_lengths", key_lengths);
  same_values("the values of alibi_slopes", alibi_slopes);
  same_values("the values of sinks", sinks);
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
