# SPDX-License-Identifier: MIT
#
# Finds nlohmann_json, whose headers are all that there is of it: as a CMake package,
# which Debian's nlohmann-json3-dev installs, else in the Python package nlohmann-json, so
# that `pip install` needs no package of the system.
find_package(nlohmann_json ${nlohmann_json_FIND_VERSION} QUIET CONFIG)
if(NOT nlohmann_json_FOUND)
  set(Python3_FIND_VIRTUALENV FIRST)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  execute_process(
    COMMAND
      "${Python3_EXECUTABLE}" -c
      "from importlib.util import find_spec; print(find_spec('nlohmann_json').submodule_search_locations[0])"
    OUTPUT_VARIABLE _package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_path(nlohmann_json_INCLUDE_DIR nlohmann/json.hpp HINTS "${_package}/include"
            NO_CACHE)
  include(FindPackageHandleStandardArgs)
  find_package_handle_standard_args(
    nlohmann_json
    REQUIRED_VARS nlohmann_json_INCLUDE_DIR
    REASON_FAILURE_MESSAGE
      "Install nlohmann-json3-dev of Debian or Ubuntu, or the Python package nlohmann-json.")
  if(nlohmann_json_FOUND AND NOT TARGET nlohmann_json::nlohmann_json)
    add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED GLOBAL)
    target_include_directories(nlohmann_json::nlohmann_json SYSTEM
                               INTERFACE "${nlohmann_json_INCLUDE_DIR}")
  endif()
endif()
