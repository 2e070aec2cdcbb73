# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of gdn. Install gdn-core to call them; this package is its backend ``cpu``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch  # noqa: F401 - first: torch brings the OpenMP runtime that the kernels share

from . import _C

__version__ = _C.version()

__all__ = ["Level", "gemm_engine", "gemm_engines", "isa_level", "levels", "openmp", "provider"]

_NATIVE = (
    "fused_gdn_gating",
    "rms_norm_gated",
    "fused_sigmoid_gating_delta_rule_update",
    "fused_sigmoid_gating_delta_rule_update_spec",
    "fused_sigmoid_gating_delta_rule_update_replay",
    "fused_gdn_decode_post_conv_mtp",
    "fused_gdn_decode_post_conv_mtp_replay",
    "fused_recurrent_gated_delta_rule",
    "chunk_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "gdn_attention",
)


@dataclass(frozen=True)
class Level:
    """One instruction-set level: whose kernels it runs, whether this machine can run it, and whether it is in use."""

    name: str
    kernels: str
    supported: bool
    active: bool
    reason: str | None


def levels() -> list[Level]:
    """List the instruction-set levels of this architecture, lowest first."""
    active = _C.active_level()
    return [Level(name, own, not reason, name == active, reason or None) for name, own, reason in _C.levels()]


@contextmanager
def isa_level(name: str) -> Iterator[str]:
    """Cap the level at ``name`` for a block, in the whole process; yields the level in use.

    Args:
        name: a name that :func:`levels` lists. The machine's own limit still holds.

    Raises:
        ValueError: no level of this architecture has that name.

    Example:
        >>> import gdn_cpu
        >>> with gdn_cpu.isa_level("baseline") as level:
        ...     level
        'baseline'
    """
    before = _C.active_level()
    _C.set_level(name)
    try:
        yield _C.active_level()
    finally:
        _C.set_level(before)


def gemm_engines() -> list[str]:
    """List the engines that can multiply bf16 in ``chunk_gated_delta_rule`` at the level in use, preferred first."""
    return _C.chunk_engines()


@contextmanager
def gemm_engine(name: str) -> Iterator[str]:
    """Force the engine that multiplies bf16 in ``chunk_gated_delta_rule`` for a block, in the whole process.

    Activations of other dtypes are never rounded to bf16 and keep their engine; so do heads of fewer than 32 keys or
    values.

    Args:
        name: ``portable`` (fp32 products on the level's vectors), ``avx512_bf16``, ``amx`` or ``arm_bf16``. A call at a
            level that has no such engine raises ValueError.

    Raises:
        ValueError: no level of this architecture has an engine of that name.

    Example:
        >>> import gdn_cpu
        >>> with gdn_cpu.gemm_engine("portable") as engine:
        ...     engine
        'portable'
    """
    before = _C.forced_gemm()
    _C.set_gemm(name)
    try:
        yield name
    finally:
        _C.set_gemm(before)


def openmp() -> str:
    """Return the path of the OpenMP runtime that the kernels share with torch; empty when there is none."""
    return _C.openmp()


class _Provider:
    name = "cpu"
    version = __version__
    device_types = ("cpu",)

    def __init__(self) -> None:
        self.ops = {name: getattr(_C, name) for name in _NATIVE}

    def availability(self) -> str | None:
        if _C.environment_error():
            return _C.environment_error()
        if not openmp():
            return "no OpenMP runtime found: torch has none that can be shared, and the system has no libgomp.so.1"
        return None

    def level(self) -> str | None:
        return _C.active_level()

    def details(self) -> dict[str, str]:
        return {
            "levels": ", ".join(level.name for level in levels() if level.supported),
            "products": f"{_C.chunk_engine(True)} for bf16, {_C.chunk_engine(False)} for fp32 and fp16",
            "OpenMP": openmp(),
            "tensors": "DLPack exchange table" if _C.has_exchange_api() else "__dlpack__",
        }


provider = _Provider()
