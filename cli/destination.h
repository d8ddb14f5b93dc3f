// SPDX-License-Identifier: MIT
//
// Where an output goes: a file that appears as a whole, or standard output.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "multihead/safetensors_file.h"

namespace cli {

/// Opened before anything runs, so that a typing error costs no time.
class Destination {
 public:
  /// path: "-" is standard output, "" nothing. `option` is what errors name:
  /// "bench: --json".
  Destination(const std::string& option, const std::string& path);

  bool standard_output() const { return standard_output_; }
  bool wanted() const { return standard_output_ || file_; }
  void write(std::string_view content);

 private:
  bool standard_output_ = false;
  std::unique_ptr<multihead::safetensors::OutputFile> file_;
};

}  // namespace cli
