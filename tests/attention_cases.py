# SPDX-License-Identifier: Apache-2.0
"""What the tests of the attention layer share: layers, random mixes of rows, a float64 shadow of a request."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn_core import GDNLayerParams, GDNMetadata, GDNStateCache, gdn_attention
from gdn_core.testing import inputs

H, HV, K, V, W, S = 2, 4, 16, 8, 4, 4
C = 2 * H * K + HV * V
FORMS = ("slots", "replay")


def layer(seed: int = 0, dtype: torch.dtype = torch.float32, *, bias: bool = False, **options: Any) -> GDNLayerParams:
    """Return the weights of a small layer whose sizes all differ."""
    rng = inputs.generator(seed)
    weight, conv_bias = inputs.conv_weights(C, W, dtype, rng, bias)
    A_log, dt_bias = inputs.gate_parameters(HV, rng)
    norm = 1 + inputs.normal((V,), rng, torch.float32, 0.1)
    return GDNLayerParams(weight, A_log, dt_bias, norm, 1e-6, H, HV, K, V, conv_bias=conv_bias, **options)


def cache(form: str, num_slots: int = 64, dtype: torch.dtype = torch.float32, **options: Any) -> GDNStateCache:
    """Return a cache for speculation in the given form, all zero."""
    return GDNStateCache(num_slots, H, HV, K, V, dtype, S=S, replay=form == "replay", **options)


def randomized(empty: GDNStateCache, seed: int = 0) -> GDNStateCache:
    """Fill a cache as its requests' pasts might have; every slot of the replay form has S live records."""
    rng = inputs.generator(seed)
    empty.conv_states.copy_(inputs.normal(empty.conv_states.shape, rng, torch.float32))
    empty.state.copy_(inputs.normal(empty.state.shape, rng, torch.float32))
    if empty.records is not None:
        everyone = torch.arange(empty.num_slots)
        empty.records = inputs.random_records(
            empty.num_slots, S, H, HV, K, V, empty.records.k.dtype, rng, everyone, [S] * empty.num_slots
        )
    return empty


def clone(original: GDNStateCache) -> GDNStateCache:
    """Copy a cache with all that it holds."""
    records = original.records
    copied = original.convert_layout(state_v_first=original.state_v_first)
    copied.conv_states, copied.state = original.conv_states.clone(), original.state.clone()
    if records is not None:
        copied.records = type(records).from_tensors(
            records.k.clone(), records.u.clone(), records.decay.clone(), records.live.clone()
        )
    return copied


def pools(held: GDNStateCache) -> dict[str, Tensor]:
    """Return the tensors of a cache by name."""
    parts = {"conv_states": held.conv_states, "state": held.state}
    if held.records is not None:
        parts |= {f"records.{name}": getattr(held.records, name) for name in ("k", "u", "decay", "live")}
    return parts


@dataclass(frozen=True)
class Row:
    """One row of a batch."""

    length: int
    slots: tuple[int, ...]
    has_initial_state: bool = True
    is_speculative: bool = False
    accepted: int = 1

    @property
    def is_padding(self) -> bool:
        return self.slots[0] < 0

    def written_slots(self, form: str) -> list[int]:
        """Return the slots that the row may change."""
        if self.is_padding or self.length == 0:
            return []
        return list(self.slots[: self.length]) if self.is_speculative and form == "slots" else [self.slots[0]]


