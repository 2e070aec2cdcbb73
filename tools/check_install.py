#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Install the wheels of a folder into empty environments, as a user would, and run each package's own tests there.

    python tools/check_install.py dist

Environments: gdn-core alone, gdn-core[cpu], gdn-core[cpu,cuda]. "Empty" means without anything of ours: torch and the
other third-party packages are borrowed from the Python that runs this, since installing torch thrice takes minutes.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("gdn_core", "gdn_cpu", "gdn_cuda", "gdn-", "_gdn", "__editable__")


def borrow_third_party(folder: Path) -> None:
    """Fill a folder with links to everything installed here but our own packages."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        # A .pth file runs code for the packages beside it, our editable ones too.
        if not path.name.startswith(OURS) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)


def make_environment(folder: Path, third_party: Path) -> Path:
    """Make an environment that sees the borrowed packages, and return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(f"{third_party}\n")
    return folder / "bin" / "python"


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command that has to succeed, away from the checkout and without its settings."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GDN_", "PYTHON", "PIP_"))}
    subprocess.run(command, cwd=cwd, env=env, check=True)


def check(extras: str, packages: list[str], dist: Path, version: str, scratch: Path) -> None:
    """Install gdn-core with some extras from `dist` alone, and run the smoke tests of the packages it brings."""
    print(f"== gdn-core{extras}", flush=True)
    folder = scratch / f"env{extras.strip('[]').replace(',', '-')}"
    python = make_environment(folder, scratch / "third-party")
    options: list[str | Path] = ["--quiet", "--no-index", "--find-links", dist, "--no-compile"]
    run(python, "-m", "pip", "install", *options, f"gdn-core{extras}=={version}", cwd=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    run(python, "-m", "pip", "list", "--format=freeze", "--path", site_packages, cwd=folder)
    run(folder / "bin" / "gdn", "info", cwd=folder)
    tests: list[str | Path] = [ROOT / "packages" / package / "tests" for package in packages]
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *tests, cwd=folder)


def main() -> int:
    """Check each way to install."""
    parser = argparse.ArgumentParser(description="Install wheels into empty environments and test them there.")
    parser.add_argument("dist", type=Path)
    dist = parser.parse_args().dist.resolve()
    version = (ROOT / "VERSION").read_text().strip()
    with tempfile.TemporaryDirectory(prefix="gdn-install-") as name:
        scratch = Path(name)
        borrow_third_party(scratch / "third-party")
        try:
            check("", ["gdn-core"], dist, version, scratch)
            check("[cpu]", ["gdn-core", "gdn-cpu"], dist, version, scratch)
            check("[cpu,cuda]", ["gdn-core", "gdn-cpu", "gdn-cuda"], dist, version, scratch)
        except subprocess.CalledProcessError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
