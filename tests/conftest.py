# SPDX-License-Identifier: Apache-2.0
"""Which implementations a test runs on, and what every test starts from.

``GDN_REQUIRE=cpu`` (a comma list) fails the run where a backend is missing, instead of skipping its tests;
``GDN_REQUIRE_LEVELS=baseline,x86_v3`` fails it where gdn-cpu supports other levels than these. ``--one-in=N`` runs one
of N parts of the tests, chosen by their names and so always the same, on machines where all of them would take hours.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

# Before torch brings its OpenMP runtime: tests with more threads than cores must not wait in spin loops.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import gdn_core
from gdn_core import _log

# Triton settles how its own functions run when it is first imported, which torch may do before a test asks for it.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Test modules share helpers, and pytest's importlib mode puts no directory on the path.
sys.path.insert(0, str(Path(__file__).parent))


class Implementation(NamedTuple):
    """One way to run an operation: a backend, for the CPU at one instruction-set level."""

    backend: str
    level: str | None = None

    @property
    def is_native(self) -> bool:
        return self.backend != "reference"

    def __str__(self) -> str:
        return self.backend if self.level is None else f"{self.backend}-{self.level}"


def _missing(name: str) -> str | None:
    """Return why a backend cannot run here, or None when it can."""
    known = {backend.name: backend for backend in gdn_core.backends()}
    if name not in known:
        return f"there is no backend {name!r}"
    return None if known[name].available else f"backend {name!r}: {known[name].reason}"


def _native_implementations() -> list[object]:
    reason = _missing("cpu")
    if reason is not None:
        return [pytest.param(Implementation("cpu"), id="cpu", marks=pytest.mark.skip(reason=reason))]
    import gdn_cpu

    # A level that has its kernels from the one below would only repeat its tests.
    levels = [level.name for level in gdn_cpu.levels() if level.supported and level.kernels == level.name]
    return [pytest.param(Implementation("cpu", level), id=f"cpu-{level}") for level in levels]


NATIVE = _native_implementations()
EVERY = [pytest.param(Implementation("reference"), id="reference"), *NATIVE]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "report(id, ...): covers these field reports")
    required = [name.strip() for name in os.environ.get("GDN_REQUIRE", "").split(",") if name.strip()]
    missing = [reason for name in required if (reason := _missing(name)) is not None]
    if missing:
        raise pytest.UsageError(f"GDN_REQUIRE={','.join(required)}, but {'; '.join(missing)}")
    _check_levels(os.environ.get("GDN_REQUIRE_LEVELS", ""))


def _check_levels(required: str) -> None:
    if not required:
        return
    import gdn_cpu

    supported = ",".join(level.name for level in gdn_cpu.levels() if level.supported)
    if supported != required:
        raise pytest.UsageError(f"GDN_REQUIRE_LEVELS={required}, but gdn-cpu supports {supported}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run the same one of N parts of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts = config.getoption("--one-in")
    left_out = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != 0]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == 0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"skipped: {len(terminalreporter.stats.get('skipped', []))}")


@pytest.fixture(autouse=True)
def _fresh_process_state() -> Iterator[None]:
    """Start every test alike: no forced backend, no message logged yet, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tests are small, and run beside each other
    gdn_core.use_backend(None)
    _log.forget()
    yield
    gdn_core.use_backend(None)
    torch.set_num_threads(threads)


def _selected(implementation: Implementation) -> Iterator[Implementation]:
    with ExitStack() as stack:
        if implementation.level is not None:
            import gdn_cpu

            assert stack.enter_context(gdn_cpu.isa_level(implementation.level)) == implementation.level
        stack.enter_context(gdn_core.use_backend(implementation.backend))
        yield implementation


@pytest.fixture(params=EVERY)
def impl(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    """Force every implementation that runs here, one after the other."""
    yield from _selected(request.param)


@pytest.fixture(params=NATIVE)
def native_impl(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    """Force every native implementation: some promises hold bit for bit on these, and within tolerance elsewhere."""
    yield from _selected(request.param)


@pytest.fixture
def cpu_backend() -> None:
    """Skip where gdn-cpu is missing; force nothing."""
    reason = _missing("cpu")
    if reason is not None:
        pytest.skip(reason)
