// SPDX-License-Identifier: MIT
#include "cli/child.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace cli {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kPoll = milliseconds(10);
constexpr auto kPatience = milliseconds(500);  // between SIGTERM and SIGKILL
constexpr double kSilence = 2;                 // seconds

volatile std::sig_atomic_t interrupted = 0;

// Ctrl-C and its like reach only us: the child has a group of its own.
class InterruptGuard {
 public:
  InterruptGuard() {
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = 1; };
    interrupted = 0;
    for (size_t i = 0; i < kSignals.size(); ++i)
      sigaction(kSignals[i], &action, &before_[i]);
  }
  ~InterruptGuard() {
    for (size_t i = 0; i < kSignals.size(); ++i)
      sigaction(kSignals[i], &before_[i], nullptr);
  }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_ = {};
};

// A file without a name, which a child can fill without anybody reading along.
class AnswerFile {
 public:
  AnswerFile() : descriptor_(memfd_create("answer", MFD_CLOEXEC)) {
    if (descriptor_ < 0) throw std::runtime_error(std::strerror(errno));
  }
  ~AnswerFile() { close(descriptor_); }
  AnswerFile(const AnswerFile&) = delete;
  AnswerFile& operator=(const AnswerFile&) = delete;

  int descriptor() const { return descriptor_; }
  std::string content() const {
    std::string text(size(), '\0');
    const ssize_t got = pread(descriptor_, text.data(), text.size(), 0);
    text.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return text;
  }

 private:
  size_t size() const {
    struct stat status = {};
    return fstat(descriptor_, &status) == 0
               ? static_cast<size_t>(status.st_size)
               : 0;
  }
  int descriptor_;
};

pid_t spawn(const std::vector<std::string>& command, int answer) {
  std::vector<char*> arguments;
  for (const std::string& argument : command)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);

  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY,
                                   0);
  posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&files, answer, kAnswerDescriptor);
  pid_t child = 0;
  const int error = posix_spawnp(&child, arguments[0], &files, &attributes,
                                 arguments.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error != 0)
    throw std::runtime_error("cannot start " + command[0] + ": " +
                             std::strerror(error));
  return child;
}

// True when it has ended; `status` is then waitpid's.
bool has_ended(pid_t child, int& status) {
  return waitpid(child, &status, WNOHANG) == child;
}

// Ends the child and its group; the child's status is of no interest.
void end_group(pid_t child, int signal) {
  int status = 0;
  kill(-child, signal);
  const auto deadline = Clock::now() + kPatience;
  while (Clock::now() < deadline && !has_ended(child, status))
    std::this_thread::sleep_for(kPoll);
  kill(-child, SIGKILL);
  waitpid(child, &status, 0);  // fails where it was waited for already
}

// How long the child has been at each of the things that are limited.
class Clocks {
 public:
  explicit Clocks(const ChildOptions& options) : options_(options) {}

  bool is_late(const std::string& answer) {
    const auto now = Clock::now();
    const std::chrono::duration<double> passed = now - last_;
    last_ = now;
    const std::string& mark = options_.resting_mark;
    if (answer.empty())
      return (start_ += passed.count()) > options_.start_limit;
    if (!mark.empty() && answer.ends_with(mark))
      return (rest_ += passed.count()) > options_.resting_limit;
    return (work_ += passed.count()) > options_.time_limit;
  }
  double total() const { return start_ + work_ + rest_; }

 private:
  const ChildOptions& options_;
  Clock::time_point last_ = Clock::now();
  double start_ = 0, work_ = 0, rest_ = 0;
};

}  // namespace

ChildEnd run_child(const ChildOptions& options) {
  const InterruptGuard guard;
  const AnswerFile answer;
  const pid_t child = spawn(options.command, answer.descriptor());
  ChildEnd end;
  Clocks clocks(options);
  bool silent = true;
  int status = 0;
  while (!has_ended(child, status)) {
    end.timed_out = clocks.is_late(answer.content());
    end.interrupted = interrupted != 0;
    if (end.timed_out || end.interrupted) {
      end_group(child, end.interrupted ? SIGINT : SIGTERM);
      end.answer = answer.content();
      return end;
    }
    if (silent && clocks.total() > kSilence && !options.waiting.empty()) {
      silent = false;
      std::fprintf(stderr, "%s\n", options.waiting.c_str());
    }
    std::this_thread::sleep_for(kPoll);
  }
  kill(-child, SIGKILL);  // what it started and left behind
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  if (WIFEXITED(status)) end.status = WEXITSTATUS(status);
  end.answer = answer.content();
  return end;
}

}  // namespace cli
