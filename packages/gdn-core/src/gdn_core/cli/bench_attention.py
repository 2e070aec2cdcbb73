# SPDX-License-Identifier: Apache-2.0
"""Cases of the layer's core: a decode step, and decodes beside a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_core import GDNLayerParams, GDNMetadata, GDNStateCache, gdn_attention

from .. import reference
from ..testing import inputs
from .bench_case import BF16, I32, Case, Contender, Expected, Plan, Sizes, StatePool, Tokens, checked_rows, draw_tokens
from .bench_recurrence import EPS, FLOP_A_TOKEN
from .bench_sequences import chunked_floor
from .machine import Limits
from .peers import Peers

_TOLERANCE = 6e-3  # the convolution's output is rounded
_DECODES, _PROMPT = 8, 512


class Turn(NamedTuple):
    """The rows of one call, and their slots."""

    metadata: GDNMetadata
    slots: Tensor


@dataclass
class Core:
    """A layer's core on `tokens`, of which the first `decodes` are a row each."""

    sizes: Sizes
    decodes: int
    tokens: Tokens
    gate: Tensor
    layer: GDNLayerParams
    pool: StatePool

    @classmethod
    def draw(cls, sizes: Sizes, decodes: int, prompt: int) -> Core:
        tokens, rng = draw_tokens(decodes + prompt, sizes), inputs.generator(5)
        gate = torch.randn(tokens.v.shape[1:], generator=rng).to(BF16)
        conv_weight, _ = inputs.conv_weights(sizes.channels, sizes.conv_width, BF16, rng, has_bias=False)
        norm_weight = torch.linspace(0.5, 1.5, sizes.value_dim)
        layer = GDNLayerParams(conv_weight, tokens.A_log, tokens.dt_bias, norm_weight, EPS, *sizes.heads)
        pool = StatePool(sizes, decodes + (prompt > 0), cold=True)
        return cls(sizes, decodes, tokens, gate, layer, pool)

    def conv_states(self) -> Tensor:
        """Return inputs before the tokens, `[P, C, W - 1]` with the channels fastest in memory."""
        shape = (len(self.pool), self.sizes.conv_width - 1, self.sizes.channels)
        return torch.randn(shape, generator=inputs.generator(6)).to(BF16).mT

    def turns(self, lengths: list[int], first_slot: int = 0) -> list[Turn]:
        """Return the rows of one call after the other, of which the long ones are prompts."""
        starts = inputs.offsets(lengths)
        has_state = [length == 1 for length in lengths]
        slots = torch.arange(len(self.pool), dtype=I32).view(-1, self.pool.slots_a_turn)
        return [
            Turn(GDNMetadata.build(starts, some, has_initial_state=has_state), some)
            for some in slots[:, first_slot : first_slot + len(lengths)]
        ]

    def expected(self, rows: Tensor) -> Expected:
        """Run some decodes in float64."""
        tokens, layer, states = self.tokens, self.layer, self.pool.initial(rows)
        convolved = reference.causal_conv1d_update(
            tokens.mixed_qkv[rows].double(), self.conv_states()[rows].double(), layer.conv_weight.double(), None, "silu"
        )
        output = reference.fused_gdn_decode_post_conv_mtp(
            convolved, tokens.a[rows].double(), tokens.b[rows].double(), layer.A_log.double(), layer.dt_bias.double(),
            torch.arange(len(rows))[:, None], torch.arange(len(rows) + 1), None, states, self.gate[rows].double(),
            layer.norm_weight.double(), None, None, EPS, num_key_heads=self.sizes.key_heads,
            head_k_dim=self.sizes.key_dim, state_v_first=False,
        )  # fmt: skip
        return Expected(output, states, lambda out: out[rows])

    def run(self, cache: GDNStateCache, metadata: GDNMetadata, rows: slice, out: Tensor) -> None:
        tokens = self.tokens
        gdn_attention(
            tokens.mixed_qkv[rows], tokens.a[rows], tokens.b[rows], self.gate[rows], self.layer, cache, metadata,
            out=out[rows],
        )  # fmt: skip

    def contender(self, calls: list[tuple[list[Turn], slice]], rows: Tensor, v_first: bool = False) -> Contender:
        """Return gdn as a contender, which takes the tokens in one call or in several."""
        cache = GDNStateCache.from_tensors(self.conv_states(), self.pool.view(v_first), state_v_first=v_first)
        out = torch.empty_like(self.gate)

        def run(_: Tensor, turn: int) -> Tensor:
            for turns, part in calls:
                self.run(cache, turns[turn].metadata, part, out)
            return out

        return self.pool.contender(range(self.pool.turns), run, rows, v_first=v_first)


def _floor(sizes: Sizes, pool: StatePool, decodes: int, prompt: int) -> Callable[[Limits], float]:
    """Return the seconds to read and write the states of the decodes, and for the prompt's products."""
    num_bytes, flop = decodes * pool.bytes_a_state, decodes * sizes.state_values * FLOP_A_TOKEN
    of_prompt = chunked_floor(sizes, [prompt], BF16)

    def floor(limits: Limits) -> float:
        of_decodes = 1e-9 * max(num_bytes / limits.cold_gb_s, flop / limits.gflop_s)
        return of_decodes + (of_prompt(limits) if prompt else 0)

    return floor


def _decode(sizes: Sizes, peers: Peers, batch: int) -> Case:
    core, rows = Core.draw(sizes, batch, 0), checked_rows(batch)
    turns, everything = core.turns([1] * batch), slice(None)
    numbers = list(range(core.pool.turns))
    return Case(
        op="core",
        label=f"B{batch}",
        function="fused_gdn_decode_post_conv_mtp",
        floor=_floor(sizes, core.pool, batch, 0),
        tolerance=_TOLERANCE,
        expected=core.expected(rows),
        ours=lambda: core.contender([(turns, everything)], rows),
        variants={"V-first": lambda: core.contender([(turns, everything)], rows, True)},
        peers=peers.core(
            core.tokens, core.gate, core.layer, core.conv_states(),
            lambda run: core.pool.contender(numbers, lambda pool, i: run(pool, turns[i].slots), rows),
        ),
    )  # fmt: skip


def _mixed(sizes: Sizes, peers: Peers) -> Case:
    core, rows = Core.draw(sizes, _DECODES, _PROMPT), checked_rows(_DECODES)
    together = [(core.turns([1] * _DECODES + [_PROMPT]), slice(None))]
    apart = [
        (core.turns([1] * _DECODES), slice(_DECODES)),
        (core.turns([_PROMPT], _DECODES), slice(_DECODES, None)),
    ]
    return Case(
        op="core",
        label=f"B{_DECODES} + {_PROMPT}",
        function="fused_gdn_decode_post_conv_mtp",
        floor=_floor(sizes, core.pool, _DECODES, _PROMPT),
        tolerance=_TOLERANCE,
        expected=core.expected(rows),
        ours=lambda: core.contender(together, rows),
        variants={"two calls": lambda: core.contender(apart, rows)},
    )


def core_plans(sizes: Sizes, peers: Peers) -> list[Plan]:
    decodes = [Plan(f"B{n}", partial(_decode, sizes, peers, n), quick=n <= 16) for n in (1, 16, 64)]
    return [*decodes, Plan(f"B{_DECODES} + {_PROMPT}", partial(_mixed, sizes, peers), quick=True)]
