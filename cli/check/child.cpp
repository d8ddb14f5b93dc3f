// SPDX-License-Identifier: MIT
#include "cli/check/child.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace cli {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kPoll = milliseconds(10);
constexpr auto kPatience = milliseconds(500);  // between SIGTERM and SIGKILL
constexpr double kSilence = 2;                 // seconds

volatile std::sig_atomic_t interrupted = 0;

// Ctrl-C and its like reach only us: the child has a session of its own. What
// is ignored, as by nohup, stays so.
class InterruptGuard {
 public:
  InterruptGuard() {
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = 1; };
    interrupted = 0;
    for (size_t i = 0; i < kSignals.size(); ++i) {
      sigaction(kSignals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler != SIG_IGN)
        sigaction(kSignals[i], &action, nullptr);
    }
  }
  ~InterruptGuard() {
    for (size_t i = 0; i < kSignals.size(); ++i)
      sigaction(kSignals[i], &before_[i], nullptr);
  }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
  std::array<struct sigaction, kSignals.size()> before_ = {};
};

// A file without a name, which a child can fill without anybody reading along.
class AnswerFile {
 public:
  AnswerFile() : descriptor_(memfd_create("answer", MFD_CLOEXEC)) {
    if (descriptor_ < 0) throw std::runtime_error(std::strerror(errno));
    setenv(kAnswerVariable, path().c_str(), /*overwrite=*/1);
  }
  ~AnswerFile() { close(descriptor_); }
  AnswerFile(const AnswerFile&) = delete;
  AnswerFile& operator=(const AnswerFile&) = delete;

  int descriptor() const { return descriptor_; }
  std::string path() const {
    return "/proc/" + std::to_string(getpid()) + "/fd/" +
           std::to_string(descriptor_);
  }
  bool empty() const { return size() == 0; }
  bool ends_with(const std::string& mark) const {
    const size_t length = size();
    return length >= mark.size() &&
           read(length - mark.size(), mark.size()) == mark;
  }
  std::string content() const { return read(0, size()); }

 private:
  size_t size() const {
    struct stat status = {};
    return fstat(descriptor_, &status) == 0
               ? static_cast<size_t>(status.st_size)
               : 0;
  }
  std::string read(size_t from, size_t count) const {
    std::string text(count, '\0');
    const ssize_t got =
        pread(descriptor_, text.data(), text.size(), static_cast<off_t>(from));
    text.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return text;
  }
  int descriptor_;
};

pid_t spawn(const std::vector<std::string>& command, int answer, bool silent) {
  std::vector<char*> arguments;
  for (const std::string& argument : command)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);

  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  // In a session without our terminal: a child that reads from the terminal in
  // the background would be stopped.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY,
                                   0);
  if (silent)
    posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null",
                                     O_WRONLY, 0);
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

// True when it has ended. It stays a zombie, whose number nobody else gets.
bool has_ended(pid_t child) {
  siginfo_t info = {};
  return waitid(P_PID, static_cast<id_t>(child), &info,
                WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == child;
}

// The children of this process; none where the kernel does not tell.
std::set<pid_t> children() {
  std::set<pid_t> found;
  std::error_code error;
  for (const auto& thread :
       std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::ifstream list(thread.path() / "children");
    for (pid_t child = 0; list >> child;) found.insert(child);
  }
  return found;
}

int wait_for(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

// Children of the child that outlive their parents become ours, to be ended.
class Orphans {
 public:
  Orphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }
  ~Orphans() { prctl(PR_SET_CHILD_SUBREAPER, 0); }
  Orphans(const Orphans&) = delete;
  Orphans& operator=(const Orphans&) = delete;

  void end() const {
    for (bool found = true; found;) {
      found = false;
      for (const pid_t child : children()) {
        if (ours_.contains(child)) continue;
        kill(child, SIGKILL);
        wait_for(child);
        found = true;
      }
    }
  }

 private:
  std::set<pid_t> ours_ = children();  // a shell's, before it became us
};

// Signals the group, and gives the child a moment to end by that.
void ask_to_end(pid_t child, int signal) {
  kill(-child, signal);
  const auto deadline = Clock::now() + kPatience;
  while (Clock::now() < deadline && !has_ended(child))
    std::this_thread::sleep_for(kPoll);
}

// Ends what there is of the child and of what it started; its waitpid status.
int end_all(pid_t child, const Orphans& orphans) {
  kill(-child, SIGKILL);
  const int status = wait_for(child);
  orphans.end();
  return status;
}

// Seconds that the child has waited for a processor which others used.
double waited(pid_t child) {
  std::ifstream statistics("/proc/" + std::to_string(child) + "/schedstat");
  double ran = 0, waited = 0;  // nanoseconds
  return statistics >> ran >> waited ? waited / 1e9 : 0;
}

// How long the child has been at each of the things that are limited. That
// others kept the processors busy is not its fault: it does not count, but for
// the whole.
class Clocks {
 public:
  Clocks(const ChildOptions& options, pid_t child)
      : options_(options), child_(child) {}

  bool is_late(const AnswerFile& answer) {
    const auto now = Clock::now();
    // A longer step was a pause of ours, by Ctrl-Z or of the whole machine.
    const auto step = std::min<std::chrono::duration<double>>(
        now - last_, std::chrono::seconds(1));
    last_ = now;
    total_ += step.count();
    const double before = std::exchange(waited_, waited(child_));
    const double passed = std::max(0.0, step.count() - (waited_ - before));
    if (total_ > options_.total_limit) return true;
    if (answer.empty()) return (start_ += passed) > options_.start_limit;
    if (std::ranges::any_of(options_.resting_marks, [&](const auto& mark) {
          return answer.ends_with(mark);
        }))
      return (rest_ += passed) > options_.resting_limit;
    return (work_ += passed) > options_.time_limit;
  }
  double total() const { return total_; }

 private:
  const ChildOptions& options_;
  const pid_t child_;
  Clock::time_point last_ = Clock::now();
  double start_ = 0, work_ = 0, rest_ = 0, total_ = 0, waited_ = 0;
};

}  // namespace

ChildEnd run_child(const ChildOptions& options) {
  std::signal(SIGCHLD, SIG_DFL);  // ignored, it would hide how a child ends
  const InterruptGuard guard;
  const AnswerFile answer;
  const Orphans orphans;
  pid_t child = options.start ? options.start(answer.path()) : 0;
  if (child == 0)
    child = spawn(options.command, answer.descriptor(), options.silent);
  ChildEnd end;
  Clocks clocks(options, child);
  bool silent = true;
  while (!has_ended(child) && !end.timed_out && !end.interrupted) {
    std::this_thread::sleep_for(kPoll);
    end.timed_out = clocks.is_late(answer);
    end.interrupted = interrupted != 0;
    if (silent && clocks.total() > kSilence && !options.waiting.empty()) {
      silent = false;
      std::fprintf(stderr, "%s\n", options.waiting.c_str());
    }
  }
  if (end.timed_out || end.interrupted)
    ask_to_end(child, end.interrupted ? SIGINT : SIGTERM);
  const int status = end_all(child, orphans);
  end.answer = answer.content();
  if (end.timed_out || end.interrupted) return end;
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  if (WIFEXITED(status)) end.status = WEXITSTATUS(status);
  return end;
}

}  // namespace cli
