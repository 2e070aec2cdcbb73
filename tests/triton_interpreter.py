# SPDX-License-Identifier: Apache-2.0
"""gdn_core's Triton kernels without a GPU: Triton's interpreter runs them, as a backend for CPU tensors."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

import gdn_core
from gdn_core import _registry
from gdn_core.triton_backend import _Provider

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: it has no wheel here"
)


class OnCpu(_Provider):
    """The backend ``triton``, for CPU tensors."""

    name = "on_cpu"
    device_types = ("cpu",)

    def availability(self) -> None:
        return None

    def level(self) -> None:
        return None


@contextmanager
def registered() -> Iterator[OnCpu]:
    """List the backend as ``on_cpu``, the first to be asked, inside the block."""
    provider = OnCpu()
    backends = _registry.loaded()
    others = dict(backends)
    backends.clear()
    backends["on_cpu"] = _registry._Backend(_registry.BackendInfo("on_cpu", None, True), provider)
    backends.update(others)
    try:
        yield provider
    finally:
        backends.clear()
        backends.update(others)


@contextmanager
def forced() -> Iterator[None]:
    """Run every call of the block on it, its kernels in Triton's interpreter."""
    modules = [f"gdn_core.triton_backend.{name}" for name in ("kernels", "decode")]
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        for name in modules:  # which way a kernel runs is settled where it is defined
            sys.modules.pop(name, None)
        try:
            with registered(), gdn_core.use_backend("on_cpu"):
                yield
        finally:
            for name in modules:
                sys.modules.pop(name, None)
