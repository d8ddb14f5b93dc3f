// SPDX-License-Identifier: MIT
//
// What is done to scores beside attention, and is no fault: learned numbers,
// soft caps, sinks, biases of positions.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

using at::Tensor;

// ---- Learned numbers --------------------------------------------------------

namespace {

// The number whose name is among these, else the only one there is.
const Tensor& number_by(const ObservedCall& call,
                        std::span<const std::string_view> texts) {
  require(!call.numbers.empty());
  for (const std::string_view text : texts) {
    for (const auto& [name, number] : call.numbers) {
      if (name.find(text) != std::string::npos) return number;
    }
  }
  return call.numbers.begin()->second;
}

constexpr std::string_view kOfScales[] = {"scale", "temp", "tau", "beta",
                                          "argument"};

bool is_named_scale(std::string_view name) {
  return std::ranges::any_of(kOfScales, [&](std::string_view text) {
    return name.find(text) != std::string_view::npos;
  });
}

}  // namespace

Tensor learned_factor(const ObservedCall& call, LearnedScale scale) {
  if (scale == LearnedScale::kOne) return at::ones({1, 1, 1}, at::kDouble);
  const Tensor& x = number_by(call, kOfScales);
  // What is 1 may be for something else, and shows nothing.
  require(call.numbers.size() > 1 || !x.eq(1).all().item<bool>() ||
          is_named_scale(call.numbers.begin()->first));
  switch (scale) {
    case LearnedScale::kTimes:
    case LearnedScale::kTimesRoot:  // 1/sqrt(D) is the recipe's own scale
      return x;
    case LearnedScale::kOver:
    case LearnedScale::kOverRoot:
      return x.reciprocal();
    case LearnedScale::kExp:
      return x.exp();
    case LearnedScale::kOne:
    case LearnedScale::kNone:
      break;
  }
  throw Impossible();
}

namespace {

// What the trace has in the shape of the scores, contiguous float64.
std::vector<Tensor> like_scores(const ObservedCall& call,
                                const Tensor& scores) {
  std::vector<Tensor> found;
  for (const Tensor& tensor : call.trace) {
    if (tensor.numel() == scores.numel() && tensor.dim() >= 3 &&
        tensor.size(-1) == scores.size(-1) &&
        tensor.size(-2) == scores.size(-2)) {
      found.push_back(tensor.to(at::kDouble).contiguous().view(scores.sizes()));
    }
  }
  return found;
}

// Whether one of these holds the numbers of `wanted`, or them over `scale`, as
// what is scaled later. One number of each tells most of them apart.
bool computes(const std::vector<Tensor>& tensors, const Tensor& wanted,
              double scale, double allowed) {
  const int64_t last = wanted.numel() - 1;
  const Tensor contiguous = wanted.contiguous();
  const double number = contiguous.const_data_ptr<double>()[last];
  return std::ranges::any_of(tensors, [&](const Tensor& tensor) {
    const double other = tensor.const_data_ptr<double>()[last];
    return (std::abs(other - number) <= allowed &&
            largest_difference(tensor, wanted) <= allowed) ||
           (std::abs(other * scale - number) <= allowed &&
            largest_difference(tensor * scale, wanted) <= allowed);
  });
}

// The c of c·tanh(s / c) = t, where there is one: tanh(u) / u falls from 1 to
// 0. Close to 1, rounding would decide, of float32 perhaps.
std::optional<double> cap_of(double s, double t, double rounding) {
  const double share = t / s;
  if (!(share > 0 && share < 1 - rounding)) return std::nullopt;
  double low = 0, high = 1 / share;  // tanh(u) < 1
  for (int halvings = 0; halvings < 100; ++halvings) {
    const double middle = (low + high) / 2;
    (std::tanh(middle) > share * middle ? low : high) = middle;
  }
  return std::abs(s) / low;
}

// The c by which x is c·tanh(scores / c), but for scores that were blocked
// before, -c, or after, -inf. One c explains all others.
std::optional<double> cap_between(const Tensor& scores, const Tensor& x,
                                  bool is_double) {
  const Tensor contiguous = scores.contiguous(), capped = x.contiguous();
  const double* const s = contiguous.const_data_ptr<double>();
  const double* const t = capped.const_data_ptr<double>();
  const double least = *std::min_element(t, t + capped.numel());
  // The largest that was not blocked.
  int64_t at = 0;
  double largest = 0;
  for (int64_t i = 0; i < contiguous.numel(); ++i) {
    if (t[i] != least && std::abs(s[i]) > std::abs(largest)) {
      largest = s[i];
      at = i;
    }
  }
  const std::optional<double> cap =
      cap_of(largest, t[at], /*rounding=*/is_double ? 1e-6 : 1e-5);
  if (!cap) return std::nullopt;
  const double allowed = (is_double ? 1e-7 : 1e-5) * std::abs(largest);
  Tensor off = (*cap * (scores / *cap).tanh() - x).abs();
  // Where c is large, float32 tells little of it.
  const double rounding = is_double ? 1e-6 : 1e-3;
  if (std::isinf(least) || std::abs(least + *cap) <= rounding * *cap)
    off = off.masked_fill(x.eq(least), 0.0);
  return off.max().item<double>() <= allowed ? cap : std::nullopt;
}

}  // namespace

