// SPDX-License-Identifier: MIT
//
// A Python that has imported PyTorch and this package, and forks a process for
// each check: the import takes longer than most checks.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace cli {

class Server {
 public:
  /// Starts it; it imports while we go on.
  Server();
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Has a process forked that checks as `words` say, and answers in the file
  /// `answer`; its number. It becomes a child of this process, which must be a
  /// subreaper. 0 where the server cannot: then Python has to be started anew.
  pid_t start(const std::vector<std::string>& words, const std::string& answer);

 private:
  void end();

  pid_t process_ = 0;
  int requests_ = -1, replies_ = -1;
};

}  // namespace cli
