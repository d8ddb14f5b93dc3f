// SPDX-License-Identifier: MIT
#include "cli/check/lanes.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "cli/check/child.h"
#include "cli/check/interpreter.h"
#include "cli/check/server.h"
#include "cli/terminal/text.h"

namespace cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr double kLaneGrace = 2, kQuiet = 2;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string one_line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// ---- Lines through pipes ---------------------------------------------------

bool write_line(int descriptor, const std::string& text) {
  const std::string line = text + "\n";
  for (size_t done = 0; done < line.size();) {
    const ssize_t count =
        ::write(descriptor, line.data() + done, line.size() - done);
    if (count < 0 && errno != EINTR) return false;
    if (count > 0) done += static_cast<size_t>(count);
  }
  return true;
}

// The next line; nullopt at the end, or when a signal comes.
std::optional<std::string> read_line(int descriptor) {
  std::string line;
  char block[65536];
  while (true) {
    // A line is read on its own: its writer waits for the answer to it.
    const ssize_t count = ::read(descriptor, block, sizeof block);
    if (count <= 0) return std::nullopt;
    line.append(block, static_cast<size_t>(count));
    if (line.back() == '\n') {
      line.pop_back();
      return line;
    }
  }
}

// ---- In a lane -------------------------------------------------------------

std::string limit_text(double seconds) { return format("%.3g", seconds); }

// One check, with so many seconds left for it.
Json checked(const SurveyOptions& options, const std::string& target,
             double left, Server& server) {
  const auto start = Clock::now();
  const double limit = std::max(0.1, std::min(options.time_limit, left));
  std::vector<std::string> words = {target};
  words.insert(words.end(), options.options.begin(), options.options.end());
  words.insert(words.end(), {"--time-limit", limit_text(limit)});
  std::vector<std::string> command = options.command;
  command.insert(command.end(), words.begin(), words.end());
  const ChildEnd end = run_child({.command = command,
                                  .start =
                                      [&](const std::string& answer) {
                                        return server.start(words, answer);
                                      },
                                  .silent = true,
                                  .time_limit = limit + kLaneGrace,
                                  .resting_marks = {"loading\n", "judging\n"},
                                  .resting_limit = 2 * options.time_limit,
                                  .total_limit = left + 0.5});
  Json result = {{"interrupted", end.interrupted}, {"report", nullptr}};
  const auto answer = answered(end.answer);
  if (end.timed_out) {
    result["why"] = left < options.time_limit ? "reached" : "late";
  } else if (answer && answer->second.starts_with("{")) {
    result["report"] = Json::parse(answer->second, nullptr, false);
    result["why"] = "";
  } else if (answer) {
    result["why"] = answer->second.substr(0, answer->second.find('\n'));
  } else if (end.signal != 0) {
    result["why"] =
        std::string("It crashes the process: ") + strsignal(end.signal) + ".";
  } else {
    result["why"] = "It ends the whole process, with status " +
                    std::to_string(end.status) + ".";
  }
  result["seconds"] = since(start);
  return result;
}

[[noreturn]] void work(const SurveyOptions& options, int tasks, int results) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  {
    Server server;
    for (auto line = read_line(tasks); line; line = read_line(tasks)) {
      const Json task = Json::parse(*line);
      Json result;
      try {
        result = checked(options, task["target"], task["left"], server);
      } catch (const std::exception& error) {
        result = {{"interrupted", false},
                  {"report", nullptr},
                  {"why", error.what()},
                  {"seconds", 0}};
      }
      if (result["interrupted"] || !write_line(results, one_line(result)))
        break;
    }
  }
  _exit(0);
}

}  // namespace

// ---- Outside ---------------------------------------------------------------

Lanes::Lanes(int count, const SurveyOptions& options) {
  for (int i = 0; i < count; ++i) {
    int tasks[2], results[2];
    if (pipe2(tasks, O_CLOEXEC) != 0 || pipe2(results, O_CLOEXEC) != 0)
      throw std::runtime_error(std::string("check: ") + std::strerror(errno));
    const pid_t process = fork();
    if (process == 0) {
      ::close(tasks[1]), ::close(results[0]);
      for (const Lane& other : lanes_)
        ::close(other.tasks), ::close(other.results);
      work(options, tasks[0], results[1]);
    }
    ::close(tasks[0]), ::close(results[1]);
    if (process < 0)
      throw std::runtime_error(std::string("check: ") + std::strerror(errno));
    lanes_.push_back({process, tasks[1], results[0]});
  }
  std::signal(SIGPIPE, SIG_IGN);
}

Lanes::~Lanes() {
  for (const Lane& lane : lanes_) {
    ::close(lane.tasks), ::close(lane.results);
    kill(lane.process, SIGTERM);
    while (waitpid(lane.process, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

std::vector<CheckedTarget> Lanes::check(const std::vector<std::string>& targets,
                                        double seconds) {
  const auto start = Clock::now();
  std::vector<CheckedTarget> outcomes(targets.size());
  std::vector<std::optional<size_t>> at(lanes_.size());
  std::vector<bool> open(lanes_.size(), true);
  size_t next = 0, done = 0;
  double said = kQuiet;
  const auto give = [&](size_t lane) {
    const double left = seconds - since(start);
    at[lane] = std::nullopt;
    if (next >= targets.size() || left <= 0) return;
    at[lane] = next++;
    open[lane] =
        write_line(lanes_[lane].tasks,
                   one_line({{"target", targets[*at[lane]]}, {"left", left}}));
  };
  for (size_t lane = 0; lane < lanes_.size(); ++lane) give(lane);
  while (true) {
    std::vector<pollfd> waiting;
    std::vector<size_t> whose;
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      if (!at[lane] || !open[lane]) continue;
      waiting.push_back({lanes_[lane].results, POLLIN, 0});
      whose.push_back(lane);
    }
    if (waiting.empty()) return outcomes;
    poll(waiting.data(), waiting.size(), 500);
    for (size_t i = 0; i < waiting.size(); ++i) {
      if (waiting[i].revents == 0) continue;
      const size_t lane = whose[i];
      const auto line = read_line(lanes_[lane].results);
      if (!line) {
        open[lane] = false;
        continue;
      }
      const Json result = Json::parse(*line);
      const std::string why = result["why"];
      outcomes[*at[lane]] = {why != "reached", result["seconds"], why,
                             result["report"]};
      ++done;
      give(lane);
    }
    if (since(start) > said) {
      said = since(start) + 5;
      std::fprintf(stderr, "multihead: checked %zu of %zu\n", done,
                   targets.size());
    }
  }
}

}  // namespace cli
