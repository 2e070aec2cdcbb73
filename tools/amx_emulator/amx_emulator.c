// SPDX-License-Identifier: Apache-2.0
//
// AMX on an x86-64 CPU without it: every AMX instruction raises SIGILL there, and the handler in this file does what
// the instruction would have done, then continues after it. See README.md for how to use it, and for what it is not.
//
// Semantics: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1 chapter 18 and volume 2 (LDTILECFG,
// STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS, TDPB*D; exception classes AMX-E1 to AMX-E6).
#define _GNU_SOURCE
#include "amx_emulator.h"

#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

#define EXPORT __attribute__((visibility("default")))

// --- one thread's tiles ----------------------------------------------------------------------------------------------

enum { kTiles = 8, kRows = 16, kRowBytes = 64, kColumns = kRowBytes / 4 };
enum { kStrictExitStatus = 86 };

enum operation {
  LDTILECFG,
  STTILECFG,
  TILERELEASE,
  TILEZERO,
  TILELOADD,
  TILELOADDT1,
  TILESTORED,
  TDPBF16PS,
  TDPBSSD,
  TDPBSUD,
  TDPBUSD,
  TDPBUUD,
  kOperations
};

static const char* const kNames[kOperations] = {"LDTILECFG", "STTILECFG",   "TILERELEASE", "TILEZERO",
                                                "TILELOADD", "TILELOADDT1", "TILESTORED",  "TDPBF16PS",
                                                "TDPBSSD",   "TDPBSUD",     "TDPBUSD",     "TDPBUUD"};

// The operand of LDTILECFG and STTILECFG, byte for byte.
struct configuration {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[kTiles];
  uint8_t reserved_row_bytes[16];
  uint8_t rows[kTiles];
  uint8_t reserved_rows[8];
};
_Static_assert(sizeof(struct configuration) == 64, "the operand of LDTILECFG has 64 bytes");

union tile {
  uint8_t bytes[kRows][kRowBytes];
  uint32_t dwords[kRows][kColumns];
  float floats[kRows][kColumns];
};

struct thread {
  struct configuration config;  // all zero while the tiles are not configured
  union tile tile[kTiles];
  _Atomic uint64_t count[kOperations];  // written by this thread, read by any
  _Atomic uint64_t signals;
  _Atomic bool configured;
  _Atomic bool in_use;  // by a living thread
  char problem[200];    // why the last instruction failed
  struct thread* next;  // in the list of all
};

static struct thread* _Atomic all_threads;
static _Atomic int unreleased_exits;
static _Atomic bool strict, permitted;
static bool native;
static pthread_key_t exit_key;
// Eight bytes of static TLS: a block that the loader makes on first use could call malloc in the handler.
static __thread struct thread* this_thread __attribute__((tls_model("initial-exec")));

static void add(_Atomic uint64_t* counter) {
  atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + 1, memory_order_relaxed);
}

