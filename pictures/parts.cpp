// SPDX-License-Identifier: MIT
//
// Parts of what is to be shown: an item of a batch, the tokens that are not
// left out; and the words of tokens.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "multihead/text/words.h"
#include "pictures/attention.h"

namespace multihead::pictures {
namespace {

constexpr int64_t kLongest = 2048;  // of sequences whose weights are formed

// (1, 1, length, length)
at::Tensor identity(int64_t length, at::ScalarType dtype) {
  return at::eye(length, dtype).unsqueeze(0).unsqueeze(0);
}

void check_length(const AttentionSource& source, const char* argument) {
  const int64_t length = std::max(source.query_length(), source.key_length());
  if (!source.weights.defined() && length > kLongest)
    refuse(argument,
           "be empty for sequences of more than " + std::to_string(kLongest) +
               " tokens, whose weights are not formed",
           std::to_string(length) + " tokens");
}

const std::vector<std::string>& tokens_of(const TokenLists& lists) {
  static const std::vector<std::string> kNone;
  return lists.empty() ? kNone : lists[0];
}

// The positions whose tokens are not among `names`, and these tokens.
struct Kept {
  at::Tensor positions = {};
  TokenLists tokens = {};
  int64_t left_out = 0;
};
Kept kept_of(const TokenLists& lists, int64_t length,
             const std::vector<std::string>& names) {
  std::vector<int64_t> positions;
  Kept kept{.tokens = TokenLists(lists.empty() ? 0 : 1)};
  for (int64_t i = 0; i < length; ++i) {
    const std::string name =
        lists.empty() ? std::to_string(i) : tokens_of(lists)[i];
    if (std::ranges::find(names, name) != names.end()) continue;
    positions.push_back(i);
    if (!lists.empty()) kept.tokens[0].push_back(name);
  }
  kept.left_out = length - static_cast<int64_t>(positions.size());
  kept.positions = at::tensor(positions, at::kLong);
  return kept;
}

// bool (1, H or 1, Lq, Lk), True = the query sees the key: to a query that is 0
// all keys that it sees are alike.
at::Tensor visible_keys(const AttentionSource& source) {
  const int64_t heads = source.num_heads(), length = source.key_length();
  std::vector<at::Tensor> pages;
  const at::Tensor query = at::zeros({1, 1, source.query_length(), 8});
  const at::Tensor key = at::zeros({1, 1, length, 8});
  const bool per_head = source.options.attn_mask.defined() &&
                        source.options.attn_mask.dim() >= 3 &&
                        source.options.attn_mask.size(-3) > 1;
  for (int64_t head = 0; head < (per_head ? heads : 1); ++head)
    pages.push_back(multihead::scaled_dot_product_attention(
                        query, key, identity(length, at::kFloat),
                        visibility(source.options, 0, head))
                        .ne(0));
  return at::cat(pages, 1);
}

}  // namespace

AttentionSource item_of(const AttentionSource& source, int64_t item) {
  AttentionSource one = source;
  if (source.batch_size() == 1) return one;
  const auto narrow = [&](at::Tensor& tensor, int64_t dims) {
    if (tensor.defined() && tensor.dim() == dims && tensor.size(0) > 1)
      tensor = tensor.narrow(0, item, 1);
  };
  for (at::Tensor* tensor : {&one.weights, &one.query, &one.key})
    narrow(*tensor, 4);
  AttentionOptions& options = one.options;
  narrow(options.attn_mask, 4);
  narrow(options.key_lengths, 1);
  narrow(options.query_offset, 1);
  narrow(options.key_mask, 2);
  narrow(options.alibi_slopes, 2);
  for (TokenLists* lists : {&one.keys, &one.queries})
    if (lists->size() > 1) *lists = {(*lists)[item]};
  return one;
}

at::Tensor weights_of(const AttentionSource& source) {
  if (source.weights.defined()) return source.weights;
  const at::Tensor& key = source.key;
  AttentionOptions options = source.options;
  options.dropout_p = 0;
  options.enable_gqa = true;
  const int64_t length = key.size(2);
  const at::Tensor values = identity(length, key.scalar_type())
                                .expand({key.size(0), key.size(1), -1, -1});
  return multihead::scaled_dot_product_attention(source.query, key, values,
                                                 options);
}

AttentionSource without(const AttentionSource& source,
                        const std::vector<std::string>& names, bool scaled) {
  check_length(source, "without");
  const Kept keys = kept_of(source.keys, source.key_length(), names),
             queries = kept_of(source.queries, source.query_length(), names);
  if (keys.left_out + queries.left_out == 0) return source;
  if (keys.positions.numel() == 0 || queries.positions.numel() == 0)
    refuse("without", "leave a query and a key", "every token");
  const auto part = [&](const at::Tensor& pages) {
    return pages.index_select(2, queries.positions)
        .index_select(3, keys.positions);
  };
  AttentionSource rest{.title = source.title,
                       .weights = part(weights_of(source)),
                       .mean_of = source.mean_of,
                       .num_kv_heads = source.num_kv_heads,
                       .keys = keys.tokens,
                       .queries = queries.tokens,
                       .remarks = source.remarks};
  const at::Tensor visible = part(visible_keys(source));
  if (!visible.all().item<bool>()) rest.options.attn_mask = visible;
  if (scaled) {
    const at::Tensor sums = rest.weights.sum(-1, /*keepdim=*/true);
    rest.weights = at::where(sums.ne(0), rest.weights / sums, rest.weights);
  }
  rest.remarks.push_back(
      "left out: " + joined(names, ", ") + " (" + plural(keys.left_out, "key") +
      ")" +
      (scaled ? "; rows are scaled to what they give to the others" : ""));
  return rest;
}

TokenLists parse_tokens(std::string_view given, const std::string& name) {
  TokenLists lists;
  if (!given.starts_with('[')) {
    std::istringstream words{std::string(given)};
    lists.emplace_back();
    for (std::string word; words >> word;) lists[0].push_back(label(word));
    return lists;
  }
  auto json = nlohmann::json::parse(given, nullptr, false);
  const auto is_list = [](const nlohmann::json& list) {
    return list.is_array() && std::ranges::all_of(list, [](const auto& x) {
             return x.is_string();
           });
  };
  if (is_list(json)) json = nlohmann::json::array({json});
  if (!json.is_array() || !std::ranges::all_of(json, is_list))
    refuse(name, "be words between spaces or a JSON array of strings",
           std::string(given.substr(0, 40)));
  for (const nlohmann::json& list : json) {
    lists.emplace_back();
    for (const std::string token : list) lists.back().push_back(label(token));
  }
  return lists;
}

void check_tokens(const TokenLists& lists, const std::string& name,
                  int64_t items, int64_t length) {
  const auto count = static_cast<int64_t>(lists.size());
  if (count > 1 && count != items)
    refuse(name,
           "be one list, or one for each of the " + std::to_string(items) +
               " items",
           std::to_string(count) + " lists");
  for (const std::vector<std::string>& list : lists)
    if (static_cast<int64_t>(list.size()) != length)
      refuse(name,
             "have one entry for each of the " + std::to_string(length) +
                 " positions",
             std::to_string(list.size()) +
                 (list.size() == 1 ? " entry" : " entries"));
}

void refuse(const std::string& argument, const std::string& condition,
            const std::string& got) {
  TORCH_CHECK_VALUE(false, "show: ", argument, " must ", condition, ", got ",
                    got);
}

}  // namespace multihead::pictures
