// SPDX-License-Identifier: MIT
#pragma once

#include <string>

namespace cli {

/// What printf would print.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

}  // namespace cli
