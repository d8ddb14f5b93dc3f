// SPDX-License-Identifier: MIT
//
// Standard output: all that is printed arrives, or the command fails.
#pragma once

#include <functional>
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

}  // namespace cli
