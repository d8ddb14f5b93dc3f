# SPDX-License-Identifier: MIT
# Two installations: a wheel, where everything lies in the Python package beside
# torch, and a prefix with headers, library, command and CMake package.

if(SKBUILD)
  set_target_properties(multihead multihead_diagnosis multihead_pictures PROPERTIES
                        INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib")
  install(TARGETS multihead multihead_diagnosis multihead_pictures
          LIBRARY DESTINATION multihead)
  install(FILES "${PROJECT_BINARY_DIR}/python/multihead/_built.py"
          DESTINATION multihead)
  if(MULTIHEAD_BUILD_CLI)
    set_target_properties(multihead_cli PROPERTIES
                          INSTALL_RPATH "$ORIGIN/..;$ORIGIN/../../torch/lib")
    install(TARGETS multihead_cli RUNTIME DESTINATION multihead/bin)
  endif()
  install(FILES python/multihead_command.py python/multihead_pytest.py
          DESTINATION .)
  return()
endif()

include(CMakePackageConfigHelpers)
set(package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/multihead")

set_target_properties(multihead PROPERTIES INSTALL_RPATH "${TORCH_ROOT}/lib")
install(TARGETS multihead EXPORT multihead-targets
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(FILES multihead/backend.h
              multihead/cache.h
              multihead/distributed.h
              multihead/errors.h
              multihead/functional.h
              multihead/install.h
              multihead/modules.h
              multihead/multihead.h
              multihead/mxint8.h
              multihead/safetensors.h
              multihead/safetensors_error.h
              multihead/stats.h
              multihead/textbook.h
              "${PROJECT_BINARY_DIR}/include/multihead/version.h"
        DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/multihead")

# What is wrong with somebody's attention: a component of its own.
set_target_properties(
  multihead_diagnosis PROPERTIES INSTALL_RPATH "$ORIGIN;${TORCH_ROOT}/lib")
install(TARGETS multihead_diagnosis EXPORT multihead-diagnosis-targets
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT diagnosis)
install(FILES diagnosis/include/multihead/diagnosis.h
        DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/multihead" COMPONENT diagnosis)
install(EXPORT multihead-diagnosis-targets NAMESPACE multihead::
        DESTINATION "${package_folder}" COMPONENT diagnosis)

if(MULTIHEAD_BUILD_CLI)
  set_target_properties(
    multihead_cli PROPERTIES INSTALL_RPATH
                             "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${TORCH_ROOT}/lib")
  install(TARGETS multihead_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()

install(EXPORT multihead-targets NAMESPACE multihead::
        DESTINATION "${package_folder}")
configure_package_config_file(cmake/multihead-config.cmake.in
                              multihead-config.cmake
                              INSTALL_DESTINATION "${package_folder}")
write_basic_package_version_file(multihead-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/multihead-config.cmake"
              "${PROJECT_BINARY_DIR}/multihead-config-version.cmake"
              cmake/FindLibTorch.cmake
        DESTINATION "${package_folder}")
