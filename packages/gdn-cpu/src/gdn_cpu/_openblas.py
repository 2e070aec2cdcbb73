# SPDX-License-Identifier: Apache-2.0
"""Finds the library of the package scipy-openblas32 and opens it, when it is asked for: nothing else needs it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from . import _C

NAME = "openblas"
REMEDY = "pip install scipy-openblas32"


def path() -> Path | None:
    """Return the installed library, without importing its package."""
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for library in sorted(Path(folder, "lib").glob("libscipy_openblas*.so")):
            return library
    return None


def load() -> str | None:
    """Open the library; return why it cannot be used, or None."""
    library = path()
    if library is None:
        return f"the package scipy-openblas32 is not installed: {REMEDY}"
    return _C.load_openblas(str(library)) or None


def describe() -> str:
    """Return what there is of it, in words."""
    if config := _C.openblas_config():
        return config
    return "installed, not loaded" if path() is not None else f"not installed ({REMEDY})"
