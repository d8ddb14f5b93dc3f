// SPDX-License-Identifier: MIT
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/special_entr.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "multihead/text/words.h"
#include "pictures/attention.h"

namespace multihead::pictures {
namespace {

constexpr int kLinks = 3;  // of each head
constexpr const char* kDivided =
    "entropies are those of rows divided by their sum";
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

using multihead::AttentionOptions;

// Index `i` of a dimension, kept; a dimension of size 1 is for all.
at::Tensor narrowed(const at::Tensor& tensor, int64_t dim, int64_t i) {
  return tensor.size(dim) == 1 ? tensor : tensor.narrow(dim, i, 1);
}

// The mask as (1 or B, 1 or H, ...).
at::Tensor four_dimensional(at::Tensor mask) {
  while (mask.dim() < 4) mask = mask.unsqueeze(0);
  return mask;
}

// The options of one item and head, which is the only one of its call.
AttentionOptions of_head(AttentionOptions options, int64_t item, int64_t head) {
  if (options.attn_mask.defined()) {
    options.attn_mask = four_dimensional(options.attn_mask);
    options.attn_mask = narrowed(options.attn_mask, 0, item);
    options.attn_mask = narrowed(options.attn_mask, 1, head);
  }
  for (at::Tensor* rows :
       {&options.key_lengths, &options.key_mask, &options.query_offset})
    if (rows->defined() && rows->dim() > 0) *rows = narrowed(*rows, 0, item);
  if (options.sinks.defined()) options.sinks = options.sinks.narrow(0, head, 1);
  at::Tensor& slopes = options.alibi_slopes;
  if (slopes.defined() && slopes.dim() == 2) slopes = narrowed(slopes, 0, item);
  if (slopes.defined()) slopes = slopes.narrow(-1, head, 1);
  options.dropout_p = 0;
  return options;
}

// (1, 1, length, cells): 1 where the position lies in the cell.
at::Tensor one_hot_cells(const Axis& axis, at::ScalarType dtype) {
  const at::Tensor ends = at::tensor(
      std::vector<int64_t>(axis.edges.begin() + 1, axis.edges.end()));
  const at::Tensor cell = at::bucketize(at::arange(axis.length(), at::kLong),
                                        ends, /*out_int32=*/false,
                                        /*right=*/true);
  return at::one_hot(cell, axis.cells()).to(dtype).unsqueeze(0).unsqueeze(0);
}

HeatMap to_map(const at::Tensor& page) {
  const at::Tensor values = page.to(at::kFloat).contiguous();
  HeatMap map{static_cast<int>(values.size(0)),
              static_cast<int>(values.size(1))};
  const float* data = values.const_data_ptr<float>();
  map.values.assign(data, data + values.numel());
  map.blocked.assign(map.values.size(), 0);
  return map;
}

Axis whole(const Axis& axis) {
  return make_axis(axis.length(), static_cast<int>(axis.length()));
}

// The mean of the rows of (rows, columns) in each cell of the queries.
HeatMap pool_rows(const at::Tensor& rows, const Axis& queries) {
  const Axis keys = make_axis(rows.size(1), static_cast<int>(rows.size(1)));
  return pool(to_map(rows), {whole(queries), queries}, {keys, keys});
}

// The cells of largest weight, where a cell is one query and one key.
std::vector<Link> strongest_cells(const HeatMap& map, const Item& item) {
  std::vector<Link> links;
  if (item.queries.pooled() || item.keys.pooled()) return links;
  for (int row = 0; row < map.rows; ++row)
    for (int column = 0; column < map.columns; ++column)
      if (std::isfinite(map.at(row, column)) && map.at(row, column) != 0)
        links.push_back({row, column, map.at(row, column)});
  const auto stronger = [](const Link& a, const Link& b) {
    return std::abs(a.weight) > std::abs(b.weight);
  };
  const size_t kept = std::min<size_t>(kLinks, links.size());
  std::ranges::partial_sort(links, links.begin() + kept, stronger);
  links.resize(kept);
  return links;
}

// -1, less than any weight, in place of what is no number to compare.
at::Tensor finite_or_none(const at::Tensor& weights) {
  return weights.masked_fill(weights.isfinite().logical_not(), -1);
}

// The largest of (Lq, k) weights, whose keys are in `keys`; -1 is no key.
std::vector<Link> strongest(const at::Tensor& weights, const at::Tensor& keys) {
  std::vector<Link> links;
  const at::Tensor finite = finite_or_none(weights).flatten();
  const auto [top, places] =
      finite.topk(std::min<int64_t>(kLinks, finite.numel()));
  const at::Tensor key_of = keys.flatten();
  for (int64_t i = 0; i < top.numel(); ++i) {
    const int64_t place = places[i].item<int64_t>();
    const int64_t key = key_of[place].item<int64_t>();
    if (key >= 0 && top[i].item<double>() > 0)
      links.push_back({place / weights.size(1), key, top[i].item<double>()});
  }
  return links;
}

std::string number(double value) { return format("%.3g", value); }

std::string mean_name(int64_t heads) {
  return "mean of " + std::to_string(heads) + " heads";
}

// What one item's heads look like.
class ItemMeasurement {
 public:
  ItemMeasurement(const AttentionSource& source, int64_t item,
                  const MapRequest& request)
      : source_(source), item_(item), features_(request.features) {
    const int cells = request.cells;
    const auto tokens = [&](const auto& lists) {
      return lists.empty()       ? std::vector<std::string>()
             : lists.size() == 1 ? lists[0]
                                 : lists[item];
    };
    result_.index = item;
    result_.remarks = source.remarks;
    result_.queries =
        make_axis(source.query_length(), cells, tokens(source.queries));
    result_.keys = make_axis(source.key_length(), cells, tokens(source.keys));
  }

