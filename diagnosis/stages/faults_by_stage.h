// SPDX-License-Identifier: MIT
//
// The parts of the catalogue, one for each file.
#pragma once

#include <span>

#include "diagnosis/stages/catalogue.h"

namespace multihead::diagnosis {

std::span<const Fault> faults_of_projections();
std::span<const Fault> faults_of_heads();
std::span<const Fault> faults_of_scores();
std::span<const Fault> faults_of_masks();
std::span<const Fault> faults_of_weights();
std::span<const Fault> faults_of_output();

}  // namespace multihead::diagnosis
