// SPDX-License-Identifier: MIT
//
// `multihead info`: where a run happens.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include "cli/commands.h"
#include "cli/environment.h"
#include "cli/terminal/output.h"
#include "cli/terminal/text.h"
#include "multihead/functional.h"
#include "multihead/install.h"
#include "multihead/mxint8.h"
#include "multihead/version.h"

namespace cli {

extern const char* const kCommit;  // commit.cmake writes it

namespace {

// The flags by which kernels are chosen, as Linux names them: x86's and ARM's.
constexpr std::array kFlags = {
    "avx2",        "fma",      "f16c",     "avx512f", "avx512bw", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_bf16", "asimd",   "sve",      "bf16"};

// What chooses instructions, threads or the order of sums, here and in what
// PyTorch runs on.
constexpr std::array kSettings = {
    "MULTIHEAD_ISA",           "MULTIHEAD_LINEAR",   "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",      "DNNL_MAX_CPU_ISA",   "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS"};

// The value of the first line "name : value"; the file has one per processor.
std::string cpuinfo(const std::string& name) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (line.starts_with(name) && colon != std::string::npos &&
        line.find_first_not_of(" \t", name.size()) == colon)
      return line.substr(std::min(colon + 2, line.size()));
  }
  return "";
}

std::vector<std::string> settings() {
  std::vector<std::string> found;
  for (const char* name : kSettings)
    if (const char* value = std::getenv(name))
      found.push_back(std::string(name) + "=" + value);
  return found;
}

std::vector<std::string> isa_flags() {
  const std::string present =
      " " + cpuinfo("flags") + " " + cpuinfo("Features") + " ";
  std::vector<std::string> flags;
  for (const std::string flag : kFlags)
    if (present.find(" " + flag + " ") != std::string::npos)
      flags.push_back(flag);
  return flags;
}

std::string first_match(const std::string& text, const char* pattern) {
  std::smatch match;
  return std::regex_search(text, match, std::regex(pattern)) ? match[1].str()
                                                             : "";
}

// Why an ordinary call, if any, would not run fused.
std::string why_not_fused() {
  const at::Tensor x = at::empty({1, 1, 16, 64}, at::kFloat);
  const multihead::AttentionOptions ordinary;
  return multihead::route(x, x, x, ordinary).reason;
}

// What attention loses by a cache of one byte a number: the error's norm over
// the result's, of keys and values that are normal.
double int8_error() {
  const multihead::BackendGuard guard(multihead::Backend::kAuto);
  const auto draws = at::make_generator<at::CPUGeneratorImpl>(/*seed=*/0);
  const auto normal = [&](int64_t rows) {
    return at::randn({1, 1, rows, 128}, draws);
  };
  const at::Tensor query = normal(64), key = normal(4096), value = normal(4096);
  const at::Tensor out =
      multihead::scaled_dot_product_attention(query, key, value);
  const at::Tensor stored = multihead::scaled_dot_product_attention(
      query, multihead::to_mxint8(key), multihead::to_mxint8(value));
  return (stored - out).norm().item<double>() / out.norm().item<double>();
}

constexpr const char* kFooter = R"(
Examples:
  multihead info
  multihead info --json
)";

std::string or_absent(const std::string& text) {
  return text.empty() ? "not in this torch" : text;
}

