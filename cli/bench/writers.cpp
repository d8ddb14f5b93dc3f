// SPDX-License-Identifier: MIT
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/bench/report.h"

namespace cli {
namespace {

using Json = nlohmann::ordered_json;

template <typename T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : nullptr;
}

Json to_json(const Statistics& s) {
  return {{"best", s.best},
          {"lower_quartile", s.lower},
          {"median", s.median},
          {"upper_quartile", s.upper},
          {"rounds", s.count}};
}

Json to_json(const Rate& r) { return {{"best", r.best}, {"mean", r.mean}}; }

Json to_json(const Entry& e) {
  Json json = {{"name", name(e.who)}, {"status", name(e.status)}};
  if (e.status != Status::kRight) {
    json["fault"] = e.fault;
    return json;
  }
  json["seconds"] = to_json(e.time);
  json["rate"] = e.rate;
  json["share_of_peak"] = e.share;
  json["ratio"] = {{"best", e.ratio}, {"paired", to_json(e.paired)}};
  json["extra_memory_bytes"] = or_null(e.memory);
  return json;
}

const char* rate_unit(const Measurement& m) {
  return m.test->memory_bound ? "GB/s" : "GFLOP/s";
}

Json to_json(const Measurement& m) {
  Json entries = Json::array(), targets = Json::array();
  for (const Entry& entry : m.entries) entries.push_back(to_json(entry));
  for (const Demand& d : demands(m))
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

std::string percent(double share) {
  return std::to_string(std::lround(100 * share)) + " %";
}

}  // namespace

std::string to_json(const Run& run) {
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
      {"amx", run.has_tiles},
      {"pytorch_held_to_isa", run.same_isa},
      {"plan", {{"rounds", run.plan.rounds}, {"seconds", run.plan.seconds}}},
      {"right", right},
      {"measurements", std::move(measurements)}};
  return all.dump(2) + "\n";
}

std::string to_csv(const Run& run) {
  std::ostringstream text;
  text.precision(6);
  text << "group,case,shapes,pass,threads,contender,status,best_s,lower_"
          "quartile_s,"
          "median_s,upper_quartile_s,rounds,rate,rate_unit,share_of_peak,"
          "ratio_best,ratio_paired,extra_memory_bytes,peak_before,peak_after,"
          "noisy\n";
  for (const Measurement& m : run.measurements)
    for (const Entry& e : m.entries) {
      text << quoted(m.test->group) << ',' << quoted(m.test->name) << ','
           << quoted(shapes(*m.test)) << ',' << name(m.test->pass) << ','
           << m.threads << ',' << quoted(name(e.who)) << ',' << name(e.status)
           << ',';
      if (e.status == Status::kRight)
        text << e.time.best << ',' << e.time.lower << ',' << e.time.median
             << ',' << e.time.upper << ',' << e.time.count << ',' << e.rate
             << ',' << rate_unit(m) << ',' << e.share << ',' << e.ratio << ','
             << e.paired.median << ','
             << (e.memory ? std::to_string(*e.memory) : "");
      else
        text << ",,,,,,,,,,";
      text << ',' << m.peak.before.best << ',' << m.peak.after.best << ','
           << m.peak.noisy() << '\n';
    }
  return text.str();
}

std::string to_markdown(const Run& run) {
  std::ostringstream text;
  text << "| case | sizes | PyTorch | ours | times faster | of peak |\n"
          "|---|---|---:|---:|---:|---:|\n";
  for (const Measurement& m : run.measurements) {
    const Entry* rival = main_rival(m);
    if (!m.test->headline || m.threads != 1 || !m.right() || !rival) continue;
    text << "| " << m.test->name << " | " << shapes(*m.test) << " | "
         << name(rival->who) << " " << duration(rival->time.best) << " | "
         << duration(m.ours().time.best) << " | **"
         << three_digits(rival->ratio) << "** | " << percent(m.ours().share)
         << " |\n";
  }
  text << "\n" << where_and_when(run, 1) << ".\n";
  return text.str();
}

}  // namespace cli
