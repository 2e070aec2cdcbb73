# SPDX-License-Identifier: Apache-2.0
"""Make a model's own layers independent of how many tokens they get at once, so that speculation changes no bit.

A matrix product of several rows adds up in another order than that of one row, and of one row in another order where
it lies in memory otherwise; an elementwise function may treat the last elements of a tensor by other instructions.
gdn's operations promise not to; torch's do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Of each, the first argument has the tokens in all dimensions but the last, and the result too.
_BY_TOKEN: frozenset[Callable[..., Any]] = frozenset(
    (
        F.linear, F.silu, F.gelu, F.softplus, F.layer_norm, F.rms_norm, F.sigmoid, F.tanh, torch.sigmoid, torch.tanh,
        F.softmax, torch.exp, torch.cos, torch.sin, torch.rsqrt, Tensor.sigmoid, Tensor.tanh, Tensor.exp, Tensor.cos,
        Tensor.sin, Tensor.mean, torch.mean, Tensor.softmax, torch.softmax,
    )
)  # fmt: skip

# Of tokens sorted by expert, each expert's with its own matrix.
_BY_EXPERT = {getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)} - {None}


class row_by_row(TorchFunctionMode):
    """Run linear layers, experts, norms, activation functions and attention token by token in a ``with`` block.

    Slow, and the same bits for a token whatever else is in the batch: how speculation is shown to be lossless.

    Example:
        >>> import torch
        >>> from gdn_core.speculate import row_by_row
        >>> layer, x = torch.nn.Linear(64, 64), torch.randn(5, 64)
        >>> with row_by_row(), torch.no_grad():
        ...     torch.equal(layer(x)[2:3], layer(x[2:3]))
        True
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if function in _BY_EXPERT:
            return _grouped(*args, **kwargs)
        if function not in _BY_TOKEN or not args or args[0].dim() < 2 or args[0].numel() == 0:
            return function(*args, **kwargs)
        x = args[0]
        rows = [function(row[None].clone(), *args[1:], **kwargs) for row in x.reshape(-1, x.shape[-1])]
        return torch.cat(rows).unflatten(0, x.shape[:-1])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend with each query [..., 1, D] alone to the keys that it sees, wherever they lie."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    outputs = []
    for i in range(query.shape[-2]):
        seen: slice | Tensor = slice(0, i + 1) if is_causal else slice(None)
        if attn_mask is not None:
            seen = attn_mask[0, 0, i % attn_mask.shape[-2]].nonzero()[:, 0]
        keys, values = key[:, :, seen].contiguous().clone(), value[:, :, seen].contiguous().clone()
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, i : i + 1].clone(), keys, values, dropout_p=dropout_p, scale=scale
            )
        )
    return torch.cat(outputs, dim=-2)


def _grouped(x: Tensor, matrices: Tensor, offs: Tensor | None = None, **options: Any) -> Tensor:
    """Multiply each of the rows x [n, K] before offs[e] with matrices [E, K, N] of expert e."""
    if offs is None or x.dim() != 2 or matrices.dim() != 3:
        raise NotImplementedError(f"row_by_row: a grouped product of {tuple(x.shape)} and {tuple(matrices.shape)}")
    result, start = x.new_zeros(len(x), matrices.shape[2]), 0
    for matrix, end in zip(matrices, offs.tolist(), strict=True):
        for i in range(start, end):
            result[i] = (x[i : i + 1].clone() @ matrix)[0]
        start = end
    return result
