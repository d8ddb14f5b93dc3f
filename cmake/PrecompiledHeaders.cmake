# SPDX-License-Identifier: MIT
# Two thirds of the time of most sources goes to PyTorch's headers. They are parsed
# once, for all targets that multihead_shares_headers() names. No source may rely on
# that: CMAKE_DISABLE_PRECOMPILE_HEADERS builds without.
file(CONFIGURE OUTPUT headers.cpp CONTENT "")
add_library(multihead_headers OBJECT "${PROJECT_BINARY_DIR}/headers.cpp")
target_link_libraries(multihead_headers PRIVATE multihead::torch)
target_compile_features(multihead_headers PRIVATE cxx_std_20)
target_precompile_headers(
  multihead_headers PRIVATE <ATen/TensorOperators.h> <ATen/core/Tensor.h>
                            <torch/library.h> <algorithm> <map> <optional>
                            <string> <tuple> <vector>)

# multihead_shares_headers(targets...): they are compiled with the flags that the
# precompiled headers depend on.
function(multihead_shares_headers)
  set_target_properties(${ARGN} PROPERTIES CXX_VISIBILITY_PRESET hidden
                                           VISIBILITY_INLINES_HIDDEN ON
                                           POSITION_INDEPENDENT_CODE ON
                                           DEFINE_SYMBOL "")
  list(REMOVE_ITEM ARGN multihead_headers)
  foreach(target IN LISTS ARGN)
    target_precompile_headers(${target} REUSE_FROM multihead_headers)
    target_compile_options(${target} PRIVATE -fPIC)  # not -fPIE, in programs too
  endforeach()
endfunction()
multihead_shares_headers(multihead_headers)
