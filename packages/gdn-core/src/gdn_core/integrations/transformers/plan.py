# SPDX-License-Identifier: Apache-2.0
"""What the layers of a patched model run on: seen by running one of each kind, without the model's weights."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import gdn_core

from .install import patched
from .layer import gated_delta_net_layers, why_not


@dataclass(frozen=True)
class LayerPlan:
    """One Gated DeltaNet layer: the backend of each operation of a prefill and of a decoded token, by operation.

    None of them: transformers' own code runs, and `reason` says why.
    """

    index: int
    kind: str
    heads: str  # of keys and of values, with their dims
    prefill: dict[str, str]
    decode: dict[str, str]
    reason: str | None


def plan_layers(model: torch.nn.Module, dtype: torch.dtype, device: str = "cpu") -> list[LayerPlan]:
    """Say what each Gated DeltaNet layer of `model`, which may be on the meta device, runs on in `dtype` on `device`.

    Nothing is left patched, and the model is not changed.
    """
    seen: dict[Any, tuple[dict[str, str], dict[str, str], str | None]] = {}
    plans = []
    for layer in gated_delta_net_layers(model):
        kind = (type(layer), *((name, tuple(weight.shape)) for name, weight in layer.named_parameters()))
        if kind not in seen:
            seen[kind] = _observe(layer, model, dtype, device)
        plans.append(LayerPlan(_index(layer), type(layer).__name__, _heads(layer), *seen[kind]))
    return plans


def _index(layer: Any) -> int:
    return int(layer.layer_idx)


def _heads(layer: Any) -> str:
    return f"{layer.num_k_heads} x {layer.head_k_dim}, {layer.num_v_heads} x {layer.head_v_dim}"


def _observe(
    layer: torch.nn.Module, model: Any, dtype: torch.dtype, device: str
) -> tuple[dict[str, str], dict[str, str], str | None]:
    reason = why_not(layer)
    if reason is not None:
        return {}, {}, reason
    example: Any = copy.deepcopy(layer).to_empty(device=device).to(dtype)
    for parameter in example.parameters():
        parameter.requires_grad_(False).zero_()
    cache = importlib.import_module("transformers").DynamicCache(config=model.config.get_text_config())
    tokens = torch.zeros(1, 2, example.hidden_size, dtype=dtype, device=device)
    with torch.no_grad(), patched(example):
        prefill = _calls(lambda: example(tokens, cache=cache))
        decode = _calls(lambda: example(tokens[:, :1], cache=cache))
    return prefill, decode, None if prefill and decode else f"no native backend of gdn runs them on {device}"


def _calls(function: Callable[[], object]) -> dict[str, str]:
    with gdn_core.record_calls() as calls:
        function()
    return dict(calls.keys())
