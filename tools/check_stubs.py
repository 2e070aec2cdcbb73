#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that the committed _C.pyi of each native package says what its module really has.

    python tools/check_stubs.py [--write]

The stubs are committed, not made by the build: making one imports the module, which needs torch.
"""

import argparse
import difflib
import importlib
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gdn_cpu", "gdn_cuda")
HEADER = "# SPDX-License-Identifier: Apache-2.0\n# Made by tools/check_stubs.py --write from the compiled module.\n"


def stub(package: str) -> str:
    """Return the stub of a package's compiled module."""
    module = importlib.import_module(f"{package}._C")
    generator = StubGen(module=module)
    generator.put(module)
    return HEADER + str(generator.get())


def main() -> int:
    """Compare the stubs, or write them anew."""
    parser = argparse.ArgumentParser(description="Check the committed stubs of the compiled modules.")
    parser.add_argument("--write", action="store_true", help="write the stubs instead")
    write = parser.parse_args().write
    is_stale = False
    for package in PACKAGES:
        path = ROOT / "packages" / package.replace("_", "-") / "src" / package / "_C.pyi"
        old, new = path.read_text() if path.exists() else "", stub(package)
        if write:
            path.write_text(new)
        elif old != new:
            is_stale = True
            name = str(path.relative_to(ROOT))
            sys.stderr.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "compiled"))
    if is_stale:
        print("The stubs differ: python3 tools/dev.py setup, then python tools/check_stubs.py --write", file=sys.stderr)
    return 1 if is_stale else 0


if __name__ == "__main__":
    sys.exit(main())
