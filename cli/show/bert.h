// SPDX-License-Identifier: MIT
//
// A BERT up to one of its layers, in order to see what that layer attends to.
#pragma once

#include "cli/show/attention_map.h"
#include "cli/show/input.h"

namespace cli {

/// The heads of layer options.layer of the model in options.model, a folder
/// with model.safetensors, config.json and vocab.txt or the first of these, for
/// options.text. Attention below that layer is this library's.
Attended run_bert(const ShowOptions& options);

}  // namespace cli
