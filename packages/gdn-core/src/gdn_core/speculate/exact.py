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


class row_by_row(TorchFunctionMode):
    """Run linear layers, norms, activation functions and attention token by token inside a ``with`` block.

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
    outputs = []
    for i in range(query.shape[-2]):
        seen = slice(0, i + 1) if is_causal else slice(None)
        if attn_mask is not None:
            seen = attn_mask[0, 0, i % attn_mask.shape[-2]].nonzero()[:, 0]
        keys, values = key[:, :, seen].contiguous().clone(), value[:, :, seen].contiguous().clone()
        options = {"scale": scale, "enable_gqa": enable_gqa}
        outputs.append(
            F.scaled_dot_product_attention(query[:, :, i : i + 1].clone(), keys, values, dropout_p=dropout_p, **options)
        )
    return torch.cat(outputs, dim=-2)
