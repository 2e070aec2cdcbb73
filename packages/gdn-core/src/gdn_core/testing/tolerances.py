# SPDX-License-Identifier: Apache-2.0
"""How far a result may be from float64 on the same rounded inputs, and how that distance is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

# What is compared: (fp32 activations, bf16 or fp16 activations), relative L2 of the worst (sequence, value head).
TOLERANCES: dict[str, tuple[float, float | None]] = {
    "decode_state": (2e-6, 2e-6),  # recurrent forms with an fp32 state
    "decode_output": (2e-6, 3e-3),
    "decode_half_pool": (5e-3, 5e-3),  # state and output with a bf16 or fp16 pool
    "chunk": (1e-5, 6e-3),  # random inputs, output and state
    "chunk_correlated_keys": (1e-5, 1e-2),  # cosine 0.9, beta 0.98, no decay
    "chunk_parallel_keys": (1e-4, 3e-2),  # cosine 0.999, beta 0.98, no decay
    "convolution": (2e-6, 3e-3),
    "gated_norm": (2e-6, 3e-3),
    "extreme_decays": (2e-5, None),  # recurrent and chunk
    "gating": (2e-6, 2e-6),  # always fp32
    "fused_decode": (2e-6, 3e-3),
    "fused_decode_composed": (2e-6, 5e-4),  # against the separate steps with o kept in fp32
    "attention": (1e-5, 1e-2),  # output and state: a convolution, rounded, and then a chunk
}
# Few elements do not average their rounding: one rounding to bf16 is at most 2^-8 of each.
SMALL_SLICE = 64
SMALL_SLICE_TOLERANCE = 2.0**-8


def tolerance(what: str, dtype: torch.dtype, slice_size: int | None = None) -> float:
    """Return the bound of `what` for activations of `dtype`; float64, which the table leaves out, gets 1e-12.

    `slice_size` is the number of elements that a relative error is taken over, which matters to the convolution and
    the gated norm.
    """
    full, half = TOLERANCES[what]
    if dtype == torch.float64:
        return 1e-12
    if dtype == torch.float32:
        return full
    if half is None:
        raise KeyError(f"{what} has no tolerance for {dtype}")
    is_small = slice_size is not None and slice_size < SMALL_SLICE and what in ("convolution", "gated_norm")
    return SMALL_SLICE_TOLERANCE if is_small else half


def relative_error(actual: Tensor, expected: Tensor, dims: int | Sequence[int]) -> float:
    """Return the relative L2 error over `dims`, the worst over the other dimensions.

    For o `[B, T, HV, V]`, `dims=(1, 3)` gives the worst sequence and value head. A slice that is 0 must be met exactly,
    and a value that is not finite counts as infinitely wrong.

    Example:
        >>> relative_error(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0]]), 1)
        0.5
    """
    if actual.shape != expected.shape:
        raise ValueError(f"actual: expected {list(expected.shape)}, got {list(actual.shape)}")
    if actual.numel() == 0:
        return 0.0
    actual, expected = actual.double(), expected.double()
    if not bool(actual.isfinite().all()) or not bool(expected.isfinite().all()):
        return math.inf
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    difference = torch.linalg.vector_norm(actual - expected, dim=dims)
    size = torch.linalg.vector_norm(expected, dim=dims)
    errors = torch.where(difference == 0, 0.0, difference / size)
    return float(errors.max())


def packed_relative_error(actual: Tensor, expected: Tensor, cu_seqlens: Tensor) -> float:
    """Return the worst relative error over the sequences and value heads of packed outputs `[1, T, HV, V]`."""
    spans = pairwise(cu_seqlens.tolist())
    return max((relative_error(actual[0, s:e], expected[0, s:e], (0, 2)) for s, e in spans), default=0.0)
