// SPDX-License-Identifier: Apache-2.0
#include "dispatch/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <cstdint>

namespace gdn::cpu {
namespace {

#if defined(__x86_64__)

struct Registers {
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

bool bit(std::uint32_t word, int position) { return (word >> position & 1u) != 0; }

bool all(std::uint64_t word, std::uint64_t mask) { return (word & mask) == mask; }

// Which register sets the operating system saves; the CPU's own bits alone promise nothing.
std::uint64_t enabled_state() {
  if (!bit(cpuid(1, 0).ecx, 27)) return 0;  // OSXSAVE
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

constexpr std::uint64_t kYmm = 0b110;               // SSE, AVX
constexpr std::uint64_t kZmm = 0b111u << 5 | kYmm;  // opmask, upper halves, upper registers
constexpr std::uint64_t kTiles = 0b11u << 17;       // tile configuration, tile data

using ArchPrctl = long (*)(int code, unsigned long argument);

// The AMX emulator of this project's tests, where it is loaded into the process: null everywhere else. The instructions
// then work, but no program can change what CPUID says, so the emulator is asked by name.
ArchPrctl amx_emulator() { return reinterpret_cast<ArchPrctl>(dlsym(RTLD_DEFAULT, "amx_emulator_arch_prctl")); }

long arch_prctl(int code, unsigned long argument) {
  if (const ArchPrctl emulated = amx_emulator()) return emulated(code, argument);
  return syscall(SYS_arch_prctl, code, argument);
}

bool is_intel() {
  const Registers vendor = cpuid(0, 0);  // "GenuineIntel", in this order
  return vendor.ebx == 0x756e6547 && vendor.edx == 0x49656e69 && vendor.ecx == 0x6c65746e;
}

CpuFeatures detect() {
  const Registers basic = cpuid(1, 0);
  const Registers extended = cpuid(7, 0);
  const Registers extended1 = cpuid(7, 1);
  const std::uint64_t state = enabled_state();
  CpuFeatures f;
  const bool fma_avx_f16c = bit(basic.ecx, 12) && bit(basic.ecx, 28) && bit(basic.ecx, 29);
  f.x86_v3 = all(state, kYmm) && fma_avx_f16c && bit(extended.ebx, 5) && bit(extended.ebx, 8);
  const bool avx512 = bit(extended.ebx, 16) && bit(extended.ebx, 17) && bit(extended.ebx, 28) &&
                      bit(extended.ebx, 30) && bit(extended.ebx, 31);
  f.x86_v4 = f.x86_v3 && all(state, kZmm) && avx512;
  f.x86_v4_bf16 = f.x86_v4 && bit(extended1.eax, 5) && bit(extended.ecx, 11);
  f.slow_bf16_dot = is_intel();
  const bool amx = all(state, kTiles) && bit(extended.edx, 24) && bit(extended.edx, 22);
  f.x86_amx = f.x86_v4_bf16 && (amx || amx_emulator() != nullptr);
  return f;
}

#elif defined(__aarch64__)

CpuFeatures detect() {
  constexpr unsigned long kHwcapAsimdHp = 1ul << 10;
  constexpr unsigned long kHwcapAsimdDp = 1ul << 20;
  constexpr unsigned long kHwcap2Bf16 = 1ul << 14;
  const unsigned long hwcap = getauxval(AT_HWCAP);
  CpuFeatures f;
  f.arm_bf16 =
      (hwcap & kHwcapAsimdHp) != 0 && (hwcap & kHwcapAsimdDp) != 0 && (getauxval(AT_HWCAP2) & kHwcap2Bf16) != 0;
  return f;
}

#else

CpuFeatures detect() { return {}; }

#endif

std::string request_amx() {
#if defined(__x86_64__)
  constexpr int kGetPermission = 0x1022;      // ARCH_GET_XCOMP_PERM
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr unsigned long kTileData = 18;
  if (!cpu_features().x86_amx) return "the CPU or its operating system has no AMX";
  std::uint64_t granted = 0;
  const auto is_granted = [&] {
    return arch_prctl(kGetPermission, reinterpret_cast<unsigned long>(&granted)) == 0 &&
           (granted >> kTileData & 1u) != 0;
  };
  if (is_granted()) return "";
  arch_prctl(kRequestPermission, kTileData);
  return is_granted() ? "" : "the operating system refused the use of AMX tiles";
#else
  return "not an x86-64 CPU";
#endif
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

const std::string& amx_permission_error() {
  static const std::string error = request_amx();
  return error;
}

}  // namespace gdn::cpu
