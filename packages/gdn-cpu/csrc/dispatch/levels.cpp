// SPDX-License-Identifier: Apache-2.0
#include "dispatch/levels.h"

#include <atomic>
#include <cstdlib>

#include "dispatch/cpu_features.h"

namespace gdn::cpu {
namespace {

// The kernels of a level that has only the chunked rule of its own.
[[maybe_unused]] KernelTable with_chunk(KernelTable below, const ChunkKernel& chunk) {
  below.chunk_of_bfloat16 = &chunk;
  return below;
}

#if defined(__x86_64__)

std::vector<Level> list_levels() {
  const CpuFeatures& cpu = cpu_features();
  const auto reason = [](bool supported, const char* needs) { return supported ? std::string() : std::string(needs); };
  std::vector<Level> all;
  all.push_back({"baseline", "", &baseline::kTable});
#if defined(GDN_HAVE_X86_V3)
  all.push_back({"x86_v3", reason(cpu.x86_v3, "needs AVX2, FMA, F16C and BMI2"), &x86_v3::kTable});
#endif
#if defined(GDN_HAVE_X86_V4)
  all.push_back({"x86_v4", reason(cpu.x86_v4, "needs AVX-512 F, BW, DQ, VL and CD"), &x86_v4::kTable});
#if defined(GDN_HAVE_X86_V4_BF16)
  static const KernelTable bf16 = with_chunk(x86_v4::kTable, x86_v4_bf16::kChunkOfBFloat16);
  all.push_back({"x86_v4_bf16", reason(cpu.x86_v4_bf16, "needs AVX512-BF16 and VNNI"), &bf16});
#endif
  const std::string amx = cpu.x86_amx ? amx_permission_error() : "needs AMX-TILE and AMX-BF16";
  all.push_back({"x86_amx", amx, &bf16});
#endif
  return all;
}

#elif defined(__aarch64__)

std::vector<Level> list_levels() {
  const std::string reason = cpu_features().arm_bf16 ? "" : "needs BF16, ASIMDDP and ASIMDHP";
  return {{"baseline", "", &baseline::kTable}, {"arm_bf16", reason, &baseline::kTable}};
}

#else

std::vector<Level> list_levels() { return {{"baseline", "", &baseline::kTable}}; }

#endif

int find(const std::string& name) {
  const std::vector<Level>& all = levels();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (name == all[i].name) return static_cast<int>(i);
  }
  return -1;
}

// The highest level that can run here and is not above `cap` (an index).
int highest(int cap) {
  int best = 0;
  for (int i = 0; i <= cap; ++i) {
    if (levels()[static_cast<std::size_t>(i)].reason.empty()) best = i;
  }
  return best;
}

std::string environment_cap() {
  const char* value = std::getenv("GDN_CPU_ISA");
  return value != nullptr ? value : "";
}

int default_level() {
  const int top = static_cast<int>(levels().size()) - 1;
  const std::string cap = environment_cap();
  const int index = cap.empty() ? top : find(cap);
  return highest(index < 0 ? top : index);
}

std::atomic<int>& current() {
  static std::atomic<int> level{default_level()};
  return level;
}

}  // namespace

const std::vector<Level>& levels() {
  static const std::vector<Level> all = list_levels();
  return all;
}

const char* kernels_of(const Level& level) {
  for (const Level& candidate : levels()) {
    if (candidate.kernels == level.kernels) return candidate.name;
  }
  return level.name;
}

const Level& active_level() { return levels()[static_cast<std::size_t>(current().load(std::memory_order_relaxed))]; }

bool set_level(const std::string& name) {
  if (name.empty()) {
    current().store(default_level(), std::memory_order_relaxed);
    return true;
  }
  const int cap = find(name);
  if (cap < 0) return false;
  current().store(highest(cap), std::memory_order_relaxed);
  return true;
}

const std::string& environment_error() {
  static const std::string error = [] {
    const std::string cap = environment_cap();
    if (cap.empty() || find(cap) >= 0) return std::string();
    std::string text = "GDN_CPU_ISA: expected one of ";
    for (const Level& level : levels()) text += std::string(&level == &levels().front() ? "" : ", ") + level.name;
    return text + ", got '" + cap + "'";
  }();
  return error;
}

}  // namespace gdn::cpu
