# SPDX-License-Identifier: Apache-2.0
"""Put the replacements into modeling modules, imported already or later, and take them out again."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ... import _registry
from ..._log import log_once, logger
from .eligibility import has_kernels, learn_kernels
from .functions import EARLY_FUNCTIONS, FUNCTIONS, LayerFunction, norm_forward
from .layer import gated_delta_net_layers, is_layer_class, layer_forward
from .step import forget_steps

_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def patch(model: torch.nn.Module | None = None) -> None:
    """Run Gated DeltaNet layers on gdn, until :func:`unpatch`; further calls for the same do nothing.

    Args:
        model: patch the modeling modules of this model's layers, and so every model of the same classes; also those
            whose code comes with the checkpoint. None: every modeling module of transformers that has such layers.

    Raises:
        ImportError: transformers is not installed.
        ValueError: `model` has no Gated DeltaNet layers.
    """
    _install(_Hold(_modules_of(model), is_lasting=True))


def unpatch() -> None:
    """Undo every :func:`patch`. A :func:`patched` block that still runs keeps what it needs until its end."""
    with _lock:
        _holds[:] = [hold for hold in _holds if not hold.is_lasting]
        _settle()


def is_held(model: torch.nn.Module) -> bool:
    """Say whether the modules of this model's layers are patched."""
    return all(type(layer).__module__ in _replaced for layer in gated_delta_net_layers(model))


def is_patched() -> bool:
    """Say whether a patch is in force."""
    return bool(_holds)


@contextmanager
def patched(model: torch.nn.Module | None = None) -> Iterator[None]:
    """Patch, as :func:`patch` does, in all threads while a `with` block runs; what another patch holds stays."""
    hold = _Hold(_modules_of(model), is_lasting=False)
    _install(hold)
    try:
        yield
    finally:
        with _lock:
            _holds[:] = [other for other in _holds if other is not hold]
            _settle()


def patch_for_environment() -> None:
    """Patch for GDN_PATCH_TRANSFORMERS=1, where transformers is installed: `import gdn_core` must not fail over it."""
    if importlib.util.find_spec("transformers") is not None:
        patch()


# What is in force


@dataclass(frozen=True, eq=False)
class _Hold:
    """Someone's wish that modules be patched: these, or, for None, every one of transformers."""

    modules: frozenset[str] | None
    is_lasting: bool

    def covers(self, module: str) -> bool:
        return _is_modeling(module) if self.modules is None else module in self.modules


@dataclass(frozen=True)
class _Replacement:
    owner: Any
    name: str
    original: Any  # _ABSENT: the owner had none of its own
    ours: Any

    def undo(self) -> None:
        if vars(self.owner).get(self.name) is not self.ours:
            where = f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"
            logger.warning("%s was replaced again after gdn replaced it, and is left as it is", where)
        elif self.original is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


_ABSENT = object()
_lock = threading.RLock()
_holds: list[_Hold] = []
_replaced: dict[str, list[_Replacement]] = {}  # by module


def _modules_of(model: torch.nn.Module | None) -> frozenset[str] | None:
    if importlib.util.find_spec("transformers") is None:
        raise ImportError('transformers is not installed: pip install "gdn-core[transformers]"')
    if model is None:
        return None
    modules = frozenset(type(layer).__module__ for layer in gated_delta_net_layers(model))
    if not modules:
        raise ValueError(f"model: expected a model with Gated DeltaNet layers, got a {type(model).__name__}")
    return modules


def _install(hold: _Hold) -> None:
    with _lock:
        already = any(other.is_lasting and other.modules == hold.modules for other in _holds)
        if not (hold.is_lasting and already):
            _holds.append(hold)
        _settle()
    for name in tuple(sys.modules):
        if hold.covers(name):
            # Where another thread is importing it, this waits until the module is complete.
            _patch_if_held(importlib.import_module(name))


def _settle() -> None:
    """Undo what nobody holds any more, and have modules that are imported later patched while someone holds them."""
    for name in [name for name in _replaced if not any(hold.covers(name) for hold in _holds)]:
        for replacement in reversed(_replaced.pop(name)):
            replacement.undo()
        forget_steps()
    is_wanted = any(hold.modules is None for hold in _holds)
    if is_wanted and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    elif not is_wanted and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _is_modeling(module: str) -> bool:
    return module.startswith("transformers.models.") and module.rpartition(".")[2].startswith("modeling_")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modeling modules as the other finders do, and has them patched once they have run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_modeling(name):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _patch_after_execution(spec.loader)
        return spec


def _patch_after_execution(loader: Any) -> None:
    execute: Callable[[ModuleType], None] = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _patch_if_held(module)

    loader.exec_module = exec_module


_finder = _Finder()


# One module


def _patch_if_held(module: ModuleType) -> None:
    name = module.__name__
    with _lock:
        if name in _replaced or not any(hold.covers(name) for hold in _holds) or not _has_rule(module):
            return
        learn_kernels()
        _replaced[name] = _replace_all(module)
        _tell(name)


def _has_rule(module: ModuleType) -> bool:
    return any(rule in vars(module) for rule in _RULES)


def _replace_all(module: ModuleType) -> list[_Replacement]:
    replaced = []
    classes: list[Any] = [
        cls for _, cls in inspect.getmembers(module, inspect.isclass) if cls.__module__ == module.__name__
    ]
    layers = [cls for cls in classes if is_layer_class(cls)]
    for cls in classes:
        if cls.__name__.endswith("RMSNormGated"):
            replaced.append(_replace(cls, "forward", norm_forward))
    for cls in layers:
        if "cache" in inspect.signature(cls.forward).parameters:
            replaced.append(_replace(cls, "forward", layer_forward))
    if any(_keeps_functions(cls) for cls in layers):  # before transformers 5.16
        for cls in layers:
            replaced += [_put(cls, name, LayerFunction(name, wrap)) for name, wrap in EARLY_FUNCTIONS.items()]
    else:
        replaced += [_replace(module, name, wrap) for name, wrap in FUNCTIONS.items() if name in vars(module)]
    return replaced


def _keeps_functions(cls: Any) -> bool:
    return "chunk_gated_delta_rule" in inspect.unwrap(cls.__init__).__code__.co_names


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> _Replacement:
    original = getattr(owner, name)
    return _put(owner, name, functools.wraps(original)(wrap(original)))


def _put(owner: Any, name: str, ours: Any) -> _Replacement:
    original = vars(owner).get(name, _ABSENT)
    setattr(owner, name, ours)
    return _Replacement(owner, name, original, ours)


def _tell(module: str) -> None:
    """Say once per family which backend the layers run on, or why they stay with transformers' code."""
    family = module.rpartition(".")[2].removeprefix("modeling_")
    devices = {"cpu", *(device for backend in _available() for device in backend[1])}
    native = sorted(device for device in devices if has_kernels(("chunk_gated_delta_rule",), device))
    if native:
        names = ", ".join(name for name, _ in _available())
        log_once(
            logging.INFO, f"transformers' {family}: Gated DeltaNet layers on {', '.join(native)} run on gdn ({names})"
        )
        return
    cpu = _registry.info("cpu")
    remedy = f" To make it fast: {cpu.install}" if cpu.install else ""
    reason = f"transformers' {family} keeps its own slow code on the CPU: backend 'cpu': {cpu.reason}.{remedy}"
    log_once(logging.WARNING, reason)


def _available() -> list[tuple[str, tuple[str, ...]]]:
    providers = ((name, _registry.provider(name)) for name in _registry.loaded())
    return [(name, provider.device_types) for name, provider in providers if provider is not None]
