# SPDX-License-Identifier: Apache-2.0
"""Cases of the recurrence: decode, speculation with several slots and with replay, and the fused step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gdn_core

from .. import reference
from ..records import ReplayRecords
from ..testing import inputs
from .bench_case import (
    BF16,
    F32,
    I32,
    Case,
    Contender,
    Expected,
    Plan,
    Sizes,
    StatePool,
    Tokens,
    checked_rows,
    draw_tokens,
    known_scale,
    tokens_of,
)
from .machine import Limits
from .peers import Peers

EPS = 1e-6
DRAFT = 5  # tokens of a row that verifies drafts, and slots for its states

# Multiply-adds count 2. A token: the decay, k @ M, the update, q @ M. A replayed token: the decay and the update.
FLOP_A_TOKEN = 8
_FLOP_A_REPLAYED_TOKEN = 4

_TOLERANCE = 3e-3
_HALF_POOL_TOLERANCE = 5e-3
# The separate operations round the recurrence's output before the norm.
_FUSED_TOLERANCE = 6e-3


# One call, on a pool and at a turn.
Run = Callable[[Tensor, Any], Tensor]


@dataclass
class Step:
    """What one of the operations needs for a step of `batch` rows, and how it is called."""

    function: str
    tokens: Tokens
    bounds: Tensor  # cu_seqlens
    pool: StatePool
    turns: list[Any]  # slots, or slots and accepted tokens, of one call after the other
    start: Callable[[bool], Run]  # V-first or not, with records of its own
    checked_slots: Tensor
    checked_tokens: Tensor
    expected: Expected
    floor: Callable[[Limits], float]
    records: ReplayRecords | None = None

    def contender(self, v_first: bool = False) -> Contender:
        return self.attach(self.start(v_first), v_first)

    def attach(self, run: Run, v_first: bool = False) -> Contender:
        """Return what `run` does as a contender on this step's states."""
        return self.pool.contender(self.turns, run, self.checked_slots, v_first=v_first, expected=self.expected)


def copy_records(records: ReplayRecords) -> ReplayRecords:
    tensors = (records.k, records.u, records.decay, records.live)
    return ReplayRecords.from_tensors(*(x.clone() for x in tensors))


def _picked(tokens: Tokens, checked: Tensor) -> Callable[[Tensor], Tensor]:
    shape = tokens.v.shape
    return lambda output: output.reshape(shape)[:, checked]


def _in_place_floor(
    sizes: Sizes, pool: StatePool, rows: int, cold: bool, tokens: float, replayed: float = 0
) -> Callable[[Limits], float]:
    """Return the seconds to read and write each row's state once, or for the arithmetic where that takes longer."""
    num_bytes = rows * pool.bytes_a_state
    flop = rows * sizes.state_values * (FLOP_A_TOKEN * tokens + _FLOP_A_REPLAYED_TOKEN * replayed)

    def floor(limits: Limits) -> float:
        traffic = 1e-9 * num_bytes / limits.cold_gb_s if cold else limits.update_seconds(num_bytes)
        return max(traffic, 1e-9 * flop / limits.gflop_s)

    return floor


def _several_slots_floor(sizes: Sizes, pool: StatePool, rows: int) -> Callable[[Limits], float]:
    """Return the seconds to read one state a row and write one a token, or for the arithmetic."""
    num_bytes = rows * pool.bytes_a_state
    flop = rows * sizes.state_values * FLOP_A_TOKEN * DRAFT

    def floor(limits: Limits) -> float:
        traffic = 1e-9 * num_bytes * (1 / limits.read_gb_s + DRAFT / limits.write_gb_s)
        return max(traffic, 1e-9 * flop / limits.gflop_s)

    return floor


def decode_step(sizes: Sizes, batch: int, cold: bool, dtype: torch.dtype = F32) -> Step:
    """One token a row, each on a slot of its own."""
    tokens, pool, rows = draw_tokens(batch, sizes), StatePool(sizes, batch, cold=cold, dtype=dtype), checked_rows(batch)
    # The fused form takes its slots as a table with one column.
    turns = [(slots, slots[:, None]) for slots in torch.arange(len(pool), dtype=I32).split(batch)]
    states = pool.initial(rows)
    in_float64: Any = reference.fused_sigmoid_gating_delta_rule_update
    output = in_float64(*tokens.double(rows), states, torch.arange(len(rows)), use_qk_l2norm_in_kernel=True)
    function: Any = gdn_core.fused_sigmoid_gating_delta_rule_update
    arguments = tokens.arguments

    def start(v_first: bool) -> Run:
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "state_v_first": v_first}
        return lambda states, turn: function(*arguments, states, turn[0], **options)

    return Step(
        function="fused_sigmoid_gating_delta_rule_update",
        tokens=tokens,
        bounds=inputs.offsets([1] * batch),
        pool=pool,
        turns=turns,
        start=start,
        checked_slots=rows,
        checked_tokens=rows,
        expected=Expected(output, states, _picked(tokens, rows)),
        floor=_in_place_floor(sizes, pool, batch, cold, tokens=1),
    )