// Take over what an ended thread has left, or get new memory from the operating system: no malloc in a handler.
static struct thread* claim_thread(void) {
  for (struct thread* t = all_threads; t != NULL; t = t->next) {
    bool expected = false;
    if (atomic_compare_exchange_strong(&t->in_use, &expected, true)) return t;
  }
  struct thread* t = mmap(NULL, sizeof(struct thread), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (t == MAP_FAILED) abort();
  t->in_use = true;
  t->next = all_threads;
  while (!atomic_compare_exchange_weak(&all_threads, &t->next, t)) continue;
  return t;
}

static struct thread* current_thread(void) {
  if (this_thread == NULL) {
    this_thread = claim_thread();
    pthread_setspecific(exit_key, this_thread);
  }
  return this_thread;
}

static void release_tiles(struct thread* t) {
  memset(&t->config, 0, sizeof t->config);
  memset(t->tile, 0, sizeof t->tile);
  t->configured = false;
}

static void on_thread_exit(void* thread) {
  struct thread* t = thread;
  if (t->configured) {
    ++unreleased_exits;
    if (strict) fputs("amx_emulator: a thread ended without TILERELEASE\n", stderr);
  }
  release_tiles(t);
  this_thread = NULL;
  t->in_use = false;
}

// --- what an instruction is ------------------------------------------------------------------------------------------

enum outcome { DONE, NOT_AMX, UNDEFINED, PROTECTION };  // the last two: #UD, #GP(0)

struct instruction {
  enum operation operation;
  int first, second, third;  // ModRM.reg, ModRM.rm, VEX.vvvv: registers of four bits
  bool is_memory, has_sib;
  bool short_addresses;  // prefix 67: addresses of 32 bits
  uint64_t base;         // segment, base register and displacement
  uint64_t index;        // index register, scaled: the distance of rows, where a tile is the operand
  uint64_t next;         // the address of the instruction after it
};

static uint64_t general_register(const ucontext_t* context, int number) {
  static const uint8_t kWhere[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                     REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return (uint64_t)context->uc_mcontext.gregs[kWhere[number]];
}

// The kernel's own entry: the library's functions may be the ones below.
static long system_call(long number, long a, long b, long c, long d, long e, long f) {
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  long result = number;
  __asm__ volatile("syscall"
                   : "+a"(result)
                   : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  if (result >= 0 || result < -4095) return result;
  errno = (int)-result;
  return -1;
}

static uint64_t segment_base(uint8_t prefix) {
  enum { kGetFs = 0x1003, kGetGs = 0x1004 };
  uint64_t base = 0;
  if (prefix == 0) return 0;
  system_call(SYS_arch_prctl, prefix == 0x64 ? kGetFs : kGetGs, (long)&base, 0, 0, 0, 0);
  return base;
}

static int64_t displacement(const uint8_t** code, int bytes) {
  int8_t one = 0;
  int32_t four = 0;
  if (bytes == 1) memcpy(&one, *code, 1);
  if (bytes == 4) memcpy(&four, *code, 4);
  *code += bytes;
  return bytes == 1 ? one : four;
}

// ModRM and what follows it. `high` has the bits of VEX that extend reg, index and base: 4, 2, 1.
static void decode_operands(const uint8_t** code, const ucontext_t* context, int high, struct instruction* i) {
  const uint8_t modrm = *(*code)++;
  const int mod = modrm >> 6;
  i->first = (modrm >> 3 & 7) | (high & 4 ? 8 : 0);
  i->second = (modrm & 7) | (high & 1 ? 8 : 0);
  i->is_memory = mod != 3;
  if (!i->is_memory) return;
  int base = i->second;
  bool has_base = true;
  i->has_sib = (modrm & 7) == 4;
  if (i->has_sib) {
    const uint8_t sib = *(*code)++;
    const int index = (sib >> 3 & 7) | (high & 2 ? 8 : 0);
    base = (sib & 7) | (high & 1 ? 8 : 0);
    has_base = !((sib & 7) == 5 && mod == 0);
    if (index != 4) i->index = general_register(context, index) << (sib >> 6);
  }
  const bool from_next = mod == 0 && (modrm & 7) == 5;  // relative to the next instruction
  const int bytes = mod == 1 ? 1 : mod == 2 || from_next || !has_base ? 4 : 0;
  const int64_t distance = displacement(code, bytes);
  if (from_next) {
    i->base += (uint64_t)(uintptr_t)*code;  // no AMX instruction has an immediate operand after its address
  } else if (has_base) {
    i->base += general_register(context, base);
  }
  i->base += (uint64_t)distance;
}

// Opcode, VEX.pp (0: none, 1: 66, 2: F3, 3: F2) and form to operation; kOperations where there is none.
static enum operation find_operation(uint8_t opcode, int pp, const struct instruction* i) {
  static const enum operation kInt8[4] = {TDPBUUD, TDPBUSD, TDPBSUD, TDPBSSD};
  static const enum operation kMove[4] = {kOperations, TILELOADDT1, TILESTORED, TILELOADD};
  if (opcode == 0x5e && !i->is_memory) return kInt8[pp];
  if (opcode == 0x5c && !i->is_memory && pp == 2) return TDPBF16PS;
  if (opcode == 0x4b && i->is_memory && i->has_sib) return kMove[pp];
  if (opcode != 0x49) return kOperations;
  if (i->is_memory && (i->first & 7) == 0 && pp < 2) return pp == 0 ? LDTILECFG : STTILECFG;
  if (!i->is_memory && pp == 0 && i->first == 0 && i->second == 0) return TILERELEASE;
  if (!i->is_memory && pp == 3 && (i->second & 7) == 0) return TILEZERO;
  return kOperations;
}

// Read one instruction. Nothing behind its last byte is read: the next page may not be there.
static bool decode(const ucontext_t* context, struct instruction* i) {
  const uint8_t* code = (const uint8_t*)(uintptr_t)context->uc_mcontext.gregs[REG_RIP];
  uint8_t segment = 0;
  memset(i, 0, sizeof *i);
  for (int prefixes = 0; *code != 0xc4; ++code) {
    if (++prefixes > 8) return false;
    if (*code == 0x64 || *code == 0x65) {
      segment = *code;
    } else if (*code == 0x67) {
      i->short_addresses = true;
    } else if (*code != 0x26 && *code != 0x2e && *code != 0x36 && *code != 0x3e) {
      return false;
    }
  }
  const uint8_t byte1 = *++code;
  if ((byte1 & 0x1f) != 2) return false;  // opcode map 0F38
  const uint8_t byte2 = *++code;
  if ((byte2 & 0x84) != 0) return false;  // W0, 128 bits
  const uint8_t opcode = *++code;
  if (opcode != 0x49 && opcode != 0x4b && opcode != 0x5c && opcode != 0x5e) return false;
  ++code;
  i->third = ~byte2 >> 3 & 15;
  decode_operands(&code, context, ~byte1 >> 5 & 7, i);
  if (i->is_memory) i->base += segment_base(segment);
  i->operation = find_operation(opcode, byte2 & 3, i);
  i->next = (uint64_t)(uintptr_t)code;
  return i->operation != kOperations;
}

// --- what it does ----------------------------------------------------------------------------------------------------

__attribute__((format(printf, 3, 4))) static enum outcome fail(struct thread* t, enum outcome outcome,
                                                               const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(t->problem, sizeof t->problem, format, arguments);
  va_end(arguments);
  return outcome;
}

static uint8_t* address_of_row(const struct instruction* i, int row) {
  uint64_t address = i->base + i->index * (uint64_t)row;
  if (i->short_addresses) address = (uint32_t)address;
  return (uint8_t*)(uintptr_t)address;
}

static bool any(const uint8_t* bytes, size_t count) {
  for (size_t n = 0; n < count; ++n) {
    if (bytes[n] != 0) return true;
  }
  return false;
}

// #GP conditions of LDTILECFG, for a palette other than 0.
static enum outcome check_configuration(struct thread* t, const struct configuration* c) {
  if (c->palette != 1) return fail(t, PROTECTION, "palette %d: expected 0 or 1", c->palette);
  if (any(c->reserved, sizeof c->reserved)) return fail(t, PROTECTION, "bytes 2 to 15: expected zeros");
  if (any(c->reserved_row_bytes, sizeof c->reserved_row_bytes)) {
    return fail(t, PROTECTION, "bytes 32 to 47: expected zeros");
  }
  if (any(c->reserved_rows, sizeof c->reserved_rows)) return fail(t, PROTECTION, "bytes 56 to 63: expected zeros");
  for (int n = 0; n < kTiles; ++n) {
    const int rows = c->rows[n], bytes = c->row_bytes[n];
    if (rows > kRows) return fail(t, PROTECTION, "tile %d: expected at most 16 rows, got %d", n, rows);
    if (bytes > kRowBytes) return fail(t, PROTECTION, "tile %d: expected at most 64 bytes a row, got %d", n, bytes);
    if ((rows == 0) != (bytes == 0)) {
      return fail(t, PROTECTION, "tile %d: %d rows of %d bytes; expected both zero or neither", n, rows, bytes);
    }
  }
  return DONE;
}

static enum outcome load_configuration(struct thread* t, const struct instruction* i) {
  struct configuration c;
  memcpy(&c, address_of_row(i, 1), sizeof c);
  if (c.palette != 0) {
    const enum outcome outcome = check_configuration(t, &c);
    if (outcome != DONE) return outcome;
  }
  release_tiles(t);
  if (c.palette == 0) return DONE;
  t->config = c;
  t->configured = true;
  return DONE;
}

// #UD conditions of every instruction that names a tile.
static enum outcome check_tile(struct thread* t, int tile) {
  if (!t->configured) return fail(t, UNDEFINED, "no tile is configured (LDTILECFG)");
  if (tile >= kTiles) return fail(t, UNDEFINED, "there is no tile %d", tile);
  if (t->config.rows[tile] == 0) return fail(t, UNDEFINED, "tile %d is not configured", tile);
  return DONE;
}

static void load_tile(struct thread* t, const struct instruction* i) {
  struct configuration* c = &t->config;
  // start_row says where to go on after a fault, so it counts what is done. Bytes outside the tile are never seen.
  for (; c->start_row < c->rows[i->first]; ++c->start_row) {
    uint8_t* row = t->tile[i->first].bytes[c->start_row];
    memcpy(row, address_of_row(i, c->start_row), c->row_bytes[i->first]);
  }
  c->start_row = 0;
}

static void store_tile(struct thread* t, const struct instruction* i) {
  struct configuration* c = &t->config;
  for (; c->start_row < c->rows[i->first]; ++c->start_row) {
    memcpy(address_of_row(i, c->start_row), t->tile[i->first].bytes[c->start_row], c->row_bytes[i->first]);
  }
  c->start_row = 0;
}

static enum outcome check_product(struct thread* t, const struct instruction* i) {
  const int c = i->first, a = i->second, b = i->third;
  const int tiles[3] = {c, a, b};
  if (c == a || c == b || a == b) return fail(t, UNDEFINED, "tiles %d, %d, %d: expected three different ones", c, a, b);
  for (int n = 0; n < 3; ++n) {
    const enum outcome outcome = check_tile(t, tiles[n]);
    if (outcome != DONE) return outcome;
    if (t->config.row_bytes[tiles[n]] % 4 != 0) {
      return fail(t, UNDEFINED, "tile %d: %d bytes a row are not a multiple of 4", tiles[n],
                  t->config.row_bytes[tiles[n]]);
    }
  }
  const uint8_t* rows = t->config.rows;
  const uint16_t* bytes = t->config.row_bytes;
  if (rows[c] != rows[a] || bytes[c] != bytes[b] || bytes[a] / 4 != rows[b]) {
    return fail(t, UNDEFINED, "tiles %d, %d, %d: %d x %d, %d x %d, %d x %d (rows x dwords) do not multiply", c, a, b,
                rows[c], bytes[c] / 4, rows[a], bytes[a] / 4, rows[b], bytes[b] / 4);
  }
  return DONE;
}

static float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// c[m][n] += (sum over k of a[m][2k] b[k][2n]) + (sum over k of a[m][2k + 1] b[k][2n + 1]): two chains of FMAs in the
// order of k, each from zero, then their sum, then c plus that. Rounded to nearest even, denormals are zeros on the way
// in and out; MXCSR is set so by the caller. Columns outside the tile are computed too, and never seen.
__attribute__((target("avx2,fma"), noinline)) static void multiply_bf16(union tile* c, const union tile* a,
                                                                        const union tile* b, int rows, int pairs) {
  for (int m = 0; m < rows; ++m) {
    float even[kColumns] = {0}, odd[kColumns] = {0};
    for (int k = 0; k < pairs; ++k) {
      const float a_even = as_float(a->dwords[m][k] << 16), a_odd = as_float(a->dwords[m][k] & 0xffff0000u);
      for (int n = 0; n < kColumns; ++n) {
        even[n] = __builtin_fmaf(a_even, as_float(b->dwords[k][n] << 16), even[n]);
        odd[n] = __builtin_fmaf(a_odd, as_float(b->dwords[k][n] & 0xffff0000u), odd[n]);
      }
    }
    for (int n = 0; n < kColumns; ++n) c->floats[m][n] += even[n] + odd[n];
  }
}

// The byte `j` of a dword, extended with its sign or with zeros.
static int32_t byte_of(uint32_t dword, int j, bool is_signed) {
  const uint8_t byte = (uint8_t)(dword >> 8 * j);
  return is_signed ? (int8_t)byte : byte;
}

// c[m][n] += sum over k and j of a[m][4k + j] b[k][4n + j], modulo 2^32.
static void multiply_int8(union tile* c, const union tile* a, const union tile* b, int rows, int quads,
                          bool a_is_signed, bool b_is_signed) {
  for (int m = 0; m < rows; ++m) {
    for (int k = 0; k < quads; ++k) {
      for (int j = 0; j < 4; ++j) {
        const int32_t left = byte_of(a->dwords[m][k], j, a_is_signed);
        for (int n = 0; n < kColumns; ++n) {
          c->dwords[m][n] += (uint32_t)(left * byte_of(b->dwords[k][n], j, b_is_signed));
        }
      }
    }
  }
}

static enum outcome multiply(struct thread* t, const struct instruction* i) {
  const enum outcome outcome = check_product(t, i);
  if (outcome != DONE) return outcome;
  const int rows = t->config.rows[i->first], depth = t->config.row_bytes[i->second] / 4;
  union tile *c = &t->tile[i->first], *a = &t->tile[i->second], *b = &t->tile[i->third];
  if (i->operation == TDPBF16PS) {
    // Masked, to nearest, denormals as zeros. The interrupted program gets its own MXCSR back with its other registers.
    enum { kMaskAll = 0x1f80, kFlushToZero = 0x8000, kDenormalsAreZeros = 0x40 };
    _mm_setcsr(kMaskAll | kFlushToZero | kDenormalsAreZeros);
    multiply_bf16(c, a, b, rows, depth);
  } else {
    const bool a_is_signed = i->operation == TDPBSSD || i->operation == TDPBSUD;
    const bool b_is_signed = i->operation == TDPBSSD || i->operation == TDPBUSD;
    multiply_int8(c, a, b, rows, depth, a_is_signed, b_is_signed);
  }
  t->config.start_row = 0;
  return DONE;
}

static bool is_product(enum operation operation) { return operation >= TDPBF16PS; }

static enum outcome execute(struct thread* t, const struct instruction* i) {
  const bool needs_permission = i->operation != STTILECFG && i->operation != TILERELEASE;
  if (strict && needs_permission && !permitted) {
    return fail(t, UNDEFINED, "no permission: ask with arch_prctl(ARCH_REQ_XCOMP_PERM, 18) before it");
  }
  if (!is_product(i->operation) && i->third != 0) return fail(t, UNDEFINED, "VEX.vvvv: expected 1111");
  if (is_product(i->operation)) return multiply(t, i);
  if (i->operation == LDTILECFG) return load_configuration(t, i);
  if (i->operation == STTILECFG) {
    memcpy(address_of_row(i, 1), &t->config, sizeof t->config);
    return DONE;
  }
  if (i->operation == TILERELEASE) {
    release_tiles(t);
    return DONE;
  }
  const enum outcome outcome = check_tile(t, i->first);
  if (outcome != DONE) return outcome;
  if (i->operation == TILEZERO) {
    memset(&t->tile[i->first], 0, sizeof t->tile[0]);
    t->config.start_row = 0;
  } else if (i->operation == TILESTORED) {
    store_tile(t, i);
  } else {
    load_tile(t, i);
  }
  return DONE;
}

// --- the signal ------------------------------------------------------------------------------------------------------

typedef int sigaction_function(int, const struct sigaction*, struct sigaction*);

static struct sigaction program_action;  // what the program, or another library, wants done on SIGILL

static int next_sigaction(int signal_number, const struct sigaction* action, struct sigaction* old) {
  static sigaction_function* next;
  if (next == NULL) next = (sigaction_function*)dlsym(RTLD_NEXT, "sigaction");
  return next(signal_number, action, old);
}

static void take_default(int signal_number) {
  const struct sigaction action = {.sa_handler = SIG_DFL};
  next_sigaction(signal_number, &action, NULL);
}

// Hand the signal to whom it would have come without this file.
static void pass_on(int signal_number, siginfo_t* info, void* context) {
  const struct sigaction action = program_action;
  if ((action.sa_flags & SA_RESETHAND) != 0) program_action = (struct sigaction){.sa_handler = SIG_DFL};
  if ((action.sa_flags & SA_SIGINFO) != 0) {
    action.sa_sigaction(signal_number, info, context);
  } else if (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN) {
    action.sa_handler(signal_number);
  } else if (info->si_code > 0) {
    take_default(signal_number);  // the instruction is tried again, and ends the process
  } else if (action.sa_handler == SIG_DFL) {
    take_default(signal_number);
    raise(signal_number);  // stays pending until the handler returns
  }
}

static enum outcome step(struct thread* t, ucontext_t* context, struct instruction* i) {
  if (!decode(context, i)) return NOT_AMX;
  const enum outcome outcome = execute(t, i);
  if (outcome != DONE) return outcome;
  add(&t->count[i->operation]);
  context->uc_mcontext.gregs[REG_RIP] = (greg_t)i->next;
  return DONE;
}

static void report(const struct thread* t, const struct instruction* i, enum outcome outcome,
                   const ucontext_t* context) {
  char line[320];
  const int length = snprintf(line, sizeof line, "amx_emulator: %s at %#llx: %s: %s\n", kNames[i->operation],
                              context->uc_mcontext.gregs[REG_RIP], outcome == UNDEFINED ? "#UD" : "#GP", t->problem);
  if (write(STDERR_FILENO, line, (size_t)length) < 0) return;
}

static void on_sigill(int signal_number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  struct instruction i;
  enum outcome outcome = NOT_AMX;
  if (info->si_code > 0) {  // not sent by kill
    struct thread* t = current_thread();
    outcome = step(t, context, &i);
    if (outcome == DONE) {
      add(&t->signals);
      // Adjacent ones, at no further signal. One that fails gets a signal of its own.
      while (step(t, context, &i) == DONE) continue;
    } else if (outcome != NOT_AMX) {
      report(t, &i, outcome, context);
    }
  }
  errno = saved_errno;
  if (outcome == PROTECTION) {
    raise(SIGSEGV);  // what Linux makes of #GP
  } else if (outcome != DONE) {
    pass_on(signal_number, info, context);
  }
}

static bool is_ours(const struct sigaction* action) { return action->sa_sigaction == on_sigill; }

EXPORT void amx_emulator_install(void) {
  if (native) return;
  struct sigaction ours = {.sa_flags = SA_SIGINFO}, old;
  ours.sa_sigaction = on_sigill;
  sigemptyset(&ours.sa_mask);
  if (next_sigaction(SIGILL, &ours, &old) == 0 && !is_ours(&old)) program_action = old;
}

// --- calls of the C library that it has to see (where it is preloaded) -----------------------------------------------

EXPORT int sigaction(int signal_number, const struct sigaction* action, struct sigaction* old) {
  if (signal_number != SIGILL || native) return next_sigaction(signal_number, action, old);
  const struct sigaction previous = program_action;
  if (action != NULL) program_action = *action;
  if (old != NULL) *old = previous;
  return 0;
}

EXPORT sighandler_t signal(int signal_number, sighandler_t handler) {
  struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
  sigemptyset(&action.sa_mask);
  return sigaction(signal_number, &action, &old) == 0 ? old.sa_handler : SIG_ERR;
}

EXPORT long syscall(long number, ...) {
  long a[6];
  va_list arguments;
  va_start(arguments, number);
  for (int n = 0; n < 6; ++n) a[n] = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_arch_prctl) return amx_emulator_arch_prctl((int)a[0], (unsigned long)a[1]);
  return system_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

EXPORT int arch_prctl(int code, unsigned long argument) { return (int)amx_emulator_arch_prctl(code, argument); }

EXPORT long amx_emulator_arch_prctl(int code, unsigned long argument) {
  enum { kGetSupported = 0x1021, kGetPermitted = 0x1022, kRequest = 0x1023, kTileData = 18 };
  const uint64_t tiles = UINT64_C(3) << 17;  // configuration and data
  if (!native && code == kRequest && argument == kTileData) {
    permitted = true;
    return 0;
  }
  const long result = system_call(SYS_arch_prctl, code, (long)argument, 0, 0, 0, 0);
  if (native || (code != kGetSupported && code != kGetPermitted)) return result;
  uint64_t* components = (uint64_t*)(uintptr_t)argument;
  if (result != 0) *components = 3;  // an operating system that does not know the call: x87 and SSE
  if (code == kGetSupported || permitted) *components |= tiles;
  return 0;
}

// --- counts ----------------------------------------------------------------------------------------------------------

EXPORT int amx_emulator_is_native(void) { return native; }

EXPORT void amx_emulator_set_strict(int value) { strict = value != 0; }

EXPORT int amx_emulator_unreleased_exits(void) { return unreleased_exits; }

EXPORT uint64_t amx_emulator_count(const char* mnemonic) {
  uint64_t total = 0;
  bool known = false;
  for (int operation = 0; operation < kOperations; ++operation) {
    if (mnemonic != NULL && strcmp(mnemonic, kNames[operation]) != 0) continue;
    known = true;
    for (struct thread* t = all_threads; t != NULL; t = t->next) total += t->count[operation];
  }
  return known ? total : UINT64_MAX;
}

EXPORT uint64_t amx_emulator_signals(void) {
  uint64_t total = 0;
  for (struct thread* t = all_threads; t != NULL; t = t->next) total += t->signals;
  return total;
}

EXPORT void amx_emulator_reset(void) {
  for (struct thread* t = all_threads; t != NULL; t = t->next) {
    for (int operation = 0; operation < kOperations; ++operation) t->count[operation] = 0;
    t->signals = 0;
  }
}

EXPORT int amx_emulator_configured_threads(void) {
  int total = 0;
  for (struct thread* t = all_threads; t != NULL; t = t->next) total += t->configured;
  return total;
}

// --- start and end ---------------------------------------------------------------------------------------------------

static bool cpu_has_amx(void) {
  uint32_t eax, ebx, ecx, edx;
  const uint32_t osxsave = 1u << 27, tile = 1u << 24;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & osxsave) == 0) return false;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & tile) == 0) return false;
  __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (eax >> 17 & 3) == 3;
}

