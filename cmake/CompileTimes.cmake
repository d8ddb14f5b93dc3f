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

# multihead_compiles_by_room(target sources...): the files of a folder are one
# translation unit, since to load the precompiled headers alone takes 1.5 seconds. So two
# files of a folder must not give the same name to helpers. For work on one file, and for
# editors that read compile_commands.json: -DMULTIHEAD_UNITY_BUILD=OFF (preset dev).
option(MULTIHEAD_UNITY_BUILD "Compile folder by folder: less in all, more after each edit" ON)
function(multihead_compiles_by_room target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${MULTIHEAD_UNITY_BUILD}
                                             UNITY_BUILD_MODE GROUP)
  foreach(source IN LISTS ARGN)
    get_filename_component(room "${source}" DIRECTORY)
    get_filename_component(room "${room}" NAME)
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP ${room})
  endforeach()
endfunction()