  Item run() {
    const int64_t mean_of = source_.mean_of;
    for (int64_t head = 0; head < (mean_of ? 1 : source_.num_heads()); ++head) {
      Panel panel{.name = mean_of ? mean_name(mean_of)
                                  : "head " + std::to_string(head)};
      source_.weights.defined() ? read(head, panel) : compute(head, panel);
      panel.map.blocked = blocked_cells(head);
      result_.panels.push_back(std::move(panel));
    }
    add_remarks();
    if (result_.panels.size() > 1)
      result_.panels.insert(result_.panels.begin(), mean_panel());
    return std::move(result_);
  }

 private:
  // Reads the weights that were given.
  void read(int64_t head, Panel& panel) {
    const at::Tensor page = source_.weights[item_][head].to(at::kDouble);
    const Axis keys = whole(result_.keys);
    panel.map = pool(to_map(page), {whole(result_.queries), result_.queries},
                     {keys, result_.keys});
    const at::Tensor sums = page.sum(-1, /*keepdim=*/true),
                     negative = page.lt(0), not_zero = page.ne(0).any(-1);
    // As of the weights that are in the same proportions and sum to 1. A row
    // with numbers below 0 is no share of anything.
    const at::Tensor entropy = at::special_entr(page.div(sums)).sum(-1);
    note_rows(panel, entropy.masked_fill(negative.any(-1), kUnknown), not_zero);
    not_finite_ += page.numel() - page.isfinite().sum().item<int64_t>();
    negative_ += negative.sum().item<int64_t>();
    note_sums(sums.squeeze(-1).masked_select(not_zero));
    const auto [weights, links] =
        finite_or_none(page).topk(std::min<int64_t>(kLinks, page.size(1)));
    panel.links = strongest(weights, links);
  }

  void note_sums(const at::Tensor& sums) {
    const at::Tensor finite = sums.masked_select(sums.isfinite());
    if (finite.numel() == 0) return;
    lowest_ = std::min(lowest_, finite.min().item<double>());
    highest_ = std::max(highest_, finite.max().item<double>());
  }