int info(bool json) {
  const Environment e = detect_environment();
  if (json) {
    write_output(to_json(e).dump(2) + "\n");
    return 0;
  }
  Table table({{.title = "", .width = 9}, {.title = ""}});
  const auto say = [&](const char* name, const std::string& value) {
    table.row({{name, Style::kDim}, {value}});
  };
  say("multihead", e.version + (e.commit.empty() ? "" : ", " + e.commit));
  say("torch", e.torch_running + " (built against " + e.torch_built +
                   "), kernels for " + e.torch_isa);
  say("BLAS", or_absent(e.blas));
  say("oneDNN", or_absent(e.onednn));
  say("CPU", e.cpu + (e.cpu_id.empty() ? "" : " (" + e.cpu_id + ")"));
  say("flags", e.isa.empty() ? "none that matter" : joined(e.isa));
  say("threads", std::to_string(e.threads) + " of " +
                     std::to_string(e.processors) + " processors");
  if (!e.settings.empty()) say("set", printable(joined(e.settings)));
  say("exact", "available: PyTorch's own order of operations");
  say("fused", e.fused.empty() ? "available: kernels for " + e.kernels +
                                     " (MULTIHEAD_ISA may name " +
                                     joined(e.kernels_available) + ")"
                               : "not available: " + e.fused);
  say("int8", c10::str("KVCache of int8: each number within 1/128 of the "
                       "largest of its 32, attention within ",
                       std::round(1000 * e.int8_error) / 10,
                       " % (4096 normal keys, width 128)"));
  say("linear", e.linear.empty()
                    ? "float32 projections of layers by oneDNN instead of MKL; "
                      "install(linear=True), which is recommended, has all "
                      "matrix products there"
                    : "install(linear=True) changes nothing: " + e.linear);
  return 0;
}

}  // namespace

// A name alone does not tell: virtual machines often hide it, and ARM has none.
std::string cpu_id() {
  const std::string vendor = cpuinfo("vendor_id");
  const std::string implementer = cpuinfo("CPU implementer");
  if (!implementer.empty())
    return "implementer " + implementer + ", part " + cpuinfo("CPU part");
  return vendor.empty() ? ""
                        : vendor + ", family " + cpuinfo("cpu family") +
                              ", model " + cpuinfo("model");
}

Environment detect_environment() {
  const std::string config = at::show_config();
  const std::string cpu = cpuinfo("model name");
  return {
      .version = MULTIHEAD_VERSION,
      .commit = kCommit,
      .torch_built = MULTIHEAD_TORCH_VERSION,
      .torch_running = first_match(config, "TORCH_VERSION=([^,\\s]+)"),
      .torch_isa = at::get_cpu_capability(),
      .blas = at::hasMKL() ? "MKL " + first_match(at::get_mkl_version(),
                                                  "Version ([0-9.]+)")
                           : first_match(config, "BLAS_INFO=([^,\\s]+)"),
      .onednn = at::hasMKLDNN()
                    ? first_match(at::get_mkldnn_version(), "v([0-9.]+)")
                    : "",
      .cpu = cpu.empty() ? "unknown processor" : cpu,
      .cpu_id = cpu_id(),
      .isa = isa_flags(),
      .threads = at::get_num_threads(),
      .processors = std::thread::hardware_concurrency(),
      .kernels = multihead::kernel_isa(),
      .kernels_available = multihead::kernel_isas(),
      .fused = why_not_fused(),
      .linear = multihead::why_not_linear(),
      .int8_error = int8_error(),
      .settings = settings(),
  };
}

nlohmann::ordered_json to_json(const Environment& e) {
  return {{"version", e.version},
          {"commit", e.commit},
          {"torch",
           {{"built", e.torch_built},
            {"running", e.torch_running},
            {"isa", e.torch_isa}}},
          {"blas", e.blas},
          {"onednn", e.onednn},
          {"cpu",
           {{"model", e.cpu},
            {"id", e.cpu_id},
            {"flags", e.isa},
            {"processors", e.processors}}},
          {"threads", e.threads},
          {"settings", e.settings},
          {"kernels", {{"isa", e.kernels}, {"available", e.kernels_available}}},
          {"backends",
           {{"exact", true},
            {"fused", e.fused.empty()},
            {"why_not_fused", e.fused}}},
          {"linear", {{"pays", e.linear.empty()}, {"why_not", e.linear}}},
          {"int8_cache", {{"number", 0x1p-7}, {"attention", e.int8_error}}}};
}

void add_info(CLI::App& app, Action& action) {
  const auto json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("info", "Versions, processor, threads, backends");
  command->footer(kFooter);
  command->add_flag("--json", *json, "Print one JSON object");
  command->callback(
      [&action, json] { action = [json] { return info(*json); }; });
}

}  // namespace cli
