// SPDX-License-Identifier: MIT
#include <algorithm>
#include <map>

#include "cli/bench/isa.h"
#include "cli/bench/metrics.h"
#include "cli/bench/report.h"
#include "cli/terminal/format.h"
#include "cli/terminal/width.h"

namespace cli {
namespace {

std::string plural(int count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

Cell verdict(const Measurement& measurement, Implementation who) {
  Cell cell;
  for (const TargetResult& demand : target_results(measurement)) {
    if (demand.who != who) continue;
    if (!cell.text.empty()) cell.text += ", ";
    cell.text +=
        (demand.met() ? "✓ ≥ " : "✗ ≥ ") +
        (demand.wanted <= 1 ? percent(demand.wanted) : times(demand.wanted)) +
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
  for (const Metric& metric : metrics())
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

}  // namespace

std::string where_and_when(const BenchRun& run, int threads) {
  const Environment& e = run.environment;
  return e.cpu + ", " + plural(threads, "thread") + ", torch " +
         e.torch_running + (e.blas.empty() ? "" : " with " + e.blas) +
         (run.same_isa ? ", held to " + run.isa : "") + ", " + run.date;
}

const Entry* baseline(const Measurement& measurement) {
  for (const Implementation who :
       {Implementation::kSdpa, Implementation::kNnModule,
        Implementation::kTorchNn})
    if (const Entry* entry = measurement.find(who);
        entry && entry->status == Status::kRight)
      return entry;
  return nullptr;
}

BenchTable::BenchTable(const std::vector<BenchCase>& cases, Terminal terminal)
    : table_(table_columns(cases), terminal) {}

void BenchTable::opening(const BenchRun& run) {
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
    if (entry.status == Status::kRight) {
      for (const Metric& metric : metrics())
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
  const TargetSet made_for = facts_of(run.isa).targets;
  if (run.has_tiles || made_for == TargetSet::kNone ||
      (made_for == TargetSet::kAvx2 && !run.same_isa))
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
                  " targets met. " + format("%.0f s", seconds),
              wrong ? Style::kBad : Style::kGood);
}

}  // namespace cli
