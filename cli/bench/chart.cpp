// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "cli/bench/metrics.h"
#include "cli/bench/report.h"
#include "cli/terminal/format.h"
#include "cli/terminal/svg.h"

namespace cli {
namespace {

constexpr int kWidth = 1030, kRow = 22, kBar = 12, kTop = 124, kGroup = 34;
constexpr int kRatios = 345, kRatiosWidth = 300;  // left end and width of the
constexpr int kShares = 715, kSharesWidth = 260;  // two panels

// Ratios lie on a logarithmic axis: twice as fast is as long as half as fast.
class RatioAxis {
 public:
  explicit RatioAxis(const std::vector<const Measurement*>& rows) {
    for (const Measurement* m : rows) {
      low_ = std::min(low_, std::floor(std::log2(baseline(*m)->ratio)));
      high_ = std::max(high_, std::ceil(std::log2(baseline(*m)->ratio)));
    }
  }
  double at(double ratio) const {
    return kRatios + kRatiosWidth * (std::log2(ratio) - low_) / (high_ - low_);
  }
  double low() const { return low_; }
  double high() const { return high_; }

 private:
  double low_ = 0, high_ = 1;
};

void draw_row(Svg& svg, const Measurement& m, const RatioAxis& axis, double y) {
  const Entry &ours = m.ours(), &theirs = *baseline(m);
  const double top = y - kBar + 1;
  const double one = axis.at(1), end = axis.at(theirs.ratio);
  const auto bar = [&](double x, double above, double width, double height,
                       const char* classes) {
    svg.rectangle({x, above, std::max(width, 1.0), height}, classes);
  };
  svg.write({kRatios - 12, y}, m.test->name, {.anchor = Anchor::kEnd});
  bar(std::min(one, end), top, std::abs(end - one), kBar,
      theirs.ratio >= 1 ? "ours" : "slower");
  svg.write({std::max(one, end) + 5, y}, format("%.2f", theirs.ratio));
  const auto width = [](double share) {
    return kSharesWidth * std::min(share, 1.0);
  };
  constexpr double kHalf = kBar / 2.0;
  bar(kShares, top, width(ours.share), kHalf, "ours");
  bar(kShares, top + kHalf, width(theirs.share), kHalf, "theirs");
  svg.write({kShares + width(std::max(ours.share, theirs.share)) + 5, y},
            percent(ours.share));
}

void draw_axes(Svg& svg, const RatioAxis& axis, double bottom) {
  constexpr double kFrom = kTop - 18;
  const Lettering dim{.tone = "dim"};
  const Lettering tick{.tone = "dim", .anchor = Anchor::kMiddle};
  svg.write({kRatios, kTop - 42}, "times faster than PyTorch (logarithmic)",
            dim);
  svg.write({kShares, kTop - 42}, "share of the peak: ours, PyTorch's in grey",
            dim);
  for (double power = axis.low(); power <= axis.high(); ++power) {
    const double x = axis.at(std::exp2(power));
    svg.line({x, kFrom}, {x, bottom}, power == 0 ? "one" : "grid");
    svg.write({x, kFrom - 5}, format("%g", std::exp2(power)), tick);
  }
  for (int quarter = 0; quarter <= 4; ++quarter) {
    const double x = kShares + kSharesWidth * quarter / 4.0;
    svg.line({x, kFrom}, {x, bottom}, "grid");
    svg.write({x, kFrom - 5}, percent(quarter / 4.0), tick);
  }
}

}  // namespace

std::string to_svg(const BenchRun& run) {
  int fewest = std::numeric_limits<int>::max();
  for (const Measurement& m : run.measurements)
    fewest = std::min(fewest, m.threads);
  std::vector<const Measurement*> rows;
  for (const Measurement& m : run.measurements)
    if (m.threads == fewest && m.right() && baseline(m)) rows.push_back(&m);

  const RatioAxis axis(rows);
  std::string group;
  double bottom = kTop - kRow + 8;
  for (const Measurement* m : rows) {
    if (m->test->group != group) bottom += kGroup - kRow;
    group = m->test->group;
    bottom += kRow;
  }
  Svg svg;
  svg.write({24, 32},
            "Attention on the CPU, multihead " + run.environment.version +
                " and PyTorch",
            {.size = 18, .bold = true});
  svg.write({24, 52}, where_and_when(run, rows.empty() ? 1 : fewest),
            {.tone = "dim"});
  draw_axes(svg, axis, bottom);
  double y = kTop;
  group.clear();
  for (const Measurement* m : rows) {
    if (m->test->group != group) {
      y += kGroup - kRow;
      svg.write({24, y}, group = m->test->group, {.bold = true});
    }
    draw_row(svg, *m, axis, y);
    y += kRow;
  }
  return svg.page(kWidth, bottom + 24, "multihead bench");
}

}  // namespace cli
