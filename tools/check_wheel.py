#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check built wheels and sdists: what they contain, need, declare and export.

    python tools/check_wheel.py [--release] dist/*.whl dist/*.tar.gz

Looks at the finished files, not at how they were made. With --release also whether they are what a release promises.
Needs pyelftools, auditwheel, abi3audit and twine (the pinned tools), and objdump for the wheels' processors.

Gates: name and tag, size, contents against the sources of this checkout, RECORD, licence, metadata, pins and extras,
entry points, linked libraries, symbols and their versions against the tag (gates/library.py), instruction-set levels
(check_isa_leaks.py), completeness of sdists (gates/sdist.py), auditwheel, abi3audit, twine (gates/programs.py).
"""

import argparse
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from gates.expected import PACKAGES
from gates.programs import program_problems
from gates.sdist import sdist_problems
from gates.wheel import wheel_note, wheel_problems


def problems(path: Path, *, is_release: bool = False) -> Iterator[str]:
    """Say everything that is wrong with a built file."""
    if path.name.split("-")[0] not in PACKAGES or not path.name.endswith((".whl", ".tar.gz")):
        yield f"is no wheel or sdist of {', '.join(PACKAGES)}. Remove it, or describe it in tools/gates/expected.py"
        return
    try:
        yield from wheel_problems(path, is_release=is_release) if path.suffix == ".whl" else sdist_problems(path)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        yield f"cannot be read ({error}). It was damaged after it was built: build it again"
        return
    yield from program_problems(path)


def main() -> int:
    """Print every problem; return 1 when there is one."""
    parser = argparse.ArgumentParser(description="Check built wheels and sdists.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--release", action="store_true", help="wheels have to run on what a release promises")
    options = parser.parse_args()
    failed = False
    for path in options.files:
        found = list(problems(path, is_release=options.release))
        failed = failed or bool(found)
        print(f"{path.name} ({path.stat().st_size / 1024:.0f} KiB): {'FAILED' if found else 'ok'}")
        for problem in found:
            print(f"    {problem}")
        if not found and "-abi3-" in path.name:
            print(f"    runs on {wheel_note(path)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
