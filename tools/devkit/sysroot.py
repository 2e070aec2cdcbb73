# SPDX-License-Identifier: Apache-2.0
"""Packages of another architecture or release of Debian, unpacked into a folder: nothing foreign on this machine.

apt runs with a state of its own, so that the machine's lists and its architecture stay as they are. Debian serves every
architecture from one archive; Ubuntu keeps Arm elsewhere and is not handled.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from devkit.console import Unavailable, check
from devkit.environment import PYTHON, installed_version

# The same versions as in .venv, and what these depend on.
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "rich", "nanobind-backend")
TEST_LIBRARIES = (
    *("pluggy", "iniconfig", "packaging", "pygments", "execnet"),
    *("sortedcontainers", "attrs", "markdown-it-py", "mdurl"),
)
# What the wheels of others are for.
GLIBC_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
SOURCES = (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d/debian.sources"))

_APT_CONFIG = """\
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
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


def make(folder: Path, packages: Sequence[str], architecture: str, release: str | None = None) -> None:
    """Fill `folder` once with packages and all that they depend on, of this machine's release or of another one."""
    done = folder / "complete"
    if done.exists():
        return
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))) or not any(map(_is_debian_archive, SOURCES)):
        raise Unavailable("its libraries come from Debian's archive, for which apt is not set up here.")
    work = folder.with_name("apt")
    for path in (folder, work):
        shutil.rmtree(path, ignore_errors=True)
    for archive in _download(work, packages, architecture, release):
        check(["dpkg-deb", "--extract", archive, folder])
    shutil.rmtree(work)
    done.touch()


def _download(work: Path, packages: Sequence[str], architecture: str, release: str | None) -> list[Path]:
    for part in ("state/lists/partial", "cache/archives/partial", "sources"):
        (work / part).mkdir(parents=True)
    (work / "status").touch()
    for path in filter(_is_debian_archive, SOURCES):
        text = path.read_text()
        (work / "sources" / path.name).write_text(text if release is None else _of_release(text, release))
    config = work / "apt.conf"
    user = "root" if os.geteuid() == 0 else ""  # not apt's own user, who may have no way to the folder
    config.write_text(_APT_CONFIG.format(folder=work, user=user, architecture=architecture))
    environment = {"APT_CONFIG": str(config)}
    check(["apt-get", "-qq", "update"], environment)
    check(["apt-get", "-qq", "-y", "--download-only", "install", *packages], environment)
    return sorted((work / "cache" / "archives").glob("*.deb"))


def _of_release(sources: str, release: str) -> str:
    """Return a file of sources with the archive itself, and not its updates, in another release."""
    entries = re.split(r"\n\s*\n", sources) if "URIs:" in sources else sources.splitlines()
    main = next(entry for entry in entries if re.search(r"debian/?\s", entry) and "security" not in entry)
    main = re.sub(r"(?m)^Suites:.*", f"Suites: {release}", main)
    return re.sub(r"^(deb (?:\[.*?\] )?\S+) \S+", rf"\1 {release}", main) + "\n"


def python(folder: Path) -> tuple[Path, str]:
    """Return the sysroot's interpreter and its version, as ``3.11``."""
    (interpreter,) = (path for path in (folder / "usr" / "bin").glob("python3.*") if path.suffix[1:].isdigit())
    return interpreter, interpreter.name.removeprefix("python")


def site_packages(folder: Path) -> Path:
    """Return where this Python finds installed packages."""
    return folder / "usr" / "local" / "lib" / python(folder)[0].name / "dist-packages"


def test_tools() -> list[str]:
    """Return what the tests need beside torch and the packages, as pip wants it."""
    return [*(f"{name}=={installed_version(name)}" for name in TEST_TOOLS), *TEST_LIBRARIES]


def pip_install(folder: Path, what: Sequence[str | Path], platforms: Sequence[str]) -> None:
    """Install wheels for these platforms for the sysroot's Python, without what they depend on."""
    version = python(folder)[1]
    command: list[str | Path] = [PYTHON, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile", "--upgrade"]
    command += ["--target", site_packages(folder), "--only-binary=:all:"]
    command += ["--python-version", version, "--implementation", "cp"]
    command += [f"--abi={abi}" for abi in (f"cp{version.replace('.', '')}", "abi3", "none")]
    command += [f"--platform={platform}" for platform in platforms]
    check([*command, *what])
