#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that one version is everywhere: in VERSION, in each built file named, and in a release's tag.

python tools/check_version.py [--tag v1.2.3] [dist/*.whl dist/*.tar.gz ...]
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The form that PEP 440 normalises to: files are named after it, so any other spelling would differ from VERSION.
NORMALISED = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")


def problems(version: str, tag: str | None, files: list[Path]) -> list[str]:
    """Return what does not agree with `version`."""
    found = []
    if not NORMALISED.fullmatch(version):
        found.append(f"VERSION: expected a normalised version such as 1.2.3 or 1.2.3rc1, got {version!r}")
    if tag is not None and tag != f"v{version}":
        found.append(f"tag: expected v{version}, got {tag}")
    for package in sorted((ROOT / "packages").iterdir()):
        link = package / "VERSION"
        if not link.is_symlink() or link.resolve() != ROOT / "VERSION":
            found.append(f"{link.relative_to(ROOT)}: expected a symbolic link to the root's VERSION")
    for file in files:
        # gdn_cpu-1.2.3-cp310-abi3-linux_x86_64.whl, gdn_cpu-1.2.3.tar.gz
        got = file.name.removesuffix(".tar.gz").partition("-")[2].partition("-")[0]
        if got != version:
            found.append(f"{file.name}: expected version {version}, got {got or 'none'}")
    return found


def main() -> int:
    """Print every disagreement; return 1 when there is one."""
    parser = argparse.ArgumentParser(description="Check that one version is everywhere.")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tag", help="the tag of a release, such as v1.2.3")
    options = parser.parse_args()
    version = (ROOT / "VERSION").read_text().strip()
    found = problems(version, options.tag, options.files)
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"version {version}: one everywhere ({len(options.files)} built files)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
