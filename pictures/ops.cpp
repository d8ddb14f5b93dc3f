// SPDX-License-Identifier: MIT
//
// The operators of this library, in the namespace of attention's. What was
// measured is an object, since it is drawn more than once.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "multihead/attention/fields.h"
#include "multihead/text/printable.h"
#include "pictures/attention.h"
#include "pictures/canvas.h"
#include "pictures/paths.h"
#include "pictures/picture.h"

namespace multihead::pictures {
namespace {

using at::Tensor;

constexpr int kCells = 128;              // along each side of a map
constexpr int64_t kLongestMean = 256;    // of sequences that paths are of
constexpr int64_t kMostFeatures = 8192;  // numbers of a head's queries

struct Measured : torch::CustomClassHolder {
  Picture picture;
  Tensor mean;  // of the heads' weights, (L, L); undefined where L is large
};
using Handle = c10::intrusive_ptr<Measured>;

// What there is to know of a call beside tensors, as JSON.
class Facts {
 public:
  explicit Facts(const std::string& text)
      : json_(
            nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false)) {
    TORCH_CHECK_VALUE(json_.is_object(), "show: facts must be a JSON object");
  }

  std::string text(const char* name) const {
    return printable(json_.value(name, std::string()));
  }
  int64_t number(const char* name, int64_t otherwise) const {
    return json_.value(name, otherwise);
  }
  bool flag(const char* name) const { return json_.value(name, false); }
  TokenLists tokens(const char* name) const {
    return json_.contains(name) ? parse_tokens(json_[name].dump(), name)
                                : TokenLists();
  }

 private:
  nlohmann::json json_;
};

Tensor mean_of(const AttentionSource& source) {
  const int64_t length = source.query_length();
  if (length != source.key_length() || length > kLongestMean) return {};
  return weights_of(source).select(0, 0).mean(0).to(at::kDouble);
}

// Measures the item that facts name.
Handle measured(AttentionSource source, const Facts& facts) {
  const at::NoGradGuard no_grad;
  const int64_t batch = source.batch_size(), item = facts.number("item", 0);
  if (item < 0 || item >= batch)
    refuse("item", "be from 0 to " + std::to_string(batch - 1),
           std::to_string(item));
  source.title = facts.text("title");
  source.keys = facts.tokens("tokens");
  source.queries = facts.tokens("query_tokens");
  check_tokens(source.keys, "tokens", batch, source.key_length());
  if (source.queries.empty() && source.query_length() == source.key_length())
    source.queries = source.keys;
  check_tokens(source.queries, "query_tokens", batch, source.query_length());
  source = item_of(source, item);
  const TokenLists left_out = facts.tokens("without");
  if (!left_out.empty() && !left_out[0].empty())
    source = without(source, left_out[0], facts.flag("scaled"));
  MapRequest request{.items = {0}, .cells = kCells};
  request.features =
      source.query.defined() &&
      source.query.size(2) * source.query.size(3) <= kMostFeatures &&
      source.key.size(2) * source.key.size(3) <= kMostFeatures;
  Handle handle = c10::make_intrusive<Measured>();
  handle->picture = measure(source, request);
  handle->picture.name = facts.text("name");
  handle->picture.group = facts.text("group");
  handle->picture.batch_size = batch;
  handle->picture.items[0].index = item;
  handle->mean = mean_of(source);
  return handle;
}

Handle picture_of_weights(const Tensor& weights,
                          const std::optional<Tensor>& blocked,
                          const std::string& text) {
  const int64_t dims = weights.dim();
  if (weights.layout() != at::kStrided || weights.is_meta())
    refuse("weights", "be a dense tensor that holds numbers",
           weights.is_meta() ? "one on the meta device"
                             : c10::str("layout ", weights.layout()));
  if (!weights.is_floating_point() || dims < 2 || dims > 4 ||
      weights.numel() == 0)
    refuse("weights",
           "be floating and have the shape (B, H, Lq, Lk), (H, Lq, Lk) or "
           "(Lq, Lk), without a size of 0",
           std::string(c10::toString(weights.scalar_type())) + " of shape " +
               shape_text(weights.sizes().vec()));
  AttentionSource source;
  source.weights = weights.detach().cpu();
  if (c10::isFloat8Type(weights.scalar_type()))  // which PyTorch cannot add
    source.weights = source.weights.to(at::kFloat);
  while (source.weights.dim() < 4) source.weights = source.weights.unsqueeze(0);
  source.num_kv_heads = source.weights.size(1);
  if (blocked.has_value()) {
    const bool fits =
        blocked->scalar_type() == at::kBool && blocked->dim() <= 4 &&
        at::is_expandable_to(blocked->sizes(), source.weights.sizes());
    if (!fits)
      refuse("blocked", "be bool and broadcast to the weights",
             std::string(c10::toString(blocked->scalar_type())) + " of shape " +
                 shape_text(blocked->sizes().vec()));
    source.options.attn_mask =
        blocked->cpu().logical_not().expand_as(source.weights);
  }
  return measured(std::move(source), Facts(text));
}

Handle picture_of_heads(const Tensor& query, const Tensor& key,
                        const AttentionOptions& options,
                        const std::string& text) {
  if (query.dim() == 3 && key.dim() == 3)  // heads of one item
    return picture_of_heads(query.unsqueeze(0), key.unsqueeze(0), options,
                            text);
  if (query.dim() != 4 || key.dim() != 4 || query.size(0) != key.size(0) ||
      query.size(3) != key.size(3) || key.size(1) == 0 || query.numel() == 0 ||
      key.numel() == 0 || query.size(1) % key.size(1) != 0)
    refuse("query and key",
           "have the shapes (B, H, Lq, D) and (B, G, Lk, D), or those of one "
           "item, where G divides H",
           shape_text(query.sizes().vec()) + " and " +
               shape_text(key.sizes().vec()));
  AttentionSource source{.query = query.detach(),
                         .key = key.detach(),
                         .options = options,
                         .num_kv_heads = key.size(1)};
  source.options.enable_gqa = true;
  return measured(std::move(source), Facts(text));
}

Handle picture_difference(const Handle& yours, const Handle& reference) {
  const auto sizes = [](const Picture& picture) {
    const Item& item = picture.items[0];
    return std::vector{picture.num_heads, item.queries.length(),
                       item.keys.length()};
  };
  if (sizes(yours->picture) != sizes(reference->picture))
    refuse(
        "reference",
        "have weights of the same shape, " + shape_text(sizes(yours->picture)),
        shape_text(sizes(reference->picture)));
  Handle handle = c10::make_intrusive<Measured>();
  handle->picture = difference(yours->picture, reference->picture);
  for (Panel& panel : handle->picture.items[0].panels) panel.features = {};
  return handle;
}

// Paths follow shares: no number below 0, and none that is not finite, of
// which what can flow would grow for ever.
bool are_shares(const Tensor& mean) {
  return mean.ge(0).logical_and(mean.isfinite()).all().item<bool>();
}

// Through the layers from `first` on that have one group and one length.
Handle path_from(const std::vector<Handle>& layers, size_t first) {
  std::vector<Tensor> means;
  const Measured& begin = *layers[first];
  for (size_t i = first; i < layers.size() && layers[i]->mean.defined() &&
                         layers[i]->picture.group == begin.picture.group &&
                         layers[i]->mean.sizes() == begin.mean.sizes();
       ++i)
    means.push_back(layers[i]->mean);
  Handle handle = c10::make_intrusive<Measured>();
  if (means.size() > 1 && std::ranges::all_of(means, are_shares))
    handle->picture = paths_of(means, begin.picture);
  return handle;
}

// Rollout and flow of each group that has several layers of one length.
std::vector<Handle> paths_through(const std::vector<Handle>& layers) {
  std::vector<Handle> paths;
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool begins =
        i == 0 || layers[i]->picture.group != layers[i - 1]->picture.group;
    if (!begins || !layers[i]->mean.defined()) continue;
    Handle path = path_from(layers, i);
    if (!path->picture.items.empty()) paths.push_back(std::move(path));
  }
  return paths;
}

