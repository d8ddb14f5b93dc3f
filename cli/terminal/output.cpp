// SPDX-License-Identifier: MIT
#include "cli/terminal/output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>

namespace cli {
namespace {

[[noreturn]] void fail(int error) {
  throw std::runtime_error("standard output must be writable, got " +
                           std::generic_category().message(error));
}

// Of a pipe that does not wait by itself.
void wait_for_room() {
  pollfd output{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  if (poll(&output, 1, /*timeout=*/-1) < 0 && errno != EINTR) fail(errno);
}

}  // namespace

void write_output(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(STDOUT_FILENO, text.data(), text.size());
    if (count >= 0)
      text.remove_prefix(static_cast<size_t>(count));
    else if (errno == EAGAIN)
      wait_for_room();
    else if (errno != EINTR)
      fail(errno);
  }
}

void guard_output() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(stream, F_GETFD) < 0 && errno == EBADF)
      // The wrong way round: reading and writing fail. It gets the lowest free
      // number, which is that of the stream.
      open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  std::signal(SIGXFSZ, SIG_IGN);
}

void finish_output() {
  const int copy = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  if (copy >= 0 && close(copy) != 0 && errno != EINTR) fail(errno);
}

void each_of(const std::vector<std::function<void()>>& steps) {
  std::exception_ptr first;
  for (const std::function<void()>& step : steps) try {
      step();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  if (first) std::rethrow_exception(first);
}

}  // namespace cli
