// SPDX-License-Identifier: MIT
// What the trace of a call shows of a convention: the tensors that follow from
// it, and from nothing else.
#pragma once

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

/// A norm or a rotation of heads.
bool is_done_to_heads(const Recipe& without, const Recipe& with);

/// Whether it shows the convention that leads from one recipe to the other.
bool shows_convention(const ObservedCall& call, Sign sign,
                      const Recipe& without, const Recipe& with);

/// Whether it shows the projected keys of a recipe.
bool shows_keys(const ObservedCall& call, const Recipe& recipe);

/// Whether the second recipe makes other queries or keys than the first, and it
/// shows them.
bool shows_cut(const ObservedCall& call, const Recipe& without,
               const Recipe& with);

/// The same of what is done to heads, of items and positions exchanged. Along
/// which axis positions lie is not told by what is done to heads: by scores of
/// the batch's items it is.
bool shows_exchanged(const ObservedCall& call, const Recipe& without,
                     const Recipe& with);

}  // namespace multihead::diagnosis
