// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "cli/bench/report.h"

namespace cli {
namespace {

std::string print(const char* format, auto... values) {
  char text[160];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

std::string percent(double share) { return print("%.0f %%", 100 * share); }

std::string times(double ratio) { return print("×%.2f", ratio); }

std::string mebibytes(const std::optional<int64_t>& bytes) {
  if (!bytes) return "–";
  return *bytes < 1 << 20 ? "< 1" : print("%.0f", *bytes / 1048576.0);
}

std::string plural(int count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

Cell verdict(const Measurement& measurement, Who who) {
  Cell cell;
  for (const Demand& demand : demands(measurement)) {
    if (demand.who != who) continue;
    if (!cell.text.empty()) cell.text += ", ";
    cell.text +=
        (demand.met() ? "✓ ≥ " : "✗ ≥ ") +
        (demand.wanted <= 1 ? percent(demand.wanted) : times(demand.wanted)) +
        (demand.of_memory ? " MiB" : "");
    if (cell.style != Style::kBad)
      cell.style = demand.met() ? Style::kGood : Style::kBad;
  }
  if (who == Who::kOurs && measurement.scaling)
    cell.text = times(*measurement.scaling) + " of one thread" +
                (cell.text.empty() ? "" : ", " + cell.text);
  return cell;
}

std::vector<Column> columns(const std::vector<BenchCase>& cases) {
  int width = 0;
  for (const BenchCase& test : cases)
    width = std::max(width, 2 + display_width(test.name));
  return {{.title = "case", .width = width},
          {.title = "threads", .right = true},
          {.title = "who", .width = 10},
          {.title = "best", .width = 8, .right = true},
          {.title = "median", .width = 8, .right = true, .dispensable = true},
          {.title = "spread", .right = true, .dispensable = true},
          {.title = "G/s", .width = 5, .right = true, .dispensable = true},
          {.title = "of peak", .right = true},
          {.title = "MiB", .width = 6, .right = true, .dispensable = true},
          {.title = "× best", .width = 6, .right = true},
          {.title = "× paired", .right = true, .dispensable = true},
          {.title = "target"}};
}

// The best rate of each unit that shares are of, and of AMX beside it.
std::map<std::string, double> peaks(const Run& run) {
  std::map<std::string, double> all;
  const auto raise = [&](const Measurement& m, const std::string& unit,
                         const char* in, double rate) {
    double& best = all[unit + ", " + plural(m.threads, "thread") + ", " + in];
    best = std::max(best, rate);
  };
  for (const Measurement& m : run.measurements) {
    raise(m, m.peak.unit, m.test->memory_bound ? "GB/s" : "GFLOP/s",
          m.peak.value());
    if (m.peak.tiles) raise(m, "AMX, bf16", "GFLOP/s", *m.peak.tiles);
  }
  return all;
}

}  // namespace

std::string three_digits(double value) {
  if (!(value > 0)) return "0";
  const int digits = 2 - static_cast<int>(std::floor(std::log10(value)));
  return print("%.*f", std::clamp(digits, 0, 6), value);
}

std::string duration(double seconds) {
  if (seconds < 1e-3) return three_digits(seconds * 1e6) + " µs";
  if (seconds < 1) return three_digits(seconds * 1e3) + " ms";
  return three_digits(seconds) + " s";
}

std::string where_and_when(const Run& run, int threads) {
  const Environment& e = run.environment;
  return e.cpu + ", " + plural(threads, "thread") + ", torch " +
         e.torch_running + (e.blas.empty() ? "" : " with " + e.blas) +
         (run.same_isa ? ", held to " + run.isa : "") + ", " + run.date;
}

const Entry* main_rival(const Measurement& measurement) {
  for (const Who who : {Who::kSdpa, Who::kNnModule, Who::kTorchNn})
    if (const Entry* entry = measurement.find(who);
        entry && entry->status == Status::kRight)
      return entry;
  return nullptr;
}

BenchTable::BenchTable(const std::vector<BenchCase>& cases, Terminal terminal)
    : table_(columns(cases), terminal) {}

void BenchTable::opening(const Run& run) {
  const Environment& e = run.environment;
  table_.line("multihead " + e.version + " · torch " + e.torch_running + " · " +
                  e.blas + " · " + e.cpu + " · kernels for " + run.isa +
                  (run.same_isa ? ", PyTorch held to it · " : " · ") + run.date,
              Style::kBold);
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
    if (entry.status == Status::kRight)
      cells.insert(cells.end(),
                   {{duration(entry.time.best)},
                    {duration(entry.time.median), Style::kDim},
                    {percent(entry.time.spread()), Style::kDim},
                    {three_digits(entry.rate)},
                    {percent(entry.share)},
                    {mebibytes(entry.memory), Style::kDim},
                    {first ? "" : times(entry.ratio)},
                    {first ? "" : times(entry.paired.median), Style::kDim},
                    verdict(m, entry.who)});
    else
      cells.push_back({name(entry.status), Style::kBad});
    cells.resize(12);
    table_.row(cells);
  }
  note(m);
}

void BenchTable::note(const Measurement& m) {
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

void BenchTable::closing(const Run& run, double seconds) {
  int wrong = 0, met = 0, noisy = 0;
  std::vector<std::string> missed;
  for (const Measurement& m : run.measurements) {
    wrong += !m.right();
    noisy += m.peak.noisy();
    for (const Demand& d : demands(m)) {
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
  if (run.has_tiles || run.isa == "portable" ||
      (run.isa == "avx2" && !run.same_isa))
    table_.line(
        "Targets are for kernels of AVX-512 and PyTorch without AMX, or "
        "AVX2 on both sides; so not for this run.");
  if (noisy > 0)
    table_.line(plural(noisy, "measurement") + " on a machine that others used",
                Style::kBad);
  const size_t targets = met + missed.size();
  table_.line(plural(run.measurements.size(), "measurement") + ", " +
                  (wrong ? plural(wrong, "wrong result") + ", " : "") +
                  std::to_string(met) + " of " + std::to_string(targets) +
                  " targets met. " + print("%.0f s", seconds),
              wrong ? Style::kBad : Style::kGood);
}

}  // namespace cli
