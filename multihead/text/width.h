// SPDX-License-Identifier: MIT
//
// How much room text takes in a terminal.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace multihead {

/// What takes one place: a letter with its accents, an emoji with what is
/// joined to it.
struct Cluster {
  std::string text;
  int columns;  ///< 2 for wide East Asian letters and emoji
};

std::vector<Cluster> clusters(std::string_view printable);

int columns(std::string_view printable);

}  // namespace multihead