  // Computes them from the heads, without a page of weights.
  void compute(int64_t head, Panel& panel) {
    const int64_t group = head / (source_.num_heads() / source_.num_kv_heads);
    const at::Tensor query =
        source_.query.narrow(0, item_, 1).narrow(1, head, 1);
    const at::Tensor key = source_.key.narrow(0, item_, 1).narrow(1, group, 1);
    const AttentionOptions options = of_head(source_.options, item_, head);
    panel.map = pool_rows(
        multihead::scaled_dot_product_attention(
            query, key, one_hot_cells(result_.keys, query.scalar_type()),
            options)[0][0],
        result_.queries);
    const multihead::AttentionSummary summary = multihead::attention_summary(
        query, key, std::min<int64_t>(kLinks, key.size(2)), options);
    const at::Tensor weights = summary.weights[0][0], keys = summary.keys[0][0];
    // Weights that are NaN have no largest ones: no key is named then either.
    const at::Tensor broken = weights.isfinite().logical_not().any(-1);
    note_rows(panel, summary.entropy[0][0],
              keys.select(-1, 0).ge(0).logical_or(broken));
    broken_rows_ += broken.sum().item<int64_t>();
    panel.links = strongest(weights, keys);
    if (features_ && !result_.queries.pooled() && !result_.keys.pooled())
      panel.features = features_of(query[0][0], key[0][0]);
  }

  // query (Lq, D) and key (Lk, D)
  Features features_of(const at::Tensor& query, const at::Tensor& key) const {
    const double width = static_cast<double>(query.size(1));
    const double scale = source_.options.scale.value_or(1 / std::sqrt(width));
    const auto numbers = [](const at::Tensor& rows) {
      const at::Tensor all = rows.to(at::kFloat).contiguous();
      const float* data = all.const_data_ptr<float>();
      return std::vector<float>(data, data + all.numel());
    };
    return {.width = static_cast<int>(query.size(1)),
            .queries = numbers(query * scale),
            .keys = numbers(key)};
  }

  // entropy (Lq), not finite where it is unknown, and which queries see a key.
  void note_rows(Panel& panel, const at::Tensor& entropy,
                 const at::Tensor& sees_a_key) {
    panel.entropy =
        entropy.to(at::kDouble)
            .masked_select(sees_a_key.logical_and(entropy.isfinite()))
            .mean()
            .item<double>();
    blind_ =
        std::max(blind_, sees_a_key.numel() - sees_a_key.sum().item<int64_t>());
  }

  // Cells no query of which sees any key: to a query that is 0 all keys that
  // it sees are alike.
  std::vector<uint8_t> blocked_cells(int64_t head) {
    const AttentionOptions& options = source_.options;
    const bool per_head = options.attn_mask.defined() &&
                          four_dimensional(options.attn_mask).size(1) > 1;
    if (!blocked_.empty() && !per_head) return blocked_;
    const size_t cells =
        static_cast<size_t>(result_.queries.cells()) * result_.keys.cells();
    blocked_.assign(cells, 0);
    const AttentionOptions visible = visibility(options, item_, head);
    if (!visible.is_causal && !visible.attn_mask.defined() && !visible.window &&
        !visible.key_lengths.defined() && !visible.key_mask.defined())
      return blocked_;
    const at::Tensor query = at::zeros({1, 1, result_.queries.length(), 8});
    const at::Tensor key = at::zeros({1, 1, result_.keys.length(), 8});
    const HeatMap seen = pool_rows(
        multihead::scaled_dot_product_attention(
            query, key, one_hot_cells(result_.keys, at::kFloat), visible)[0][0],
        result_.queries);
    for (size_t i = 0; i < cells; ++i) blocked_[i] = seen.values[i] == 0;
    return blocked_;
  }

  Panel mean_panel() const {
    const auto count = static_cast<double>(result_.panels.size());
    Panel mean{.name = mean_name(result_.panels.size()),
               .map = result_.panels[0].map};
    for (size_t cell = 0; cell < mean.map.values.size(); ++cell) {
      double sum = 0;
      for (const Panel& panel : result_.panels) {
        sum += panel.map.values[cell];
        mean.map.blocked[cell] &= panel.map.blocked[cell];
      }
      mean.map.values[cell] = static_cast<float>(sum / count);
    }
    mean.links = strongest_cells(mean.map, result_);
    return mean;
  }

