// SPDX-License-Identifier: MIT
//
// A process that may misbehave: it gets a session of its own, a file to answer
// in, and so much time.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace cli {

/// How a child ended. Of `signal`, `timed_out` and `interrupted` one at most is
/// set; without them it ended by itself, with `status`.
struct ChildEnd {
  int status = 0;
  int signal = 0;            ///< of its own, or from outside; not ours
  bool timed_out = false;    ///< we ended it
  bool interrupted = false;  ///< somebody ended us: Ctrl-C
  std::string answer;        ///< what it wrote to the file
};

struct ChildOptions {
  std::vector<std::string> command;  ///< program, looked for in PATH; arguments
  /// Tried before: starts it, to answer in the file of this name, and returns
  /// its number, a child of ours; 0 where it cannot.
  std::function<pid_t(const std::string& answer)> start = {};
  bool silent = false;      ///< what it prints goes nowhere
  double start_limit = 60;  ///< seconds until it has written the first byte
  double time_limit = 20;   ///< seconds from then on, unless it is resting:
  /// While its answer ends with one of these,
  std::vector<std::string> resting_marks = {};
  double resting_limit = 0;  ///< these seconds count
  double total_limit = 1e9;  ///< seconds for all of it
  std::string waiting = {};  ///< said on standard error after two seconds
};

/// The descriptor under which a child finds the file for its answer, and the
/// variable that names a path to it, should that be closed.
inline constexpr int kAnswerDescriptor = 3;
inline constexpr const char* kAnswerVariable = "MULTIHEAD_ANSWER";

/// Runs a program with nothing to read and with standard error as its output.
/// When it ends, so does what it started: its whole group, and what has left
/// that. Throws std::runtime_error where it cannot be started.
ChildEnd run_child(const ChildOptions& options);

}  // namespace cli
