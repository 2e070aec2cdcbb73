// SPDX-License-Identifier: Apache-2.0
//
// The decode operations as Python calls them: the arguments of torch.ops.gdn.<name> in order, then `dry_run`, which
// stops after the checks. A backend takes them as the structs below.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "check.h"
#include "layout.h"
#include "scalars.h"

namespace gdn {

struct Sizes {
  std::int64_t batch = 0, tokens = 0, key_heads = 0, key_dim = 0, value_heads = 0, value_dim = 0;
};

// What every form of decode from q, k and v takes, but its rows.
struct DecodeArguments {
  TensorView &A_log, &dt_bias, &q, &k, &v, &a, &b, &pool;
  Name pool_name;
  nb::handle use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, scale, state_v_first;
  TensorView& out;
};

// The same for a step from the convolution's output.
struct FusedArguments {
  TensorView &mixed_qkv, &a, &b, &A_log, &dt_bias, &pool, &output_gate, &norm_weight;
  nb::handle scale, norm_eps, output_gate_activation, num_key_heads, head_k_dim, state_v_first;
  TensorView& out;
};

// The rows of a call: the slots of each, [N] or [N, S], which tokens it has, and which of the N rows the call is about:
// all, or those of row_indices, so that other rows and tokens in no row are left alone.
struct RowArguments {
  TensorView& slots;
  Name slots_name;
  TensorView &num_accepted_tokens, &cu_seqlens;
  nb::handle null_slot;
  TensorView& row_indices;
};

struct RecordTensors {
  TensorView &k, &u, &decay, &live;
};

inline void check_head_groups(const Sizes& s, Name name) {
  if (s.key_heads < 1 || s.value_heads % s.key_heads != 0) {
    raise_value(cat({name, ": expected a multiple of the ", std::to_string(s.key_heads),
                     " key heads as value heads, got ", std::to_string(s.value_heads)}));
  }
}

// `check_floating(view, name, shape)` wants a tensor that the backend can read, of an activation dtype.
template <class CheckFloating>
Sizes check_qkv(const TensorView& q, const TensorView& k, const TensorView& v, Dim batch,
                const CheckFloating& check_floating) {
  check_floating(q, "q", {batch, "T", "H", "K"});
  Sizes s{q.size(0), q.size(1), q.size(2), q.size(3), 0, 0};
  check_floating(k, "k", {s.batch, s.tokens, s.key_heads, s.key_dim});
  check_floating(v, "v", {s.batch, s.tokens, "HV", "V"});
  s.value_heads = v.size(2);
  s.value_dim = v.size(3);
  check_same_dtype(k, "k", q, "q");
  check_same_dtype(v, "v", q, "q");
  check_head_groups(s, "v");
  check_not_empty(q, "q");
  check_not_empty(v, "v");
  return s;
}

// Channels q | k | v of mixed_qkv [T, C]; HV and V are those of output_gate [T, HV, V].
template <class CheckFloating>
Sizes check_channels(const FusedArguments& args, const CheckFloating& check_floating) {
  check_floating(args.mixed_qkv, "mixed_qkv", {"T", "C"});
  const std::int64_t tokens = args.mixed_qkv.size(0), channels = args.mixed_qkv.size(1);
  check_floating(args.output_gate, "output_gate", {tokens, "HV", "V"});
  const std::int64_t value_heads = args.output_gate.size(1), value_dim = args.output_gate.size(2);
  const std::int64_t key_dim = integer(args.head_k_dim, "head_k_dim");
  if (key_dim < 1) raise_value("head_k_dim: expected at least 1, got " + std::to_string(key_dim));
  const std::int64_t key_channels = std::max<std::int64_t>(0, channels - value_heads * value_dim);
  const std::int64_t key_heads =
      optional_integer(args.num_key_heads, "num_key_heads").value_or(key_channels / (2 * key_dim));
  // More heads or wider ones than there are channels: the product need not fit 64 bits.
  const bool too_many = key_heads < 0 || key_heads > channels || key_dim > channels;
  if (too_many || channels != 2 * key_heads * key_dim + value_heads * value_dim) {
    raise_value(cat({"mixed_qkv: expected [", std::to_string(tokens), ", 2 * ", std::to_string(key_heads), " * ",
                     std::to_string(key_dim), " + ", std::to_string(value_heads), " * ", std::to_string(value_dim),
                     "], got ", describe(args.mixed_qkv)}));
  }
  const Sizes s{1, tokens, key_heads, key_dim, value_heads, value_dim};
  check_head_groups(s, "output_gate");
  check_not_empty(args.output_gate, "output_gate");
  return s;
}

// `check_exact(view, name, dtype, shape)` wants a tensor that the backend can read. Returns how many records a slot has
// room for. `activations` has the dtype of k.
template <class CheckExact>
std::int64_t check_records(const RecordTensors& records, const TensorView& activations, std::int64_t pool_size,
                           const Sizes& s, const CheckExact& check_exact) {
  constexpr dlpack::DataType kFp32{dlpack::kFloat, 32, 1};
  constexpr dlpack::DataType kInt32{dlpack::kInt, 32, 1};
  check_exact(records.k, "records.k", activations.dl.dtype, {pool_size, "S", s.key_heads, s.key_dim});
  const std::int64_t columns = records.k.size(1);
  check_exact(records.u, "records.u", kFp32, {pool_size, columns, s.value_heads, s.value_dim});
  check_exact(records.decay, "records.decay", kFp32, {pool_size, columns, s.value_heads});
  check_exact(records.live, "records.live", kInt32, {pool_size});
  for (const auto& [view, name] : {std::pair{&records.k, "records.k"},
                                   {&records.u, "records.u"},
                                   {&records.decay, "records.decay"},
                                   {&records.live, "records.live"}}) {
    check_separate_elements(*view, name);
  }
  return columns;
}

// Puts the operations into a module. `Backend` has static functions run_single, run_several_slots and run_replay, the
// latter two for arguments of either kind; a row of run_single has no accepted tokens.
template <class Backend>
void bind_decode_ops(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "fused_sigmoid_gating_delta_rule_update",
      [](TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k, TensorView& v, TensorView& a,
         TensorView& b, TensorView& initial_state_source, TensorView& initial_state_indices, TensorView& cu_seqlens,
         nb::handle use_qk_l2norm_in_kernel, nb::handle softplus_beta, nb::handle softplus_threshold, nb::handle scale,
         nb::handle state_v_first, nb::handle null_slot, TensorView& out, bool dry_run) {
        TensorView absent;
        Backend::run_single({A_log, dt_bias, q, k, v, a, b, initial_state_source, "initial_state_source",
                             use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, scale, state_v_first, out},
                            {initial_state_indices, "initial_state_indices", absent, cu_seqlens, null_slot, absent},
                            dry_run);
      },
      "A_log"_a.none(), "dt_bias"_a.none(), "q"_a.none(), "k"_a.none(), "v"_a.none(), "a"_a.none(), "b"_a.none(),
      "initial_state_source"_a.none(), "initial_state_indices"_a.none(), "cu_seqlens"_a.none(),
      "use_qk_l2norm_in_kernel"_a.none(), "softplus_beta"_a.none(), "softplus_threshold"_a.none(), "scale"_a.none(),
      "state_v_first"_a.none(), "null_slot"_a.none(), "out"_a.none(), "dry_run"_a = false);
  m.def(
      "fused_sigmoid_gating_delta_rule_update_spec",
      [](TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k, TensorView& v, TensorView& a,
         TensorView& b, TensorView& initial_state_source, TensorView& spec_state_indices,
         TensorView& num_accepted_tokens, TensorView& cu_seqlens, nb::handle use_qk_l2norm_in_kernel,
         nb::handle softplus_beta, nb::handle softplus_threshold, nb::handle scale, nb::handle state_v_first,
         nb::handle null_slot, TensorView& out, bool dry_run) {
        const DecodeArguments args{A_log,
                                   dt_bias,
                                   q,
                                   k,
                                   v,
                                   a,
                                   b,
                                   initial_state_source,
                                   "initial_state_source",
                                   use_qk_l2norm_in_kernel,
                                   softplus_beta,
                                   softplus_threshold,
                                   scale,
                                   state_v_first,
                                   out};
        TensorView absent;
        Backend::run_several_slots(
            args, {spec_state_indices, "spec_state_indices", num_accepted_tokens, cu_seqlens, null_slot, absent},
            dry_run);
      },
      "A_log"_a.none(), "dt_bias"_a.none(), "q"_a.none(), "k"_a.none(), "v"_a.none(), "a"_a.none(), "b"_a.none(),
      "initial_state_source"_a.none(), "spec_state_indices"_a.none(), "num_accepted_tokens"_a.none(),
      "cu_seqlens"_a.none(), "use_qk_l2norm_in_kernel"_a.none(), "softplus_beta"_a.none(),
      "softplus_threshold"_a.none(), "scale"_a.none(), "state_v_first"_a.none(), "null_slot"_a.none(), "out"_a.none(),
      "dry_run"_a = false);
  m.def(
      "fused_sigmoid_gating_delta_rule_update_replay",
      [](TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k, TensorView& v, TensorView& a,
         TensorView& b, TensorView& state, TensorView& slot_indices, TensorView& records_k, TensorView& records_u,
         TensorView& records_decay, TensorView& records_live, TensorView& num_accepted_tokens, TensorView& cu_seqlens,
         nb::handle use_qk_l2norm_in_kernel, nb::handle softplus_beta, nb::handle softplus_threshold, nb::handle scale,
         nb::handle state_v_first, nb::handle null_slot, TensorView& out, bool dry_run) {
        const DecodeArguments args{A_log,
                                   dt_bias,
                                   q,
                                   k,
                                   v,
                                   a,
                                   b,
                                   state,
                                   "state",
                                   use_qk_l2norm_in_kernel,
                                   softplus_beta,
                                   softplus_threshold,
                                   scale,
                                   state_v_first,
                                   out};
        TensorView absent;
        Backend::run_replay(args, {slot_indices, "slot_indices", num_accepted_tokens, cu_seqlens, null_slot, absent},
                            {records_k, records_u, records_decay, records_live}, dry_run);
      },
      "A_log"_a.none(), "dt_bias"_a.none(), "q"_a.none(), "k"_a.none(), "v"_a.none(), "a"_a.none(), "b"_a.none(),
      "state"_a.none(), "slot_indices"_a.none(), "records_k"_a.none(), "records_u"_a.none(), "records_decay"_a.none(),
      "records_live"_a.none(), "num_accepted_tokens"_a.none(), "cu_seqlens"_a.none(),
      "use_qk_l2norm_in_kernel"_a.none(), "softplus_beta"_a.none(), "softplus_threshold"_a.none(), "scale"_a.none(),
      "state_v_first"_a.none(), "null_slot"_a.none(), "out"_a.none(), "dry_run"_a = false);
  m.def(
      "fused_gdn_decode_post_conv_mtp",
      [](TensorView& mixed_qkv, TensorView& a, TensorView& b, TensorView& A_log, TensorView& dt_bias,
         TensorView& state_indices, TensorView& cu_seqlens, TensorView& num_accepted_tokens, TensorView& state,
         TensorView& output_gate, TensorView& norm_weight, nb::handle scale, nb::handle norm_eps,
         nb::handle output_gate_activation, nb::handle num_key_heads, nb::handle head_k_dim, nb::handle state_v_first,
         nb::handle null_slot, TensorView& row_indices, TensorView& out, bool dry_run) {
        const FusedArguments args{mixed_qkv,
                                  a,
                                  b,
                                  A_log,
                                  dt_bias,
                                  state,
                                  output_gate,
                                  norm_weight,
                                  scale,
                                  norm_eps,
                                  output_gate_activation,
                                  num_key_heads,
                                  head_k_dim,
                                  state_v_first,
                                  out};
        Backend::run_several_slots(
            args, {state_indices, "state_indices", num_accepted_tokens, cu_seqlens, null_slot, row_indices}, dry_run);
      },
      "mixed_qkv"_a.none(), "a"_a.none(), "b"_a.none(), "A_log"_a.none(), "dt_bias"_a.none(), "state_indices"_a.none(),
      "cu_seqlens"_a.none(), "num_accepted_tokens"_a.none(), "state"_a.none(), "output_gate"_a.none(),
      "norm_weight"_a.none(), "scale"_a.none(), "norm_eps"_a.none(), "output_gate_activation"_a.none(),
      "num_key_heads"_a.none(), "head_k_dim"_a.none(), "state_v_first"_a.none(), "null_slot"_a.none(),
      "row_indices"_a.none(), "out"_a.none(), "dry_run"_a = false);
  m.def(
      "fused_gdn_decode_post_conv_mtp_replay",
      [](TensorView& mixed_qkv, TensorView& a, TensorView& b, TensorView& A_log, TensorView& dt_bias,
         TensorView& slot_indices, TensorView& records_k, TensorView& records_u, TensorView& records_decay,
         TensorView& records_live, TensorView& cu_seqlens, TensorView& num_accepted_tokens, TensorView& state,
         TensorView& output_gate, TensorView& norm_weight, nb::handle scale, nb::handle norm_eps,
         nb::handle output_gate_activation, nb::handle num_key_heads, nb::handle head_k_dim, nb::handle state_v_first,
         nb::handle null_slot, TensorView& row_indices, TensorView& out, bool dry_run) {
        const FusedArguments args{mixed_qkv,
                                  a,
                                  b,
                                  A_log,
                                  dt_bias,
                                  state,
                                  output_gate,
                                  norm_weight,
                                  scale,
                                  norm_eps,
                                  output_gate_activation,
                                  num_key_heads,
                                  head_k_dim,
                                  state_v_first,
                                  out};
        Backend::run_replay(args,
                            {slot_indices, "slot_indices", num_accepted_tokens, cu_seqlens, null_slot, row_indices},
                            {records_k, records_u, records_decay, records_live}, dry_run);
      },
      "mixed_qkv"_a.none(), "a"_a.none(), "b"_a.none(), "A_log"_a.none(), "dt_bias"_a.none(), "slot_indices"_a.none(),
      "records_k"_a.none(), "records_u"_a.none(), "records_decay"_a.none(), "records_live"_a.none(),
      "cu_seqlens"_a.none(), "num_accepted_tokens"_a.none(), "state"_a.none(), "output_gate"_a.none(),
      "norm_weight"_a.none(), "scale"_a.none(), "norm_eps"_a.none(), "output_gate_activation"_a.none(),
      "num_key_heads"_a.none(), "head_k_dim"_a.none(), "state_v_first"_a.none(), "null_slot"_a.none(),
      "row_indices"_a.none(), "out"_a.none(), "dry_run"_a = false);
}

}  // namespace gdn
