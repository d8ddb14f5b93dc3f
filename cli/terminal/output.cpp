// SPDX-License-Identifier: MIT
#include "cli/terminal/output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <exception>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>

#include "multihead/safetensors/file.h"

namespace cli {

using multihead::safetensors::OutputFile;

namespace {

[[noreturn]] void fail(int error) {
  throw std::runtime_error("standard output must be writable, got " +
                           std::generic_category().message(error));
}

}  // namespace

void write_output(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(STDOUT_FILENO, text.data(), text.size());
    if (count >= 0) {
      text.remove_prefix(static_cast<size_t>(count));
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) fail(errno);
    // A pipe that is set not to wait by itself is waited for.
    pollfd output{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
    if (poll(&output, 1, /*timeout=*/-1) < 0 && errno != EINTR) fail(errno);
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

Destination::Destination(const std::string& option, const std::string& path) {
  namespace fs = std::filesystem;
  if (path.empty() || path == "-") {
    standard_output_ = path == "-";
    return;
  }
  std::error_code error;  // ignored: OutputFile says why it cannot write
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status))
    throw std::invalid_argument(
        option + " must be a regular file, got " + path + ", a " +
        (fs::is_directory(status) ? "folder" : "device, pipe or socket"));
  path_ = fs::exists(status) ? fs::canonical(path, error).string() : path;
  where_ = option + " " + path;
  // Nothing of this trial is left, nor would it be of a run that is ended.
  OutputFile(path_, where_);
}

void Destination::write(std::string_view content) const {
  if (standard_output_) write_output(content);
  if (path_.empty()) return;
  OutputFile file(path_, where_);
  file.write_at(0, std::as_bytes(std::span(content)));
  file.commit();
}

void print_at_most_one(const std::string& command, int64_t printed) {
  if (printed > 1)
    throw std::invalid_argument(command +
                                ": only one output must be printed, got " +
                                std::to_string(printed));
}

}  // namespace cli