std::string draw_pictures(const std::string& title,
                          const std::vector<Handle>& layers,
                          const std::vector<Handle>& paths,
                          const std::string& form) {
  if (layers.empty()) refuse("layers", "have at least one entry", "none");
  if (form != "svg" && form != "html") refuse("form", "be svg or html", form);
  Album album{.title = printable(title)};
  for (const Handle& layer : layers) album.layers.push_back(layer->picture);
  for (const Handle& path : paths) album.paths.push_back(path->picture);
  return form == "svg" ? to_svg(album) : to_html(album);
}

Tensor draw_png(const std::string& svg) {
  require_png("show: png");
  const std::string bytes = png_of(svg);
  Tensor content = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(content.mutable_data_ptr(), bytes.data(), bytes.size());
  return content;
}

// Heads, queries and keys; entropies, of the mean first where there is one.
std::tuple<std::vector<int64_t>, std::vector<double>> picture_facts(
    const Handle& handle) {
  const Item& item = handle->picture.items[0];
  std::vector<double> entropies;
  for (const Panel& panel : item.panels) entropies.push_back(panel.entropy);
  return {
      {handle->picture.num_heads, item.queries.length(), item.keys.length()},
      entropies};
}

// A map as it was measured: (rows, columns), float32.
Tensor picture_map(const Handle& handle, int64_t panel) {
  const std::vector<Panel>& panels = handle->picture.items[0].panels;
  const auto count = static_cast<int64_t>(panels.size());
  if (panel < 0 || panel >= count)
    refuse("panel", "be from 0 to " + std::to_string(count - 1),
           std::to_string(panel));
  const HeatMap& map = panels[panel].map;
  Tensor values = at::empty({map.rows, map.columns}, at::kFloat);
  std::ranges::copy(map.values, values.mutable_data_ptr<float>());
  return values;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(multihead, m) {
  m.class_<Measured>("Picture");
  const std::string picture = "__torch__.torch.classes.multihead.Picture";
  const auto define = [&](const std::string& schema, auto&& function) {
    m.def(schema.c_str(), std::forward<decltype(function)>(function));
  };
  define("picture_of_weights(Tensor weights, Tensor? blocked, str facts) -> " +
             picture,
         &picture_of_weights);
  define("picture_of_heads(Tensor query, Tensor key, " + fields::schema() +
             ", str facts) -> " + picture,
         fields::implementation<&picture_of_heads>);
  define("picture_difference(" + picture + " yours, " + picture +
             " reference) -> " + picture,
         &picture_difference);
  define("paths_through(" + picture + "[] layers) -> " + picture + "[]",
         &paths_through);
  define("draw_pictures(str title, " + picture + "[] layers, " + picture +
             "[] paths, str form) -> str",
         &draw_pictures);
  define("draw_png(str svg) -> Tensor", &draw_png);
  define("picture_facts(" + picture +
             " picture) -> (int[] sizes, float[] "
             "entropies)",
         &picture_facts);
  define("picture_map(" + picture + " picture, int panel) -> Tensor",
         &picture_map);
}

}  // namespace multihead::pictures
