// SPDX-License-Identifier: MIT
#include "pictures/paths.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace multihead::pictures {
namespace {

constexpr const char* kCaveats =
    "rollout and flow follow weights alone: values, other parts of the layers "
    "and what heads do apart are left out, and half of each layer is taken to "
    "pass by; they say what can have reached a token, not why it matters";

// The weights of a layer and what passes by it.
at::Tensor with_residual(const at::Tensor& mean) {
  const at::Tensor sum =
      mean.to(at::kDouble) + at::eye(mean.size(0), at::kDouble);
  return sum / sum.sum(-1, /*keepdim=*/true);
}

// Flows between the positions of neighbouring layers (E. Dinic, 1970): node
// layer·L + i is what position i holds above that many layers.
class Network {
 public:
  explicit Network(const std::vector<at::Tensor>& means)
      : length_(static_cast<int>(means[0].size(0))),
        nodes_(length_ * (static_cast<int>(means.size()) + 1)),
        edges_of_(nodes_) {
    for (size_t layer = 0; layer < means.size(); ++layer) {
      const at::Tensor weights = with_residual(means[layer]).contiguous();
      const double* weight = weights.const_data_ptr<double>();
      const int below = static_cast<int>(layer) * length_;
      for (int i = 0; i < length_; ++i)
        for (int j = 0; j < length_; ++j)
          connect(below + length_ + i, below + j, *weight++);
    }
  }

  double most(int source, int sink) {
    source += nodes_ - length_;
    for (Edge& edge : edges_) edge.left = edge.capacity;
    double sum = 0;
    while (find_levels(source, sink)) {
      next_.assign(nodes_, 0);
      for (double more; (more = push(source, sink, kNoLimit)) > 0;) sum += more;
    }
    return sum;
  }

 private:
  struct Edge {
    int to;
    double capacity, left;
  };
  static constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  static constexpr double kSmall = 1e-9;  // less is rounding

  // Edge e and e ^ 1 are the two directions of one.
  void connect(int from, int to, double capacity) {
    edges_of_[from].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({to, capacity, capacity});
    edges_of_[to].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({from, 0, 0});
  }

  bool find_levels(int source, int sink) {
    level_.assign(nodes_, -1);
    level_[source] = 0;
    std::vector<int> queue = {source};
    for (size_t place = 0; place < queue.size(); ++place)
      for (const int e : edges_of_[queue[place]]) {
        const Edge& edge = edges_[e];
        if (edge.left <= kSmall || level_[edge.to] >= 0) continue;
        level_[edge.to] = level_[queue[place]] + 1;
        queue.push_back(edge.to);
      }
    return level_[sink] >= 0;
  }

  double push(int node, int sink, double most) {
    if (node == sink) return most;
    for (size_t& i = next_[node]; i < edges_of_[node].size(); ++i) {
      Edge& edge = edges_[edges_of_[node][i]];
      if (edge.left <= kSmall || level_[edge.to] != level_[node] + 1) continue;
      const double pushed = push(edge.to, sink, std::min(most, edge.left));
      if (pushed <= 0) continue;
      edge.left -= pushed;
      edges_[edges_of_[node][i] ^ 1].left += pushed;
      return pushed;
    }
    return 0;
  }

  int length_, nodes_;
  std::vector<std::vector<int>> edges_of_;
  std::vector<Edge> edges_ = {};
  std::vector<int> level_ = {};
  std::vector<size_t> next_ = {};
};

HeatMap map_of(const at::Tensor& page) {
  const at::Tensor values = page.to(at::kFloat).contiguous();
  const float* data = values.const_data_ptr<float>();
  HeatMap map{static_cast<int>(page.size(0)), static_cast<int>(page.size(1))};
  map.values.assign(data, data + page.numel());
  map.blocked.assign(map.values.size(), 0);
  return map;
}

}  // namespace

at::Tensor rollout(const std::vector<at::Tensor>& means) {
  at::Tensor product = with_residual(means[0]);
  for (size_t layer = 1; layer < means.size(); ++layer)
    product = at::matmul(with_residual(means[layer]), product);
  return product;
}

at::Tensor flow(const std::vector<at::Tensor>& means) {
  const int64_t length = means[0].size(0);
  Network network(means);
  at::Tensor most = at::zeros({length, length}, at::kDouble);
  double* value = most.mutable_data_ptr<double>();
  for (int i = 0; i < length; ++i)
    for (int j = 0; j < length; ++j) *value++ = network.most(i, j);
  return most;
}

bool is_flow_short(int64_t layers, int64_t length) {
  constexpr int64_t kMostSteps = 40'000'000;
  return length <= 64 &&
         length * length * length * length * layers <= kMostSteps;
}

Picture paths_of(const std::vector<at::Tensor>& means, const Picture& layer) {
  const auto layers = static_cast<int64_t>(means.size());
  const int64_t length = means[0].size(0);
  Picture picture{.title = layer.title,
                  .name = "through " + std::to_string(layers) + " layers",
                  .group = layer.group};
  const Item& like = layer.items[0];
  Item item{.index = like.index};
  item.queries =
      make_axis(length, static_cast<int>(length), like.queries.tokens);
  item.keys = make_axis(length, static_cast<int>(length), like.keys.tokens);
  item.panels.push_back(
      {.name = "mean of " + std::to_string(layers) + " layers",
       .map = map_of(at::stack(means).mean(0))});
  item.panels.push_back({.name = "rollout", .map = map_of(rollout(means))});
  item.remarks = {kCaveats};
  if (is_flow_short(layers, length))
    item.panels.push_back({.name = "flow", .map = map_of(flow(means))});
  else
    item.remarks.emplace_back(
        "flow is left out: of so many tokens it takes minutes");
  picture.num_heads = picture.num_kv_heads = layer.num_heads;
  picture.items.push_back(std::move(item));
  return picture;
}

}  // namespace multihead::pictures