def _acceptance(pattern: str, turns: int, batch: int) -> Tensor:
    """Return the accepted tokens of each row at each turn: `all`, or `uniform` from 1 to all."""
    if pattern == "all":
        return torch.full((turns, batch), DRAFT, dtype=I32)
    return torch.randint(1, DRAFT + 1, (turns, batch), generator=inputs.generator(2), dtype=I32)


def spec_step(sizes: Sizes, batch: int, pattern: str) -> Step:
    """Rows of draft tokens, with a slot for the state after each."""
    tokens, bounds = draw_tokens(batch * DRAFT, sizes), inputs.offsets([DRAFT] * batch)
    pool, rows = StatePool(sizes, batch * DRAFT, cold=True), checked_rows(batch)
    tables = torch.arange(len(pool), dtype=I32).view(pool.turns, batch, DRAFT)
    accepted = _acceptance(pattern, pool.turns, batch)
    checked, checked_slots = tokens_of(rows, DRAFT), tables[0][rows].flatten()
    states = pool.initial(checked_slots)
    in_float64: Any = reference.fused_sigmoid_gating_delta_rule_update_spec
    output = in_float64(
        *tokens.double(checked), states, torch.arange(len(states)).view(-1, DRAFT), accepted[0][rows],
        inputs.offsets([DRAFT] * len(rows)), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    function: Any = gdn_core.fused_sigmoid_gating_delta_rule_update_spec
    arguments = tokens.arguments

    def start(v_first: bool) -> Run:
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "state_v_first": v_first}
        return lambda states, turn: function(*arguments, states, *turn, bounds, **options)

    return Step(
        function="fused_sigmoid_gating_delta_rule_update_spec",
        tokens=tokens,
        bounds=bounds,
        pool=pool,
        turns=list(zip(tables, accepted, strict=True)),
        start=start,
        checked_slots=checked_slots,
        checked_tokens=checked,
        expected=Expected(output, states, _picked(tokens, checked)),
        floor=_several_slots_floor(sizes, pool, batch),
    )


def replay_step(sizes: Sizes, batch: int, pattern: str) -> Step:
    """Rows of draft tokens with one slot each, and the records of the step before."""
    tokens, bounds = draw_tokens(batch * DRAFT, sizes), inputs.offsets([DRAFT] * batch)
    pool, rows = StatePool(sizes, batch, cold=True), checked_rows(batch)
    slots, accepted = torch.arange(len(pool), dtype=I32), _acceptance(pattern, pool.turns, batch)
    rng = inputs.generator(3)
    records = inputs.random_records(len(pool), DRAFT, *sizes.heads, BF16, rng, slots, [DRAFT] * len(pool))
    checked, states = tokens_of(rows, DRAFT), pool.initial(rows)
    some = (records.k[rows].double(), records.u[rows].double(), records.decay[rows].double(), records.live[rows])
    in_float64: Any = reference.fused_sigmoid_gating_delta_rule_update_replay
    output = in_float64(
        *tokens.double(checked), states, torch.arange(len(rows)), ReplayRecords.from_tensors(*some), accepted[0][rows],
        inputs.offsets([DRAFT] * len(rows)), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    function: Any = gdn_core.fused_sigmoid_gating_delta_rule_update_replay
    arguments = tokens.arguments

    def start(v_first: bool) -> Run:
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "state_v_first": v_first}
        own = copy_records(records)
        return lambda states, turn: function(*arguments, states, turn[0], own, turn[1], bounds, **options)

    return Step(
        function="fused_sigmoid_gating_delta_rule_update_replay",
        tokens=tokens,
        bounds=bounds,
        pool=pool,
        turns=list(zip(slots.split(batch), accepted, strict=True)),
        start=start,
        checked_slots=rows,
        checked_tokens=checked,
        expected=Expected(output, states, _picked(tokens, checked)),
        floor=_in_place_floor(sizes, pool, batch, cold=True, tokens=DRAFT, replayed=float(accepted.double().mean())),
        records=records,
    )


def _decode(sizes: Sizes, peers: Peers, batch: int, cold: bool) -> Case:
    step = decode_step(sizes, batch, cold)
    label = f"B{batch} {'cold' if cold else 'hot'}"
    return Case(
        op="decode",
        label=label,
        function=step.function,
        floor=step.floor,
        tolerance=_TOLERANCE,
        expected=step.expected,
        ours=step.contender,
        variants={"V-first": partial(step.contender, True)},
        peers=peers.decode(step.tokens, step.attach),
        known_as=("decode", label),
        scale=known_scale(sizes),
    )


