// SPDX-License-Identifier: MIT
//
// safetensors_copy FROM TO: reads FROM and writes TO. The tests compare what
// Python's package makes of both. Exit status 2 and the message on stderr where
// FROM is refused.
#include <iostream>

#include "multihead/safetensors.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: safetensors_copy FROM TO\n";
    return 1;
  }
  try {
    multihead::write_safetensors(argv[2], multihead::read_safetensors(argv[1]));
  } catch (const multihead::SafetensorsError& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
