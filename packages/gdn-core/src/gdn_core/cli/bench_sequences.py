# SPDX-License-Identifier: Apache-2.0
"""Cases of whole sequences: chunked prefill, and the recurrence token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gdn_core

from .. import reference
from ..testing import inputs
from .bench_case import (
    BF16,
    F32,
    I32,
    Build,
    Case,
    Contender,
    Expected,
    Plan,
    Sequences,
    Sizes,
    StatePool,
    draw_tokens,
    known_scale,
)
from .bench_recurrence import FLOP_A_TOKEN
from .machine import Limits
from .peers import Peers

CHUNK = 64
RAGGED = [17, 64, 129, 1000]

# Of longer inputs a few heads are compared with float64.
_MOST_CHECKED_TOKENS = 2048
_TOLERANCES = {BF16: 6e-3, F32: 1e-5}


def draw_sequences(lengths: list[int], sizes: Sizes, dtype: torch.dtype) -> Sequences:
    """Draw packed sequences, with their gates."""
    tokens = draw_tokens(sum(lengths), sizes, dtype)
    g = inputs.log_decays((1, len(tokens.a), sizes.value_heads), inputs.generator(4)).float()
    slots = torch.arange(len(lengths), dtype=I32)
    return Sequences(tokens.q, tokens.k, tokens.v, g, tokens.b[None].float().sigmoid(), inputs.offsets(lengths), slots)


def _checked_heads(sizes: Sizes, tokens: int) -> Tensor:
    count = sizes.value_heads if tokens <= _MOST_CHECKED_TOKENS else min(3, sizes.value_heads)
    return torch.linspace(0, sizes.value_heads - 1, count).long()


def _expected(run: Any, drawn: Sequences, states: Tensor, heads: Tensor, sizes: Sizes) -> Expected:
    key_heads = heads // (sizes.value_heads // sizes.key_heads)
    some = (drawn.q[:, :, key_heads], drawn.k[:, :, key_heads], drawn.v[:, :, heads])
    gates = {"g": drawn.g[:, :, heads].double(), "beta": drawn.beta[:, :, heads].double()}
    output, state = run(
        *(x.double() for x in some), **gates, initial_state=states[:, heads], output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=drawn.bounds,
    )  # fmt: skip
    shape = drawn.v.shape
    return Expected(output, state, lambda o: o.reshape(shape)[:, :, heads])


def _contender(function: str, drawn: Sequences, pool: StatePool, heads: Tensor) -> Contender:
    run: Any = getattr(gdn_core, function)
    q, k, v, g, beta, bounds, slots = drawn
    options = {"cu_seqlens": bounds, "state_indices": slots, "use_qk_l2norm_in_kernel": True}
    return sequence_contender(
        pool, heads, lambda states, _: run(q, k, v, g=g, beta=beta, initial_state=states, **options)[0]
    )


def sequence_contender(pool: StatePool, heads: Tensor, run: Callable[[Tensor, Any], Tensor]) -> Contender:
    """Return a contender that runs on the pool, of whose states `heads` are compared."""
    slots = torch.arange(len(pool))
    contender = pool.contender([slots], run, slots)
    return Contender(contender.call, lambda: pool.view(False)[:, heads], contender.prepare)


def chunked_floor(sizes: Sizes, lengths: list[int], dtype: torch.dtype) -> Callable[[Limits], float]:
    """Return the seconds for the products of the chunked form with whatever is masked left out.

    Per token and value head: 6 K V with the states, C V each for the solve and for the outputs within a chunk; per
    token and key head C K each for k k^T and q k^T.
    """
    H, HV, K, V = sizes.heads
    flop = sum(n * (HV * (6 * K * V + 2 * min(n, CHUNK) * V) + H * 2 * min(n, CHUNK) * K) for n in lengths)
    num_bytes = 4 * len(lengths) * sizes.state_values

    def floor(limits: Limits) -> float:
        bf16 = limits.bf16_gflop_s if dtype == BF16 and limits.bf16_gflop_s is not None else 0.0
        rate = max(bf16, limits.gflop_s)  # bf16 may be multiplied in fp32, which some CPUs do faster
        return max(1e-9 * flop / rate, limits.update_seconds(num_bytes))

    return floor


def _prefill(sizes: Sizes, peers: Peers, lengths: list[int], label: str, dtype: torch.dtype) -> Case:
    drawn, pool = draw_sequences(lengths, sizes, dtype), StatePool(sizes, len(lengths), cold=False)
    heads = _checked_heads(sizes, sum(lengths))
    states = pool.initial(drawn.slots)
    function = "chunk_gated_delta_rule"
    short = max(lengths) < CHUNK
    variants: dict[str, Build] = {}
    if short:
        variants["recurrent"] = partial(_contender, "fused_recurrent_gated_delta_rule", drawn, pool, heads)
    attach = partial(sequence_contender, pool, heads)
    return Case(
        op="prefill",
        label=label,
        function=function,
        floor=chunked_floor(sizes, lengths, dtype),
        tolerance=_TOLERANCES[dtype],
        expected=_expected(reference.chunk_gated_delta_rule, drawn, states, heads, sizes),
        ours=partial(_contender, function, drawn, pool, heads),
        variants=variants,
        peers={} if short else peers.sequences("torch_chunk_gated_delta_rule", drawn, attach),
        known_as=("prefill", label),
        scale=known_scale(sizes),
    )


def _recurrent(sizes: Sizes, peers: Peers, lengths: list[int], label: str) -> Case:
    drawn, pool = draw_sequences(lengths, sizes, BF16), StatePool(sizes, len(lengths), cold=False)
    heads = _checked_heads(sizes, sum(lengths))
    function = "fused_recurrent_gated_delta_rule"
    flop = FLOP_A_TOKEN * sum(lengths) * sizes.state_values
    num_bytes = 4 * len(lengths) * sizes.state_values
    attach = partial(sequence_contender, pool, heads)
    return Case(
        op="recurrent",
        label=label,
        function=function,
        floor=lambda limits: max(1e-9 * flop / limits.gflop_s, limits.update_seconds(num_bytes)),
        tolerance=3e-3,
        expected=_expected(reference.fused_recurrent_gated_delta_rule, drawn, pool.initial(drawn.slots), heads, sizes),
        ours=partial(_contender, function, drawn, pool, heads),
        peers=peers.sequences("torch_recurrent_gated_delta_rule", drawn, attach),
    )


def prefill_plans(sizes: Sizes, peers: Peers) -> list[Plan]:
    build = partial(_prefill, sizes, peers)
    lengths = (128, 512, 1024, 4096, 32768)
    plans = [Plan(f"T={n}", partial(build, [n], f"T={n}", BF16), quick=n in (128, 1024)) for n in lengths]
    plans.append(Plan("varlen", partial(build, RAGGED, "varlen", BF16)))
    plans += [Plan(f"T={n}", partial(build, [n], f"T={n}", BF16)) for n in (1, 4, 16, 32, 63)]
    return plans + [Plan(f"T={n} fp32", partial(build, [n], f"T={n} fp32", F32)) for n in (128, 512, 1024)]


def recurrent_plans(sizes: Sizes, peers: Peers) -> list[Plan]:
    rows = {"T=16": [16], "16 x T=4": [4] * 16}
    return [
        Plan(label, partial(_recurrent, sizes, peers, each, label), quick=len(each) == 1)
        for label, each in rows.items()
    ]
