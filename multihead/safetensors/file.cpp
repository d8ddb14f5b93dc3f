// SPDX-License-Identifier: MIT
#include "multihead/safetensors/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

namespace multihead::safetensors {
namespace {

using enum SafetensorsFault;

[[noreturn]] void fail_with(int error, const std::string& where,
                            const char* condition) {
  fail(kUnreadable, where, "file must ", condition, ", got ",
       std::generic_category().message(error));
}

/// The first result of a system call that no signal interrupted.
auto uninterrupted(auto&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

int open_or_fail(int directory, const std::string& name, int flags,
                 const std::string& where, const char* condition) {
  constexpr mode_t kMode = 0666;  // less the process's umask
  const int file = uninterrupted([&] {
    return ::openat(directory, name.c_str(), flags | O_CLOEXEC, kMode);
  });
  if (file < 0) fail_with(errno, where, condition);
  return file;
}

std::string directory_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

std::string temporary_name() {
  std::random_device random;
  std::ostringstream name;
  name << ".multihead-" << std::hex << random() << random() << ".tmp";
  return name.str();
}

}  // namespace

Descriptor::~Descriptor() { ::close(value_); }

// O_NONBLOCK: opening a FIFO must not wait for its other end.
InputFile::InputFile(const std::string& path, std::string where)
    : where_(std::move(where)),
      file_(open_or_fail(AT_FDCWD, path, O_RDONLY | O_NONBLOCK, where_,
                         "be readable")) {
  struct stat status;
  if (::fstat(file_.value(), &status) != 0) {
    fail_with(errno, where_, "be readable");
  }
  if (S_ISDIR(status.st_mode)) fail_with(EISDIR, where_, "be readable");
  if (!S_ISREG(status.st_mode)) {
    fail(kUnreadable, where_, "file must be a regular file, got a device, ",
         "socket or FIFO");
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

void InputFile::read_at(uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t count = uninterrupted([&] {
      return ::pread(file_.value(), to.data(), to.size(),
                     static_cast<off_t>(offset));
    });
    if (count < 0) fail_with(errno, where_, "be readable");
    if (count == 0) {
      fail(kUnreadable, where_, "file must keep its size of ", size_,
           " bytes while it is read, got an end at ", offset);
    }
    to = to.subspan(count);
    offset += count;
  }
}

OutputFile::OutputFile(const std::string& path, std::string where)
    : where_(std::move(where)),
      name_(std::filesystem::path(path).filename()),
      directory_(open_or_fail(AT_FDCWD, directory_of(path),
                              O_RDONLY | O_DIRECTORY, where_,
                              "lie in a readable directory")),
      temporary_(temporary_name()),
      file_(open_or_fail(directory_.value(), temporary_,
                         O_WRONLY | O_CREAT | O_EXCL, where_,
                         "lie in a writable directory")) {
  struct stat before;
  if (::fstatat(directory_.value(), name_.c_str(), &before, 0) == 0) {
    ::fchmod(file_.value(), before.st_mode & 0777);
  }
}

OutputFile::~OutputFile() {
  if (!temporary_.empty()) {
    ::unlinkat(directory_.value(), temporary_.c_str(), 0);
  }
}

void OutputFile::write_at(uint64_t offset, std::span<const std::byte> from) {
  while (!from.empty()) {
    const ssize_t count = uninterrupted([&] {
      return ::pwrite(file_.value(), from.data(), from.size(),
                      static_cast<off_t>(offset));
    });
    if (count < 0) fail_with(errno, where_, "be writable");
    from = from.subspan(count);
    offset += count;
  }
}

void OutputFile::commit() {
  if (::fsync(file_.value()) != 0) fail_with(errno, where_, "be writable");
  if (::renameat(directory_.value(), temporary_.c_str(), directory_.value(),
                 name_.c_str()) != 0) {
    fail_with(errno, where_, "be replaceable");
  }
  temporary_.clear();
  // EINVAL: a file system without directories that can be flushed.
  if (::fsync(directory_.value()) != 0 && errno != EINVAL) {
    fail_with(errno, where_, "lie in a directory that can be flushed");
  }
}

}  // namespace multihead::safetensors
