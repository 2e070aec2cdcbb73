# SPDX-License-Identifier: Apache-2.0
"""What a case of `gdn bench` is made of: sizes, inputs, pools of states, contenders, and the result they must have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..testing import inputs, relative_error
from .machine import COLD_BYTES, Limits

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32

# Toy sizes would need a slot index for each of very many tiny states.
_MOST_TURNS = 4096
# Checking all rows of a large batch in float64 would take longer than timing them.
_CHECKED_ROWS = 4
_TOKENS_DRAWN_AT_ONCE = 1024

Turn = TypeVar("Turn")
Call = Callable[[], Tensor]
Build = Callable[[], "Contender"]


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
    def state_values(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim


class Expected(NamedTuple):
    """The float64 result: of the output the part that `pick` takes, and of the states those that contenders read."""

    output: Tensor
    state: Tensor | None
    pick: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """One implementation on its states.

    `prepare` puts the states back before the first call, `state` reads what that call left. `expected` is there where
    its result is not that of the case.
    """

    call: Call
    state: Call | None = None
    prepare: Callable[[], None] | None = None
    expected: Expected | None = None


@dataclass
class Case:
    """One operation at one size. `ours` and `variants` build calls of gdn, under whichever backend is in force."""

    op: str
    label: str
    function: str
    floor: Callable[[Limits], float]  # the seconds that the machine needs for it
    tolerance: float
    expected: Expected
    ours: Build
    variants: dict[str, Build] = field(default_factory=dict)
    peers: dict[str, Build] = field(default_factory=dict)
    known_as: tuple[str, str] | None = None  # where the times of peers are known
    scale: float = 0.0  # of this size against that of the known times

    def error(self, contender: Contender) -> float:
        """Make the first call and return how far it is from float64: the worst head's, output or state."""
        expected = contender.expected or self.expected
        if contender.prepare is not None:
            contender.prepare()
        error = _worst_head(expected.pick(contender.call()), expected.output, -2)
        if expected.state is not None and contender.state is not None:
            error = max(error, _worst_head(contender.state(), expected.state, -3))
        return error


class Plan(NamedTuple):
    """A case to be built when its turn comes: pools are large. `quick` ones are in every selection."""

    label: str
    build: Callable[[], Case]
    quick: bool = False


def _worst_head(actual: Tensor, expected: Tensor, head_dim: int) -> float:
    """Return the worst relative error over heads, which are `head_dim` of what has three dimensions or more."""
    actual = actual.reshape(expected.shape)
    dims = list(range(expected.dim()))
    if len(dims) >= 3:
        del dims[head_dim]
    return relative_error(actual, expected, dims)