def metadata_of(rows: list[Row], form: str) -> GDNMetadata:
    """Describe the rows; a table of S columns in the form of several slots, one slot a row in the other."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row.length)
    slots: Any = [row.slots[0] for row in rows]
    if form == "slots":
        slots = [[*row.slots, *[-1] * S][:S] for row in rows]
    return GDNMetadata.build(
        starts,
        slots,
        has_initial_state=[row.has_initial_state for row in rows],
        is_speculative=[row.is_speculative for row in rows],
        num_accepted_tokens=[row.accepted for row in rows],
    )


def random_rows(seed: int, form: str, count: int | None = None, num_slots: int = 64) -> list[Row]:
    """Draw 1 to 12 rows of every kind, on slots of their own, in any order."""
    rng = random.Random(seed)
    free = list(range(num_slots))
    rng.shuffle(free)
    rows = []
    for _ in range(rng.randint(1, 12) if count is None else count):
        kind = rng.choice(["fresh", "continued", "decode", "decode", "spec", "spec", "empty", "padding"])
        slots = tuple(free.pop() for _ in range(S if kind == "spec" and form == "slots" else 1))
        if kind == "fresh":
            rows.append(Row(rng.choice([1, 2, 3, 7, 64, 65]), slots, has_initial_state=False))
        elif kind == "continued":
            rows.append(Row(rng.choice([2, 3, 9, 70]), slots))
        elif kind == "decode":
            rows.append(Row(1, slots))
        elif kind == "spec":
            rows.append(Row(rng.randint(1, S), slots, is_speculative=True, accepted=rng.randint(0, S)))
        elif kind == "empty":
            rows.append(Row(0, slots, has_initial_state=rng.random() < 0.5))
        else:
            rows.append(Row(rng.choice([1, 3, 70]), (-1,) * len(slots), has_initial_state=rng.random() < 0.5))
    return rows


def prepare(held: GDNStateCache, rows: list[Row]) -> None:
    """Give rows that do not speculate slots without live records, as commit() leaves them."""
    if held.records is not None:
        plain = [row.slots[0] for row in rows if not row.is_speculative and not row.is_padding]
        held.records.reset(torch.tensor(plain, dtype=torch.int64))


@dataclass
class Inputs:
    """The projected inputs of a batch: views of one wide projection."""

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor
    z: Tensor

    def tokens(self, index: Any) -> Inputs:
        """Pick some tokens."""
        return Inputs(self.mixed_qkv[index], self.a[index], self.b[index], self.z[index])

    def run(self, params: Any, held: GDNStateCache, metadata: GDNMetadata, **options: Any) -> Tensor:
        return gdn_attention(self.mixed_qkv, self.a, self.b, self.z, params, held, metadata, **options)


def random_inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
    """Return inputs as they come from a projection."""
    rng = inputs.generator(seed)
    projected = inputs.normal((tokens, C + HV * V + 2 * HV + 3), rng, torch.float32).to(dtype)
    mixed_qkv, z, a, b, _ = projected.split([C, HV * V, HV, HV, 3], dim=-1)
    return Inputs(mixed_qkv, a, b, z.unflatten(-1, (HV, V)))


def token_slices(rows: list[Row]) -> list[slice]:
    """Return the tokens of each row."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row.length)
    return [slice(start, end) for start, end in pairwise(starts)]


# --- float64 ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shadow:
    """A request in float64: the inputs before its next token and its state, advanced token by token."""

    history: Tensor  # [W - 1, C]
    state: Tensor  # [HV, K, V]
    condition: Tensor | None = None  # [HV], how much the last token's output magnifies an error of the state

    @classmethod
    def fresh(cls) -> Shadow:
        return cls(torch.zeros(W - 1, C, dtype=torch.float64), torch.zeros(HV, K, V, dtype=torch.float64))

    @classmethod
    def of_slot(cls, held: GDNStateCache, slot: int) -> Shadow:
        """Read the plain state of a slot."""
        state = held.state[slot].double()
        return cls(held.conv_states[slot, :, : W - 1].T.double(), state.mT if held.state_v_first else state)

    def advance(self, params: GDNLayerParams, new: Inputs) -> tuple[Tensor, list[Shadow]]:
        """Return the outputs [L, HV, V] and the shadow after each token."""
        outputs, shadows, current = [], [], self
        for t in range(new.mixed_qkv.shape[0]):
            output, current = current._token(params, new.tokens(t))
            outputs.append(output)
            shadows.append(current)
        return torch.stack(outputs) if outputs else new.z.double(), shadows

    def _token(self, params: GDNLayerParams, token: Inputs) -> tuple[Tensor, Shadow]:
        window = torch.cat([self.history, token.mixed_qkv.double()[None]])
        mixed = (window * params.conv_weight.double().T).sum(0)
        if params.conv_bias is not None:
            mixed = mixed + params.conv_bias.double()
        q, k, v = F.silu(mixed).split([H * K, H * K, HV * V])
        q, k = (self._normalized(x.view(H, K)).repeat_interleave(HV // H, 0) for x in (q, k))
        g = -params.A_log.double().exp() * F.softplus(token.a.double() + params.dt_bias.double())
        state = g.exp()[:, None, None] * self.state
        predicted = torch.einsum("hk,hkv->hv", k, state)
        u = token.b.double().sigmoid()[:, None] * (v.view(HV, V) - predicted)
        state = state + torch.einsum("hk,hv->hkv", k, u)
        o = K**-0.5 * torch.einsum("hk,hkv->hv", q, state)
        norm = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + params.norm_eps)
        output = norm * params.norm_weight.double() * F.silu(token.z.double())
        # q may read next to nothing of the state; the norm then magnifies what rounding has left in it.
        condition = state.norm(dim=(1, 2)) / (K**0.5 * o.norm(dim=1) * K**0.5)
        return output, replace(self, history=window[1:], state=state, condition=condition.clamp(min=1))

    @staticmethod
    def _normalized(x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
