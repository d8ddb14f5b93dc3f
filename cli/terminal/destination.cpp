// SPDX-License-Identifier: MIT
#include "cli/terminal/destination.h"

#include <filesystem>
#include <span>
#include <stdexcept>

#include "cli/terminal/output.h"
#include "multihead/safetensors/file.h"

namespace cli {

using multihead::safetensors::OutputFile;

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
  path_ = fs::exists(status) ? fs::canonical(path, error).string() : path;
  where_ = option + " " + path;
  // Nothing of this trial is left, nor would it be of a run that is ended.
  OutputFile(path_, where_);
}

void Destination::write(std::string_view content) const {
  if (standard_output_) write_output(content);
  if (path_.empty()) return;
  OutputFile file(path_, where_);
  file.write_at(0, std::as_bytes(std::span(content)));
  file.commit();
}

void print_at_most_one(const std::string& command, int64_t printed) {
  if (printed > 1)
    throw std::invalid_argument(command +
                                ": only one output must be printed, got " +
                                std::to_string(printed));
}

}  // namespace cli
