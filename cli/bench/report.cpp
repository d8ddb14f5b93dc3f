// SPDX-License-Identifier: MIT
#include "cli/bench/report.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/bench/targets.h"
#include "cli/terminal/text.h"
#include "pictures/canvas.h"

namespace cli {

using namespace multihead::pictures;

namespace {

using Json = nlohmann::ordered_json;

// A number or a text; null: not measured.
using Value = Json;

struct Metric {
  const char* csv = nullptr;   // the column in a CSV file, if any
  const char* json = nullptr;  // the place in a contender's object, if any
  Value (*value)(const Measurement&, const Entry&);
  Column column = {};  // in the terminal; without a title: none
  std::string (*shown)(const Value&) = nullptr;  // there
  const char* help = nullptr;   // what a column of the terminal says
  Style style = Style::kPlain;  // in the terminal
  bool theirs = false;  // compares with ours, which the terminal leaves out
};

const char* rate_unit(const Measurement& measurement) {
  return measurement.test->memory_bound ? "GB/s" : "GFLOP/s";
}

template <std::string (*shown)(double)>
std::string number(const Value& value) {
  return shown(value.get<double>());
}

std::string mebibytes(const Value& bytes) {
  if (bytes.is_null()) return "–";
  const double mebi = bytes.get<double>() / 1048576;
  return mebi < 1 ? "< 1" : format("%.0f", mebi);
}

Value memory(const Measurement&, const Entry& entry) {
  return entry.memory ? Value(*entry.memory) : Value();
}

const Metric kMetrics[] = {
    {.csv = "best_s",
     .json = "/seconds/best",
     .value = [](auto&, auto& e) -> Value { return e.time.best; },
     .column = {.title = "best", .width = 8, .right = true},
     .shown = number<duration>,
     .help = "time of the fastest call"},
    {.csv = "lower_quartile_s",
     .json = "/seconds/lower_quartile",
     .value = [](auto&, auto& e) -> Value { return e.time.lower; }},
    {.csv = "median_s",
     .json = "/seconds/median",
     .value = [](auto&, auto& e) -> Value { return e.time.median; },
     .column = {"median", 8, /*right=*/true, /*dispensable=*/true},
     .shown = number<duration>,
     .help = "of the time of one call",
     .style = Style::kDim},
    {.csv = "upper_quartile_s",
     .json = "/seconds/upper_quartile",
     .value = [](auto&, auto& e) -> Value { return e.time.upper; }},
    {.csv = "rounds",
     .json = "/seconds/rounds",
     .value = [](auto&, auto& e) -> Value { return e.time.count; }},
    {.value = [](auto&, auto& e) -> Value { return e.time.spread(); },
     .column = {"spread", 0, /*right=*/true, /*dispensable=*/true},
     .shown = number<percent>,
     .help = "distance of the quartiles as a share of the median",
     .style = Style::kDim},
    {.csv = "rate",
     .json = "/rate",
     .value = [](auto&, auto& e) -> Value { return e.rate; },
     .column = {"G/s", 5, /*right=*/true, /*dispensable=*/true},
     .shown = number<three_digits>,
     .help = "GFLOP/s of useful work: pairs that a mask hides do not count;\n"
             "GB/s in \"few queries\", \"decode\" and \"paged\""},
    {.csv = "rate_unit",
     .value = [](auto& m, auto&) -> Value { return rate_unit(m); }},
    {.csv = "share_of_peak",
     .json = "/share_of_peak",
     .value = [](auto&, auto& e) -> Value { return e.share; },
     .column = {.title = "of peak", .right = true},
     .shown = number<percent>,
     .help = "share of what the processor's multiply-add units (or memory) "
             "gave in\nthe same process right before and after, without AMX"},
    // In the terminal, memory stands before what compares with ours.
    {.value = memory,
     .column = {"MiB", 6, /*right=*/true, /*dispensable=*/true},
     .shown = mebibytes,
     .help = "memory that the first call took, its results included",
     .style = Style::kDim},
    {.csv = "ratio_best",
     .json = "/ratio/best",
     .value = [](auto&, auto& e) -> Value { return e.ratio; },
     .column = {.title = "× best", .width = 6, .right = true},
     .shown = number<times>,
     .help = "their best time over ours",
     .theirs = true},
    {.json = "/ratio/paired/best",
     .value = [](auto&, auto& e) -> Value { return e.paired.best; }},
    {.json = "/ratio/paired/lower_quartile",
     .value = [](auto&, auto& e) -> Value { return e.paired.lower; }},
    {.csv = "ratio_paired",
     .json = "/ratio/paired/median",
     .value = [](auto&, auto& e) -> Value { return e.paired.median; },
     .column = {"× paired", 0, /*right=*/true, /*dispensable=*/true},
     .shown = number<times>,
     .help = "median of their time over ours, round by round",
     .style = Style::kDim,
     .theirs = true},
    {.json = "/ratio/paired/upper_quartile",
     .value = [](auto&, auto& e) -> Value { return e.paired.upper; }},
    {.json = "/ratio/paired/rounds",
     .value = [](auto&, auto& e) -> Value { return e.paired.count; }},
    {.csv = "extra_memory_bytes",
     .json = "/extra_memory_bytes",
     .value = memory},
};

// --- The table ---------------------------------------------------------------

Cell verdict(const Measurement& measurement, Implementation who) {
  Cell cell;
  for (const TargetResult& demand : target_results(measurement)) {
    if (demand.who != who) continue;
    if (!cell.text.empty()) cell.text += ", ";
    cell.text += (demand.met() ? "✓ ≥ " : "✗ ≥ ") +
                 (demand.what == kShareOfPeak ? percent(demand.wanted)
                                              : times(demand.wanted)) +
                 (demand.of_memory ? " MiB" : "");
    if (cell.style != Style::kBad)
      cell.style = demand.met() ? Style::kGood : Style::kBad;
  }
  if (who == Implementation::kOurs && measurement.scaling)
    cell.text = times(*measurement.scaling) + " of one thread" +
                (cell.text.empty() ? "" : ", " + cell.text);
  return cell;
}

std::vector<Column> table_columns(const std::vector<BenchCase>& cases) {
  int width = 0;
  for (const BenchCase& test : cases)
    width = std::max(width, 2 + columns(test.name));
  std::vector<Column> all = {{.title = "case", .width = width},
                             {.title = "threads", .right = true},
                             {.title = "who", .width = 10}};
  for (const Metric& metric : kMetrics)
    if (metric.shown) all.push_back(metric.column);
  all.push_back({.title = "target"});
  return all;
}

// The best rate of each unit that shares are of, and of AMX beside it.
std::map<std::string, double> peaks(const BenchRun& run) {
  std::map<std::string, double> all;
  const auto raise = [&](const Measurement& m, const std::string& unit,
                         const char* in, double rate) {
    double& best = all[unit + ", " + plural(m.threads, "thread") + ", " + in];
    best = std::max(best, rate);
  };
  for (const Measurement& m : run.measurements) {
    raise(m, m.peak.unit, rate_unit(m), m.peak.value());
    if (m.peak.tiles) raise(m, "AMX, bf16", "GFLOP/s", *m.peak.tiles);
  }
  return all;
}

// "AMD EPYC 9754, 1 thread, torch 2.13.0 with MKL 2024.0, 2026-11-21"
std::string where_and_when(const BenchRun& run, int threads) {
  const Environment& e = run.environment;
  return e.cpu + ", " + plural(threads, "thread") + ", torch " +
         e.torch_running + (e.blas.empty() ? "" : " with " + e.blas) +
         (run.same_isa ? ", held to " + run.isa : "") + ", " + run.date;
}

// The entry of PyTorch that ours is compared with first: SDPA, nn.MHA,
// torch::nn; nullptr: none is right.
const Entry* baseline(const Measurement& measurement) {
  for (const Implementation who :
       {Implementation::kSdpa, Implementation::kNnModule,
        Implementation::kTorchNn})
    if (const Entry* entry = measurement.find(who);
        entry && entry->status == Status::kRight)
      return entry;
  return nullptr;
}

// --- Files -------------------------------------------------------------------

template <typename T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : nullptr;
}

Json to_json(const Rate& r) { return {{"best", r.best}, {"mean", r.mean}}; }

Json to_json(const Measurement& m, const Entry& e) {
  Json json = {{"name", name(e.who)}, {"status", name(e.status)}};
  if (e.status != Status::kRight) {
    json["fault"] = e.fault;
    return json;
  }
  for (const Metric& metric : kMetrics)
    if (metric.json) json[Json::json_pointer(metric.json)] = metric.value(m, e);
  return json;
}

Json to_json(const Measurement& m) {
  Json entries = Json::array(), targets = Json::array();
  for (const Entry& entry : m.entries) entries.push_back(to_json(m, entry));
  for (const TargetResult& d : target_results(m))
    targets.push_back({{"what", d.what},
                       {"wanted", d.wanted},
                       {"reached", d.reached},
                       {"met", d.met()}});
  return {{"group", m.test->group},
          {"case", m.test->name},
          {"shapes", shapes(*m.test)},
          {"pass", name(m.test->pass)},
          {"threads", m.threads},
          {"rate_unit", rate_unit(m)},
          {"peak",
           {{"unit", m.peak.unit},
            {"before", to_json(m.peak.before)},
            {"after", to_json(m.peak.after)},
            {"noisy", m.peak.noisy()},
            {"amx", or_null(m.peak.tiles)}}},
          {"contenders", std::move(entries)},
          {"scaling", or_null(m.scaling)},
          {"targets", std::move(targets)}};
}

// As RFC 4180 wants it: quotes around everything that could need them.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) result += c == '"' ? "\"\"" : std::string(1, c);
  return result + "\"";
}

