# SPDX-License-Identifier: Apache-2.0
"""What the reference operations share: the compute dtype, slots of a pool, and walking ragged sequences together."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

L2_NORM_EPS = 1e-6


def compute_dtype(activations: Tensor) -> torch.dtype:
    """Return float64 for float64 activations, float32 for every other dtype."""
    return torch.float64 if activations.dtype == torch.float64 else torch.float32


def l2_normalize(x: Tensor) -> Tensor:
    """Return `x * rsqrt(sum(x*x) + 1e-6)` over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_NORM_EPS)


def expand_heads(x: Tensor, num_value_heads: int) -> Tensor:
    """Give every value head its key head: `[..., H, K]` to `[..., HV, K]`, head h reading h // (HV // H)."""
    return x.repeat_interleave(num_value_heads // x.shape[-2], dim=-2)


def deliver(result: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Round a result once: into `out`, or to a new tensor of `dtype`."""
    return result.to(dtype) if out is None else out.copy_(result)


def is_live(slots: Tensor, num_slots: int, null_slot: int | None) -> Tensor:
    """Return which slot indices are real; the others are padding."""
    live = (slots >= 0) & (slots < num_slots)
    return live if null_slot is None else live & (slots != null_slot)


def load_states(pool: Tensor, slots: Tensor, dtype: torch.dtype, state_v_first: bool) -> Tensor:
    """Copy the states of `slots` out of the pool, as `[N, HV, K, V]` in the compute dtype."""
    states = pool.index_select(0, slots).to(dtype)
    return states.mT.contiguous() if state_v_first else states


def store_states(pool: Tensor, slots: Tensor, states: Tensor, state_v_first: bool) -> None:
    """Round states `[N, HV, K, V]` to the pool's dtype and write them to `slots`."""
    states = states.mT if state_v_first else states
    pool.index_copy_(0, slots, states.to(pool.dtype))


def take(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return the given rows of `x`; None stands for all of them."""
    return x if rows is None else x.index_select(0, rows)


def put(x: Tensor, rows: Tensor | None, values: Tensor) -> Tensor:
    """Return `x` with the given rows replaced; None stands for all of them."""
    return values if rows is None else x.index_copy(0, rows, values)


class Pieces:
    """Cut sequences into pieces of `width` tokens, so that step c treats piece c of every sequence that has one.

    With a `width` of None a whole sequence is one piece. Only live sequences that have tokens take part: a padding row
    or an empty sequence is never read, never computed.

    Args:
        cu_seqlens: bounds of N packed sequences; None for `num_rows` sequences of one length laid end to end.
        num_tokens: tokens of all sequences together. A span that ends beyond them counts as padding.
        live: which sequences are no padding, `[N]`; None for all of them.

    Attributes:
        all_lengths: the lengths of the N sequences, on the host.
        live: `[M]`, the numbers of the sequences that take part.
        lengths: `[M]`, their lengths.
        rows: for each step, which of the M sequences have a piece (None: all of them).
    """

    def __init__(
        self,
        cu_seqlens: Tensor | None,
        num_rows: int,
        num_tokens: int,
        live: Tensor | None,
        width: int | None,
        device: torch.device,
    ) -> None:
        if cu_seqlens is None:
            length = num_tokens // max(num_rows, 1)
            bounds = [n * length for n in range(num_rows + 1)]
        else:
            bounds = cu_seqlens.tolist()
        self.all_lengths = [max(end - start, 0) for start, end in pairwise(bounds)]
        takes_part = [length > 0 and bounds[n + 1] <= num_tokens for n, length in enumerate(self.all_lengths)]
        if live is not None:
            takes_part = [a and b for a, b in zip(takes_part, live.tolist(), strict=True)]
        numbers = [n for n, does in enumerate(takes_part) if does]
        lengths = [self.all_lengths[n] for n in numbers]

        longest = max(lengths, default=0)
        width = longest if width is None else width

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.live = integers(numbers)
        self.lengths = integers(lengths)
        self.rows: list[Tensor | None] = []
        self._sizes: list[int] = []
        first: list[int] = []
        count: list[int] = []
        for offset in range(0, longest, max(width, 1)):
            rows = [m for m, length in enumerate(lengths) if length > offset]
            self.rows.append(None if len(rows) == len(numbers) else integers(rows))
            self._sizes.append(len(rows))
            first += [bounds[numbers[m]] + offset for m in rows]
            count += [min(width, lengths[m] - offset) for m in rows]

        columns = torch.arange(width, device=device)
        self._is_ragged = any(c < width for c in count)
        self._valid = columns < integers(count)[:, None]
        self._tokens = integers(first)[:, None] + torch.where(self._valid, columns, 0)
        # All tokens, in order, in pieces of one length: cutting them is a view.
        self._is_everything = (
            bool(first) and count == [width] * len(first) and first == list(range(0, num_tokens, width))
        )

    def gather(self, x: Tensor) -> Tensor:
        """Return all pieces of `x [T, ...]` as `[num_pieces, width, ...]`, zero beyond the end of a sequence."""
        if self._is_everything:
            return x.contiguous().view(*self._tokens.shape, *x.shape[1:])
        picked = x[self._tokens]
        if not self._is_ragged:
            return picked
        valid = self._valid.reshape(self._valid.shape + (1,) * (x.dim() - 1))
        return torch.where(valid, picked, 0)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the pieces of `x [T, ...]` step by step, `[n, width, ...]` each."""
        return torch.split(self.gather(x), self._sizes) if self._sizes else ()

    def join(self, pieces: Tensor, like: Tensor) -> Tensor:
        """Put all pieces `[num_pieces, width, ...]` back at their tokens, into a tensor shaped as `like`.

        It is 0 wherever no piece reaches.
        """
        if self._is_everything:
            return pieces.reshape(like.shape)
        joined = pieces.new_zeros(like.shape)
        if self._is_ragged:
            return joined.index_put((self._tokens[self._valid],), pieces[self._valid])
        return joined.index_put((self._tokens,), pieces)


class States:
    """The recurrent states of a call: where they come from and where they go.

    Args:
        initial_state: `[N, HV, K, V]`, or with `state_indices` a pool `[P, HV, K, V]`; V first with `state_v_first`.
        has_initial_state: `[N]`; a sequence without one starts from zero, and what its slot holds is not used.
    """

    def __init__(
        self,
        initial_state: Tensor | None,
        state_indices: Tensor | None,
        has_initial_state: Tensor | None,
        null_slot: int | None,
        state_v_first: bool,
    ) -> None:
        self._source = initial_state
        self._indices = None if state_indices is None else state_indices.to(torch.int64)
        self._has_initial_state = has_initial_state
        self._null_slot = null_slot
        self._v_first = state_v_first

    def live(self) -> Tensor | None:
        """Return which sequences have a real slot; None when the states are in no pool."""
        if self._indices is None or self._source is None:
            return None
        return is_live(self._indices, self._source.shape[0], self._null_slot)

    def load(self, pieces: Pieces, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Return the states `[M, HV, K, V]` that the live sequences start from."""
        if self._source is None:
            return torch.zeros((len(pieces.live), *shape), dtype=dtype, device=pieces.live.device)
        states = load_states(self._source, self._slots(pieces), dtype, self._v_first)
        if self._has_initial_state is None:
            return states
        return torch.where(self._has_initial_state[pieces.live, None, None, None], states, 0)

    def store(self, pieces: Pieces, states: Tensor, output_final_state: bool) -> Tensor | None:
        """Write the last states to the pool, or return those of all sequences where asked; empty ones keep theirs."""
        if self._source is not None and self._indices is not None:
            store_states(self._source, self._slots(pieces), states, self._v_first)
            return None
        if not output_final_state:
            return None
        states = states.mT if self._v_first else states
        if self._source is not None:
            return self._source.index_copy(0, pieces.live, states.to(self._source.dtype))
        return states.new_zeros((len(pieces.all_lengths), *states.shape[1:])).index_copy(0, pieces.live, states)

    def _slots(self, pieces: Pieces) -> Tensor:
        return pieces.live if self._indices is None else self._indices[pieces.live]
