# SPDX-License-Identifier: Apache-2.0
"""What a wheel is named, holds and installs."""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from gates.expected import LICENCE, MIB, PACKAGES, RELEASE_PLATFORM
from gates.library import library_problems, out_of_reach
from gates.metadata import entry_point_problems, metadata_problems


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


def _libraries(wheel: zipfile.ZipFile) -> list[str]:
    return [file for file in wheel.namelist() if ".so" in PurePosixPath(file).suffixes]


def _contents(wheel: zipfile.ZipFile, name: str, version: str, tag: str) -> Iterator[str]:
    info = f"{name}-{version}.dist-info"
    texts = {file: wheel.read(file) for file in wheel.namelist() if file.startswith(info)}
    if texts.get(f"{info}/licenses/LICENSE") != LICENCE:
        yield "licence: expected the repository's LICENSE. Name it in license-files, and keep the package's link to it"
    if f"{name}/py.typed" not in wheel.namelist():
        yield f"no {name}/py.typed, without which type checkers ignore the annotations. Add the empty file"
    strangers = {PurePosixPath(file).parts[0] for file in wheel.namelist()} - {name, info}
    if strangers:
        yield f"installs outside of {name}: {', '.join(sorted(strangers))}. Mend wheel.packages in pyproject.toml"
    libraries, wanted = _libraries(wheel), [] if tag == "py3-none-any" else [f"{name}/_C.abi3.so"]
    if libraries != wanted:
        yield f"shared objects: expected {wanted}, got {libraries}. Mend CMakeLists.txt"
    tags = re.findall(r"^Tag: (\S+)", texts[f"{info}/WHEEL"].decode(), re.MULTILINE)
    if tags != [tag]:
        yield f"tag: {', '.join(tags)} in the file WHEEL, {tag} in the name. Do not rename wheels: auditwheel repair"
    yield from metadata_problems(texts[f"{info}/METADATA"].decode(), name, version)
    yield from entry_point_problems(texts.get(f"{info}/entry_points.txt", b"").decode(), name)
