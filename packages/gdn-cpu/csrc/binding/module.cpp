// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch/levels.h"
#include "ops.h"
#include "runtime/chunk_plan.h"
#include "runtime/chunked.h"
#include "runtime/openblas.h"
#include "runtime/openmp.h"
#include "runtime/recurrence_plan.h"

namespace nb = nanobind;

namespace {

using LevelRow = std::tuple<std::string, std::string, std::string>;

std::vector<LevelRow> list_levels() {
  std::vector<LevelRow> rows;
  for (const gdn::cpu::Level& level : gdn::cpu::levels()) {
    rows.emplace_back(level.name, gdn::cpu::kernels_of(level), level.reason);
  }
  return rows;
}

void set_level(const std::string& name) {
  if (!gdn::cpu::set_level(name)) gdn::raise_value("level: no level of this architecture is called '" + name + "'");
}

std::string chunk_engine(bool is_bfloat16) {
  const gdn::cpu::ChunkKernel* kernel = gdn::cpu::chunk_kernel(is_bfloat16);
  return kernel != nullptr ? kernel->engine : "";
}

void set_gemm(const std::string& name) {
  if (!gdn::cpu::set_gemm(name)) gdn::raise_value("name: no level of this architecture has an engine '" + name + "'");
}

using ChainRow = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

gdn::cpu::ChunkWork chunk_work(std::vector<std::int64_t> lengths, std::int64_t num_key_heads,
                               std::int64_t num_value_heads, std::int64_t key_dim, std::int64_t value_dim, int threads,
                               bool is_bfloat16) {
  const gdn::cpu::ChunkKernel* kernel = gdn::cpu::chunk_kernel(is_bfloat16);
  if (kernel == nullptr) gdn::raise_value("the level in use has no engine '" + gdn::cpu::forced_gemm() + "'");
  return {.lengths = std::move(lengths),
          .num_key_heads = num_key_heads,
          .num_value_heads = num_value_heads,
          .key_dim = key_dim,
          .value_dim = value_dim,
          .column_step = kernel->column_step,
          .threads = threads,
          .kernel = kernel};
}

std::tuple<double, std::vector<double>, std::vector<ChainRow>, std::size_t> chunk_plan(
    std::vector<std::int64_t> lengths, std::int64_t num_key_heads, std::int64_t num_value_heads, std::int64_t key_dim,
    std::int64_t value_dim, int threads, bool is_bfloat16) {
  const gdn::cpu::ChunkPlan plan = gdn::cpu::plan_chunks(
      chunk_work(std::move(lengths), num_key_heads, num_value_heads, key_dim, value_dim, threads, is_bfloat16));
  std::vector<ChainRow> chains;
  for (const gdn::cpu::ChunkChain& chain : plan.chains) {
    chains.emplace_back(chain.sequence, chain.head_begin, chain.head_end, chain.v_begin, chain.v_end, chain.length);
  }
  gdn::cpu::Simulation run = gdn::cpu::simulate(plan, threads);
  return {run.time, std::move(run.work), std::move(chains), plan.shared_chains()};
}

std::int64_t chunk_memory(std::vector<std::int64_t> lengths, std::int64_t num_key_heads, std::int64_t num_value_heads,
                          std::int64_t key_dim, std::int64_t value_dim, int threads, bool is_bfloat16) {
  const gdn::cpu::ChunkWork work =
      chunk_work(std::move(lengths), num_key_heads, num_value_heads, key_dim, value_dim, threads, is_bfloat16);
  return gdn::cpu::chunked_memory(*work.kernel, work);
}

std::tuple<std::int64_t, std::int64_t, bool> recurrence_plan(const std::vector<std::int64_t>& lengths,
                                                             std::int64_t num_heads, std::int64_t value_dim,
                                                             int num_threads) {
  gdn::cpu::Indices rows;
  for (const std::int64_t length : lengths) rows.push_back(length);
  const gdn::cpu::RecurrencePlan plan = gdn::cpu::plan_recurrence(rows, num_heads, value_dim, num_threads);
  return {plan.tile, plan.num_threads, plan.is_ragged};
}

}  // namespace

