// SPDX-License-Identifier: MIT
//
// Everything of attention; include single headers to compile faster.
#pragma once

#include "multihead/backend.h"
#include "multihead/cache.h"
#include "multihead/distributed.h"
#include "multihead/errors.h"
#include "multihead/functional.h"
#include "multihead/install.h"
#include "multihead/modules.h"
#include "multihead/mxint8.h"
#include "multihead/safetensors.h"
#include "multihead/stats.h"
#include "multihead/textbook.h"
#include "multihead/version.h"
