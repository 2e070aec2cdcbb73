# SPDX-License-Identifier: Apache-2.0
"""The gates that others wrote: abi3audit, auditwheel and twine, each with its own words on the terminal."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BIN = Path(sys.executable).parent


def program_problems(path: Path) -> Iterator[str]:
    """Say which of them found something in a wheel or an sdist."""
    yield from _run("twine", "check", "--strict", path, remedy="mend README.md or pyproject.toml of the package")
    if "-abi3-" in path.name:
        remedy = "use only what Python 3.10's stable ABI has, or raise wheel.py-api and requires-python"
        yield from _run("abi3audit", "--strict", path, remedy=remedy)
        yield from _auditwheel(path)


def _run(*command: str | Path, remedy: str) -> Iterator[str]:
    result = subprocess.run([BIN / command[0], *command[1:]], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.stderr.write(result.stdout + result.stderr)
        yield f"{command[0]} failed, its words are above: {remedy}"


def _auditwheel(path: Path) -> Iterator[str]:
    """Compare the tag with the one that auditwheel finds: it may promise less, not more."""
    result = subprocess.run([BIN / "auditwheel", "show", "--json", path], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.stderr.write(result.stdout + result.stderr)
        yield "auditwheel show failed, its words are above: build the wheel again"
        return
    found, claimed = json.loads(result.stdout)["overall_tag"], path.stem.split("-")[-1]
    if _glibc(found) > _glibc(claimed):
        yield f"auditwheel finds {found}, the tag says {claimed}. Remove what auditwheel show lists, or repair the tag"


def _glibc(platform: str) -> tuple[int, ...]:
    """Return the version of glibc that a platform needs; a plain linux tag may need any."""
    words = platform.split("_")
    return (int(words[1]), int(words[2])) if words[0] == "manylinux" else (sys.maxsize,)
