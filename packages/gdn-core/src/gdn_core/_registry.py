# SPDX-License-Identifier: Apache-2.0
"""Which backends exist, which can run here, and why the others cannot.

Backends are found through the entry-point group ``gdn_core.backends`` on first use. An entry point tells a backend that
is installed but broken from one that is not installed, and lets third parties add their own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

GROUP = "gdn_core.backends"
REFERENCE = "reference"
DECODE_KERNELS = ("cuda", "triton")

# Every environment variable that gdn reads: what to set it to, and what that does.
ENVIRONMENT = {
    "GDN_BACKEND": ("NAME", "force a backend: cpu, cuda, triton, reference"),
    "GDN_CPU_ISA": ("LEVEL", "cap gdn-cpu's instruction-set level (`gdn info` lists them)"),
    "GDN_CPU_GEMM": ("ENGINE", "force what multiplies bf16 in gdn-cpu's chunked prefill (`gdn info` names it)"),
    "GDN_DECODE_KERNEL": ("NAME", "insist on what runs the fused decode on CUDA: cuda or triton"),
    "GDN_PATCH_TRANSFORMERS": ("1", "run transformers' Gated DeltaNet layers on gdn, once gdn_core is imported"),
    "GDN_DEBUG": ("1", "check more, at the price of speed"),
    "GDN_SKIP_VERSION_CHECK": ("1", "accept a backend of another version"),
    "GDN_REQUIRE": ("NAME,...", "in gdn's own tests: fail where one of these backends is missing"),
}

# Our own backends: distribution, extra of gdn-core, and the machines that its wheels exist for.
_OWN = {"cpu": ("gdn-cpu", "cpu"), "cuda": ("gdn-cuda", "cuda")}
TRITON = "triton"  # in gdn-core itself, over libraries of others
_WHEEL_MACHINES = ("x86_64", "aarch64")


class Provider(Protocol):
    """What an entry point of the group ``gdn_core.backends`` resolves to."""

    name: str
    version: str
    device_types: tuple[str, ...]

    @property
    def ops(self) -> Mapping[str, Callable[..., None]]:
        """Kernels by op name. Each takes the arguments of ``torch.ops.gdn.<name>`` in order, plus ``dry_run=False``;
        checks them all before it changes anything; and raises NotImplementedError to decline a call. With
        ``dry_run=True`` it only checks."""

    def availability(self) -> str | None:
        """Return why the backend cannot run here, or None when it can."""

    def level(self) -> str | None:
        """Return the instruction-set level or the compute capability in use."""

    def details(self) -> dict[str, str]:
        """Return what else a person may want to know, for ``gdn info``."""


@dataclass(frozen=True)
class BackendInfo:
    """One backend as :func:`gdn_core.backends` lists it.

    ``install`` is there only where pip can help: the backend is missing, of another version, or does not import.
    """

    name: str
    version: str | None
    available: bool
    level: str | None = None
    reason: str | None = None
    install: str | None = None
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """The environment's choices, read once, on first use."""

    backend: str | None
    decode_kernel: str | None


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Read ``GDN_BACKEND`` and ``GDN_DECODE_KERNEL``; empty is unset."""
    decode_kernel = os.environ.get("GDN_DECODE_KERNEL") or None
    if decode_kernel not in (None, *DECODE_KERNELS):
        raise ValueError(f"GDN_DECODE_KERNEL: expected one of {', '.join(DECODE_KERNELS)}, got {decode_kernel!r}")
    return Settings(backend=os.environ.get("GDN_BACKEND") or None, decode_kernel=decode_kernel)


def _skips_version_check() -> bool:
    # Not among the settings: backends are listed even where those are wrong.
    return os.environ.get("GDN_SKIP_VERSION_CHECK") == "1"


@lru_cache(maxsize=1)
def core_version() -> str:
    """Return the version of the installed gdn-core."""
    try:
        return importlib.metadata.version("gdn-core")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def install_command(name: str) -> str | None:
    """Return the pip command that brings one of our own backends at this version."""
    if name not in _OWN:
        return None
    return f'pip install "gdn-core[{_OWN[name][1]}]=={core_version()}"'


def _reinstall_command(name: str) -> str | None:
    """Return the pip command that puts one of our own backends in place again, and leaves torch alone."""
    return f'pip install --force-reinstall --no-deps "{_OWN[name][0]}=={core_version()}"' if name in _OWN else None


@dataclass
class _Backend:
    info: BackendInfo
    provider: Provider | None


_lock = threading.Lock()
_backends: dict[str, _Backend] | None = None


def _unavailable(name: str, version: str | None, reason: str, install: str | None = None) -> _Backend:
    return _Backend(BackendInfo(name, version, False, reason=reason, install=install), None)


def _missing(name: str) -> _Backend:
    distribution = _OWN[name][0]
    if platform.system() != "Linux" or platform.machine() not in _WHEEL_MACHINES:
        where = f"{platform.system()} {platform.machine()}"
        reason = f"{distribution} has wheels for Linux on {' and '.join(_WHEEL_MACHINES)}, this is {where}"
        return _unavailable(name, None, reason)
    return _unavailable(name, None, f"{distribution} is not installed", install_command(name))


def _load(entry: importlib.metadata.EntryPoint) -> _Backend:
    name, dist = entry.name, entry.dist
    version = dist.version if dist is not None else None
    if name in _OWN and version != core_version() and not _skips_version_check():
        reason = f"{_OWN[name][0]} {version} does not match gdn-core {core_version()}"
        return _unavailable(name, version, reason, install_command(name))
    cut_short = _cut_short(dist)
    if cut_short is not None:
        return _unavailable(name, version, f"{cut_short} is cut short", _reinstall_command(name))
    # A broken backend is listed with its own words, whatever they are.
    try:
        provider = cast(Provider, entry.load())
    except Exception as error:
        return _unavailable(name, version, f"{type(error).__name__}: {error}", _reinstall_command(name))
    try:
        reason_or_none = provider.availability()
        if reason_or_none is not None:
            return _unavailable(name, version, reason_or_none)
        info = BackendInfo(name, version, True, level=provider.level(), details=provider.details())
    except Exception as error:
        return _unavailable(name, version, f"{type(error).__name__}: {error}")
    return _Backend(info, provider)


def _cut_short(dist: importlib.metadata.Distribution | None) -> Path | None:
    """Return a module of a distribution that lacks its end, which the loader would not miss before it crashes."""
    for file in (dist.files if dist is not None else None) or ():
        path = Path(str(file.locate()))
        if path.suffix == ".so" and path.is_file():
            with path.open("rb") as module:
                header = module.read(64)
            if header[:6] == b"\x7fELF\2\1" and len(header) == 64:
                # A linker writes the table of the sections last.
                table, *_, size, count = struct.unpack_from("<QI5H", header, 40)
                if path.stat().st_size < table + size * count:
                    return path
    return None


def _triton() -> _Backend:
    from .triton_backend import provider

    reason = provider.availability()
    if reason is not None:
        install = None if provider.version else f'pip install "gdn-core[triton]=={core_version()}"'
        return _unavailable(TRITON, provider.version or None, reason, install)
    info = BackendInfo(TRITON, provider.version, True, level=provider.level(), details=provider.details())
    return _Backend(info, provider)


def _discover() -> dict[str, _Backend]:
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    backends = {name: _load(found.pop(name)) if name in found else _missing(name) for name in _OWN}
    backends[TRITON] = _triton()
    backends.update({name: _load(entry) for name, entry in sorted(found.items())})
    return backends


def loaded() -> dict[str, _Backend]:
    """Return every native backend by name, discovering them on the first call."""
    global _backends
    if _backends is None:
        with _lock:
            if _backends is None:
                _backends = _discover()
    return _backends


def provider(name: str) -> Provider | None:
    """Return the provider of an available backend, else None."""
    backend = loaded().get(name)
    return backend.provider if backend is not None else None


def info(name: str) -> BackendInfo:
    """Return what is known now of the backend ``name``; its level follows changes made after loading."""
    if name == REFERENCE:
        return BackendInfo(REFERENCE, core_version(), True, details={"runs on": "any device, in plain torch"})
    backend = loaded()[name]
    if backend.provider is None:
        return backend.info
    known: dict[str, Any] = {"level": backend.provider.level(), "details": backend.provider.details()}
    return BackendInfo(name, backend.info.version, True, **known)


def names() -> tuple[str, ...]:
    """Return the names of all backends, the reference last."""
    return (*loaded(), REFERENCE)


def backends() -> list[BackendInfo]:
    """List every backend: its version, whether it can run here, its level, and what to do where it cannot.

    Returns:
        One :class:`BackendInfo` per backend: ``name``, ``version`` (None: not installed), ``available``, ``level`` (the
        instruction-set level or compute capability), ``reason`` (why it is unavailable), ``install`` (the pip command
        that helps, where one does) and ``details``.

    Example:
        >>> import gdn_core
        >>> [backend.name for backend in gdn_core.backends()][-1]
        'reference'
    """
    return [info(name) for name in names()]
