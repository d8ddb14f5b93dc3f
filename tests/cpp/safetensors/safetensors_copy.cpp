// SPDX-License-Identifier: MIT
//
// Reads pairs of lines, FROM and TO, from its input: reads the file FROM with
// read_safetensors and writes it to TO with write_safetensors. Each pair gets a
// line in answer: empty, or why FROM was refused. One process serves all tests
// of Python, because loading LibTorch takes longer than they do.
#include <iostream>
#include <string>

#include "multihead/safetensors.h"

int main() {
  std::string from, to;
  while (std::getline(std::cin, from) && std::getline(std::cin, to)) {
    try {
      multihead::write_safetensors(to, multihead::read_safetensors(from));
    } catch (const multihead::SafetensorsError& error) {
      std::cout << error.what();
    }
    std::cout << std::endl;
  }
}