// In six digits, if it is a number; no text of a metric needs quotes.
std::string plain(const Value& value) {
  if (value.is_null()) return "";
  if (value.is_string()) return value.get<std::string>();
  return value.is_number_float() ? format("%g", value.get<double>())
                                 : value.dump();
}

}  // namespace

std::string describe_metrics() {
  std::string text;
  for (const Metric& metric : kMetrics) {
    if (!metric.help) continue;
    std::istringstream lines(metric.help);
    std::string title = metric.column.title;
    for (std::string line; std::getline(lines, line); title.clear())
      text += "  " + padded(title, 8) + "  " + line + "\n";
  }
  return text;
}

std::string three_digits(double value) {
  if (!(value > 0)) return "0";
  const int digits = 2 - static_cast<int>(std::floor(std::log10(value)));
  return format("%.*f", std::clamp(digits, 0, 6), value);
}

std::string duration(double seconds) {
  if (seconds < 1e-3) return three_digits(seconds * 1e6) + " µs";
  if (seconds < 1) return three_digits(seconds * 1e3) + " ms";
  return three_digits(seconds) + " s";
}

std::string percent(double share) { return format("%.0f %%", 100 * share); }

std::string times(double ratio) { return format("×%.2f", ratio); }

std::string headline(const BenchRun& run) {
  const Environment& e = run.environment;
  return "multihead " + e.version + (e.commit.empty() ? "" : ", " + e.commit) +
         " · torch " + e.torch_running + " · " + e.blas + " · " + e.cpu +
         " · kernels for " + run.isa +
         (run.same_isa ? ", PyTorch held to it" : "") +
         (run.family.empty() ? "" : " · family " + run.family) + " · " +
         run.date;
}