  void add_remarks() {
    std::vector<std::string>& remarks = result_.remarks;
    int64_t leaks = 0;
    for (const Panel& panel : result_.panels)
      for (size_t i = 0; i < panel.map.values.size(); ++i)
        leaks += panel.map.blocked[i] && panel.map.values[i] != 0;
    const auto count = [&](const std::string& of, int64_t found) {
      if (found > 0) remarks.push_back(of + ": " + std::to_string(found));
    };
    count("cells with weight where the mask blocks", leaks);
    count("weights that are not finite (NaN or infinite)", not_finite_);
    count("rows with weights that are not finite (NaN or infinite)",
          broken_rows_);
    if (blind_ > 0)
      remarks.push_back(std::to_string(blind_) + " of " +
                        std::to_string(result_.queries.length()) +
                        " queries see no key: their weights are 0");
    count("numbers below 0, which weights never are", negative_);
    if (lowest_ >= 1 - kSum && highest_ <= 1 + kSum) return;
    remarks.push_back(sums_text());
    if (std::ranges::any_of(result_.panels, [](const Panel& panel) {
          return !std::isnan(panel.entropy);
        }))
      remarks.push_back(kDivided);
  }

  // What the rows sum to instead of 1.
  std::string sums_text() const {
    const std::string low = number(lowest_), high = number(highest_);
    return low == high ? "each row of weights sums to " + low + ", not to 1"
                       : "rows of weights sum to " + low + " up to " + high +
                             ", not to 1 each";
  }

  static constexpr double kSum = 0.02;  // what bfloat16 leaves of a sum of 1

  const AttentionSource& source_;
  int64_t item_;
  bool features_;
  Item result_;
  std::vector<uint8_t> blocked_;
  double lowest_ = INFINITY, highest_ = -INFINITY;  // sums of rows
  int64_t not_finite_ = 0, broken_rows_ = 0, negative_ = 0, blind_ = 0;
};

}  // namespace

AttentionOptions visibility(const AttentionOptions& options, int64_t item,
                            int64_t head) {
  AttentionOptions own = options;
  own.sinks = own.alibi_slopes = at::Tensor();
  own = of_head(own, item, head);
  AttentionOptions visible{.attn_mask = own.attn_mask,
                           .is_causal = own.is_causal,
                           .causal_alignment = own.causal_alignment,
                           .query_offset = own.query_offset,
                           .window = own.window,
                           .key_lengths = own.key_lengths,
                           .key_mask = own.key_mask};
  if (visible.attn_mask.defined() && visible.attn_mask.is_floating_point())
    visible.attn_mask = visible.attn_mask.ne(-INFINITY);
  return visible;
}

Picture measure(const AttentionSource& source, const MapRequest& request) {
  Picture picture{.title = source.title,
                  .num_heads = source.num_heads(),
                  .num_kv_heads = source.num_kv_heads,
                  .batch_size = source.batch_size(),
                  .stages = source.stages};
  for (const int64_t index : request.items) {
    Item item = ItemMeasurement(source, index, request).run();
    std::vector<Panel>& panels = item.panels;
    const int64_t first = panels.size() > 1 ? 1 : 0;
    if (request.head) panels = {panels[first + *request.head]};
    if (request.mean_only) panels.resize(1);
    picture.items.push_back(std::move(item));
  }
  return picture;
}

Picture difference(Picture yours, const Picture& reference) {
  for (size_t i = 0; i < yours.items.size(); ++i) {
    Item& item = yours.items[i];
    Extremes extremes;
    for (size_t p = 0; p < item.panels.size(); ++p) {
      Panel& panel = item.panels[p];
      const HeatMap& other = reference.items[i].panels[p].map;
      for (size_t cell = 0; cell < other.values.size(); ++cell)
        panel.map.values[cell] -= other.values[cell];
      widen(extremes, panel.map);
      panel.entropy = kUnknown;
      panel.links = strongest_cells(panel.map, item);
    }
    std::erase(item.remarks, kDivided);  // none is shown
    item.remarks.push_back("the largest difference is " +
                           number(std::max(extremes.high, -extremes.low)));
  }
  yours.difference = true;
  return yours;
}

}  // namespace multihead::pictures
