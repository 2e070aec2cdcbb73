# SPDX-License-Identifier: Apache-2.0
"""From the arguments of ``torch.ops.gdn.<op>`` to what a library or kernel is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import _validate

Arguments = dict[str, Any]


def decline(reason: str) -> NoReturn:
    """Leave the call to another backend."""
    raise NotImplementedError(reason)


def by_name(op: str, flat: Sequence[Any]) -> Arguments:
    """Check the arguments, but for what lies in device memory: reading that would wait for the device."""
    with _validate.values_unread():
        _validate.check(op, flat)
    arguments = getattr(torch.ops.gdn, op).default._schema.arguments
    return {argument.name: value for argument, value in zip(arguments, flat, strict=True)}


def live_slots(slots: Tensor, num_slots: int, null_slot: int | None) -> Tensor:
    """Return the slots as int64, padding as -1: negative ones, the null slot, those beyond the pool."""
    slots = slots.to(torch.int64)
    is_padding = (slots < 0) | (slots >= num_slots)
    if null_slot is not None:
        is_padding |= slots == null_slot
    return slots.masked_fill(is_padding, -1)


def row_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the row of each token, -1 for those of none."""
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    row = torch.searchsorted(cu_seqlens.to(torch.int64), token, right=True) - 1
    return row.masked_fill(row >= len(cu_seqlens) - 1, -1)
