# SPDX-License-Identifier: Apache-2.0
"""Cases of the operations around the recurrence: gating, gated norm, convolution."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gdn_core

from .. import reference
from ..testing import inputs
from .bench_case import BF16, I32, Case, Contender, Expected, Plan, Sizes, channel_last, in_double, known_scale
from .bench_sequences import RAGGED
from .machine import Limits
from .peers import Peers

_EPS = 1e-6
_DRAFT_ROWS = 16
_DRAFT = 5
_CONV_TOLERANCE = 4e-3
# A value of every so many channels is compared with float64.
_CHECKED_CHANNELS = 8


def _gating(sizes: Sizes, peers: Peers, tokens: int) -> Case:
    arguments = inputs.gating_arguments((tokens, sizes.value_heads), dtype=BF16)
    wanted = reference.fused_gdn_gating(**in_double(**arguments))
    num_bytes = tokens * sizes.value_heads * (2 + 2 + 4 + 4)
    return Case(
        op="gating",
        label=f"T={tokens}",
        function="fused_gdn_gating",
        floor=lambda limits: limits.update_seconds(num_bytes / 2, num_bytes),
        tolerance=2e-6,
        expected=Expected(wanted[0], None, lambda g: g),
        ours=lambda: Contender(lambda: gdn_core.fused_gdn_gating(**arguments)[0]),
        peers=peers.gating(arguments),
    )


def _norm(sizes: Sizes, peers: Peers, tokens: int) -> Case:
    arguments = inputs.norm_arguments((tokens, sizes.value_heads, sizes.value_dim), dtype=BF16, eps=_EPS)
    num_bytes = 3 * 2 * tokens * sizes.value_heads * sizes.value_dim
    wanted = reference.rms_norm_gated(**in_double(**arguments))
    return Case(
        op="norm",
        label=f"T={tokens}",
        function="rms_norm_gated",
        floor=lambda limits: limits.update_seconds(num_bytes / 2, num_bytes),
        tolerance=3e-3,
        expected=Expected(wanted, None, lambda y: y),
        ours=lambda: Contender(lambda: gdn_core.rms_norm_gated(**arguments)),
        peers=peers.norm(arguments),
    )


def _conv_floor(values: int, state_bytes: int) -> Callable[[Limits], float]:
    """Return the seconds to read x, write y and update the states, or for the exponentials of SiLU."""
    num_bytes = 2 * values + state_bytes

    def floor(limits: Limits) -> float:
        traffic = limits.update_seconds(num_bytes, 2 * num_bytes)
        return max(traffic, 1e-9 * values / limits.exp_g_s) if limits.exp_g_s else traffic

    return floor


def _some_channels(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(dim, (-1, _CHECKED_CHANNELS)).select(dim + 1, 0) if x.shape[dim] % _CHECKED_CHANNELS == 0 else x


def _conv_prefill(sizes: Sizes, peers: Peers, lengths: list[int], label: str) -> Case:
    C, W, N = sizes.channels, sizes.conv_width, len(lengths)
    rng = inputs.generator(0)
    x = torch.randn(sum(lengths), C, generator=rng).to(BF16).mT
    weight, _ = inputs.conv_weights(C, W, BF16, rng, has_bias=False)
    states = torch.randn(N, C, W - 1, generator=rng).to(BF16)
    bounds, slots, fresh = inputs.offsets(lengths), torch.arange(N, dtype=I32), torch.zeros(N, dtype=torch.bool)
    options: dict[str, Any] = {
        "activation": "silu", "query_start_loc": bounds, "cache_indices": slots, "has_initial_state": fresh
    }  # fmt: skip
    wanted = _some_channels(states, 1).double()
    y: Any = reference.causal_conv1d_fn(
        _some_channels(x, 0).double(), _some_channels(weight, 0).double(), conv_states=wanted, **options
    )

    def ours() -> Contender:
        pool = channel_last(states)
        run: Any = gdn_core.causal_conv1d_fn
        return Contender(lambda: run(x, weight, conv_states=pool, **options), lambda: _some_channels(pool, 1))

    return Case(
        op="conv",
        label=label,
        function="causal_conv1d_fn",
        floor=_conv_floor(x.numel(), states.nbytes),
        tolerance=_CONV_TOLERANCE,
        expected=Expected(y, wanted, lambda y: _some_channels(y.reshape(x.shape), 0)),
        ours=ours,
        peers=peers.conv_prefill(x, weight, states, bounds, lambda pool: _some_channels(pool, 1)),
        known_as=("conv", label),
        scale=known_scale(sizes) and C / 8192,
    )


def _conv_update(sizes: Sizes, peers: Peers, batch: int) -> Case:
    C, W = sizes.channels, sizes.conv_width
    rng = inputs.generator(0)
    x, states = torch.randn(batch, C, generator=rng).to(BF16), torch.randn(batch, C, W - 1, generator=rng).to(BF16)
    weight, _ = inputs.conv_weights(C, W, BF16, rng, has_bias=False)
    slots = torch.arange(batch, dtype=I32)
    wanted = states.double()
    y = reference.causal_conv1d_update(x.double(), wanted, weight.double(), None, "silu", conv_state_indices=slots)

    def ours(pool: Tensor) -> Contender:
        pool = pool.clone()
        run: Any = gdn_core.causal_conv1d_update
        return Contender(lambda: run(x, pool, weight, None, "silu", conv_state_indices=slots), lambda: pool)

    return Case(
        op="conv",
        label=f"update B{batch}",
        function="causal_conv1d_update",
        floor=_conv_floor(x.numel(), states.nbytes),
        tolerance=_CONV_TOLERANCE,
        expected=Expected(y, wanted, lambda y: y),
        ours=partial(ours, channel_last(states)),
        variants={"time-fastest": partial(ours, states)},
        peers=peers.conv_update(x, weight, states, slots),
        known_as=("conv", f"update B{batch}"),
        scale=known_scale(sizes) and C / 8192,
    )


def _conv_drafts(sizes: Sizes, peers: Peers) -> Case:
    """Rows of 1 to 5 tokens on a state that can be rolled back; vLLM's rows all have 5."""
    C, W = sizes.channels, sizes.conv_width
    rng = inputs.generator(0)
    lengths = [1 + n % _DRAFT for n in range(_DRAFT_ROWS)]
    weight, _ = inputs.conv_weights(C, W, BF16, rng, has_bias=False)
    states = torch.randn(_DRAFT_ROWS, C, W + _DRAFT - 2, generator=rng).to(BF16)
    accepted = torch.randint(1, _DRAFT + 1, (_DRAFT_ROWS,), generator=rng, dtype=I32)
    full = torch.randn(_DRAFT_ROWS, _DRAFT, C, generator=rng).to(BF16)
    x = torch.cat([row[:length] for row, length in zip(full, lengths, strict=True)])
    options: dict[str, Any] = {
        "conv_state_indices": torch.arange(_DRAFT_ROWS, dtype=I32),
        "num_accepted_tokens": accepted,
    }

    def expected(x: Tensor, **ragged: Any) -> Tensor:
        return reference.causal_conv1d_update(
            x.double(), states.double(), weight.double(), None, "silu", **options, **ragged
        )

    ragged: dict[str, Any] = {"query_start_loc": inputs.offsets(lengths)}

    def ours(pool: Tensor) -> Contender:
        pool = pool.clone()
        run: Any = gdn_core.causal_conv1d_update
        return Contender(lambda: run(x, pool, weight, None, "silu", **options, **ragged))

    return Case(
        op="conv",
        label="ragged spec",
        function="causal_conv1d_update",
        floor=_conv_floor(x.numel(), states.nbytes),
        tolerance=_CONV_TOLERANCE,
        expected=Expected(expected(x, **ragged), None, lambda y: y),
        ours=partial(ours, channel_last(states)),
        variants={"time-fastest": partial(ours, states)},
        peers=peers.conv_drafts(full, weight, states, accepted, Expected(expected(full.mT).mT, None, lambda y: y)),
    )


def gating_plans(sizes: Sizes, peers: Peers) -> list[Plan]:
    return [Plan(f"T={n}", partial(_gating, sizes, peers, n), quick=True) for n in (1, 1024)]


def norm_plans(sizes: Sizes, peers: Peers) -> list[Plan]:
    return [Plan(f"T={n}", partial(_norm, sizes, peers, n), quick=True) for n in (1, 1024)]


def conv_plans(sizes: Sizes, peers: Peers) -> list[Plan]:
    lengths = {"T=128": [128], "T=1024": [1024], "T=4096": [4096], "varlen": RAGGED}
    plans = [
        Plan(label, partial(_conv_prefill, sizes, peers, each, label), quick=label == "T=1024")
        for label, each in lengths.items()
    ]
    plans += [Plan(f"update B{n}", partial(_conv_update, sizes, peers, n), quick=n == 1) for n in (1, 16, 64)]
    return [*plans, Plan("ragged spec", partial(_conv_drafts, sizes, peers), quick=True)]
