// SPDX-License-Identifier: Apache-2.0
#include "dispatch/levels.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "dispatch/cpu_features.h"
#include "runtime/openblas.h"

namespace gdn::cpu {
namespace {

using ChunkKernels = std::vector<const ChunkKernel*>;

ChunkKernels fp32_kernels(const KernelTable& table) { return {table.chunk, table.blas_chunk}; }

constexpr const char* kOpenBlas = "openblas";

bool is_there(const ChunkKernel& kernel) {
  if (!kernel.calls_blas) return true;
  return kernel.multiplies_bf16 ? openblas().sbgemm != nullptr : openblas().sgemm != nullptr;
}

#if defined(__x86_64__)

#if defined(GDN_HAVE_X86_V4_BF16)
// The kernels of the level below, but for the recurrence.
const KernelTable& bf16_table() {
  static const KernelTable table = [] {
    KernelTable kernels = x86_v4::kTable;
    kernels.recurrence = x86_v4_bf16::recurrence;
    kernels.recurrence_norm = x86_v4_bf16::recurrence_norm;
    return kernels;
  }();
  return table;
}

// The faster one first.
ChunkKernels bf16_kernels() {
  const ChunkKernel* const own = &x86_v4_bf16::kChunkOfBFloat16;
  const ChunkKernel* const fp32 = x86_v4::kTable.chunk;
  const bool is_slow = cpu_features().slow_bf16_dot;
  return {is_slow ? fp32 : own, is_slow ? own : fp32, x86_v4::kTable.blas_chunk};
}

#if defined(GDN_HAVE_X86_AMX)
ChunkKernels amx_kernels() {
  ChunkKernels kernels = bf16_kernels();
  kernels.insert(kernels.begin(), &x86_amx::kChunkOfBFloat16);
  return kernels;
}
#endif
#endif

std::vector<Level> list_levels() {
  const CpuFeatures& cpu = cpu_features();
  const auto reason = [](bool supported, const char* needs) { return supported ? std::string() : std::string(needs); };
  std::vector<Level> all;
  all.push_back({"baseline", "", &baseline::kTable, fp32_kernels(baseline::kTable)});
#if defined(GDN_HAVE_X86_V3)
  all.push_back(
      {"x86_v3", reason(cpu.x86_v3, "needs AVX2, FMA, F16C and BMI2"), &x86_v3::kTable, fp32_kernels(x86_v3::kTable)});
#endif
#if defined(GDN_HAVE_X86_V4)
  all.push_back({"x86_v4", reason(cpu.x86_v4, "needs AVX-512 F, BW, DQ, VL and CD"), &x86_v4::kTable,
                 fp32_kernels(x86_v4::kTable)});
#endif
#if defined(GDN_HAVE_X86_V4_BF16)
  all.push_back({"x86_v4_bf16", reason(cpu.x86_v4_bf16, "needs AVX512-BF16 and VNNI"), &bf16_table(), bf16_kernels()});
#endif
#if defined(GDN_HAVE_X86_AMX)
  all.push_back(
      {"x86_amx", cpu.x86_amx ? amx_permission_error() : "needs AMX-TILE and AMX-BF16", &bf16_table(), amx_kernels()});
#endif
  return all;
}

#elif defined(__aarch64__)

std::vector<Level> list_levels() {
  std::vector<Level> all;
  all.push_back({"baseline", "", &baseline::kTable, fp32_kernels(baseline::kTable)});
#if defined(GDN_HAVE_ARM_BF16)
  all.push_back(
      {"arm_bf16",
       cpu_features().arm_bf16 ? "" : "needs BF16, ASIMDDP and ASIMDHP",
       &baseline::kTable,
       {&arm_bf16::kChunkOfBFloat16, baseline::kTable.chunk, &arm_bf16::kBlasOfBFloat16, baseline::kTable.blas_chunk}});
#endif
  return all;
}

#else

std::vector<Level> list_levels() { return {{"baseline", "", &baseline::kTable, fp32_kernels(baseline::kTable)}}; }

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
    if (candidate.kernels == level.kernels && candidate.chunk_kernels == level.chunk_kernels) return candidate.name;
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

namespace {

const char* engine_of(const Level& level, const std::string& name) {
  for (const ChunkKernel* kernel : level.chunk_kernels) {
    if (name == kernel->engine) return kernel->engine;
  }
  return nullptr;
}

// The name as its kernel has it, which lives as long as the process; null: no level has such an engine.
const char* engine_named(const std::string& name) {
  for (const Level& level : levels()) {
    if (const char* engine = engine_of(level, name)) return engine;
  }
  return nullptr;
}

std::string environment_gemm() {
  const char* value = std::getenv("GDN_CPU_GEMM");
  return value != nullptr ? value : "";
}

// Null: none is forced.
std::atomic<const char*>& forced() {
  static std::atomic<const char*> engine{engine_named(environment_gemm())};
  return engine;
}

// Each name once, whether or not its library is there.
std::vector<std::string> engines_of(const Level& level) {
  std::vector<std::string> names;
  for (const ChunkKernel* kernel : level.chunk_kernels) {
    if (std::find(names.begin(), names.end(), kernel->engine) == names.end()) names.emplace_back(kernel->engine);
  }
  return names;
}

std::string level_error() {
  const std::string cap = environment_cap();
  if (cap.empty() || find(cap) >= 0) return "";
  std::string text = "GDN_CPU_ISA: expected one of ";
  for (const Level& level : levels()) text += std::string(&level == &levels().front() ? "" : ", ") + level.name;
  return text + ", got '" + cap + "'";
}

std::string gemm_error() {
  const std::string name = environment_gemm();
  const Level& level = levels()[static_cast<std::size_t>(default_level())];
  if (name.empty() || engine_of(level, name) != nullptr) return "";
  std::string text = "GDN_CPU_GEMM: expected one of the engines of level " + std::string(level.name) + " (";
  const char* separator = "";
  for (const std::string& engine : engines_of(level)) {
    text += separator + engine;
    separator = ", ";
  }
  return text + "), got '" + name + "'";
}

}  // namespace

const ChunkKernel* chunk_kernel(bool is_bfloat16) {
  const char* engine = forced().load(std::memory_order_relaxed);
  const ChunkKernel* first = nullptr;
  for (const ChunkKernel* kernel : active_level().chunk_kernels) {
    if (!is_there(*kernel) || (kernel->multiplies_bf16 && !is_bfloat16)) continue;
    if (first == nullptr) first = kernel;
    if (engine != nullptr && std::strcmp(engine, kernel->engine) == 0) return kernel;
  }
  return engine == nullptr || !is_bfloat16 ? first : nullptr;
}

std::vector<std::string> chunk_engines() {
  std::vector<std::string> names = engines_of(active_level());
  if (openblas().sgemm == nullptr) names.erase(std::remove(names.begin(), names.end(), kOpenBlas), names.end());
  return names;
}

bool set_gemm(const std::string& name) {
  const char* engine = engine_named(name.empty() ? environment_gemm() : name);
  if (engine == nullptr && !name.empty()) return false;
  forced().store(engine, std::memory_order_relaxed);
  return true;
}

std::string forced_gemm() {
  const char* engine = forced().load(std::memory_order_relaxed);
  return engine != nullptr ? engine : "";
}

const std::string& environment_error() {
  static const std::string error = level_error().empty() ? gemm_error() : level_error();
  return error;
}

}  // namespace gdn::cpu
