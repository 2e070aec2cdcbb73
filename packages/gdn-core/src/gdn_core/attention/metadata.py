# SPDX-License-Identifier: Apache-2.0
"""Which rows a batch has: their tokens, slots and kinds. Built and validated once a step, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from .._validate import CHUNK, debugging, describe, distinct_slots
from .groups import PREFILL, REPLAY, STEP, Group, RowTensors, group_rows
from .rows import Booleans, Integers, Row, flags, integers, is_one_slot, slot_table


@dataclass(eq=False)
class GDNMetadata:
    """Describe the rows of a batch; build it with :meth:`build` or a converter, once for all layers of a step.

    Attributes:
        num_prefills, num_prefill_tokens, num_decodes, num_decode_tokens, num_spec_decodes, num_spec_decode_tokens:
            rows that have tokens and are no padding, and their tokens, by kind.
        num_rows, num_tokens: N, padding included, and the tokens that the rows cover.
        slots: int32 [N, S], each row's slots in the pools; -1 in padding rows and in rows without tokens.
        num_accepted_tokens: int32 [N]; 1 in rows that do not speculate.
        has_initial_state: bool [N].
        query_start_loc: int32 [N + 1], the offsets of the rows.
        layout: int64 [N, 3] on the host: what happens to each row, its first and its end token.
        is_replay: speculative rows own one slot and use the cache's records.
        null_slot: as the cache's.

    Example:
        >>> import gdn_core
        >>> metadata = gdn_core.GDNMetadata.build([0, 1, 2, 102], [4, 1, 7], has_initial_state=[True, True, False])
        >>> metadata.num_decodes, metadata.num_prefills, metadata.num_prefill_tokens
        (2, 1, 100)
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    num_rows: int
    num_tokens: int
    slots: Tensor
    num_accepted_tokens: Tensor
    has_initial_state: Tensor
    query_start_loc: Tensor
    layout: Tensor
    is_replay: bool
    null_slot: int | None
    max_slot: int
    max_accepted: int
    longest_step: int
    row_kinds: tuple[int, ...]
    row_ends: tuple[int, ...]

    @classmethod
    def build(
        cls,
        query_start_loc: Integers,
        slots: Integers | Sequence[Sequence[int]],
        *,
        has_initial_state: Booleans | None = None,
        is_speculative: Booleans | None = None,
        num_accepted_tokens: Integers | None = None,
        is_prefill: Booleans | None = None,
        null_slot: int | None = None,
        device: torch.device | str | None = None,
    ) -> GDNMetadata:
        """Classify the rows of a batch and check them, on the host, so that no layer has to.

        Row n has tokens ``query_start_loc[n]`` to ``query_start_loc[n + 1]``. It is padding where its slot is negative
        or ``null_slot``: its outputs are 0. A row is speculative because ``is_speculative`` says so, whatever its
        length, also with no draft at all. Another row is a prefill where ``is_prefill`` says so; by default one
        without an initial state or with several tokens is, and the others are decodes.

        Args:
            query_start_loc: [N + 1], from 0, non-decreasing.
            slots: [N], one slot a row; or a table [N, S], of which a row that is not speculative uses column 0. With
                [N], speculative rows take the replay form.
            has_initial_state: [N], True by default; where False a row starts from zero and its slot is not read.
            is_speculative: [N], False by default.
            num_accepted_tokens: [N], tokens that the previous step of a speculative row accepted; 0 acts as 1, other
                rows have 0 or 1.
            is_prefill: [N].
            null_slot: the cache's.
            device: where the layers run; that of ``slots`` by default.

        Raises:
            TypeError, ValueError: a size, a value or a combination makes no sense; the message names the row.

        Example:
            >>> import gdn_core
            >>> metadata = gdn_core.GDNMetadata.build(
            ...     [0, 3, 4], [[5, 6, 7], [2, -1, -1]], is_speculative=[True, False], num_accepted_tokens=[2, 1])
            >>> metadata.num_spec_decodes, metadata.num_decodes
            (1, 1)
        """
        if device is None:
            device = slots.device if isinstance(slots, Tensor) else torch.device("cpu")
        ends = integers("query_start_loc", query_start_loc, None)
        if not ends or ends[0] != 0 or any(end < start for start, end in pairwise(ends)):
            raise ValueError(f"query_start_loc: expected non-decreasing offsets from 0, got {ends}")
        count = len(ends) - 1
        table = slot_table(slots, count, null_slot)
        # A row without tokens keeps its state in any run of rows: as padding it does in the replay form too.
        is_empty = torch.tensor([start == end for start, end in pairwise(ends)], dtype=torch.bool)
        table = table.masked_fill(is_empty[:, None], -1)
        initial = flags("has_initial_state", has_initial_state, count, True)
        speculative = flags("is_speculative", is_speculative, count, False)
        accepted = [1] * count
        if num_accepted_tokens is not None:
            accepted = integers("num_accepted_tokens", num_accepted_tokens, count)
        prefill = None if is_prefill is None else flags("is_prefill", is_prefill, count, False)
        is_replay = is_one_slot(slots) and any(speculative)
        rows = [
            Row(*row)
            for row in zip(
                range(count),
                (end - start for start, end in pairwise(ends)),
                table.tolist(),
                initial,
                speculative,
                accepted,
                [None] * count if prefill is None else prefill,
                strict=True,
            )
        ]
        for row in rows:
            row.check(None if is_replay else table.shape[1])
        if debugging():
            distinct_slots("slots", table, None)
        return cls._of_rows(rows, ends, table, is_replay, null_slot, torch.device(device))

    @classmethod
    def _of_rows(
        cls,
        rows: list[Row],
        ends: list[int],
        table: Tensor,
        is_replay: bool,
        null_slot: int | None,
        device: torch.device,
    ) -> GDNMetadata:
        kinds = [row.kind(is_replay) for row in rows]
        layout = [[kind, *span] for kind, span in zip(kinds, pairwise(ends), strict=True)]
        live = [row for row in rows if row.length > 0 and not row.is_padding]
        groups = {
            "prefill": [row.length for row in live if row.kind(is_replay) == PREFILL],
            "decode": [row.length for row in live if row.kind(is_replay) != PREFILL and not row.is_speculative],
            "spec": [row.length for row in live if row.is_speculative],
        }
        tensors = {
            "query_start_loc": torch.tensor(ends, dtype=torch.int32).to(device),
            "slots": table.to(device, torch.int32),
            "num_accepted_tokens": torch.tensor(
                [row.accepted if row.is_speculative and not row.is_padding else 1 for row in rows], dtype=torch.int32
            ).to(device),
            "has_initial_state": torch.tensor([row.has_initial_state for row in rows], dtype=torch.bool).to(device),
        }
        return cls(
            num_prefills=len(groups["prefill"]),
            num_prefill_tokens=sum(groups["prefill"]),
            num_decodes=len(groups["decode"]),
            num_decode_tokens=sum(groups["decode"]),
            num_spec_decodes=len(groups["spec"]),
            num_spec_decode_tokens=sum(groups["spec"]),
            num_rows=len(rows),
            num_tokens=ends[-1],
            layout=torch.tensor(layout, dtype=torch.int64).reshape(-1, 3),
            is_replay=is_replay,
            null_slot=null_slot,
            max_slot=int(table.max()) if table.numel() > 0 else -1,
            max_accepted=max((row.accepted for row in live), default=1),
            longest_step=max((row.length for row in live if row.kind(is_replay) != PREFILL), default=0),
            row_kinds=tuple(
                -1 if row.length == 0 or row.is_padding else kind for row, kind in zip(rows, kinds, strict=True)
            ),
            row_ends=tuple(ends),
            **tensors,
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Return the rows that one call of each operation can take together, prefills first."""
        rows = RowTensors(self.query_start_loc, self.slots, self.num_accepted_tokens, self.has_initial_state)
        return group_rows(self.layout.tolist(), rows)

    # --- graphs of fixed sizes ----------------------------------------------------------------------------------------

    def pad_to(self, num_rows: int) -> GDNMetadata:
        """Return the metadata of a captured graph of ``num_rows`` rows: decodes and speculative rows, then padding.

        Padding rows have no tokens (the offsets repeat their last value), slot -1 and one accepted token. A graph
        captured with it serves any batch of as many rows: fill its tensors with :meth:`copy_`.

        Raises:
            ValueError: there are more rows than that, or prefills, which no graph of fixed sizes can hold.
        """
        if self.num_rows > num_rows:
            raise ValueError(f"num_rows: expected at least the {self.num_rows} rows there are, got {num_rows}")
        kinds = {group.kind for group in self.groups} or {STEP}
        if PREFILL in kinds or len(kinds) > 1:
            raise ValueError("num_rows: expected decode and speculative rows only, all in one form, got others too")
        missing = num_rows - self.num_rows
        table = torch.nn.functional.pad(self.slots.cpu(), (0, 0, 0, missing), value=-1)
        accepted = [*self.num_accepted_tokens.tolist(), *[1] * missing]
        ends = [*self.row_ends, *[self.num_tokens] * missing]
        rows = [
            Row(n, ends[n + 1] - ends[n], slots, True, True, accepted[n], None)
            for n, slots in enumerate(table.tolist())
        ]
        padded = self._of_rows(rows, ends, table, kinds == {REPLAY}, self.null_slot, self.slots.device)
        for name in _COUNTS:
            setattr(padded, name, getattr(self, name))
        return padded

    def copy_(self, other: GDNMetadata) -> None:
        """Put another batch into the tensors of this one, in place, as before the replay of a captured graph.

        Raises:
            ValueError: the two have other sizes or kinds of rows; pad both to the same number of rows.
        """
        same_kinds = torch.equal(self.layout[:, 0], other.layout[:, 0])
        if not same_kinds or self.slots.shape != other.slots.shape or self.is_replay != other.is_replay:
            raise ValueError(f"other: expected rows as in {self}, got {other}")
        for name in (*RowTensors._fields, "layout"):
            getattr(self, name).copy_(getattr(other, name))
        for name in _HOST_FIELDS:
            setattr(self, name, getattr(other, name))
        for name in _CACHED:
            self.__dict__.pop(name, None)

    # --- what kernels of other projects want --------------------------------------------------------------------------

    def _token_indices(self, *kinds: int) -> Tensor:
        spans = zip(self.row_kinds, pairwise(self.row_ends), strict=True)
        indices = [i for kind, (start, end) in spans if kind in kinds for i in range(start, end)]
        return torch.tensor(indices, dtype=torch.int64).to(self.slots.device)

    @cached_property
    def prefill_token_indices(self) -> Tensor:
        """Return the tokens of all prefills, int64, in the order of the batch."""
        return self._token_indices(PREFILL)

    @cached_property
    def step_token_indices(self) -> Tensor:
        """Return the tokens of all decode and speculative rows, int64, in the order of the batch."""
        return self._token_indices(STEP, REPLAY)

    def _prefill_lengths(self) -> list[int]:
        spans = zip(self.row_kinds, pairwise(self.row_ends), strict=True)
        return [end - start for kind, (start, end) in spans if kind == PREFILL]

    @cached_property
    def prefill_query_start_loc(self) -> Tensor:
        """Return the offsets of the prefills among their own tokens, int32 [num_prefills + 1]."""
        lengths = torch.tensor([0, *self._prefill_lengths()], dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self.slots.device)

    @cached_property
    def chunk_offsets(self) -> Tensor:
        """Return where each prefill's chunks of 64 tokens begin among all, int64 [num_prefills + 1]."""
        counts = [-(-length // CHUNK) for length in self._prefill_lengths()]
        return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0).to(self.slots.device)

    @cached_property
    def chunk_indices(self) -> Tensor:
        """Return the prefill and the place in it of every chunk of 64 tokens, int64 [chunks, 2]."""
        pairs = [
            (prefill, chunk)
            for prefill, length in enumerate(self._prefill_lengths())
            for chunk in range(-(-length // CHUNK))
        ]
        return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(self.slots.device)

    def __repr__(self) -> str:
        kinds = {"prefills": self.num_prefills, "decodes": self.num_decodes, "speculative": self.num_spec_decodes}
        counts = ", ".join(f"{count} {name}" for name, count in kinds.items())
        return f"GDNMetadata({self.num_rows} rows: {counts}; {self.num_tokens} tokens, slots {describe(self.slots)})"


_COUNTS = (
    "num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_spec_decodes",
    "num_spec_decode_tokens",
)  # fmt: skip
_HOST_FIELDS = (*_COUNTS, "num_tokens", "max_slot", "max_accepted", "longest_step", "row_kinds", "row_ends")
_CACHED = (
    "groups", "prefill_token_indices", "step_token_indices", "prefill_query_start_loc", "chunk_offsets",
    "chunk_indices",
)  # fmt: skip
