// SPDX-License-Identifier: MIT
#pragma once

#include <string>

#include "multihead/safetensors.h"

namespace cli {

/// multihead::read_safetensors, whose error, where there is no such file, also
/// says which one may have been meant.
multihead::Safetensors read_dump(const std::string& path);

}  // namespace cli
