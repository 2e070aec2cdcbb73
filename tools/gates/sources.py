# SPDX-License-Identifier: Apache-2.0
"""The files of a package in this checkout, which its sdist has to hold, and its wheel where they lie in src/."""

import os
from functools import cache
from pathlib import Path

from gates.expected import ROOT

_OUTPUTS = ("build", "dist", "wheelhouse", "__pycache__")


@cache
def sources(name: str) -> frozenset[str]:
    """Return them by their path from the package's folder, those behind its links too; no outputs, nothing hidden."""
    package = ROOT / "packages" / name.replace("_", "-")
    found = set()
    for folder, folders, files in os.walk(package, followlinks=True):
        folders[:] = [inner for inner in folders if inner not in _OUTPUTS and not inner.startswith(".")]
        paths = (Path(folder, file) for file in files if not file.startswith("."))
        found |= {path.relative_to(package).as_posix() for path in paths if path.suffix not in (".so", ".pyc")}
    return frozenset(found)
