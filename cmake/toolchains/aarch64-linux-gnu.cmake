# SPDX-License-Identifier: Apache-2.0
#
# Cross compile for 64-bit Arm Linux with the compiler that Debian and Ubuntu package as g++-aarch64-linux-gnu.
# CMAKE_CROSSCOMPILING_EMULATOR stays unset: CMake would run the host's Python through it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
