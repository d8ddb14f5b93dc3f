# SPDX-License-Identifier: MIT
#
# Finds LibTorch inside an installed `torch` package and makes the target
# multihead::torch. Nothing of CUDA is asked for: a CUDA build of torch on a
# machine without a toolkit serves as well as a CPU build.
#
# TORCH_ROOT   the folder of the torch package (…/site-packages/torch), as a
#              variable or in the environment. Default: that of the Python that
#              CMake finds, active virtual environment first.
# Sets LibTorch_FOUND, LibTorch_VERSION, TORCH_ROOT.

if(NOT TORCH_ROOT AND DEFINED ENV{TORCH_ROOT})
  set(TORCH_ROOT "$ENV{TORCH_ROOT}")
endif()
if(NOT TORCH_ROOT)
  # find_spec locates the package without importing it, which would take seconds.
  set(Python3_FIND_VIRTUALENV FIRST)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_Interpreter_FOUND)
    execute_process(
      COMMAND
        "${Python3_EXECUTABLE}" -c
        "from importlib.util import find_spec; print(find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
set(TORCH_ROOT "${TORCH_ROOT}" CACHE PATH "Folder of the installed torch package")

# Not cached: another TORCH_ROOT must not keep the libraries of the last one.
find_library(LibTorch_CPU_LIBRARY torch_cpu PATHS "${TORCH_ROOT}/lib"
             NO_DEFAULT_PATH NO_CACHE)
find_library(LibTorch_C10_LIBRARY c10 PATHS "${TORCH_ROOT}/lib" NO_DEFAULT_PATH
             NO_CACHE)
set(_torch_version_file "${TORCH_ROOT}/include/torch/headeronly/version.h")
if(EXISTS "${_torch_version_file}")
  file(STRINGS "${_torch_version_file}" _torch_version
       REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]*([0-9]+)[^0-9]*([0-9]+)[^0-9]*"
                       "\\1.\\2.\\3" LibTorch_VERSION "${_torch_version}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch
  REQUIRED_VARS LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE
    "Set TORCH_ROOT to the folder of an installed torch package, which python3 -c 'print(__import__(\"torch\").__path__[0])' prints.")

if(LibTorch_FOUND AND NOT TARGET multihead::torch)
  add_library(multihead::c10 SHARED IMPORTED GLOBAL)
  set_target_properties(multihead::c10 PROPERTIES IMPORTED_LOCATION
                                                  "${LibTorch_C10_LIBRARY}")
  add_library(multihead::torch SHARED IMPORTED GLOBAL)
  set_target_properties(
    multihead::torch
    PROPERTIES IMPORTED_LOCATION "${LibTorch_CPU_LIBRARY}"
               INTERFACE_INCLUDE_DIRECTORIES
               "${TORCH_ROOT}/include;${TORCH_ROOT}/include/torch/csrc/api/include"
               INTERFACE_LINK_LIBRARIES multihead::c10
               INTERFACE_COMPILE_FEATURES cxx_std_20)
endif()
unset(_torch_version)
unset(_torch_version_file)
