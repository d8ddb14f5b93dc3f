// SPDX-License-Identifier: MIT
#include "cli/destination.h"

#include <cstdio>
#include <filesystem>
#include <span>
#include <stdexcept>

namespace cli {

Destination::Destination(const std::string& option, const std::string& path) {
  namespace fs = std::filesystem;
  if (path.empty() || path == "-") {
    standard_output_ = path == "-";
    return;
  }
  std::error_code error;  // of what cannot be looked at: OutputFile says why
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status))
    throw std::invalid_argument(
        option + " must be a regular file, got " + path + ", a " +
        (fs::is_directory(status) ? "folder" : "device, pipe or socket"));
  const fs::path target =
      fs::exists(status) ? fs::canonical(path, error) : fs::path(path);
  file_ = std::make_unique<multihead::safetensors::OutputFile>(
      target.string(), option + " " + path);
}

void Destination::write(std::string_view content) {
  if (standard_output_) std::fwrite(content.data(), 1, content.size(), stdout);
  if (!file_) return;
  file_->write_at(0, std::as_bytes(std::span(content)));
  file_->commit();
}

void print_at_most_one(const std::string& command, int64_t printed) {
  if (printed > 1)
    throw std::invalid_argument(command +
                                ": only one output must be printed, got " +
                                std::to_string(printed));
}

}  // namespace cli
