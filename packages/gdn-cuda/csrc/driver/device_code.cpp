// SPDX-License-Identifier: Apache-2.0
#include "driver/device_code.h"

// Files that the build made, from symbol to symbol_end. Global, though hidden: an assembler for Arm names a local
// symbol by its section, of which the linker's table of addresses then holds the start.
#define GDN_EMBED_SYMBOL(SYMBOL) ".globl " #SYMBOL "\n.hidden " #SYMBOL "\n" #SYMBOL ":\n"
#define GDN_EMBED(SYMBOL, FILE)                                                                                \
  __asm__(".section .rodata\n.balign 64\n" GDN_EMBED_SYMBOL(SYMBOL) ".incbin \"" FILE "\"\n" GDN_EMBED_SYMBOL( \
      SYMBOL##_end) ".byte 0\n.text\n");                                                                       \
  extern "C" const char SYMBOL[], SYMBOL##_end[];
#include "device_code_table.h"
#undef GDN_EMBED
#undef GDN_EMBED_SYMBOL

namespace gdn::cuda {
namespace {

[[maybe_unused]] constexpr bool cubin = false, ptx = true;

}  // namespace

const std::vector<DeviceCode>& device_code() {
  static const std::vector<DeviceCode> all{
#define GDN_DEVICE_CODE(SYMBOL, ARCHITECTURE, MAJOR, MINOR, SCOPE, IS_PTX) \
  {ARCHITECTURE, MAJOR, MINOR, SCOPE, IS_PTX, SYMBOL, static_cast<std::size_t>(SYMBOL##_end - SYMBOL)},
#include "device_code_table.h"
  };
  return all;
}

DeviceCompiler device_compiler() { return {GDN_DEVICE_COMPILER, GDN_DEVICE_COMPILER_MAJOR, GDN_DEVICE_COMPILER_MINOR}; }

const DeviceCode* code_for(int major, int minor) {
  const DeviceCode* best = nullptr;
  for (const DeviceCode& code : device_code()) {
    const bool is_older = code.major < major || (code.major == major && code.minor <= minor);
    const bool runs =
        code.is_ptx ? is_older : code.major == major && (code.scope == 'a' ? code.minor == minor : is_older);
    const bool is_better =
        best == nullptr || (best->is_ptx && !code.is_ptx) || (best->is_ptx == code.is_ptx && code.minor > best->minor);
    if (runs && is_better) best = &code;
  }
  return best;
}

}  // namespace gdn::cuda
