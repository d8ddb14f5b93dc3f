// SPDX-License-Identifier: MIT
//
// Keys and values that are stored narrower than query: bfloat16 under float32,
// and rows of MXINT8 (mxint8.h). The forward kernels read them as they are;
// whatever else computes gets them restored.
#pragma once

#include <ATen/core/Tensor.h>

#include "multihead/mxint8.h"

namespace multihead {

/// Whether x, a key or value, is stored so.
bool is_stored(const at::Tensor& query, const at::Tensor& x);

/// Numbers in a row of x: fewer than elements where they are MXINT8.
c10::SymInt width_of(const at::Tensor& x);

/// int8 rows of that form. `fn` begins an error.
void check_mxint8(const char* fn, const char* name, const at::Tensor& rows);

/// x, a key or value, has the dtype of query or is stored.
void check_storage(const char* fn, const char* name, const at::Tensor& query,
                   const at::Tensor& x);

/// x, or where it is stored, its numbers in query's dtype.
at::Tensor restored(const at::Tensor& query, const at::Tensor& x);

/// Refuses what is stored, for operators that do not read it.
void check_not_stored(const char* function, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value);

}  // namespace multihead
