// SPDX-License-Identifier: MIT
#include "cli/destination.h"

#include <cstdio>
#include <filesystem>
#include <span>
#include <stdexcept>

namespace cli {

Destination::Destination(const std::string& option, const std::string& path) {
  if (path.empty() || path == "-") {
    standard_output_ = path == "-";
    return;
  }
  const std::string where = option + " " + path;
  if (std::filesystem::exists(path) && !std::filesystem::is_regular_file(path))
    throw std::invalid_argument(where + ": must be a regular file");
  file_ = std::make_unique<multihead::safetensors::OutputFile>(path, where);
}

void Destination::write(std::string_view content) {
  if (standard_output_) std::fwrite(content.data(), 1, content.size(), stdout);
  if (!file_) return;
  file_->write_at(0, std::as_bytes(std::span(content)));
  file_->commit();
}

}  // namespace cli
