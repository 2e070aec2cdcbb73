# SPDX-License-Identifier: Apache-2.0
#
# What every C++ target of this project has in common: language level, warnings, visibility, sanitizers.

include_guard(GLOBAL)

option(GDN_WERROR "Turn warnings into errors" OFF)
set(GDN_SANITIZE "" CACHE STRING "Sanitizers to build with, for example address;undefined")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR
    "gdn needs GCC 11 or newer (found ${CMAKE_CXX_COMPILER_VERSION}): older ones lack the bf16 and AMX intrinsics. "
    "Set the CXX environment variable to a newer compiler.")
endif()

# The one version string: from the Python build where there is one, else from the VERSION file.
if(DEFINED SKBUILD_PROJECT_VERSION_FULL)
  set(GDN_VERSION "${SKBUILD_PROJECT_VERSION_FULL}")
else()
  file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/VERSION" GDN_VERSION LIMIT_COUNT 1)
endif()

# Applies to our own targets only; nanobind's module gets it on top of nanobind's flags.
function(gdn_target_defaults target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON
    # A link-time optimiser may move code between instruction sets.
    INTERPROCEDURAL_OPTIMIZATION OFF)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wconversion $<$<BOOL:${GDN_WERROR}>:-Werror>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # For Arm, GCC 12 takes merged stores into a struct for writes past the end of its first member.
    target_compile_options(${target} PRIVATE -Wno-error=stringop-overflow)
  endif()
  if(GDN_SANITIZE)
    list(JOIN GDN_SANITIZE "," sanitizers)
    target_compile_options(${target} PRIVATE -fsanitize=${sanitizers} -fno-omit-frame-pointer -g)
    target_link_options(${target} PRIVATE -fsanitize=${sanitizers})
  endif()
endfunction()
