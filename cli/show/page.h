// SPDX-License-Identifier: MIT
#pragma once

namespace cli {

/// page.html, with {{DATA}} where the numbers go; made by CMake.
extern const char* const kPage;

}  // namespace cli
