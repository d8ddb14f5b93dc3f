// SPDX-License-Identifier: MIT
#include "cli/check/interpreter.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "cli/terminal/text.h"

namespace cli {

std::string python() {
  const std::string named = environment("MULTIHEAD_PYTHON");
  if (!named.empty()) return named;
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const std::string folder = environment(variable);
    const std::string candidate = folder + "/bin/python";
    if (!folder.empty() && access(candidate.c_str(), X_OK) == 0)
      return candidate;
  }
  return "python3";
}

void offer_package() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  const fs::path folder = self.parent_path().parent_path() / "python";
  if (error || !fs::exists(folder / "multihead" / "_built.py")) return;
  const std::string others = environment("PYTHONPATH");
  const std::string path =
      folder.string() + (others.empty() ? "" : ":" + others);
  setenv("PYTHONPATH", path.c_str(), /*overwrite=*/1);
}

std::optional<std::pair<int, std::string>> answered(const std::string& answer) {
  constexpr std::string_view kMarker = "report ";
  size_t at = 0;
  while (at < answer.size() && answer.compare(at, kMarker.size(), kMarker) != 0)
    at = std::min(answer.find('\n', at), answer.size() - 1) + 1;
  const size_t line_end = answer.find('\n', at);
  if (line_end == std::string::npos) return std::nullopt;
  return std::pair(std::atoi(answer.c_str() + at + kMarker.size()),
                   answer.substr(line_end + 1));
}

}  // namespace cli
