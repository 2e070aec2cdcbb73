# SPDX-License-Identifier: Apache-2.0
#
# Python extension modules in nanobind's split mode: one cp310-abi3 file serves every Python from 3.10 on, because
# nanobind's own code comes from the nanobind-backend package at run time.
#
#   gdn_add_python_module(<package> <source>...)
#
# makes the target _C and installs it into <package>.

include_guard(GLOBAL)

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

if(NOT nanobind_ROOT)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
    OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_package(nanobind 3.1 CONFIG REQUIRED)

# Headers that both native packages share.
if(NOT TARGET gdn_abi)
  add_library(gdn_abi INTERFACE)
  target_include_directories(gdn_abi INTERFACE "${CMAKE_CURRENT_LIST_DIR}/abi")
endif()
set(GDN_EXPORTS "${CMAKE_CURRENT_LIST_DIR}/exports.map")

function(gdn_add_python_module package)
  # The root build has a module of this name in each package.
  set(target ${package}_C)
  # Not stripped: its symbols say of each instruction which level it belongs to (tools/check_isa_leaks.py), and name the
  # kernels in a profiler.
  nanobind_add_module(${target}
    BACKEND_MODULE nanobind_backend NB_DOMAIN gdn FREE_THREADED NOMINSIZE NOSTRIP NB_SUPPRESS_WARNINGS ${ARGN})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME _C)
  gdn_target_defaults(${target})
  target_link_libraries(${target} PRIVATE gdn_abi)
  target_link_options(${target} PRIVATE "LINKER:--version-script=${GDN_EXPORTS}")
  set_target_properties(${target} PROPERTIES LINK_DEPENDS "${GDN_EXPORTS}")
  target_compile_definitions(${target} PRIVATE GDN_VERSION="${GDN_VERSION}")
  install(TARGETS ${target} LIBRARY DESTINATION ${package})
endfunction()
