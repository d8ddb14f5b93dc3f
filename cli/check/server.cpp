// SPDX-License-Identifier: MIT
#include "cli/check/server.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cli/check/interpreter.h"

namespace cli {
namespace {

// One thread in all that libraries start when they are imported: what forks
// must have no other.
constexpr const char* kServe = R"py(
import os, signal, sys
sys.path[:] = [folder for folder in sys.path if folder]
os.environ["OPENBLAS_NUM_THREADS"] = "1"
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    from multihead.check.workplace.serve import serve
except ImportError:
    os._exit(1)  # a check in a process of its own says why
serve()
)py";

}  // namespace

Server::Server() {
  int requests[2], replies[2];
  if (pipe2(requests, O_CLOEXEC) != 0) return;
  if (pipe2(replies, O_CLOEXEC) != 0) {
    close(requests[0]), close(requests[1]);
    return;
  }
  const std::string program = python();
  const char* arguments[] = {program.c_str(), "-c", kServe, nullptr};
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, requests[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&files, replies[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY,
                                   0);
  if (posix_spawnp(&process_, arguments[0], &files, &attributes,
                   const_cast<char**>(arguments), environ) != 0)
    process_ = 0;
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  close(requests[0]), close(replies[1]);
  requests_ = requests[1];
  replies_ = replies[0];
  std::signal(SIGPIPE, SIG_IGN);  // it may have ended: a write tells
}

Server::~Server() { end(); }

void Server::end() {
  if (requests_ >= 0) close(requests_), close(replies_);
  requests_ = replies_ = -1;
  if (process_ > 0) {
    kill(process_, SIGKILL);
    while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  process_ = 0;
}

pid_t Server::start(const std::vector<std::string>& words,
                    const std::string& answer) {
  if (process_ == 0) return 0;
  const nlohmann::json request = {{"words", words}, {"answer", answer}};
  const std::string line =
      request.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) +
      "\n";
  std::string reply;
  if (::write(requests_, line.data(), line.size()) ==
      static_cast<ssize_t>(line.size())) {
    for (char c = 0; ::read(replies_, &c, 1) == 1 && c != '\n';) reply += c;
  }
  const pid_t child = std::atoi(reply.c_str());
  if (child <= 0) end();
  return child > 0 ? child : 0;
}

}  // namespace cli
