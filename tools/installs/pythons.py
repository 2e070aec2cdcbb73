# SPDX-License-Identifier: Apache-2.0
"""The other Pythons of this machine: one wheel has to serve all of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from installs.environment import Environment, expect
from installs.scenarios import Context

STAND_IN = Path(__file__).with_name("stand_in_torch.py")
OLDEST, NEWEST = 10, 14


def other_pythons(context: Context) -> None:
    """Other Pythons, with a stand-in for torch: the backends load and compute, and gdn-core's files compile."""
    missing = []
    for minor in range(OLDEST, NEWEST + 1):
        python = None if minor == sys.version_info.minor else _find(minor)
        if python is not None:
            _check(python, f"python3.{minor}", context)
        elif minor != sys.version_info.minor:
            missing.append(f"3.{minor}")
    if missing:
        print(f"    not on this machine: Python {', '.join(missing)}")


def _find(minor: int) -> Path | None:
    """Return a working Python 3.<minor>: from PATH, or where pyenv keeps its own."""
    name = f"python3.{minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(name)
    for path in [*([Path(on_path)] if on_path else []), *sorted(pyenv.glob(f"versions/3.{minor}.*/bin/{name}"))]:
        # pyenv also puts names into PATH behind which there is nothing.
        if subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return path
    return None


def _check(python: Path, name: str, context: Context) -> None:
    environment = Environment(context.scratch / name, context.dist)
    subprocess.run([python, "-m", "venv", "--without-pip", environment.folder], check=True)
    # By the pip that is here, for the other Python. Only nanobind-backend comes from an index.
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        environment.python,
        "install",
        "--quiet",
        "--no-compile",
    ]
    subprocess.run([*pip, "nanobind-backend"], check=True)
    packages = [f"{package}=={context.version}" for package in ("gdn-core", "gdn-cpu", "gdn-cuda")]
    subprocess.run([*pip, "--no-deps", "--no-index", "--find-links", context.dist, *packages], check=True)
    output = environment.run(environment.python, STAND_IN)
    expect(f"{name}: {output.strip()}", "kernels right at baseline" in output)
    environment.run(environment.python, "-m", "compileall", "-q", environment.site_packages / "gdn_core")