// In float32 scores that are much smaller than c show nothing of it, and are as
// they were.
Tensor softcapped(const ObservedCall& call, const Tensor& scores) {
  const bool is_double = call.dtype == at::kDouble;
  if (!call.cap && !call.uncapped.contains(fingerprint(scores))) {
    for (const Tensor& x : like_scores(call, scores)) {
      call.cap = cap_between(scores.detach(), x, is_double);
      if (call.cap) break;
    }
    if (!call.cap) call.uncapped.insert(fingerprint(scores));
  }
  if (!call.cap) call.cap = call.cap_elsewhere;
  require(call.cap || !is_double);
  return call.cap ? *call.cap * (scores / *call.cap).tanh() : scores;
}

Tensor sink_score(const ObservedCall& call, Sink sink) {
  if (sink == Sink::kZero) return at::zeros({1, 1, 1}, at::kDouble);
  constexpr std::string_view kOfSinks[] = {"sink"};
  return number_by(call, kOfSinks);
}

// ---- Biases of positions ---------------------------------------------------

namespace {

// bias (B, H, Lq, Lk), where it is `seen`, as slope · places (Lq, Lk) and a
// number for each row, of which softmax takes no notice. nullopt: it is not.
// Where it is not seen, as behind a mask, the line goes on.
std::optional<StraightBias> line_of(const Tensor& bias, const Tensor& seen,
                                    const Tensor& places, double allowed) {
  const Tensor steps = bias.diff(1, -1) / places.diff(1, -1);
  const Tensor both = seen.slice(-1, 1).logical_and(seen.slice(-1, 0, -1));
  const auto of_head = [&](const Tensor& x) { return x.sum({0, 2, 3}, true); };
  const Tensor count = of_head(both);
  // One or two steps are straight whatever they are.
  if (count.min().item<int64_t>() < 4) return std::nullopt;
  const Tensor slope = of_head(steps.masked_fill(~both, 0.0)) / count;
  const Tensor off = (steps - slope).abs().masked_fill(~both, 0.0);
  const double least = slope.min().item<double>(),
               most = slope.max().item<double>();
  const bool falls = least >= -allowed, rises = most <= allowed;
  if (!(off.max().item<double>() <= allowed) || falls == rises ||
      std::max(-least, most) <= 10 * allowed) {
    return std::nullopt;
  }
  const Tensor line = slope * places;
  const Tensor rest =
      (bias - line).masked_fill(~seen, -kInfinity).amax(-1, /*keepdim=*/true);
  // A row of which nothing is seen has no number to begin with.
  return StraightBias{
      at::where(seen, bias, line + rest.nan_to_num(0.0, 0.0, 0.0)), falls};
}

// Whether the first steps of each head that are seen are equal, as those of a
// line are: this tells most of what a trace has from one, sooner than PyTorch
// is called once.
bool begins_straight(const Tensor& bias, const Tensor& seen,
                     const Tensor& places, double allowed) {
  constexpr int kSteps = 4;
  const auto b = bias.accessor<const double, 4>();
  const auto p = places.accessor<const double, 2>();
  const Tensor all = seen.expand(bias.sizes());
  const auto is_seen = all.accessor<const bool, 4>();
  for (int64_t h = 0; h < bias.size(1); ++h) {
    int steps = 0;
    double first = 0;
    for (int64_t i = 0; i < bias.size(2) && steps < kSteps; ++i) {
      for (int64_t j = 1; j < bias.size(3) && steps < kSteps; ++j) {
        if (!is_seen[0][h][i][j] || !is_seen[0][h][i][j - 1]) continue;
        const double step =
            (b[0][h][i][j] - b[0][h][i][j - 1]) / (p[i][j] - p[i][j - 1]);
        if (steps++ == 0) first = step;
        // Both are within `allowed` of the mean.
        if (!(std::abs(step - first) <= 2 * allowed)) return false;
      }
    }
  }
  return true;
}

// The keys that may tell: all, or those that padding leaves, whatever its
// numbers mean. Of padded ones, positions may not be counted.
std::vector<Tensor> telling_keys(const ObservedCall& call) {
  std::vector<Tensor> found = {at::ones({1, 1, 1, 1}, at::kBool)};
  for (const GivenMask* mask : {&call.padding, &call.mask}) {
    if (mask->numbers.defined() && mask->numbers.size(2) == 1) {
      found.push_back(mask->numbers.ne(0));
      found.push_back(mask->numbers.eq(0));
    }
  }
  return found;
}

// The line by which x differs from the scores.
std::optional<StraightBias> line_between(const ObservedCall& call,
                                         const Tensor& scores,
                                         const Tensor& x) {
  const int64_t queries = scores.size(2), keys = scores.size(3);
  const Tensor key = at::arange(keys, at::kDouble);
  const Tensor query = at::arange(queries, at::kDouble).unsqueeze(-1);
  const Tensor last = query + static_cast<double>(keys - queries);
  const Tensor of_keys = key.expand({queries, keys});
  const double largest = largest_finite(scores);
  const Tensor bias = (x - scores).detach();
  // Behind a mask there is another number, or infinity.
  const Tensor seen = bias.abs().lt(1e3 * (1 + largest));
  const double size = largest_finite(bias.masked_fill(~seen, 0.0));
  const double allowed =
      (call.dtype == at::kDouble ? 1e-7 : 1e-5) * (size + largest);
  if (size <= 10 * allowed) return std::nullopt;
  for (const Tensor& telling : telling_keys(call)) {
    for (const Tensor& places :
         {of_keys, -(key - query).abs(), -(key - last).abs()}) {
      const Tensor telling_seen = seen.logical_and(telling);
      if (!begins_straight(bias, telling_seen, places, allowed)) continue;
      auto line = line_of(bias, telling_seen, places, allowed);
      if (!line) continue;
      line->of_keys = places.is_same(of_keys);
      return line;
    }
  }
  return std::nullopt;
}

// Whether x, in the shape of scores, are weights of which some are of keys
// ahead of their query.
bool weighs_ahead(const Tensor& x) {
  const int64_t ahead = std::max<int64_t>(x.size(3) - x.size(2), 0);
  if (x.lt(0).any().item<bool>() ||
      (x.sum(-1) - 1).abs().max().item<double>() > 1e-5) {
    return false;
  }
  // Not those of a query whose keys are all blocked by one number.
  const Tensor alike = (x.amax(-1, true) - x.amin(-1, true)).le(1e-9);
  return x.masked_fill(alike, 0.0).triu(ahead + 1).max().item<double>() > 0;
}

// That of some tensor of the trace.
std::optional<StraightBias> straight_bias(const ObservedCall& call,
                                          const Tensor& scores) {
  const std::vector<Tensor> tensors = like_scores(call, scores);
  for (const Tensor& x : tensors) {
    auto line = line_between(call, scores, x);
    if (!line) continue;
    line->sees_ahead = std::ranges::any_of(tensors, weighs_ahead);
    return line;
  }
  return std::nullopt;
}

// Whether one of two tensors of the trace is the other capped, or with a line
// added.
bool shows_a_pair(const ObservedCall& call) {
  const Sizes& n = call.sizes;
  const Tensor shape =
      at::zeros({}, at::kDouble).expand({n.batch, n.heads, n.queries, n.keys});
  const std::vector<Tensor> tensors = like_scores(call, shape);
  for (const Tensor& x : tensors) {
    for (const Tensor& y : tensors) {
      if (x.is_same(y) || !x.isfinite().all().item<bool>()) continue;
      if (line_between(call, x, y) ||
          cap_between(x, y, call.dtype == at::kDouble)) {
        return true;
      }
    }
  }
  return false;
}

// What x (B, H, Lq, Lk) has more than the scores. A mask that was added to it
// before, as in T5, hides it in one item perhaps, and in another not. Where it
// hides it in all, it is 0; but softmax takes it from a row of which nothing
// is seen, less one finite number. given: the numbers that an additive mask has
// beside -inf, which are none of the bias.
struct Added {
  Tensor numbers;
  Tensor seen;
  double size = 0;  // of the largest number that is seen
  bool is_masked = false;
};

Added added_to(const Tensor& scores, const Tensor& x, const Tensor& given,
               double largest) {
  Tensor difference = (x - scores).detach();
  const Tensor seen = difference.abs().lt(1e6 * (1 + largest));
  if (seen.all().item<bool>())
    return {difference, seen, largest_finite(difference)};
  if (given.defined()) difference = difference - given;
  const Tensor of_seen = difference.masked_fill(~seen, 0.0);
  const Tensor of_one =
      difference.masked_fill(~seen, -kInfinity).amax(0, /*keepdim=*/true);
  const Tensor top = difference.amax(-1, /*keepdim=*/true);
  const Tensor is_hidden = seen.any(-1, /*keepdim=*/true).logical_not();
  const Tensor of_row = at::where(is_hidden, difference - top, 0.0);
  const Tensor of_any =
      at::where(of_one.isinf(), of_row.nan_to_num(0.0, 0.0, 0.0), of_one);
  return {at::where(seen, difference, of_any), seen, largest_finite(of_seen),
          /*is_masked=*/true};
}

// Whether x is another multiple of the scores, where it is seen. Each head may
// have a scale of its own.
bool is_multiple_of(const Tensor& scores, const Tensor& x, const Tensor& seen,
                    double allowed) {
  const Tensor plain = scores.masked_fill(~seen, 0.0);
  const Tensor other = x.masked_fill(~seen, 0.0);
  const auto of_head = [](const Tensor& t) {
    return t.abs().amax({-2, -1}, /*keepdim=*/true);
  };
  const Tensor ratios = of_head(plain) / of_head(other);
  return largest_difference(other * ratios, plain) <= allowed;
}

// One of places alone is the same for all items; what depends on the query,
// too, is computed by itself, and scaled before it is added or after. Of one
// item alone, it may be anything but another multiple of the scores.
Tensor with_shown_bias(const ObservedCall& call, const Tensor& scores,
                       double scale, bool adds_mask) {
  Tensor given;
  if (adds_mask && call.mask.meaning == MaskMeaning::kAdditive &&
      at::is_expandable_to(call.mask.numbers.sizes(), scores.sizes())) {
    given = call.mask.numbers.masked_fill(call.mask.numbers.isinf(), 0.0);
  }
  // The code may scale by a number in float32.
  const double unit = call.dtype == at::kDouble ? 1e-7 : 1e-5;
  const double largest = largest_finite(scores);
  Tensor of_one, of_masked;
  const std::vector<Tensor> tensors = like_scores(call, scores);
  for (const Tensor& x : tensors) {
    const Added bias = added_to(scores, x, given, largest);
    const double allowed = unit * (bias.size + largest);
    if (bias.size <= 10 * allowed) continue;
    const Tensor& numbers = bias.numbers;
    const Tensor of_first = numbers.amax(0, /*keepdim=*/true);
    const bool is_same =
        scores.size(0) > 1 &&
        largest_difference(numbers, of_first.expand_as(numbers)) <= allowed;
    const bool is_multiple = is_multiple_of(scores, x, bias.seen, allowed);
    if (bias.is_masked) {
      const bool is_one = scores.size(0) == 1 && !is_multiple;
      if ((is_same || is_one) && !of_masked.defined()) of_masked = numbers;
      continue;
    }
    if (is_same ||
        (!is_multiple && computes(tensors, numbers, scale, allowed))) {
      return scores + numbers;
    }
    if (scores.size(0) > 1 || is_multiple) continue;
    // What meets the softmax next tells it; else the first.
    const bool is_last = computes(tensors, x.softmax(-1), 1.0, 1e-6);
    if (is_last) return scores + numbers;
    if (!of_one.defined()) of_one = numbers;
  }
  // A mask of its own is clearer than one beside a bias.
  if (of_masked.defined()) return scores + of_masked;
  require(of_one.defined());
  return scores + of_one;
}

}  // namespace

bool shows_added_line_or_cap(const ObservedCall& call) {
  if (!call.has_line_or_cap) call.has_line_or_cap = shows_a_pair(call);
  return *call.has_line_or_cap;
}

Tensor with_position_bias(const ObservedCall& call, PositionBias kind,
                          const Tensor& scores, double scale, bool adds_mask) {
  if (kind == PositionBias::kShown)
    return with_shown_bias(call, scores, scale, adds_mask);
  // It is the same beside scores that a fault has changed.
  if (!call.line && !call.unlined.contains(fingerprint(scores))) {
    call.line = straight_bias(call, scores);
    if (!call.line) call.unlined.insert(fingerprint(scores));
  }
  require(call.line.has_value());
  require(is_of_distance(kind) ? !call.line->of_keys || !call.line->sees_ahead
                               : call.line->of_keys);
  require(call.line->falls ==
          (kind == PositionBias::kFalling || kind == PositionBias::kLateKeys));
  return scores + call.line->numbers;
}

}  // namespace multihead::diagnosis
