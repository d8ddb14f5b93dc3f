// SPDX-License-Identifier: MIT
//
// The parts of the catalogue, one for each file.
#pragma once

#include <vector>

#include "multihead/diagnosis/faults.h"

namespace multihead::diagnosis {

std::vector<Fault> faults_of_projections();
std::vector<Fault> faults_of_heads();
std::vector<Fault> faults_of_scores();
std::vector<Fault> faults_of_masks();
std::vector<Fault> faults_of_weights();
std::vector<Fault> faults_of_output();

}  // namespace multihead::diagnosis