__attribute__((constructor)) static void start(void) {
  native = cpu_has_amx();
  if (native) return;
  if (!__builtin_cpu_supports("fma") || !__builtin_cpu_supports("avx2")) {
    fputs("amx_emulator: inactive, since it needs a CPU with AVX2 and FMA\n", stderr);
    return;
  }
  const char* value = getenv("AMX_EMULATOR_STRICT");
  strict = value != NULL && strcmp(value, "1") == 0;
  pthread_key_create(&exit_key, on_thread_exit);
  amx_emulator_install();
}

static void print_counts(void) {
  fprintf(stderr, "amx_emulator: %llu instructions, %llu signals\n", (unsigned long long)amx_emulator_count(NULL),
          (unsigned long long)amx_emulator_signals());
  for (int operation = 0; operation < kOperations; ++operation) {
    const unsigned long long count = amx_emulator_count(kNames[operation]);
    if (count != 0) fprintf(stderr, "amx_emulator: %-11s %llu\n", kNames[operation], count);
  }
}

__attribute__((destructor)) static void end(void) {
  const char* value = getenv("AMX_EMULATOR_COUNTS");
  if (value != NULL && strcmp(value, "1") == 0) print_counts();
  const int unreleased = amx_emulator_configured_threads() + amx_emulator_unreleased_exits();
  if (!strict || unreleased == 0) return;
  fprintf(stderr, "amx_emulator: %d threads never released their tiles (TILERELEASE)\n", unreleased);
  fflush(NULL);
  _exit(kStrictExitStatus);
}
