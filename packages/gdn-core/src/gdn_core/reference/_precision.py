# SPDX-License-Identifier: Apache-2.0
"""Autocast must not reach into the reference: it would turn fp32 products into half-precision ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with autocast off for the device of its first tensor."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device_type = _device_type(args, kwargs)
        if not torch.is_autocast_enabled(device_type):
            return function(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    return run


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    device_type = next(tensors).device.type
    return device_type if device_type in ("cpu", "cuda", "xpu", "mps") else "cpu"
