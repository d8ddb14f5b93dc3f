# Finds LibTorch inside an installed `torch` package and makes the target
# multihead::torch. Nothing of CUDA is asked for: a CUDA build of torch on a
# machine without a toolkit serves as well as a CPU build.
#
# TORCH_ROOT   the folder of the torch package (…/site-packages/torch), as a
#              variable or in the environment. Default: that of the Python that
#              CMake finds, active virtual environment first.
# Sets LibTorch_FOUND, LibTorch_VERSION, TORCH_ROOT.

if(NOT TORCH_ROOT AND DEFINED ENV{TORCH_ROOT})
  set(TORCH_ROOT $ENV{TORCH_ROOT})
endif()
if(NOT TORCH_ROOT)
  # find_spec locates the package without importing it, which would take seconds.
  set(Python3_FIND_VIRTUALENV FIRST)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_Interpreter_FOUND)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c
              "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
set(TORCH_ROOT "${TORCH_ROOT}" CACHE PATH "Folder of the installed torch package")

find_library(LibTorch_CPU_LIBRARY torch_cpu PATHS "${TORCH_ROOT}/lib" NO_DEFAULT_PATH)
find_library(LibTorch_C10_LIBRARY c10 PATHS "${TORCH_ROOT}/lib" NO_DEFAULT_PATH)
if(EXISTS "${TORCH_ROOT}/include/torch/headeronly/version.h")
  file(STRINGS "${TORCH_ROOT}/include/torch/headeronly/version.h" _torch_version
       REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]*([0-9]+)[^0-9]*([0-9]+)[^0-9]*" "\\1.\\2.\\3"
         LibTorch_VERSION "${_torch_version}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch
  REQUIRED_VARS LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE
    "No torch package found. Set TORCH_ROOT to its folder (python3 -c 'import torch; print(torch.__path__[0])').")

if(LibTorch_FOUND AND NOT TARGET multihead::torch)
  set(_torch_include "${TORCH_ROOT}/include" "${TORCH_ROOT}/include/torch/csrc/api/include")
  add_library(multihead::c10 SHARED IMPORTED GLOBAL)
  set_target_properties(multihead::c10 PROPERTIES IMPORTED_LOCATION "${LibTorch_C10_LIBRARY}")
  add_library(multihead::torch SHARED IMPORTED GLOBAL)
  set_target_properties(
    multihead::torch
    PROPERTIES IMPORTED_LOCATION "${LibTorch_CPU_LIBRARY}"
               INTERFACE_INCLUDE_DIRECTORIES "${_torch_include}"
               INTERFACE_LINK_LIBRARIES multihead::c10
               INTERFACE_COMPILE_FEATURES cxx_std_20)
endif()
mark_as_advanced(LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY)
