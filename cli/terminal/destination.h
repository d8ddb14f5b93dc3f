// SPDX-License-Identifier: MIT
//
// Where an output goes: a file that appears as a whole, or standard output.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace cli {

/// Tried before anything runs, so that a typing error costs no time.
class Destination {
 public:
  /// path: "-" is standard output, "" nothing; a link to a file is followed.
  /// `option` is what errors name: "bench: --json".
  Destination(const std::string& option, const std::string& path);

  bool standard_output() const { return standard_output_; }
  bool wanted() const { return standard_output_ || !path_.empty(); }
  /// Throws where not all of it can be written; a file is then as it was.
  void write(std::string_view content) const;
  /// The same with what `text_of` makes of `value`, if it is wanted.
  template <typename T>
  void write(std::string (*text_of)(const T&), const T& value) const {
    if (wanted()) write(text_of(value));
  }

 private:
  bool standard_output_ = false;
  std::string path_, where_;
};

/// Throws std::invalid_argument where more than one output of a command goes to
/// standard output.
void print_at_most_one(const std::string& command, int64_t printed);

}  // namespace cli
