// SPDX-License-Identifier: MIT
#include <nlohmann/json.hpp>

#include "cli/bench/metrics.h"
#include "cli/bench/report.h"
#include "cli/terminal/format.h"

namespace cli {
namespace {

using Json = nlohmann::ordered_json;

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
  for (const Metric& metric : metrics())
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
      {"amx", run.has_tiles},
      {"pytorch_held_to_isa", run.same_isa},
      {"plan", {{"rounds", run.plan.rounds}, {"seconds", run.plan.seconds}}},
      {"right", right},
      {"measurements", std::move(measurements)}};
  return all.dump(2) + "\n";
}

std::string to_csv(const BenchRun& run) {
  std::string text = "group,case,shapes,pass,threads,contender,status";
  for (const Metric& metric : metrics())
    if (metric.csv) text += std::string(",") + metric.csv;
  text += ",peak_before,peak_after,noisy\n";
  for (const Measurement& m : run.measurements)
    for (const Entry& e : m.entries) {
      text += quoted(m.test->group) + ',' + quoted(m.test->name) + ',' +
              quoted(shapes(*m.test)) + ',' + name(m.test->pass) + ',' +
              std::to_string(m.threads) + ',' + quoted(name(e.who)) + ',' +
              name(e.status);
      for (const Metric& metric : metrics())
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

}  // namespace cli
