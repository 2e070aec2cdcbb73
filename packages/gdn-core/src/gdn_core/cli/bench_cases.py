# SPDX-License-Identifier: Apache-2.0
"""What `gdn bench` times: each workload with its contenders, its work and its correct result.

Work is what the operation cannot avoid. Bytes of states count once though they are read and written, as the in-place
limit counts them; other bytes count half, each being either read or written. A token of one value head costs 6 K V
floating-point operations: the products of the recurrence itself, whatever an algorithm adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import gdn_core

from ..testing import inputs, relative_error, to_float64
from . import output
from .machine import COLD_BYTES, Limits, update_gb_s
from .peers import Peers

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
EPS = 1e-6

# Toy sizes would need a slot index for each of very many tiny states.
_MOST_ROTATIONS = 4096

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Heads and widths of a layer."""

    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    conv_width: int = 4

    @property
    def heads(self) -> tuple[int, int, int, int]:
        return self.key_heads, self.value_heads, self.key_dim, self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        return 4 * self.value_heads * self.key_dim * self.value_dim

    def flop(self, tokens: int) -> int:
        return 6 * tokens * self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class Contender:
    """One implementation, on states of its own. `state` reads what the first call left behind."""

    call: Call
    state: Callable[[], Tensor] | None = None


@dataclass
class Workload:
    """One operation at one size. `ours` builds the call of gdn, whichever backend is in force."""

    op: str
    function: str
    label: str
    work: float
    unit: str  # GB/s or GFLOP/s
    limit: Callable[[Limits, int], float]  # of the machine, at a number of threads
    tolerance: float
    expected: tuple[Tensor, Tensor | None]
    ours: Callable[[], Contender]
    peers: dict[str, Callable[[], Contender]] = field(default_factory=dict)

    def error(self, contender: Contender) -> float:
        """Make the first call and return how far it is from float64: the worst head's, output or state."""
        output, state = self.expected
        error = _worst(contender.call(), output)
        if state is not None and contender.state is not None:
            error = max(error, _worst(contender.state(), state))
        return error


def _worst(actual: Tensor, expected: Tensor) -> float:
    """Return the worst relative error over value heads, or over all where there are none."""
    actual = actual.reshape(expected.shape)
    dims = {4: (0, 1, 3), 3: (0, 2)}.get(expected.dim(), tuple(range(expected.dim())))
    return relative_error(actual, expected, dims)


def workloads(op: str, sizes: Sizes, peers: Peers, *, full: bool) -> Iterator[Workload]:
    """Build the workloads of one operation, one at a time: the pools are large."""
    yield from _BUILDERS[op](sizes, peers, full)


def _gflop_limit(limits: Limits, threads: int) -> float:
    return limits.gflop_s


def _bytes_limit(num_bytes: int) -> Callable[[Limits, int], float]:
    """Return the in-place limit of a working set: of the caches where it fits them."""
    return lambda limits, threads: update_gb_s(min(max(num_bytes, 1 << 20), COLD_BYTES), threads)


def _decode(sizes: Sizes, peers: Peers, full: bool) -> Iterator[Workload]:
    batches = (1, 16, 64) if full else (1, 16)
    for batch, cold in [(batch, True) for batch in batches] + [(1, False)]:
        yield _decode_workload(sizes, peers, batch, cold)


