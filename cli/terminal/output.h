// SPDX-License-Identifier: MIT
//
// Standard output, all of which arrives or the command fails, and files that
// appear as a whole.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace cli {

/// Writes all of `text` to standard output before it returns. Throws
/// std::runtime_error where it cannot.
void write_output(std::string_view text);

/// To be called before any file is opened. A standard stream that is closed
/// becomes one that fails: otherwise its number would go to the next file, and
/// what is printed into that. A file that grows too large is an error of its
/// write, not the end of the process.
void guard_output();

/// What some file systems tell only when a file is closed: throws as
/// write_output.
void finish_output();

/// Runs every step, even if one before it throws, so that an output that fails
/// takes none of the others with it. Throws what the first of them threw.
void each_of(const std::vector<std::function<void()>>& steps);

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
