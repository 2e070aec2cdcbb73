# SPDX-License-Identifier: Apache-2.0
"""Environments without anything of ours, into which wheels of a folder are installed."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

OURS = ("gdn_core", "gdn_cpu", "gdn_cuda", "gdn-", "_gdn", "__editable__")


class Failure(Exception):
    """What went otherwise than it has to, and what was seen."""


@dataclass(frozen=True)
class Environment:
    """One environment, and the folder of wheels that it installs ours from."""

    folder: Path
    wheels: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @cached_property
    def site_packages(self) -> Path:
        (path,) = self.folder.glob("lib/python*/site-packages")
        return path

    def pip(self, *arguments: str | Path) -> None:
        """Run pip, which sees no index."""
        self.run(self.python, "-m", "pip", *arguments)

    def install(self, *requirements: str, source: Path | None = None) -> None:
        """Install from the wheels, or from those of another folder, alone."""
        self.pip(
            "install", "--quiet", "--no-compile", "--no-index", "--find-links", source or self.wheels, *requirements
        )

    def install_from_index(self, *requirements: str) -> None:
        """Install what requirements of ours want, from pip's index; ours are there already."""
        pip: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "install",
            "--quiet",
            "--no-compile",
        ]
        subprocess.run([*pip, *requirements], check=True)

    def info(self) -> dict[str, Any]:
        """Return what ``gdn info --json`` says of each backend."""
        backends = json.loads(self.run(self.folder / "bin" / "gdn", "info", "--json"))["backends"]
        return {backend["name"]: backend for backend in backends}

    def test(self, *arguments: str | Path) -> None:
        """Run pytest on tests of this checkout against what is installed."""
        output = self.run(
            self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={self.folder}", *arguments
        )
        print("    " + output.strip().splitlines()[-1], flush=True)

    def files(self) -> set[Path]:
        """Return every file that is installed, without compiled copies."""
        paths = (path.relative_to(self.folder) for path in self.folder.rglob("*") if not path.is_dir())
        return {path for path in paths if "__pycache__" not in path.parts}

    def run(self, *command: str | Path) -> str:
        """Run a command that has to succeed, away from the checkout and without its settings; return what it prints."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("GDN_", "PYTHON", "PIP_"))}
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        result = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise Failure(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
        return result.stdout


def expect(what: str, is_so: bool, seen: object = "") -> None:
    """Say that something is as it has to be, or raise Failure."""
    if not is_so:
        raise Failure(f"expected: {what}; seen: {seen}")
    print(f"    {what}", flush=True)


def borrow_third_party(folder: Path) -> None:
    """Fill a folder with links to everything installed here but our own packages."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        # A .pth file runs code for the packages beside it, our editable ones too.
        if not path.name.startswith(OURS) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)


def make_environment(folder: Path, wheels: Path, third_party: Path) -> Environment:
    """Make an environment that sees the borrowed packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    environment = Environment(folder, wheels)
    (environment.site_packages / "borrowed.pth").write_text(f"{third_party}\n")
    return environment