BenchTable::BenchTable(const std::vector<BenchCase>& cases)
    : table_(table_columns(cases)) {}

void BenchTable::opening(const BenchRun& run) {
  table_.line(headline(run), Style::kBold);
  table_.line("");
  table_.header();
}

void BenchTable::add(const Measurement& m) {
  if (m.test->group != group_) {
    if (!group_.empty()) table_.line("");
    table_.line(group_ = m.test->group, Style::kBold);
  }
  for (const Entry& entry : m.entries) {
    const bool first = &entry == &m.entries.front();
    std::vector<Cell> cells = {
        {first ? "  " + m.test->name : ""},
        {first ? std::to_string(m.threads) : "", Style::kDim},
        {name(entry.who), first ? Style::kBold : Style::kPlain}};
    if (entry.status == Status::kRight) {
      for (const Metric& metric : kMetrics)
        if (metric.shown)
          cells.push_back({first && metric.theirs
                               ? ""
                               : metric.shown(metric.value(m, entry)),
                           metric.style});
      cells.push_back(verdict(m, entry.who));
    } else {
      cells.push_back({name(entry.status), Style::kBad});
    }
    table_.row(cells);
  }
  for (const Entry& entry : m.entries)
    if (entry.status != Status::kRight)
      table_.line("      " + name(entry.who) + ": " + entry.fault, Style::kBad);
  if (m.peak.noisy())
    table_.line("      noisy: the peak was " + three_digits(m.peak.value()) +
                    ", on average " + three_digits(m.peak.before.mean) +
                    " before and " + three_digits(m.peak.after.mean) +
                    " after (" + m.peak.unit + ")",
                Style::kBad);
}

