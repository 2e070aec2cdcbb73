# SPDX-License-Identifier: Apache-2.0
"""The system libraries and the Python of 64-bit Arm, unpacked into a folder: no foreign packages on this machine.

apt runs with a state of its own, so that the machine's lists and its architecture stay as they are. Debian serves every
architecture from one archive; Ubuntu keeps Arm elsewhere and is not handled.
"""

import os
import shutil
from pathlib import Path

from devkit.console import Unavailable, check, say

PACKAGES = ("python3", "libpython3-dev", "libstdc++6", "libgomp1")
SOURCES = (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d/debian.sources"))

_APT_CONFIG = """\
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "{user}";
Acquire::Languages "none";
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "{folder}/sources";
"""


def _is_debian_archive(path: Path) -> bool:
    return path.exists() and "debian" in path.read_text() and "ubuntu" not in path.read_text()


def make(folder: Path, work: Path) -> None:
    """Fill `folder` once; `work` holds what apt needs and is removed afterwards."""
    done = folder / "complete"
    if done.exists():
        return
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))) or not any(map(_is_debian_archive, SOURCES)):
        raise Unavailable("the Arm libraries come from Debian's archive, for which apt is not set up here.")
    say(f"unpacking Arm libraries and Python into {folder} (about 30 MB to download)")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)
    for archive in _download(work):
        check(["dpkg-deb", "--extract", archive, folder])
    shutil.rmtree(work)
    done.touch()


def _download(work: Path) -> list[Path]:
    for part in ("state/lists/partial", "cache/archives/partial", "sources"):
        (work / part).mkdir(parents=True)
    (work / "status").touch()
    for path in filter(_is_debian_archive, SOURCES):
        shutil.copy(path, work / "sources")
    config = work / "apt.conf"
    user = "root" if os.geteuid() == 0 else ""  # not apt's own user, who may have no way to the folder
    config.write_text(_APT_CONFIG.format(folder=work, user=user))
    environment = {"APT_CONFIG": str(config)}
    check(["apt-get", "-qq", "update"], environment)
    check(["apt-get", "-qq", "-y", "--download-only", "install", *PACKAGES], environment)
    return sorted((work / "cache" / "archives").glob("*.deb"))


def python(folder: Path) -> tuple[Path, str]:
    """Return the sysroot's interpreter and its version, as ``3.11``."""
    (interpreter,) = (path for path in (folder / "usr" / "bin").glob("python3.*") if path.suffix[1:].isdigit())
    return interpreter, interpreter.name.removeprefix("python")


def site_packages(folder: Path) -> Path:
    """Return where this Python finds installed packages."""
    return folder / "usr" / "local" / "lib" / python(folder)[0].name / "dist-packages"