NB_MODULE(_C, m) {
  using namespace nb::literals;
  m.def("version", [] { return std::string(GDN_VERSION); });
  m.def("levels", &list_levels,
        "(name, level whose kernels it runs, why it cannot run here or '') of each level, lowest first.");
  m.def("active_level", [] { return std::string(gdn::cpu::active_level().name); });
  m.def("set_level", &set_level, "name"_a, "Cap the level; an empty name restores the cap of GDN_CPU_ISA.");
  m.def("chunk_engines", &gdn::cpu::chunk_engines,
        "The engines of the chunked rule at the level in use, the preferred one first.");
  m.def("chunk_engine", &chunk_engine, "is_bfloat16"_a,
        "The engine that multiplies in the chunked rule for activations of bf16, or others; '' where none can.");
  m.def("set_gemm", &set_gemm, "name"_a, "Force that engine; an empty name restores GDN_CPU_GEMM.");
  m.def("forced_gemm", &gdn::cpu::forced_gemm, "The forced engine, or ''.");
  m.def("load_openblas", &gdn::cpu::load_openblas, "path"_a,
        "Open that library for the engine 'openblas'; '' or what went wrong.");
  m.def("openblas_config", &gdn::cpu::openblas_config, "What OpenBLAS says of itself, or ''.");
  m.def("chunk_plan", &chunk_plan, "lengths"_a, "num_key_heads"_a, "num_value_heads"_a, "key_dim"_a, "value_dim"_a,
        "threads"_a, "is_bfloat16"_a,
        "Estimated time and work of each thread, (sequence, heads, columns, tokens) of each chain of chunks, and how "
        "many of the chains share what does not depend on their states.");
  m.def("chunk_memory", &chunk_memory, "lengths"_a, "num_key_heads"_a, "num_value_heads"_a, "key_dim"_a, "value_dim"_a,
        "threads"_a, "is_bfloat16"_a, "Bytes that such a call allocates, all threads together, at most.");
  m.def("environment_error", &gdn::cpu::environment_error, "What is wrong with GDN_CPU_ISA or GDN_CPU_GEMM, or ''.");
  m.def("openmp", [] { return gdn::cpu::openmp().library; }, "Path of the OpenMP runtime in use, or ''.");
  m.def(
      "recurrence_plan", &recurrence_plan, "lengths"_a, "num_heads"_a, "value_dim"_a, "num_threads"_a,
      "How the recurrence over rows of these lengths is shared out: columns of an item, threads, and whether the items "
      "go longest first to whoever is free (else in equal contiguous shares).");
  m.def(
      "use_exchange_api", [](bool enabled) { gdn::TorchTypes::get().use_exchange_api(enabled); }, "enabled"_a,
      "Take tensors through the DLPack exchange table (the default, where torch has one) or through __dlpack__.");
  m.def("has_exchange_api", [] { return gdn::TorchTypes::get().exchange_api() != nullptr; });

  m.def("fused_gdn_gating", &gdn::cpu::fused_gdn_gating, "A_log"_a.none(), "a"_a.none(), "b"_a.none(),
        "dt_bias"_a.none(), "softplus_beta"_a.none(), "softplus_threshold"_a.none(), "g"_a.none(), "beta"_a.none(),
        "dry_run"_a = false);
  m.def("rms_norm_gated", &gdn::cpu::rms_norm_gated, "x"_a.none(), "gate"_a.none(), "weight"_a.none(), "eps"_a.none(),
        "activation"_a.none(), "out"_a.none(), "dry_run"_a = false);
  gdn::bind_decode_ops<gdn::cpu::Decode>(m);
  m.def("fused_recurrent_gated_delta_rule", &gdn::cpu::fused_recurrent_gated_delta_rule, "q"_a.none(), "k"_a.none(),
        "v"_a.none(), "g"_a.none(), "beta"_a.none(), "scale"_a.none(), "initial_state"_a.none(), "state"_a.none(),
        "use_qk_l2norm_in_kernel"_a.none(), "use_gate_in_kernel"_a.none(), "A_log"_a.none(), "dt_bias"_a.none(),
        "use_beta_sigmoid_in_kernel"_a.none(), "allow_neg_eigval"_a.none(), "state_v_first"_a.none(),
        "cu_seqlens"_a.none(), "state_indices"_a.none(), "has_initial_state"_a.none(), "null_slot"_a.none(),
        "out"_a.none(), "final_state"_a.none(), "dry_run"_a = false);
  m.def("chunk_gated_delta_rule", &gdn::cpu::chunk_gated_delta_rule, "q"_a.none(), "k"_a.none(), "v"_a.none(),
        "g"_a.none(), "beta"_a.none(), "scale"_a.none(), "initial_state"_a.none(), "state"_a.none(),
        "use_qk_l2norm_in_kernel"_a.none(), "use_beta_sigmoid_in_kernel"_a.none(), "allow_neg_eigval"_a.none(),
        "state_v_first"_a.none(), "cu_seqlens"_a.none(), "state_indices"_a.none(), "has_initial_state"_a.none(),
        "null_slot"_a.none(), "out"_a.none(), "final_state"_a.none(), "chunk_states"_a.none(), "dry_run"_a = false);
  m.def("causal_conv1d_fn", &gdn::cpu::causal_conv1d_fn, "x"_a.none(), "weight"_a.none(), "bias"_a.none(),
        "seq_idx"_a.none(), "initial_states"_a.none(), "activation"_a.none(), "conv_states"_a.none(),
        "query_start_loc"_a.none(), "cache_indices"_a.none(), "has_initial_state"_a.none(), "null_slot"_a.none(),
        "out"_a.none(), "final_states"_a.none(), "dry_run"_a = false);
  m.def("causal_conv1d_update", &gdn::cpu::causal_conv1d_update, "x"_a.none(), "conv_state"_a.none(), "weight"_a.none(),
        "bias"_a.none(), "activation"_a.none(), "cache_seqlens"_a.none(), "conv_state_indices"_a.none(),
        "num_accepted_tokens"_a.none(), "query_start_loc"_a.none(), "null_slot"_a.none(), "row_indices"_a.none(),
        "out"_a.none(), "dry_run"_a = false);
  m.def("gdn_attention", &gdn::cpu::gdn_attention, "mixed_qkv"_a.none(), "a"_a.none(), "b"_a.none(), "z"_a.none(),
        "conv_weight"_a.none(), "conv_bias"_a.none(), "A_log"_a.none(), "dt_bias"_a.none(), "norm_weight"_a.none(),
        "norm_eps"_a.none(), "num_key_heads"_a.none(), "head_k_dim"_a.none(), "activation"_a.none(),
        "output_gate_activation"_a.none(), "conv_states"_a.none(), "state"_a.none(), "records_k"_a.none(),
        "records_u"_a.none(), "records_decay"_a.none(), "records_live"_a.none(), "state_v_first"_a.none(),
        "null_slot"_a.none(), "layout"_a.none(), "query_start_loc"_a.none(), "slots"_a.none(),
        "num_accepted_tokens"_a.none(), "has_initial_state"_a.none(), "out"_a.none(), "dry_run"_a = false);
}
