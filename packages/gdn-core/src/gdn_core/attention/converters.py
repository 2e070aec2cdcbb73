# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch from what the schedulers of vLLM and SGLang hand to their own GDN layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .metadata import GDNMetadata

VLLM_NULL_SLOT = 0  # block 0 of vLLM's pools belongs to no request


def metadata_from_vllm(fields: Any, *, null_slot: int | None = VLLM_NULL_SLOT) -> GDNMetadata:
    """Build a :class:`GDNMetadata` from an object with the fields of vLLM's ``GDNAttentionMetadata``.

    vLLM keeps speculative and other rows apart and turns plain decodes that meet a speculative row into prefills; here
    all rows are in the batch's order again, and such a decode is one. The fields are read on the host, once a step:
    tensors on a GPU make it wait.

    Args:
        fields: ``non_spec_query_start_loc``, ``non_spec_state_indices_tensor``, ``has_initial_state`` and, where there
            are speculative rows, ``spec_sequence_masks`` (or ``spec_sequence_masks_cpu``), ``spec_query_start_loc``,
            ``spec_state_indices_tensor`` and ``num_accepted_tokens``; ``num_decodes`` where there are none.
        null_slot: vLLM's null block.

    Raises:
        ValueError: the fields contradict each other.
    """
    plain = _Rows.of(
        fields.non_spec_query_start_loc, fields.non_spec_state_indices_tensor, fields.has_initial_state, None
    )
    mask = getattr(fields, "spec_sequence_masks_cpu", None)
    mask = getattr(fields, "spec_sequence_masks", None) if mask is None else mask
    if mask is None:
        # Decodes come first, and no flag says that they have a state.
        decodes = fields.num_decodes
        plain.has_state[:decodes] = [True] * min(decodes, len(plain.lengths))
        order = [False] * len(plain.lengths)
        speculative = _Rows([], [], [], [])
    else:
        order = [bool(is_speculative) for is_speculative in mask.tolist()]
        speculative = _Rows.of(
            fields.spec_query_start_loc, fields.spec_state_indices_tensor, None, fields.num_accepted_tokens
        )
    # A graph's padding rows trail: they are counted in no mask.
    order += [True] * (len(speculative.lengths) - sum(order))
    if sum(order) != len(speculative.lengths) or len(order) - sum(order) != len(plain.lengths):
        raise ValueError(
            f"spec_sequence_masks: expected {len(speculative.lengths)} speculative rows and {len(plain.lengths)} "
            f"others, got {sum(order)} and {len(order) - sum(order)}"
        )
    return _merge(order, plain, speculative, null_slot, _device(fields))


def metadata_from_sglang(
    query_start_loc: Tensor,
    mamba_cache_indices: Tensor,
    *,
    has_initial_states: Tensor | None = None,
    is_target_verify: bool = False,
    num_accepted_tokens: Tensor | Sequence[int] | None = None,
    null_slot: int | None = None,
) -> GDNMetadata:
    """Build a :class:`GDNMetadata` from the fields of SGLang's ``ForwardMetadata`` and ``Mamba2Metadata``.

    SGLang gives a request one slot: its drafts are verified in the replay form here, by a cache with records.

    Args:
        query_start_loc: [N + 1].
        mamba_cache_indices: [N]; -1 is padding.
        has_initial_states: [N], of extend batches (``extend_prefix_lens > 0``); decodes have a state.
        is_target_verify: all rows verify drafts.
        num_accepted_tokens: [N], of the previous verification; 1 everywhere by default.
        null_slot: a slot that stands for no request.
    """
    count = mamba_cache_indices.shape[0]
    return GDNMetadata.build(
        query_start_loc,
        mamba_cache_indices,
        has_initial_state=has_initial_states,
        is_speculative=[is_target_verify] * count,
        num_accepted_tokens=num_accepted_tokens if is_target_verify else None,
        null_slot=null_slot,
    )


class _Rows:
    """Rows of one kind, on the host; popped one by one in the batch's order."""

    def __init__(self, lengths: list[int], slots: list[list[int]], has_state: list[bool], accepted: list[int]) -> None:
        self.lengths, self.slots, self.has_state, self.accepted = lengths, slots, has_state, accepted

    @classmethod
    def of(
        cls, query_start_loc: Tensor | None, slots: Tensor | None, has_state: Tensor | None, accepted: Tensor | None
    ) -> _Rows:
        if query_start_loc is None or slots is None:
            return cls([], [], [], [])
        lengths = [end - start for start, end in pairwise(query_start_loc.tolist())]
        count = len(lengths)
        table = (slots if slots.dim() == 2 else slots[:, None])[:count]
        states = [True] * count if has_state is None else [bool(value) for value in has_state[:count].tolist()]
        states += [True] * (count - len(states))
        return cls(lengths, table.tolist(), states, [1] * count if accepted is None else accepted[:count].tolist())


def _merge(
    order: list[bool], plain: _Rows, speculative: _Rows, null_slot: int | None, device: torch.device
) -> GDNMetadata:
    columns = max((len(row) for row in speculative.slots), default=1)
    sources = {False: iter(range(len(plain.lengths))), True: iter(range(len(speculative.lengths)))}
    starts, slots, has_state, accepted = [0], [], [], []
    for is_speculative in order:
        rows, i = (speculative if is_speculative else plain), next(sources[is_speculative])
        starts.append(starts[-1] + rows.lengths[i])
        slots.append([*rows.slots[i], *[-1] * columns][:columns])
        has_state.append(rows.has_state[i])
        accepted.append(rows.accepted[i])
    table = torch.tensor(slots, dtype=torch.int64).reshape(len(order), columns)
    return GDNMetadata.build(
        starts, table, has_initial_state=has_state, is_speculative=order, num_accepted_tokens=accepted,
        null_slot=null_slot, device=device,
    )  # fmt: skip


def _device(fields: Any) -> torch.device:
    for name in ("non_spec_state_indices_tensor", "spec_state_indices_tensor"):
        value = getattr(fields, name, None)
        if value is not None:
            return torch.device(value.device)
    return torch.device("cpu")