void BenchTable::closing(const BenchRun& run, double seconds) {
  int wrong = 0, met = 0, noisy = 0;
  std::vector<std::string> missed;
  for (const Measurement& m : run.measurements) {
    wrong += !m.right();
    noisy += m.peak.noisy();
    for (const TargetResult& d : target_results(m)) {
      met += d.met();
      if (!d.met())
        missed.push_back(m.test->name + ": " + d.what + " " +
                         three_digits(d.reached) + " of " +
                         three_digits(d.wanted));
    }
  }
  table_.line("");
  for (const auto& [unit, rate] : peaks(run))
    table_.line("peak  " + unit + ": " + three_digits(rate), Style::kDim);
  for (const std::string& text : missed) table_.line("missed  " + text);
  const auto& available = run.environment.kernels_available;
  if (run.family == name(Family::kOther))
    table_.line("No targets against PyTorch for these kernels.");
  else if (!run.same_isa && !available.empty() &&
           facts_of(available.back()).family != facts_of(run.isa).family)
    table_.line(
        "PyTorch may use more than these kernels: targets hold with "
        "--same-isa.");
  if (noisy > 0)
    table_.line(plural(noisy, "measurement") + " on a machine that others used",
                Style::kBad);
  const size_t targets = met + missed.size();
  table_.line(plural(run.measurements.size(), "measurement") + ", " +
                  (wrong ? plural(wrong, "wrong result") + ", " : "") +
                  std::to_string(met) + " of " + std::to_string(targets) +
                  " targets met. " + format("%.0f s", seconds),
              wrong ? Style::kBad : Style::kGood);
}

std::string to_json(const BenchRun& run) {
  Json measurements = Json::array();
  bool right = true;
  for (const Measurement& m : run.measurements) {
    measurements.push_back(to_json(m));
    right = right && m.right();
  }
  const Json all = {
      {"environment", to_json(run.environment)},
      {"date", run.date},
      {"isa", run.isa},
      {"family", run.family},
      {"amx", run.has_tiles},
      {"pytorch_held_to_isa", run.same_isa},
      {"plan", {{"rounds", run.plan.rounds}, {"seconds", run.plan.seconds}}},
      {"right", right},
      {"measurements", std::move(measurements)}};
  return all.dump(2) + "\n";
}

std::string to_csv(const BenchRun& run) {
  std::string text = "group,case,shapes,pass,threads,contender,status";
  for (const Metric& metric : kMetrics)
    if (metric.csv) text += std::string(",") + metric.csv;
  text += ",peak_before,peak_after,noisy\n";
  for (const Measurement& m : run.measurements)
    for (const Entry& e : m.entries) {
      text += quoted(m.test->group) + ',' + quoted(m.test->name) + ',' +
              quoted(shapes(*m.test)) + ',' + name(m.test->pass) + ',' +
              std::to_string(m.threads) + ',' + quoted(name(e.who)) + ',' +
              name(e.status);
      for (const Metric& metric : kMetrics)
        if (metric.csv)
          text += ',' +
                  (e.status == Status::kRight ? plain(metric.value(m, e)) : "");
      text += format(",%g,%g,%d\n", m.peak.before.best, m.peak.after.best,
                     m.peak.noisy());
    }
  return text;
}

std::string to_markdown(const BenchRun& run) {
  std::string text =
      "| case | sizes | PyTorch | ours | times faster | of peak |\n"
      "|---|---|---:|---:|---:|---:|\n";
  for (const Measurement& m : run.measurements) {
    const Entry* rival = baseline(m);
    if (!m.test->headline || m.threads != 1 || !m.right() || !rival) continue;
    text += "| " + m.test->name + " | " + shapes(*m.test) + " | " +
            name(rival->who) + " " + duration(rival->time.best) + " | " +
            duration(m.ours().time.best) + " | **" +
            three_digits(rival->ratio) + "** | " + percent(m.ours().share) +
            " |\n";
  }
  return text + "\n" + where_and_when(run, 1) + ".\n";
}

// --- The chart ---------------------------------------------------------------

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
