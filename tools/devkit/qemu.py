# SPDX-License-Identifier: Apache-2.0
"""A Python that runs on an emulated processor: a script in a file named python, which qemu's user mode is behind.

Tests that start `sys.executable` again start that script, and so stay on the emulated processor.
"""

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from devkit import system
from devkit.environment import PYTHON, VENV


def need(architecture: str) -> None:
    """Have qemu's user mode for an architecture."""
    system.need({f"qemu-{architecture}-static": "qemu-user-static"}, f"emulating {architecture}")


def write_python(folder: Path, architecture: str, cpu: str, interpreter: Path, environment: Mapping[str, str]) -> Path:
    """Write the script that runs `interpreter` on the processor `cpu` as ``bin/python``, and return it."""
    script = folder / "bin" / "python"
    script.parent.mkdir(parents=True, exist_ok=True)
    settings = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    # -0: what Python takes for its own name, and so for sys.executable.
    command = f'exec qemu-{architecture}-static -cpu {cpu} -0 "$0" {shlex.quote(str(interpreter))} "$@"\n'
    script.write_text(f"#!/bin/sh\n{settings}{command}")
    script.chmod(0o755)
    return script


def python_of_this_architecture(folder: Path, cpu: str) -> Path:
    """Return a Python with the packages of .venv on another processor of the same architecture."""
    need("x86_64")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # A virtual environment is a folder with pyvenv.cfg: this one has the libraries of the other.
    shutil.copy(VENV / "pyvenv.cfg", folder)
    (folder / "lib").symlink_to(VENV / "lib")
    return write_python(folder, "x86_64", cpu, Path(os.path.realpath(PYTHON)), {})
