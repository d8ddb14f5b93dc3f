// SPDX-License-Identifier: MIT
#include "cli/check/dump.h"

#include <stdexcept>

#include "cli/terminal/suggestion.h"

namespace cli {

multihead::Safetensors read_dump(const std::string& path) {
  try {
    return multihead::read_safetensors(path);
  } catch (const std::runtime_error& error) {
    const std::string hint = did_you_mean_file(path);
    if (hint.empty()) throw;
    throw std::runtime_error(error.what() + hint);
  }
}

}  // namespace cli
