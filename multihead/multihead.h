// SPDX-License-Identifier: MIT
//
// Everything of multihead; include single headers to compile faster.
#pragma once

#include "multihead/backend.h"
#include "multihead/errors.h"
#include "multihead/explain.h"
#include "multihead/functional.h"
#include "multihead/modules.h"
#include "multihead/report.h"
#include "multihead/safetensors.h"
#include "multihead/textbook.h"
#include "multihead/version.h"