def _decode_half(sizes: Sizes, peers: Peers, batch: int) -> Case:
    step = decode_step(sizes, batch, cold=True, dtype=BF16)
    return Case(
        op="decode",
        label=f"B{batch} cold bf16",
        function=step.function,
        floor=step.floor,
        tolerance=_HALF_POOL_TOLERANCE,
        expected=step.expected,
        ours=step.contender,
        variants={"fp32 pool": lambda: decode_step(sizes, batch, cold=True).contender()},
    )


def _drafts(op: str, sizes: Sizes, peers: Peers, batch: int, pattern: str) -> Case:
    several_slots = partial(spec_step, sizes, batch, pattern)
    step = replay_step(sizes, batch, pattern) if op == "replay" else several_slots()
    # vLLM has several slots only: for replay, on the same rows and in a pool of its own.
    theirs = step if op == "spec" else several_slots()
    return Case(
        op=op,
        label=f"B{batch} {pattern}",
        function=step.function,
        floor=step.floor,
        tolerance=_TOLERANCE,
        expected=step.expected,
        ours=step.contender,
        variants={"V-first": partial(step.contender, True)},
        peers=peers.spec(theirs.tokens, theirs.bounds, theirs.attach),
        known_as=("spec", f"B{batch}"),
        scale=known_scale(sizes),
    )


def _fused(sizes: Sizes, peers: Peers, kind: str, batch: int) -> Case:
    """The fused step against the operations that it fuses: the recurrence with its gates, and the norm."""
    step = _FUSED[kind](sizes, batch)
    gate = torch.randn(step.tokens.v.shape[1:], generator=inputs.generator(5)).to(BF16)
    weight = torch.linspace(0.5, 1.5, sizes.value_dim)
    wanted = reference.rms_norm_gated(
        step.expected.output, gate[None, step.checked_tokens].double(), weight.double(), EPS
    )
    # In place of the recurrence's own output; the states are the same.
    step.expected = step.expected._replace(output=wanted)
    name = "fused_gdn_decode_post_conv_mtp" + ("_replay" if kind == "replay" else "")
    function: Any = getattr(gdn_core, name)
    A_log, dt_bias, *_, a, b, mixed_qkv = step.tokens

    def fused(v_first: bool = False) -> Contender:
        options: dict[str, Any] = {
            "norm_eps": EPS, "num_key_heads": sizes.key_heads, "head_k_dim": sizes.key_dim, "state_v_first": v_first
        }  # fmt: skip
        records = [] if step.records is None else [copy_records(step.records)]

        def run(states: Tensor, turn: Any) -> Tensor:
            slots, accepted = (turn[1], None) if kind == "decode" else turn
            return function(
                mixed_qkv, a, b, A_log, dt_bias, slots, *records, step.bounds, accepted, states, gate, weight, **options
            )

        return step.attach(run, v_first)

    def separate() -> Contender:
        recurrence = step.start(False)
        norm: Any = gdn_core.rms_norm_gated
        return step.attach(lambda states, turn: norm(recurrence(states, turn)[0], gate, weight, EPS))

    return Case(
        op="fused",
        label=f"B{batch}" + ("" if kind == "decode" else f" {kind}"),
        function=name,
        floor=step.floor,
        tolerance=_FUSED_TOLERANCE,
        expected=step.expected,
        ours=fused,
        variants={"separate": separate, "V-first": partial(fused, True)},
    )


_FUSED: dict[str, Callable[[Sizes, int], Step]] = {
    "decode": lambda sizes, batch: decode_step(sizes, batch, cold=True),
    "spec": lambda sizes, batch: spec_step(sizes, batch, "uniform"),
    "replay": lambda sizes, batch: replay_step(sizes, batch, "uniform"),
}


def decode_plans(sizes: Sizes, peers: Peers) -> list[Plan]:
    batches = (1, 16, 64, 256)
    plans = [Plan(f"B{n} cold", partial(_decode, sizes, peers, n, True), quick=n <= 16) for n in batches]
    plans.append(Plan("B1 hot", partial(_decode, sizes, peers, 1, False), quick=True))
    return plans + [Plan(f"B{n} cold bf16", partial(_decode_half, sizes, peers, n)) for n in batches]


def draft_plans(op: str, sizes: Sizes, peers: Peers) -> list[Plan]:
    return [
        Plan(f"B{n} {pattern}", partial(_drafts, op, sizes, peers, n, pattern), quick=n == 1 and pattern == "uniform")
        for n in (1, 4, 16)
        for pattern in ("uniform", "all")
    ]


def fused_plans(sizes: Sizes, peers: Peers) -> list[Plan]:
    plans = [Plan(f"B{n}", partial(_fused, sizes, peers, "decode", n), quick=n == 1) for n in (1, 16, 64, 256)]
    for kind in ("spec", "replay"):
        plans += [Plan(f"B{n} {kind}", partial(_fused, sizes, peers, kind, n), quick=n == 1) for n in (1, 4, 16)]
    return plans
