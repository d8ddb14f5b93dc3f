// SPDX-License-Identifier: MIT
//
// The Python that runs checks, and what it answers.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace cli {

/// As ./run chooses it, but for .venv.
std::string python();

/// Lets Python find the package in the build folder, if this is the command
/// there; elsewhere it is installed.
void offer_package();

/// The exit status and the text of an answer; nullopt where there is none.
std::optional<std::pair<int, std::string>> answered(const std::string& answer);

}  // namespace cli
