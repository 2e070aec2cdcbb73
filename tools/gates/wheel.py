# SPDX-License-Identifier: Apache-2.0
"""What a wheel is named, holds and installs."""

import base64
import csv
import hashlib
import re
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path, PurePosixPath

from gates.expected import LICENCE, MIB, PACKAGES, RELEASE_PLATFORM
from gates.library import library_problems, out_of_reach
from gates.metadata import entry_point_problems, metadata_problems
from gates.sources import sources

# Beside these an installer finds nothing that a package of ours has to say.
_INFO = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")


def wheel_problems(path: Path, *, is_release: bool) -> Iterator[str]:
    """Say what is wrong with a wheel."""
    name, version, tag = path.stem.split("-", 2)
    expected, platform = PACKAGES[name], tag.split("-")[-1]
    if not re.fullmatch(expected.tag, tag):
        yield f"tag: expected {expected.tag}, got {tag}. For a plain linux tag: auditwheel repair (tools/dev.py build)"
        return
    if is_release and platform != "any" and not platform.startswith(f"{RELEASE_PLATFORM}_"):
        yield f"tag: a release is for {RELEASE_PLATFORM}, got {platform}. Build it with cibuildwheel, in that image"
    if path.stat().st_size > expected.max_size:
        yield (
            f"size: expected at most {expected.max_size / MIB:.0f} MiB, got {path.stat().st_size / MIB:.1f} MiB. "
            "See what grew with unzip -lv; a limit that is too low is in tools/gates/expected.py"
        )
    with zipfile.ZipFile(path) as wheel:
        yield from _contents(wheel, name, version, tag)
        for library in _libraries(wheel):
            yield from (f"{library}: {problem}" for problem in library_problems(wheel.read(library), platform))


def wheel_note(path: Path) -> str:
    """Say where a wheel runs, and what of it a release's platform lacks."""
    platform = path.stem.split("-")[-1]
    with zipfile.ZipFile(path) as wheel:
        reasons = [out_of_reach(wheel.read(library), platform) for library in _libraries(wheel)]
    return "; ".join([platform, *filter(None, reasons)])


def _names(wheel: zipfile.ZipFile) -> list[str]:
    """Return the files by name. auditwheel adds entries for folders, which install nothing."""
    return [file for file in wheel.namelist() if not file.endswith("/")]


def _libraries(wheel: zipfile.ZipFile) -> list[str]:
    return [file for file in _names(wheel) if ".so" in PurePosixPath(file).suffixes]


def _contents(wheel: zipfile.ZipFile, name: str, version: str, tag: str) -> Iterator[str]:
    info = f"{name}-{version}.dist-info"
    names = set(_names(wheel))
    missing = [file for file in ("METADATA", "WHEEL", "RECORD") if f"{info}/{file}" not in names]
    if missing or len(names) != len(_names(wheel)):
        yield f"no {', '.join(missing) or 'single copy of each file'} in the wheel. Build it again"
        return
    texts = {file: wheel.read(file) for file in names if file.startswith(info)}
    if texts.get(f"{info}/licenses/LICENSE") != LICENCE:
        yield "licence: expected the repository's LICENSE. Name it in license-files, and keep the package's link to it"
    yield from _files(names, name, info)
    libraries, wanted = _libraries(wheel), [] if tag == "py3-none-any" else [f"{name}/_C.abi3.so"]
    if libraries != wanted:
        yield f"shared objects: expected {wanted}, got {libraries}. Mend CMakeLists.txt"
    about = Parser().parsestr(texts[f"{info}/WHEEL"].decode())
    if (tags := about.get_all("Tag", [])) != [tag]:
        yield f"tag: {', '.join(tags)} in the file WHEEL, {tag} in the name. Do not rename wheels: auditwheel repair"
    if about["Root-Is-Purelib"] != str(not wanted).lower():
        yield f"WHEEL: Root-Is-Purelib is {about['Root-Is-Purelib']}: it is true for gdn-core only (wheel.cmake)"
    yield from metadata_problems(texts[f"{info}/METADATA"].decode(), name, version)
    yield from entry_point_problems(texts.get(f"{info}/entry_points.txt", b"").decode(), name)
    yield from _record_problems(wheel, f"{info}/RECORD")


def _files(names: set[str], name: str, info: str) -> Iterator[str]:
    """Compare the files with the package's sources: every module and stub, and nothing that was left in its way."""
    wanted = {file.removeprefix("src/") for file in sources(name) if file.startswith("src/")}
    if f"{name}/py.typed" not in names:
        yield f"no {name}/py.typed, without which type checkers ignore the annotations. Add the empty file"
    for file in sorted(wanted - names):
        yield f"lacks {file}. Mend wheel.packages in pyproject.toml"
    strangers = {PurePosixPath(file).parts[0] for file in names} - {name, info}
    if strangers:
        yield f"installs outside of {name}: {', '.join(sorted(strangers))}. Mend wheel.packages in pyproject.toml"
    inside = {file for file in names if file.startswith(f"{name}/") and ".so" not in PurePosixPath(file).suffixes}
    inside |= {file for file in names if file.startswith(f"{info}/")} - {f"{info}/{file}" for file in _INFO}
    for file in sorted(inside - wanted):
        yield f"holds {file}, which is no source of the package. Remove it, or what the build left beside the sources"


def _record_problems(wheel: zipfile.ZipFile, path: str) -> Iterator[str]:
    """Compare RECORD with the files: indexes refuse a wheel in which they differ, and some installers do."""
    rows = {row[0]: row[1:] for row in csv.reader(wheel.read(path).decode().splitlines())}
    names = set(_names(wheel))
    for file in sorted(names ^ rows.keys()):
        yield f"RECORD: {file} is {'not listed' if file in names else 'listed and not there'}. Build the wheel again"
    for file in sorted(names & rows.keys() - {path}):
        content = wheel.read(file)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if rows[file] != [f"sha256={digest}", str(len(content))]:
            yield f"RECORD: {file} is not the file that was recorded. The wheel was changed afterwards: build it again"
