// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "cli/bench/report.h"
#include "cli/terminal/format.h"
#include "cli/terminal/width.h"

namespace cli {
namespace {

constexpr int kWidth = 1030, kRow = 22, kBar = 12, kTop = 124, kGroup = 34;
constexpr int kRatios = 345, kRatiosWidth = 300;  // left end and width of the
constexpr int kShares = 715, kSharesWidth = 260;  // two panels

constexpr const char* kStyle = R"(<style>
  .page { fill: #ffffff } text { fill: #1f2328; font: 12px system-ui, sans-serif }
  .title { font-size: 18px; font-weight: 600 } .group { font-weight: 600 }
  .dim { fill: #656d76 } .line { stroke: #d0d7de; stroke-width: 1 }
  .one { stroke: #656d76; stroke-width: 1 }
  .ours { fill: #1f6feb } .slower { fill: #cf222e } .theirs { fill: #afb8c1 }
  .end { text-anchor: end } .middle { text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .dim { fill: #8d96a0 }
    .line { stroke: #30363d } .one { stroke: #8d96a0 }
    .ours { fill: #4493f8 } .slower { fill: #f85149 } .theirs { fill: #484f58 }
  }
</style>
)";

std::string label(double x, double y, const std::string& classes,
                  const std::string& text) {
  return format("<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">", x, y,
                classes.c_str()) +
         escaped(text) + "</text>\n";
}

struct Box {
  double x, y, width, height;
};

std::string bar(const Box& box, const char* classes) {
  return format(
      "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" "
      "class=\"%s\"/>\n",
      box.x, box.y, std::max(box.width, 1.0), box.height, classes);
}

std::string vertical(double x, double from, double to, const char* classes) {
  return format(
      "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" "
      "class=\"%s\"/>\n",
      x, from, x, to, classes);
}

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

std::string row(const Measurement& m, const RatioAxis& axis, double y) {
  const Entry &ours = m.ours(), &rival = *baseline(m);
  const double top = y - kBar + 1;
  const double one = axis.at(1), end = axis.at(rival.ratio);
  std::string text = label(kRatios - 12, y, "end", m.test->name);
  text += bar({std::min(one, end), top, std::abs(end - one), kBar},
              rival.ratio >= 1 ? "ours" : "slower");
  text += label(std::max(one, end) + 5, y, "", format("%.2f", rival.ratio));
  const auto width = [](double share) {
    return kSharesWidth * std::min(share, 1.0);
  };
  constexpr double kHalf = kBar / 2.0;
  text += bar({kShares, top, width(ours.share), kHalf}, "ours");
  text += bar({kShares, top + kHalf, width(rival.share), kHalf}, "theirs");
  text += label(kShares + width(std::max(ours.share, rival.share)) + 5, y, "",
                format("%.0f %%", 100 * ours.share));
  return text;
}

std::string axes(const RatioAxis& axis, double bottom) {
  constexpr double kFrom = kTop - 18;
  std::string text = label(kRatios, kTop - 42, "dim",
                           "times faster than PyTorch (logarithmic)");
  text += label(kShares, kTop - 42, "dim",
                "share of the peak: ours, PyTorch's in grey");
  for (double power = axis.low(); power <= axis.high(); ++power) {
    const double x = axis.at(std::exp2(power));
    text += vertical(x, kFrom, bottom, power == 0 ? "one" : "line");
    text += label(x, kFrom - 5, "dim middle", format("%g", std::exp2(power)));
  }
  for (int quarter = 0; quarter <= 4; ++quarter) {
    const double x = kShares + kSharesWidth * quarter / 4.0;
    text += vertical(x, kFrom, bottom, "line");
    text += label(x, kFrom - 5, "dim middle", format("%d %%", 25 * quarter));
  }
  return text;
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
  std::string body, group;
  double y = kTop;
  for (const Measurement* m : rows) {
    if (m->test->group != group) {
      y += kGroup - kRow;
      body += label(24, y, "group", group = m->test->group);
    }
    body += row(*m, axis, y);
    y += kRow;
  }
  const double bottom = y - kRow + 8, height = bottom + 24;
  return format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" "
             "height=\"%.0f\" viewBox=\"0 0 %d %.0f\" role=\"img\">\n",
             kWidth, height, kWidth, height) +
         "<title>multihead bench</title>\n" + kStyle +
         "<rect class=\"page\" width=\"100%\" height=\"100%\"/>\n" +
         label(24, 32, "title",
               "Attention on the CPU, multihead " + run.environment.version +
                   " and PyTorch") +
         label(24, 52, "dim", where_and_when(run, rows.empty() ? 1 : fewest)) +
         axes(axis, bottom) + body + "</svg>\n";
}

}  // namespace cli
