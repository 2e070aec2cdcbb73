# SPDX-License-Identifier: Apache-2.0
"""The faults that tools/mutants.py plants: what each one would get wrong, in its name."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault: in `file` of gdn_core `old`, which occurs there once, becomes `new`; `pytest -k tests` should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


COMMON = "reference/_common.py"
GATING = "reference/gating.py"
RECURRENT = "reference/recurrent.py"
CHUNK = "reference/chunk.py"
SPECULATIVE = "reference/speculative.py"
CONVOLUTION = "reference/convolution.py"
NORM = "reference/norm.py"
FUSED = "reference/fused.py"

MUTANTS = (
    # --- gates --------------------------------------------------------------------------------------------------------
    Mutant(
        "beta rounded to the activation dtype",
        GATING,
        "b.to(compute_dtype(b)).sigmoid()",
        "b.sigmoid().to(compute_dtype(b))",
        "test_gating",
    ),
    Mutant(
        "log decay rounded to the activation dtype",
        GATING,
        "-0.0, g).to(dtype)",
        "-0.0, g).to(a.dtype).to(dtype)",
        "test_gating",
    ),
    Mutant("A_log not exponentiated", GATING, "-A_log.double().exp() *", "-A_log.double() *", "test_gating"),
    Mutant("exp of A_log in fp32", GATING, "A_log.double().exp()", "A_log.float().exp().double()", "test_gating_where"),
    Mutant("A_log detached", GATING, "-A_log.double().exp()", "-A_log.detach().double().exp()", "test_other_gradients"),
    Mutant("dt_bias dropped", GATING, "a.double() + dt_bias.double()", "a.double()", "test_gating"),
    Mutant(
        "softplus_beta ignored",
        GATING,
        "F.softplus(x, softplus_beta, softplus_threshold)",
        "F.softplus(x, 1.0, softplus_threshold)",
        "test_gating_softplus",
    ),
    Mutant(
        "softplus_threshold ignored",
        GATING,
        "F.softplus(x, softplus_beta, softplus_threshold)",
        "F.softplus(x, softplus_beta)",
        "test_gating_softplus",
    ),
    Mutant(
        "softplus_threshold compared with the unscaled input",
        GATING,
        "F.softplus(x, softplus_beta, softplus_threshold)",
        "torch.where(x > softplus_threshold, x, F.softplus(x, softplus_beta, 1e9))",
        "test_gating_softplus",
    ),
    Mutant(
        "an overflowing rate beats an underflowing softplus",
        GATING,
        "torch.where(softplus.to(dtype) == 0, -0.0, g)",
        "g",
        "test_gating_where",
    ),
    # --- heads, normalisation, step size ------------------------------------------------------------------------------
    Mutant(
        "key heads tiled instead of grouped",
        COMMON,
        "x.repeat_interleave(num_value_heads // x.shape[-2], dim=-2)",
        "torch.cat([x] * (num_value_heads // x.shape[-2]), dim=-2)",
        "test_each_value_head",
    ),
    Mutant("eps of the key norm 1e-5", COMMON, "L2_NORM_EPS = 1e-6", "L2_NORM_EPS = 1e-5", "test_rule_batched"),
    Mutant(
        "eps of the key norm outside the root",
        COMMON,
        "torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_NORM_EPS)",
        "(torch.rsqrt((x * x).sum(-1, keepdim=True)) + L2_NORM_EPS)",
        "test_rule_batched",
    ),
    Mutant(
        "key norm by the mean",
        COMMON,
        "(x * x).sum(-1, keepdim=True) +",
        "(x * x).mean(-1, keepdim=True) +",
        "test_rule_batched",
    ),  # fmt: skip
    Mutant(
        "k not normalised",
        RECURRENT,
        "q, k = l2_normalize(q), l2_normalize(k)",
        "q = l2_normalize(q)",
        "test_rule_batched",
    ),  # fmt: skip
    Mutant(
        "q and k normalised in the activation dtype",
        RECURRENT,
        "    q, k = q.to(compute_dtype(q)), k.to(compute_dtype(q))\n"
        "    if normalize:\n"
        "        q, k = l2_normalize(q), l2_normalize(k)\n",
        "    if normalize:\n"
        "        q, k = l2_normalize(q), l2_normalize(k)\n"
        "    q, k = q.to(compute_dtype(q)), k.to(compute_dtype(q))\n",
        "test_rule_packed",
    ),
    Mutant(
        "sigmoid of beta applied twice",
        RECURRENT,
        "beta = beta.sigmoid()",
        "beta = beta.sigmoid().sigmoid()",
        "test_rule_options",
    ),  # fmt: skip
    Mutant(
        "sigmoid of beta left out", RECURRENT, "beta = beta.sigmoid()", "beta = beta.clamp(0, 1)", "test_rule_options"
    ),  # fmt: skip
    Mutant(
        "beta doubled before the sigmoid",
        RECURRENT,
        "    if apply_sigmoid:\n        beta = beta.sigmoid()\n    return 2 * beta if allow_neg_eigval else beta\n",
        "    beta = 2 * beta if allow_neg_eigval else beta\n    return beta.sigmoid() if apply_sigmoid else beta\n",
        "test_rule_options",
    ),
    Mutant(
        "allow_neg_eigval ignored",
        RECURRENT,
        "return 2 * beta if allow_neg_eigval else beta",
        "return beta",
        "test_rule_options",
    ),  # fmt: skip
    Mutant(
        "beta of None counts as 0", RECURRENT, "torch.ones_like(like)", "torch.zeros_like(like)", "test_recurrent_gates"
    ),  # fmt: skip
    Mutant(
        "g of None decays",
        RECURRENT,
        "v.new_zeros(B * T, HV, dtype=dtype)",
        "v.new_full((B * T, HV), -1, dtype=dtype)",
        "test_recurrent_gates",
    ),  # fmt: skip
    Mutant(
        "use_gate_in_kernel ignored",
        RECURRENT,
        "if use_gate_in_kernel and A_log is not None:",
        "if use_gate_in_kernel and A_log is None:",
        "test_recurrent_gates",
    ),  # fmt: skip
    # --- the recurrence -----------------------------------------------------------------------------------------------
    Mutant(
        "decay after the prediction",
        RECURRENT,
        "    state = decay_state(state, decay)\n    u = beta[..., None] * (v - apply_state(k, state))\n",
        "    u = beta[..., None] * (v - apply_state(k, state))\n    state = decay_state(state, decay)\n",
        "test_rule_batched",
    ),
    Mutant(
        "output from the state before the update",
        RECURRENT,
        "    state = add_outer(state, k, u)\n    o = scale * apply_state(q, state)\n",
        "    o = scale * apply_state(q, state)\n    state = add_outer(state, k, u)\n",
        "test_rule_batched",
    ),
    Mutant("exp2 for exp in the recurrence", RECURRENT, "g_.exp(), beta_)", "g_.exp2(), beta_)", "test_rule_batched"),
    Mutant("exp2 for exp in decode", RECURRENT, "g.exp(), beta)", "g.exp2(), beta)", "test_decode"),
    Mutant("scale dropped", RECURRENT, "o = scale * apply_state", "o = apply_state", "test_rule_batched"),
    Mutant(
        "scale applied twice",
        RECURRENT,
        "o = scale * apply_state",
        "o = scale * scale * apply_state",
        "test_rule_batched",
    ),  # fmt: skip
    Mutant(
        "scale ignored in the recurrence",
        RECURRENT,
        "K**-0.5 if scale is None else scale, state)\n    final_state",
        "K**-0.5, state)\n    final_state",
        "test_rule_options",
    ),
    Mutant(
        "scale ignored in decode",
        RECURRENT,
        "K**-0.5 if scale is None else scale, state)\n    states.store",
        "K**-0.5, state)\n    states.store",
        "test_decode_options",
    ),
    Mutant(
        "scale of 0 counts as none in decode",
        RECURRENT,
        "K**-0.5 if scale is None else scale, state)\n    states.store",
        "scale or K**-0.5, state)\n    states.store",
        "test_a_scale_of_zero",
    ),
    Mutant(
        "a reset keeps a NaN state",
        RECURRENT,
        "torch.where(decay == 0, 0, state) * decay",
        "state * decay",
        "test_hard_reset",
    ),  # fmt: skip
    Mutant(
        "state rounded between tokens",
        RECURRENT,
        "state = put(state, rows, new_state)",
        "state = put(state, rows, new_state.bfloat16().to(new_state.dtype))",
        "test_rule_batched",
    ),
    Mutant(
        "gradient cut between tokens",
        RECURRENT,
        "state = put(state, rows, new_state)",
        "state = put(state, rows, new_state.detach())",
        "test_rule_gradients",
    ),
    Mutant(
        "softplus parameters ignored in decode",
        RECURRENT,
        "fused_gdn_gating(A_log, a, b, dt_bias, softplus_beta=softplus_beta, softplus_threshold=softplus_threshold)",
        "fused_gdn_gating(A_log, a, b, dt_bias)",
        "test_decode_options",
    ),
    Mutant(
        "q and k always normalised in decode",
        RECURRENT,
        "keys_and_queries(q, k, v.shape[-2], normalize)",
        "keys_and_queries(q, k, v.shape[-2], True)",
        "test_decode_options",
    ),
    Mutant(
        "decode does not store its state",
        RECURRENT,
        "    states.store(pieces, last, output_final_state=False)\n",
        "",
        "test_decode",
    ),
    # --- sequences, slots and states ----------------------------------------------------------------------------------
    Mutant(
        "out ignored",
        COMMON,
        "return result.to(dtype) if out is None else out.copy_(result)",
        "return result.to(dtype)",
        "test_rule_out",
    ),  # fmt: skip
    Mutant(
        "result rounded before it reaches out", COMMON, "out.copy_(result)", "out.copy_(result.to(dtype))", "test_norm"
    ),  # fmt: skip
    Mutant(
        "null_slot ignored",
        COMMON,
        "return live if null_slot is None else live & (slots != null_slot)",
        "return live",
        "test_rule_on_a_pool",
    ),  # fmt: skip
    Mutant("slot 0 always padding", COMMON, "(slots >= 0) &", "(slots > 0) &", "test_decode_padding"),
    Mutant(
        "negative slots clamped to slot 0",
        COMMON,
        "state_indices.to(torch.int64)\n",
        "state_indices.to(torch.int64).clamp(min=0)\n",
        "test_decode_padding",
    ),
    Mutant(
        "V-first states read by reinterpreting the layout",
        COMMON,
        "states.mT.contiguous() if state_v_first else states",
        "states.reshape(*states.shape[:2], *states.shape[:1:-1]) if state_v_first else states",
        "test_decode",
    ),
    Mutant(
        "V-first states written by reinterpreting the layout",
        COMMON,
        "states = states.mT if state_v_first else states\n",
        "states = states.reshape(*states.shape[:2], *states.shape[:1:-1]) if state_v_first else states\n",
        "test_decode",
    ),
    Mutant(
        "V-first final states reinterpret the layout",
        COMMON,
        "states = states.mT if self._v_first else states\n",
        "states = states.reshape(*states.shape[:2], *states.shape[:1:-1]) if self._v_first else states\n",
        "test_rule_packed",
    ),
    Mutant(
        "state rounded where it is read",
        COMMON,
        "pool.index_select(0, slots).to(dtype)",
        "pool.index_select(0, slots).bfloat16().to(dtype)",
        "test_decode",
    ),  # fmt: skip
    Mutant(
        "last sequence of cu_seqlens dropped",
        COMMON,
        "bounds[n + 1] <= num_tokens",
        "bounds[n + 1] < num_tokens",
        "test_rule_packed",
    ),
    Mutant(
        "an empty fresh sequence zeroes its slot",
        COMMON,
        "takes_part = [length > 0 and",
        "takes_part = [length >= 0 and",
        "test_rule_on_a_pool",
    ),
    Mutant(
        "rows outside every span not zeroed",
        COMMON,
        "pieces.new_zeros(like.shape)",
        "pieces.new_ones(like.shape)",
        "test_rule_on_a_pool",
    ),  # fmt: skip
    Mutant(
        "tail of a chunk not zeroed",
        COMMON,
        "return torch.where(valid, picked, 0)",
        "return picked",
        "test_rule_packed",
    ),  # fmt: skip
    Mutant(
        "a fresh sequence reads its slot and multiplies by 0",
        COMMON,
        "torch.where(self._has_initial_state[pieces.live, None, None, None], states, 0)",
        "states * self._has_initial_state[pieces.live, None, None, None]",
        "test_rule_on_a_pool",
    ),
    Mutant(
        "has_initial_state ignored",
        COMMON,
        "if self._has_initial_state is None:",
        "if self._has_initial_state is None or self._indices is not None:",
        "test_rule_on_a_pool",
    ),
    Mutant(
        "has_initial_state ignored without a pool",
        COMMON,
        "if self._has_initial_state is None:",
        "if self._has_initial_state is None or self._indices is None:",
        "test_fresh_sequences_without_a_pool",
    ),
    Mutant(
        "final state in the compute dtype",
        COMMON,
        "self._source.index_copy(0, pieces.live, states.to(self._source.dtype))",
        "self._source.to(states.dtype).index_copy(0, pieces.live, states)",
        "test_rule_options",
    ),
    Mutant(
        "initial_state overwritten",
        COMMON,
        "return self._source.index_copy(",
        "return self._source.index_copy_(",
        "test_rule_packed",
    ),
    Mutant(
        "final state of an empty sequence is 0",
        COMMON,
        "return self._source.index_copy(",
        "return torch.zeros_like(self._source).index_copy(",
        "test_rule_packed",
    ),
    Mutant(
        "output_final_state ignored",
        COMMON,
        "if not output_final_state:",
        "if not output_final_state and self._source is None:",
        "test_rule_options",
    ),  # fmt: skip
    # --- chunks -------------------------------------------------------------------------------------------------------
    Mutant("chunks of 32 tokens", CHUNK, "CHUNK_SIZE = 64", "CHUNK_SIZE = 32", "test_chunk_states"),
    Mutant(
        "chunk state taken after the chunk",
        CHUNK,
        "starts.append(start)",
        "starts.append(new_state)",
        "test_chunk_states",
    ),
    Mutant(
        "a chunk state too many", CHUNK, "-(-length // CHUNK_SIZE)", "length // CHUNK_SIZE + 1", "test_chunk_states"
    ),
    Mutant(
        "chunk states all at the first", CHUNK, "take(first, rows) + number", "take(first, rows)", "test_chunk_states"
    ),  # fmt: skip
    Mutant(
        "chunk states not transposed",
        CHUNK,
        "chunk_states.mT if state_v_first else chunk_states",
        "chunk_states",
        "test_chunk_states",
    ),  # fmt: skip
    Mutant(
        "decays masked after the exp",
        CHUNK,
        "masked_fill(~reach, -torch.inf).exp()",
        "exp().masked_fill(~reach, 0)",
        "test_gradients_with_strong_decays",
    ),
    Mutant("sums of g in fp32", CHUNK, "0, g).double().cumsum(-1)", "0, g).cumsum(-1)", "test_rule_extreme_decays"),
    Mutant(
        "sums of g without the token's own",
        CHUNK,
        "    G = torch.where(is_bad | reset, 0, g).double().cumsum(-1)\n",
        "    G = torch.where(is_bad | reset, 0, g).double()\n    G = G.cumsum(-1) - G\n",
        "test_rule_batched",
    ),
    Mutant(
        "exp2 for exp in a chunk",
        CHUNK,
        "start = G.masked_fill(~from_start, -torch.inf).exp()",
        "start = G.masked_fill(~from_start, -torch.inf).exp2()",
        "test_rule_batched",
    ),  # fmt: skip
    Mutant(
        "a chunk's output misses its own token",
        CHUNK,
        "torch.where(decays.reach, (q @ k.mT) * decays.between, 0)",
        "torch.where(decays.reach, (q @ k.mT) * decays.between, 0).tril(-1)",
        "test_rule_batched",
    ),  # fmt: skip
    Mutant(
        "a chunk's state passes a reset",
        CHUNK,
        "from_start = resets == 0",
        "from_start = resets >= 0",
        "test_hard_reset",
    ),  # fmt: skip
    Mutant(
        "state not decayed over a chunk",
        CHUNK,
        "decays.start[..., -1:, :] * state, 0)",
        "state, 0)",
        "test_rule_batched",
    ),  # fmt: skip
    Mutant(
        "keys not decayed to the end of a chunk",
        CHUNK,
        "(k * decays.between[..., -1, :, None]).mT",
        "k.mT",
        "test_rule_batched",
    ),  # fmt: skip
    Mutant(
        "a NaN becomes a number in a chunk",
        CHUNK,
        "o = torch.where(is_spoiled, torch.nan, o)",
        "o = o + 0",
        "test_a_bad_token",
    ),  # fmt: skip
    Mutant(
        "a NaN token reaches earlier tokens", CHUNK, "u = torch.where(spoils, 0, u)", "u = u + 0", "test_later_tokens"
    ),  # fmt: skip
    Mutant(
        "an infinite key passes a reset",
        CHUNK,
        "k = torch.where(is_bad[..., None], 0, k)",
        "k = k + 0",
        "test_hard_reset",
    ),  # fmt: skip
    Mutant(
        "scale ignored in chunks",
        CHUNK,
        "scale = q.shape[-1] ** -0.5 if scale is None else scale",
        "scale = q.shape[-1] ** -0.5",
        "test_rule_options",
    ),  # fmt: skip
    Mutant(
        "allow_neg_eigval ignored in chunks",
        CHUNK,
        "use_beta_sigmoid_in_kernel, allow_neg_eigval)",
        "use_beta_sigmoid_in_kernel, False)",
        "test_rule_options",
    ),  # fmt: skip
    Mutant(
        "gradient cut in a chunk's solve",
        CHUNK,
        "solve_triangular(A, rhs",
        "solve_triangular(A.detach(), rhs",
        "test_rule_gradients",
    ),  # fmt: skip
    # --- speculative decode -------------------------------------------------------------------------------------------
    Mutant(
        "resumes one column too late",
        SPECULATIVE,
        "accepted.clamp(max=table.shape[1])[:, None] - 1",
        "accepted.clamp(max=table.shape[1] - 1)[:, None]",
        "test_several_slots",
    ),
    Mutant(
        "an accepted count of 0 not clamped",
        SPECULATIVE,
        "to(torch.int64).clamp(min=1)",
        "to(torch.int64)",
        "test_several_slots",
    ),  # fmt: skip
    Mutant(
        "num_accepted_tokens of None counts as all",
        SPECULATIVE,
        "torch.ones(len(rows), dtype=torch.int64, device=rows.device)",
        "torch.full((len(rows),), rows.shape[-1], dtype=torch.int64, device=rows.device)",
        "test_several_slots_padding",
    ),
    Mutant(
        "state stored one column early",
        SPECULATIVE,
        "slots = take(table, rows)[:, t]",
        "slots = take(table, rows)[:, t - 1]",
        "test_several_slots",
    ),  # fmt: skip
    Mutant(
        "a padding column writes slot 0",
        SPECULATIVE,
        "slots = take(table, rows)[:, t]",
        "slots = take(table, rows)[:, t].clamp(min=0)",
        "test_several_slots_padding",
    ),  # fmt: skip
    Mutant(
        "padding judged by the first column",
        SPECULATIVE,
        "is_live(source, pool.shape[0], null_slot)",
        "is_live(table[:, 0], pool.shape[0], null_slot)",
        "test_padding_is_judged_by_the_source",
    ),
    Mutant("one record too few replayed", SPECULATIVE, "(num_replayed > i)", "(num_replayed > i + 1)", "test_replay"),
    Mutant("one record too many replayed", SPECULATIVE, "(num_replayed > i)", "(num_replayed >= i)", "test_replay"),
    Mutant(
        "records replayed beyond the live ones",
        SPECULATIVE,
        "torch.minimum(accepted[pieces.live], records.live[slots])",
        "accepted[pieces.live]",
        "test_replay",
    ),
    Mutant(
        "rejected records replayed",
        SPECULATIVE,
        "torch.minimum(accepted[pieces.live], records.live[slots])",
        "records.live[slots]",
        "test_replay",
    ),
    Mutant(
        "records replayed newest first",
        SPECULATIVE,
        "for i in range(num_columns):",
        "for i in reversed(range(num_columns)):",
        "test_replay",
    ),  # fmt: skip
    Mutant(
        "replay without the decay",
        SPECULATIVE,
        "state = decay_state(state, records.decay[slots, i].to(state.dtype))",
        "state = state + 0",
        "test_replay",
    ),  # fmt: skip
    Mutant("replayed keys not normalised", SPECULATIVE, "l2_normalize(k) if normalize else k", "k", "test_replay"),
    Mutant(
        "records hold normalised keys",
        SPECULATIVE,
        "records.k[row_slots, t] = new_k[t].squeeze(1)",
        "records.k[row_slots, t] = l2_normalize(new_k[t].squeeze(1))",
        "test_replay",
    ),
    Mutant(
        "recorded u rounded", SPECULATIVE, "u.to(records.u.dtype)", "u.bfloat16().to(records.u.dtype)", "test_replay"
    ),  # fmt: skip
    Mutant(
        "live keeps the longest row",
        SPECULATIVE,
        "records.live[slots] = pieces.lengths.to(records.live.dtype)",
        "records.live[slots] = torch.maximum(records.live[slots], pieces.lengths.to(records.live.dtype))",
        "test_replay",
    ),
    Mutant(
        "replayed state not stored",
        SPECULATIVE,
        "    store_states(pool, slots, state, state_v_first)\n\n",
        "",
        "test_replay",
    ),  # fmt: skip
    Mutant(
        "new tokens run from the unrounded state",
        SPECULATIVE,
        "    state = state.to(pool.dtype).to(state.dtype)\n",
        "",
        "test_replay_is_several_slots",
    ),
    Mutant(
        "scale ignored with several slots",
        SPECULATIVE,
        "tokens, q.shape[-1] ** -0.5 if scale is None else scale, initial_state_source",
        "tokens, q.shape[-1] ** -0.5, initial_state_source",
        "test_decode_options",
    ),
    Mutant(
        "scale ignored in replay",
        SPECULATIVE,
        "use_qk_l2norm_in_kernel, q.shape[-1] ** -0.5 if scale is None else scale, state",
        "use_qk_l2norm_in_kernel, q.shape[-1] ** -0.5, state",
        "test_decode_options",
    ),
    Mutant(
        "reset forgets every slot",
        "records.py",
        "self.live.index_fill_(0, slots.to(torch.int64), 0)",
        "self.live.zero_()",
        "test_records",
    ),
    Mutant(
        "records keep u in the activation dtype",
        "records.py",
        "self.u = torch.zeros(num_slots, S, HV, V, dtype=accumulator",
        "self.u = torch.zeros(num_slots, S, HV, V, dtype=dtype",
        "test_records",
    ),
    # --- convolution --------------------------------------------------------------------------------------------------
    Mutant("taps reversed", CONVOLUTION, "y + weight[:, j] * inputs", "y + weight[:, -1 - j] * inputs", "test_conv"),
    Mutant(
        "bias dropped",
        CONVOLUTION,
        "bias.to(dtype).expand(x.shape)\n    for j in range(weight.shape[1])",
        "x.new_zeros(x.shape, dtype=dtype)\n    for j in range(weight.shape[1])",
        "test_conv",
    ),
    Mutant("activation left out", CONVOLUTION, "y if activation is None else F.silu(y)", "y", "test_conv"),
    Mutant(
        "activation always applied",
        CONVOLUTION,
        "y if activation is None else F.silu(y)",
        "F.silu(y)",
        "test_conv_batched",
    ),  # fmt: skip
    Mutant(
        "swish unknown to the convolution",
        CONVOLUTION,
        "y if activation is None else",
        'y if activation != "silu" else',
        "test_conv_batched",
    ),  # fmt: skip
    Mutant(
        "convolution accumulated in the activation dtype",
        CONVOLUTION,
        "    dtype = compute_dtype(x)\n    inputs = torch.cat(",
        "    dtype = x.dtype\n    inputs = torch.cat(",
        "test_conv_accumulates",
    ),
    Mutant(
        "history newest first", CONVOLUTION, "history = history.mT\n", "history = history.mT.flip(1)\n", "test_conv"
    ),
    Mutant(
        "state stored newest first",
        CONVOLUTION,
        "pieces.lengths, W - 1).mT\n",
        "pieces.lengths, W - 1).flip(1).mT\n",
        "test_conv",
    ),  # fmt: skip
    Mutant(
        "state holds outputs instead of inputs",
        CONVOLUTION,
        "torch.cat([history, rows], dim=1), pieces.lengths, W - 1)",
        "torch.cat([history, y.to(rows.dtype)], dim=1), pieces.lengths, W - 1)",
        "test_conv",
    ),
    Mutant(
        "short sequence filled up behind",
        CONVOLUTION,
        "columns_from(torch.cat([history, rows], dim=1), pieces.lengths, W - 1)",
        "columns_from(torch.cat([rows, history], dim=1), (pieces.lengths - W + 1).clamp(min=0), W - 1)",
        "test_conv",
    ),
    Mutant(
        "wide pool read from its last columns",
        CONVOLUTION,
        "conv_states[..., : W - 1]",
        "conv_states[..., 1 - W :]",
        "test_conv_packed",
    ),
    Mutant(
        "seq_idx ignored",
        CONVOLUTION,
        "segments[:, j : j + L] == seq_idx",
        "segments[:, j : j + L] >= -1",
        "test_conv_segments",
    ),  # fmt: skip
    Mutant(
        "tokens of no segment not zeroed",
        CONVOLUTION,
        "torch.where(seq_idx[..., None] >= 0, activate(y, activation), 0)",
        "activate(y, activation)",
        "test_conv_segments",
    ),  # fmt: skip
    Mutant(
        "a fresh convolution reads its slot and multiplies by 0",
        CONVOLUTION,
        "torch.where(has_initial_state[pieces.live, None, None], history, 0)",
        "history * has_initial_state[pieces.live, None, None]",
        "test_conv_packed",
    ),
    Mutant(
        "has_initial_state ignored in the convolution",
        CONVOLUTION,
        "if has_initial_state is not None:",
        "if has_initial_state is not None and conv_states is None:",
        "test_conv_packed",
    ),
    Mutant(
        "final_states_out ignored",
        CONVOLUTION,
        "deliver(final_states, final_states_out, x.dtype)",
        "deliver(final_states, None, x.dtype)",
        "test_conv_batched",
    ),  # fmt: skip
    Mutant(
        "null_slot ignored by the convolution",
        CONVOLUTION,
        "live = is_live(slots, conv_states.shape[0], null_slot)",
        "live = is_live(slots, conv_states.shape[0], None)",
        "test_null_slot_of_the_convolution",
    ),
    Mutant(
        "null_slot ignored by the convolution's update",
        CONVOLUTION,
        "live = is_live(slots, conv_state.shape[0], null_slot)",
        "live = is_live(slots, conv_state.shape[0], None)",
        "test_null_slot_of_the_convolution",
    ),
    Mutant(
        "num_accepted_tokens ignored in the convolution",
        CONVOLUTION,
        "num_accepted_tokens.to(torch.int64)[pieces.live].clamp(min=1)",
        "torch.ones_like(pieces.live)",
        "test_conv_update_accepted",
    ),
    Mutant(
        "convolution resumes one column too late",
        CONVOLUTION,
        "columns_from(state, accepted - 1, W - 1)",
        "columns_from(state, accepted.clamp(max=state.shape[1] - W + 1), W - 1)",
        "test_conv_update_accepted",
    ),  # fmt: skip
    Mutant(
        "history not shifted",
        CONVOLUTION,
        "torch.cat([history[:, 1:], x], dim=1)",
        "torch.cat([history[:, :-1], x], dim=1)",
        "test_conv_update_accepted",
    ),  # fmt: skip
    Mutant(
        "history from the first columns",
        CONVOLUTION,
        "history = state[:, state_len - (W - 1) :]",
        "history = state[:, : W - 1]",
        "test_conv_update_shifts",
    ),  # fmt: skip
    Mutant(
        "ragged rows shifted by the longest",
        CONVOLUTION,
        "torch.cat([state, x], dim=1), lengths, state_len)",
        "torch.cat([state, x], dim=1), torch.full_like(lengths, x.shape[1]), state_len)",
        "test_conv_update_ragged",
    ),  # fmt: skip
    Mutant(
        "ring read one column late",
        CONVOLUTION,
        "torch.arange(1 - W, 0,",
        "torch.arange(2 - W, 1,",
        "test_conv_update_ring",
    ),  # fmt: skip
    Mutant(
        "ring written one column late",
        CONVOLUTION,
        "torch.arange(first, num_tokens,",
        "torch.arange(first + 1, num_tokens + 1,",
        "test_conv_update_ring",
    ),  # fmt: skip
    # --- gated norm and fused decode ----------------------------------------------------------------------------------
    Mutant(
        "gate before the norm",
        NORM,
        "    y = x * torch.rsqrt(",
        "    x = x * (gate.sigmoid() if activation == 'sigmoid' else F.silu(gate))\n"
        "    gate = torch.full_like(gate, 1e9 if activation == 'sigmoid' else 1)\n"
        "    y = x * torch.rsqrt(",
        "test_norm",
    ),
    Mutant("eps of the norm 1e-5", NORM, "keepdim=True) + eps)", "keepdim=True) + 1e-5)", "test_norm"),
    Mutant(
        "eps of the norm outside the root",
        NORM,
        "torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)",
        "(torch.rsqrt((x * x).mean(-1, keepdim=True)) + eps)",
        "test_norm",
    ),  # fmt: skip
    Mutant(
        "mean over 128 elements whatever their number",
        NORM,
        "(x * x).mean(-1, keepdim=True)",
        "((x * x).sum(-1, keepdim=True) / 128)",
        "test_norm",
    ),  # fmt: skip
    Mutant("weight counts from 1", NORM, "y = y * weight", "y = y * (1 + weight)", "test_norm"),
    Mutant(
        "output gate always silu",
        NORM,
        'gate.sigmoid() if activation == "sigmoid" else F.silu(gate)',
        "F.silu(gate)",
        "test_norm",
    ),  # fmt: skip
    Mutant("swish taken for a sigmoid", NORM, 'activation == "sigmoid"', 'activation != "silu"', "test_norm"),
    Mutant(
        "norm in the activation dtype",
        NORM,
        "gated_norm(x.to(dtype), gate.to(dtype), weight.to(dtype),",
        "gated_norm(x, gate, weight.to(x.dtype),",
        "test_norm",
    ),  # fmt: skip
    Mutant(
        "no gradient through the mean square",
        NORM,
        "torch.rsqrt((x * x)",
        "torch.rsqrt((x * x).detach()",
        "test_other_gradients",
    ),  # fmt: skip
    Mutant(
        "q and k swapped in mixed_qkv",
        FUSED,
        "q, k, v = mixed_qkv.split(",
        "k, q, v = mixed_qkv.split(",
        "test_fused_decode",
    ),  # fmt: skip
    Mutant(
        "head_k_dim ignored",
        FUSED,
        "key_channels // head_k_dim if",
        "key_channels // 128 if",
        "test_fused_decode_is_its_steps",
    ),  # fmt: skip
    Mutant(
        "o rounded before the norm",
        FUSED,
        "y = gated_norm(outputs,",
        "y = gated_norm(outputs.to(dtype).to(outputs.dtype),",
        "test_fused_decode",
    ),  # fmt: skip
    Mutant("norm_eps ignored", FUSED, "norm_eps, activation)", "1e-5, activation)", "test_fused_decode"),
    Mutant("output_gate_activation ignored", FUSED, "norm_eps, activation)", 'norm_eps, "silu")', "test_fused_decode"),
    Mutant(
        "fused decode does not normalise q and k",
        FUSED,
        "normalize=True)\n    pieces, outputs = run_several_slots(",
        "normalize=False)\n    pieces, outputs = run_several_slots(",
        "test_fused_decode",
    ),
    Mutant(
        "fused replay takes recorded keys as normalised",
        FUSED,
        "tokens, k, True,",
        "tokens, k, False,",
        "test_fused_decode",
    ),  # fmt: skip
    Mutant(
        "scale ignored in the fused decode",
        FUSED,
        "tokens, q.shape[-1] ** -0.5 if scale is None else scale, state,",
        "tokens, q.shape[-1] ** -0.5, state,",
        "test_decode_options",
    ),
    # --- the public functions -----------------------------------------------------------------------------------------
    Mutant(
        "an op runs before its arguments are checked",
        "_dispatch.py",
        "    _validate.check(op, flat)\n    reference_kernels[op](*flat)\n",
        "    reference_kernels[op](*flat)\n    _validate.check(op, flat)\n",
        "test_errors_come_before_any_write",
    ),
    Mutant(
        "a forced backend falls back silently",
        "_dispatch.py",
        '            raise NotImplementedError(f"{op}: the forced backend',
        "            reference_kernels[op](*flat)\n"
        "            return\n"
        '            raise NotImplementedError(f"{op}: the forced backend',
        "test_forced_backend",
    ),
    Mutant(
        "a forced backend detaches silently",
        "_dispatch.py",
        "needed = _grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)",
        "needed = False",
        "test_gradient",
    ),
    Mutant(
        "a pool update detaches silently",
        "_dispatch.py",
        "    if writes is not None:\n        raise RuntimeError(",
        "    if writes is not None:\n        return False\n        raise RuntimeError(",
        "test_gradient",
    ),
    Mutant(
        "a use_backend block does not end",
        "_dispatch.py",
        "            _forced_here.reset(self._token)\n",
        "",
        "test_forced_backend",
    ),
    Mutant(
        "the fallback to the reference says nothing",
        "_dispatch.py",
        '        log_once(\n            logging.WARNING,\n            f"{op} runs on the slow reference because',
        '        log_once(\n            logging.DEBUG,\n            f"{op} runs on the slow reference because',
        "test_gradient",
    ),
    Mutant(
        "dt_bias forgotten among what needs a gradient",
        "ops.py",
        '"fused_gdn_gating", (A_log, a, b, dt_bias), flat',
        '"fused_gdn_gating", (A_log, a, b), flat',
        "test_gradient",
    ),  # fmt: skip
    Mutant(
        "state forgotten among what needs a gradient",
        "ops.py",
        "(q, k, v, g, beta, start), flat",
        "(q, k, v, g, beta), flat",
        "test_gradient",
    ),  # fmt: skip
    Mutant(
        "has_initial_state dropped where a gradient is needed",
        "ops.py",
        "            cu_seqlens, has_initial_state=has_initial_state,\n        )  # fmt: skip\n"
        '    run("fused_recurrent',
        '            cu_seqlens,\n        )  # fmt: skip\n    run("fused_recurrent',
        "test_gradient",
    ),
    Mutant(
        "out ignored by the public norm",
        "ops.py",
        'y = _like("x", x) if out is None else out\n    flat = (x, gate, weight, eps, activation, y)',
        'y = _like("x", x)\n    flat = (x, gate, weight, eps, activation, y)',
        "test_public_outputs",
    ),  # fmt: skip
    Mutant(
        "final state always fp32",
        "ops.py",
        "dtype = _wide(q) if initial_state is None else initial_state.dtype",
        "dtype = _wide(q)",
        "test_public_outputs",
    ),  # fmt: skip
    Mutant("gv ignored", "ops.py", "_unsupported(gk=gk, gv=gv)", "_unsupported(gk=gk)", "test_errors"),
    Mutant("cp_context ignored", "ops.py", "    _unsupported(cp_context=cp_context)\n", "", "test_errors"),
    Mutant("a slot beyond the pool accepted", "_validate.py", ">= pool_size:", "> pool_size:", "test_errors"),
    Mutant(
        "null_slot tested after the range",
        "_validate.py",
        "live = live[live != null_slot]",
        "live = live + 0",
        "test_a_null_slot_beyond_the_pool",
    ),  # fmt: skip
    Mutant(
        "more accepted tokens than columns let through",
        "_validate.py",
        "int(value.max()) > columns:",
        "int(value.max()) > columns + 1:",
        "test_errors",
    ),  # fmt: skip
    Mutant(
        "a row longer than the table let through",
        "_validate.py",
        'offsets("cu_seqlens", cu_seqlens, total, columns)',
        'offsets("cu_seqlens", cu_seqlens, total)',
        "test_errors",
    ),  # fmt: skip
    Mutant("cu_seqlens beyond the tokens let through", "_validate.py", "ends[-1] > total or ", "", "test_errors"),
    Mutant(
        "decreasing cu_seqlens let through",
        "_validate.py",
        " or any(length < 0 for length in lengths):",
        ":",
        "test_errors",
    ),  # fmt: skip
    Mutant(
        "more accepted tokens than live records let through",
        "_validate.py",
        "0 < recorded < count:",
        "0 < recorded < count - 1:",
        "test_errors",
    ),  # fmt: skip
    Mutant(
        "two sources of the convolution's history let through",
        "_validate.py",
        'raise ValueError("initial_states: expected None with conv_states, got a tensor")',
        "pass",
        "test_errors",
    ),  # fmt: skip
    Mutant(
        "a slot that is not packed let through",
        "_validate.py",
        "if size != 1 and stride != expected:",
        "if size == 0 and stride != expected:",
        "test_errors",
    ),  # fmt: skip
    Mutant(
        "a wrong num_key_heads ignored",
        "_validate.py",
        "(channels - hv * value_dim) // (2 * head_k_dim) if num_key_heads is None else num_key_heads",
        "(channels - hv * value_dim) // (2 * head_k_dim)",
        "test_errors",
    ),  # fmt: skip
    Mutant(
        "shared slots let through under GDN_DEBUG",
        "_validate.py",
        "if _debug() and value.dim() == 1:",
        "if _debug() and value.dim() == 3:",
        "test_errors_under_GDN_DEBUG",
    ),  # fmt: skip
)