def _decode_workload(sizes: Sizes, peers: Peers, batch: int, cold: bool) -> Workload:
    arguments, _ = inputs.decode_arguments([1] * batch, *sizes.heads, dtype=BF16, spare_slots=0)
    states = arguments["initial_state_source"][arguments["initial_state_indices"].long()].contiguous()
    num_bytes = batch * sizes.state_bytes
    rotations = min(-(-COLD_BYTES // num_bytes), _MOST_ROTATIONS) if cold else 1
    slots = torch.arange(rotations * batch, dtype=I32).split(batch)
    names = ("A_log", "dt_bias", "q", "k", "v", "a", "b")
    inputs_of_call = tuple(arguments[name] for name in names)

    wanted = to_float64(arguments | {"initial_state_source": states, "initial_state_indices": slots[0]})
    output = gdn_core.reference.fused_sigmoid_gating_delta_rule_update(**wanted)

    def fresh() -> tuple[Tensor, Iterator[Tensor], Callable[[], Tensor]]:
        pool = states.repeat(rotations, 1, 1, 1)
        return pool, itertools.cycle(slots), lambda: pool[:batch]

    def ours() -> Contender:
        pool, turn, state = fresh()
        function: Any = gdn_core.fused_sigmoid_gating_delta_rule_update

        def call() -> Tensor:
            return function(*inputs_of_call, pool, next(turn), use_qk_l2norm_in_kernel=True)

        return Contender(call, state)

    return Workload(
        op="decode",
        function="fused_sigmoid_gating_delta_rule_update",
        label=f"batch {batch}, {'cold' if cold else 'hot'}",
        work=num_bytes,
        unit="GB/s",
        limit=_bytes_limit(COLD_BYTES if cold else num_bytes),
        tolerance=3e-3,
        expected=(output, wanted["initial_state_source"]),
        ours=ours,
        peers=peers.decode(inputs_of_call, fresh),
    )


def _recurrent(sizes: Sizes, peers: Peers, full: bool) -> Iterator[Workload]:
    for rows, tokens in ((1, 16), (16, 4)) if full else ((1, 16),):
        yield _sequences("recurrent", "fused_recurrent_gated_delta_rule", [tokens] * rows, sizes, peers, 3e-3)


def _chunk(sizes: Sizes, peers: Peers, full: bool) -> Iterator[Workload]:
    lengths = [[128], [1024]] + ([[4096], [17, 64, 129, 1000]] if full else [])
    for each in lengths:
        yield _sequences("chunk", "chunk_gated_delta_rule", each, sizes, peers, 6e-3)


def _sequences(op: str, function: str, lengths: list[int], sizes: Sizes, peers: Peers, tolerance: float) -> Workload:
    arguments = inputs.delta_rule_arguments(lengths, *sizes.heads, dtype=BF16)
    wanted = getattr(gdn_core.reference, function)(**to_float64(arguments))
    final_states: list[Tensor] = []

    def ours() -> Contender:
        run = getattr(gdn_core, function)

        def call() -> Tensor:
            o, final_state = run(**arguments)
            final_states[:] = [final_state]
            output: Tensor = o
            return output

        return Contender(call, lambda: final_states[0])

    return Workload(
        op=op,
        function=function,
        label=f"{' + '.join(map(str, lengths))} tokens"
        if len(set(lengths)) > 1
        else f"{len(lengths)} x {lengths[0]} tokens",
        work=sizes.flop(sum(lengths)),
        unit="GFLOP/s",
        limit=_gflop_limit,
        tolerance=tolerance,
        expected=(wanted[0], wanted[1]),
        ours=ours,
        peers=peers.sequences(op, arguments, lengths),
    )


def _gating(sizes: Sizes, peers: Peers, full: bool) -> Iterator[Workload]:
    for tokens in (1, 1024):
        arguments = inputs.gating_arguments((tokens, sizes.value_heads), dtype=BF16)
        wanted = gdn_core.reference.fused_gdn_gating(**to_float64(arguments))
        values = tokens * sizes.value_heads

        def ours(arguments: dict[str, Any] = arguments) -> Contender:
            return Contender(lambda: gdn_core.fused_gdn_gating(**arguments)[0])

        yield Workload(
            op="gating",
            function="fused_gdn_gating",
            label=output.count(tokens, "token"),
            work=values * (2 + 2 + 4 + 4) / 2,
            unit="GB/s",
            limit=_bytes_limit(values * 12),
            tolerance=2e-6,
            expected=(wanted[0], None),
            ours=ours,
            peers=peers.gating(arguments),
        )


def _norm(sizes: Sizes, peers: Peers, full: bool) -> Iterator[Workload]:
    for tokens in (1, 1024):
        shape = (tokens, sizes.value_heads, sizes.value_dim)
        arguments = inputs.norm_arguments(shape, dtype=BF16, eps=EPS)
        num_bytes = 3 * 2 * tokens * sizes.value_heads * sizes.value_dim

        def ours(arguments: dict[str, Any] = arguments) -> Contender:
            return Contender(lambda: gdn_core.rms_norm_gated(**arguments))

        yield Workload(
            op="norm",
            function="rms_norm_gated",
            label=output.count(tokens, "token"),
            work=num_bytes / 2,
            unit="GB/s",
            limit=_bytes_limit(num_bytes),
            tolerance=3e-3,
            expected=(gdn_core.reference.rms_norm_gated(**to_float64(arguments)), None),
            ours=ours,
            peers=peers.norm(arguments),
        )


def _conv(sizes: Sizes, peers: Peers, full: bool) -> Iterator[Workload]:
    for tokens in (1024, 4096) if full else (1024,):
        yield _conv_prefill(sizes, peers, tokens)
    for batch in (1, 64):
        yield _conv_update(sizes, peers, batch)


def _conv_prefill(sizes: Sizes, peers: Peers, tokens: int) -> Workload:
    arguments, _ = inputs.conv_fn_arguments([tokens], sizes.channels, sizes.conv_width, dtype=BF16, has_bias=False)
    x, weight = arguments["x"], arguments["weight"]
    states = arguments["conv_states"].contiguous()
    bounds = arguments["query_start_loc"]
    slots, fresh = torch.zeros(1, dtype=I32), torch.zeros(1, dtype=torch.bool)
    options = {"query_start_loc": bounds, "cache_indices": slots, "has_initial_state": fresh}
    wanted = states.double()
    y: Any = gdn_core.reference.causal_conv1d_fn(
        x.double(), weight.double(), activation="silu", conv_states=wanted, **options
    )

    def ours() -> Contender:
        pool = states.clone()

        def call() -> Tensor:
            output = gdn_core.causal_conv1d_fn(x, weight, activation="silu", conv_states=pool, **options)
            return output if isinstance(output, Tensor) else output[0]

        return Contender(call, lambda: pool[:1])

    return Workload(
        op="conv",
        function="causal_conv1d_fn",
        label=output.count(tokens, "token"),
        work=x.nbytes,
        unit="GB/s",
        limit=_bytes_limit(2 * x.nbytes),
        tolerance=4e-3,
        expected=(y, wanted[:1]),
        ours=ours,
        peers=peers.conv_prefill(x, weight, states, bounds),
    )


def _conv_update(sizes: Sizes, peers: Peers, batch: int) -> Workload:
    arguments, _ = inputs.conv_update_arguments(
        [1] * batch, sizes.channels, sizes.conv_width, is_dense=True, dtype=BF16, has_bias=False, spare_slots=0
    )
    x, weight, states = arguments["x"].contiguous(), arguments["weight"], arguments["conv_state"].contiguous()
    slots = torch.arange(batch, dtype=I32)
    wanted = states.double()
    y = gdn_core.reference.causal_conv1d_update(
        x.double(), wanted, weight.double(), None, "silu", conv_state_indices=slots
    )

    def ours() -> Contender:
        pool = states.clone()

        def call() -> Tensor:
            return gdn_core.causal_conv1d_update(x, pool, weight, None, "silu", conv_state_indices=slots)

        return Contender(call, lambda: pool)

    num_bytes = 2 * x.nbytes + 2 * states.nbytes
    return Workload(
        op="conv",
        function="causal_conv1d_update",
        label=f"update, batch {batch}",
        work=num_bytes / 2,
        unit="GB/s",
        limit=_bytes_limit(num_bytes),
        tolerance=4e-3,
        expected=(y, wanted),
        ours=ours,
        peers=peers.conv_update(x, weight, states, slots),
    )


_BUILDERS: dict[str, Callable[[Sizes, Peers, bool], Iterator[Workload]]] = {
    "decode": _decode,
    "recurrent": _recurrent,
    "gating": _gating,
    "norm": _norm,
    "chunk": _chunk,
    "conv": _conv,
}
OPS = tuple(_BUILDERS)
