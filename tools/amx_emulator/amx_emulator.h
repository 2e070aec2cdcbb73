// SPDX-License-Identifier: Apache-2.0
//
// What the AMX emulator exports, for tests. It needs no call to work: loading it is enough.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// 1 on a CPU that has AMX: nothing is emulated or counted there, and arch_prctl goes to the operating system.
int amx_emulator_is_native(void);

// arch_prctl(2), with ARCH_GET_XCOMP_SUPP, ARCH_GET_XCOMP_PERM and ARCH_REQ_XCOMP_PERM answered as a machine with AMX
// would. Programs reach it through syscall() or arch_prctl() where the emulator is preloaded, and by this name
// elsewhere.
long amx_emulator_arch_prctl(int code, unsigned long argument);

// Instructions emulated so far in all threads: by mnemonic ("TDPBF16PS"), or all of them for a null pointer. UINT64_MAX
// for a name it does not know. Tile loads are "TILELOADD" and "TILELOADDT1", tile products the five "TDP...".
uint64_t amx_emulator_count(const char* mnemonic);

// Signals that these instructions cost: adjacent ones share one.
uint64_t amx_emulator_signals(void);

// Set all counts to zero. Call it while no thread runs AMX.
void amx_emulator_reset(void);

// Threads whose tiles are configured now: 0 after a kernel that releases what it configured.
int amx_emulator_configured_threads(void);

// Threads that ended with configured tiles.
int amx_emulator_unreleased_exits(void);

// Strict: an instruction before the permission request fails as on hardware (SIGILL), threads that end without
// TILERELEASE are reported on standard error, and the process then exits with status 86.
void amx_emulator_set_strict(int strict);

// Become the handler of SIGILL again, where other code has replaced it.
void amx_emulator_install(void);

#ifdef __cplusplus
}
#endif
