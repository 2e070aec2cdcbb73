# SPDX-License-Identifier: Apache-2.0
"""Whether an sdist is complete: it has to build by itself, away from this repository."""

import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from gates.expected import LICENCE, MAX_SDIST_SIZE, MIB
from gates.metadata import metadata_problems
from gates.sources import sources

# A header by its path from some folder of the sdist, and a CMake module of ours.
_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_CMAKE_INCLUDE = re.compile(rb"^\s*include\((Gdn\w+)\)", re.MULTILINE)
# Made by the build.
_GENERATED = ("device_code_table.h",)


def sdist_problems(path: Path) -> Iterator[str]:
    """Say what is wrong with an sdist."""
    root = path.name.removesuffix(".tar.gz")
    name, version = root.split("-")
    if path.stat().st_size > MAX_SDIST_SIZE:
        yield (
            f"size: expected at most {MAX_SDIST_SIZE / MIB:.0f} MiB, got {path.stat().st_size / MIB:.1f} MiB. "
            "See what grew with tar -tvzf; a limit that is too low is in tools/gates/expected.py"
        )
    files = {}
    with tarfile.open(path) as sdist:
        for member in sdist.getmembers():
            file = member.name.removeprefix(f"{root}/")
            if member.name != root and file == member.name:
                yield f"{file} lies outside of {root}. Build it again, with python -m build"
            elif member.isfile():
                content = sdist.extractfile(member)
                files[file] = content.read() if content else b""
            elif not member.isdir():
                yield f"{file} is a link, to nothing outside of the repository. sdist.resolve-symlinks has to be all"
    wanted = sources(name)
    for file in sorted(wanted - files.keys()):
        yield f"lacks {file}. Keep the package's link to it, and list it in sdist.include of pyproject.toml"
    for file in sorted(files.keys() - wanted - {"PKG-INFO"}):
        yield f"holds {file}, which is no source of the package. Build in a folder that .gitignore names"
    if files.get("LICENSE") != LICENCE:
        yield "licence: expected the repository's LICENSE. Keep the package's link to it, and list it in sdist.include"
    if (inside := files.get("VERSION", b"").decode().strip()) != version:
        yield f"VERSION: expected {version}, as in the sdist's name, got {inside}. Build it again"
    yield from _missing_includes(files)
    yield from metadata_problems(files.get("PKG-INFO", b"").decode(), name, version)


def _missing_includes(files: Mapping[str, bytes]) -> Iterator[str]:
    for file, content in files.items():
        wanted = [match.decode() for match in _INCLUDE.findall(content) if match.decode() not in _GENERATED]
        if file.endswith(("CMakeLists.txt", ".cmake")):
            wanted += [f"{match.decode()}.cmake" for match in _CMAKE_INCLUDE.findall(content)]
        for path in wanted:
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
            if beside not in files and not any(other.endswith(f"/{path}") for other in files):
                yield f"lacks {path}, which {file} includes. Put it where the package's links lead (cmake/, csrc/)"
