# SPDX-License-Identifier: Apache-2.0
"""Sdists, and wheels made from them, with the tag that their symbols reach."""

from collections.abc import Mapping
from pathlib import Path

from devkit.console import ROOT, check
from devkit.environment import PYTHON, WITH_TOOLS


def make_sdist(package: str, folder: Path) -> Path:
    """Make the sdist of a package in `folder`, and return it."""
    check(
        [PYTHON, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT / "packages" / package],
        WITH_TOOLS,
    )
    (sdist,) = folder.glob(f"{package.replace('-', '_')}-*.tar.gz")
    return sdist


def make_wheel(sdist: Path, folder: Path, work: Path, env: Mapping[str, str] | None = None) -> Path:
    """Make a wheel from an sdist in `folder`, and return it; the objects stay in `work`/objects.

    Not in a manylinux image: auditwheel gives it the tag of the newest symbol that it uses, which is newer than what a
    release promises. check_wheel.py says by what.
    """
    built = work / "built"
    options: list[str | Path] = ["-qq", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", built]
    options.append(f"--config-settings=build-dir={work / 'objects'}")
    check([PYTHON, "-m", "pip", "wheel", *options, sdist], {**WITH_TOOLS, **(env or {})})
    (wheel,) = built.glob("*.whl")
    if wheel.stem.endswith("-any"):
        return wheel.replace(folder / wheel.name)
    repaired = work / "repaired"
    # Nothing is to be copied into it, and so nothing to be patched: check_wheel.py refuses what links more than glibc.
    repair = ["auditwheel", "repair", "--only-plat", "--patcher", "none", "--wheel-dir", str(repaired), str(wheel)]
    check(repair, WITH_TOOLS)
    (wheel,) = repaired.glob("*.whl")
    return wheel.replace(folder / wheel.name)
