# SPDX-License-Identifier: Apache-2.0
"""Programs of the operating system that a command needs: found, installed where that is allowed, or asked for."""

import os
import shutil
from collections.abc import Mapping

from devkit.console import Unavailable, run, say


def need(programs: Mapping[str, str], what_for: str) -> None:
    """Have these programs (name: the package of Debian and Ubuntu that holds it), or raise Unavailable."""
    packages = sorted({package for program, package in programs.items() if not shutil.which(program)})
    if not packages:
        return
    if not (os.geteuid() == 0 and shutil.which("apt-get") and _apt_install(packages)):
        missing = ", ".join(program for program in programs if not shutil.which(program))
        raise Unavailable(f"{what_for} needs {missing}.", f"Debian, Ubuntu: apt install {' '.join(packages)}")


def _apt_install(packages: list[str]) -> bool:
    say(f"installing {', '.join(packages)} with apt")
    run(["apt-get", "-qq", "update"])
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    return run(["apt-get", "-qq", "install", "-y", "--no-install-recommends", *packages], quiet) == 0
