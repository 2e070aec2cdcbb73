# SPDX-License-Identifier: Apache-2.0
#
# One source, several instruction sets, one shared object. Each level is an OBJECT library compiled from the same
# files with -DGDN_ISA=<level>; the code puts itself in a namespace of that name, and a table chooses at run time.
#
#   gdn_add_isa_objects(<target> LEVELS <level>... SOURCES <file>... [INCLUDES <dir>...])
#
# makes <target>_<level> for each level this processor has, and the INTERFACE library <target>, which carries their
# objects and the definitions GDN_HAVE_<LEVEL>=1. Levels of other processors are skipped.

include_guard(GLOBAL)

# Explicit features, never -march=<name>: a name means different features in different compilers, and
# -march=x86-64-vN marks the whole file as needing that level.
set(GDN_ISA_X86_LEVELS x86_v3 x86_v4 x86_v4_bf16 x86_amx)
set(GDN_ISA_FLAGS_x86_v3 -mavx2 -mfma -mf16c -mbmi2)
set(GDN_ISA_FLAGS_x86_v4 ${GDN_ISA_FLAGS_x86_v3}
  -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mprefer-vector-width=512)
set(GDN_ISA_FLAGS_x86_v4_bf16 ${GDN_ISA_FLAGS_x86_v4} -mavx512bf16 -mavx512vnni)
set(GDN_ISA_FLAGS_x86_amx ${GDN_ISA_FLAGS_x86_v4_bf16} -mamx-tile -mamx-bf16)

set(GDN_ISA_ARM_LEVELS arm_bf16)
set(GDN_ISA_FLAGS_arm_bf16 -march=armv8.2-a+fp16+dotprod+bf16)

# baseline: whatever the compiler targets by itself, x86-64 (SSE2) or armv8-a (Neon).
set(GDN_ISA_FLAGS_baseline)

# The levels that this project knows for the target processor, lowest first.
function(gdn_isa_known_levels result)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set(levels baseline ${GDN_ISA_X86_LEVELS})
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    set(levels baseline ${GDN_ISA_ARM_LEVELS})
  else()
    set(levels baseline)
  endif()
  set(${result} ${levels} PARENT_SCOPE)
endfunction()

function(gdn_add_isa_objects target)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "" "LEVELS;SOURCES;INCLUDES")
  gdn_isa_known_levels(known_levels)
  add_library(${target} INTERFACE)
  # Baseline objects come first on the link line: should two levels ever emit one symbol, the linker keeps the first.
  foreach(level IN LISTS known_levels)
    if(NOT level IN_LIST ARG_LEVELS)
      continue()
    endif()
    set(objects ${target}_${level})
    add_library(${objects} OBJECT ${ARG_SOURCES})
    gdn_target_defaults(${objects})
    target_include_directories(${objects} PRIVATE ${ARG_INCLUDES})
    target_compile_definitions(${objects} PRIVATE GDN_ISA=${level})
    # No contraction: which products fuse must be the code's choice, so that results do not change with the
    # compiler. No exceptions: their weak personality symbol would leave the level.
    target_compile_options(${objects} PRIVATE
      ${GDN_ISA_FLAGS_${level}} $<$<CONFIG:Release,RelWithDebInfo>:-O3> -ffp-contract=off -fno-exceptions -fno-rtti)
    target_sources(${target} INTERFACE $<TARGET_OBJECTS:${objects}>)
    string(TOUPPER ${level} level_upper)
    target_compile_definitions(${target} INTERFACE GDN_HAVE_${level_upper}=1)
  endforeach()
endfunction()