class StatePool:
    """Slots of states, in memory that all contenders share: each puts the states back before it is checked.

    Later calls start from what others left, in whatever layout, which costs the same.
    """

    def __init__(self, sizes: Sizes, slots_a_turn: int, *, cold: bool, dtype: torch.dtype = F32) -> None:
        HV, K, V = sizes.value_heads, sizes.key_dim, sizes.value_dim
        self.slots_a_turn = slots_a_turn
        self.bytes_a_state = sizes.state_values * dtype.itemsize
        wanted = -(-COLD_BYTES // (slots_a_turn * self.bytes_a_state)) if cold else 1
        self.turns = min(wanted, _MOST_TURNS)
        # Few different states: rows still differ, by their inputs.
        different = max(n for n in range(1, 17) if slots_a_turn % n == 0)
        self._states = inputs.normal((different, HV, K, V), inputs.generator(1), dtype)
        self._next_turn = 0
        self._memory = torch.empty(self.turns * slots_a_turn, HV, K, V, dtype=dtype)

    def __len__(self) -> int:
        return len(self._memory)

    def view(self, v_first: bool) -> Tensor:
        """Return the pool `[P, HV, K, V]`, or `[P, HV, V, K]`."""
        slots, HV, K, V = self._memory.shape
        return self._memory.view(slots, HV, V, K) if v_first else self._memory

    def fill(self, v_first: bool) -> None:
        """Put the states back, and start with the first turn."""
        self._next_turn = 0
        states = self._states.mT if v_first else self._states
        self.view(v_first).unflatten(0, (-1, len(states))).copy_(states)

    def initial(self, slots: Tensor) -> Tensor:
        """Return the states of slots as `fill` leaves them, `[n, HV, K, V]` in float64."""
        return self._states[slots.long() % len(self._states)].double()

    def contender(
        self,
        turns: Sequence[Turn],
        run: Callable[[Tensor, Turn], Tensor],
        checked: Tensor,
        *,
        v_first: bool = False,
        expected: Expected | None = None,
    ) -> Contender:
        """Return a contender that runs on the pool, at one of `turns` after the other; slots `checked` are read.

        The turns go on from one contender to the next: what one has just used lies in the caches.
        """
        pool = self.view(v_first)

        def call() -> Tensor:
            turn = turns[self._next_turn]
            self._next_turn = (self._next_turn + 1) % len(turns)
            return run(pool, turn)

        def state() -> Tensor:
            states = pool[checked.long()]
            return states.mT if v_first else states

        return Contender(call, state, lambda: self.fill(v_first), expected)


class Tokens(NamedTuple):
    """Inputs of the recurrence: `q, k [1, T, H, K]`, `v [1, T, HV, V]`, `a, b [T, HV]`, views of one projection."""

    A_log: Tensor
    dt_bias: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    mixed_qkv: Tensor  # [T, C]

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The first arguments of the decode operations."""
        return self[:-1]

    def double(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return those arguments for some tokens only, in float64."""
        q, k, v = (x[:, rows] for x in (self.q, self.k, self.v))
        some = (self.A_log, self.dt_bias, q, k, v, self.a[rows], self.b[rows])
        return tuple(x.double() for x in some)


class Sequences(NamedTuple):
    """Packed sequences: `q, k [1, T, H, K]`, `v [1, T, HV, V]`, fp32 `g, beta [1, T, HV]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    bounds: Tensor  # cu_seqlens
    slots: Tensor


def draw_tokens(count: int, sizes: Sizes, dtype: torch.dtype = BF16) -> Tokens:
    """Draw inputs for `count` tokens."""
    H, HV, K, V = sizes.heads
    rng = inputs.generator(0)
    widths = [sizes.channels, HV, HV, 3]
    projection = torch.empty(count, sum(widths), dtype=dtype)
    for part in projection.split(_TOKENS_DRAWN_AT_ONCE):
        part.copy_(torch.randn(part.shape, generator=rng))
    mixed_qkv, a, b, _ = projection.split(widths, dim=-1)
    q, k, v = mixed_qkv[None].split([H * K, H * K, HV * V], dim=-1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    A_log, dt_bias = inputs.gate_parameters(HV, rng)
    return Tokens(A_log, dt_bias, q, k, v, a, b, mixed_qkv)


def channel_last(states: Tensor) -> Tensor:
    """Copy states `[P, C, n]` into memory where channels lie side by side."""
    return states.mT.contiguous().mT


def known_scale(sizes: Sizes) -> float:
    """Return how much more work a layer is than the one whose times are known; 0 where they say nothing about it."""
    others = (sizes.key_heads, sizes.key_dim, sizes.value_dim)
    return sizes.value_heads / 32 if others == (16, 128, 128) else 0.0


def checked_rows(batch: int) -> Tensor:
    """Return which rows of a batch are compared with float64: the first, the last and some between."""
    return torch.linspace(0, batch - 1, min(batch, _CHECKED_ROWS)).long()


def tokens_of(rows: Tensor, length: int) -> Tensor:
    """Return the tokens of rows of equal length."""
    return (rows[:, None] * length + torch.arange(length)).flatten()


def in_double(**arguments: Any) -> dict[str, Any]:
    """Return the arguments with floating-point tensors copied to float64."""
    return inputs.to_float64(arguments)
