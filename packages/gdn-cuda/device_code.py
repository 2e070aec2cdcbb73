# SPDX-License-Identifier: Apache-2.0
"""Compile gdn-cuda's kernels for GPUs, at build time, with nvcc or with NVRTC from PyPI. Needs no GPU.

    python device_code.py --which
    python device_code.py --arch 9.0a --include DIR [--include DIR] --output FILE [--ptx] KERNEL.cu

NVRTC, of the package nvidia-cuda-nvrtc-cu12, is taken where it is installed: code that CUDA 12 compiled loads with
drivers for CUDA 12 and 13. Else nvcc is, from PATH, CUDACXX or CUDA_HOME, whose code wants a driver as new as it is.
"""

import argparse
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

OPTIONS = ("-std=c++17", "-fmad=false")


class CompileError(Exception):
    """What a compiler said."""


class Nvcc:
    """nvcc, which needs a C++ compiler beside it."""

    def __init__(self, path: str) -> None:
        self.path = path
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        match = re.search(r"release (\d+)\.(\d+)", text)
        if match is None:
            raise CompileError(f"{path} does not tell its version")
        self.version = (int(match[1]), int(match[2]))
        self.name = "nvcc"

    def compile(self, source: Path, architecture: str, includes: Sequence[str], *, ptx: bool) -> bytes:
        output = Path(f"{source.stem}.{os.getpid()}.{architecture}")
        command = [self.path, *OPTIONS, "-O3", *(f"-I{path}" for path in includes), "-o", str(output)]
        command += ["-ptx" if ptx else "-cubin", f"-arch={_target(architecture, ptx=ptx)}", str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise CompileError(result.stdout + result.stderr)
        data = output.read_bytes()
        output.unlink()
        return data


class Nvrtc:
    """The compiler as a library. All strings of its interface are bytes."""

    def __init__(self, library: Path) -> None:
        # Its own second library lies beside it, and is looked for by name.
        for other in library.parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(other), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(library))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)
        self.name = "NVRTC"

    def _check(self, result: int) -> None:
        if result != 0:
            self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise CompileError(self.library.nvrtcGetErrorString(result).decode())

    def compile(self, source: Path, architecture: str, includes: Sequence[str], *, ptx: bool) -> bytes:
        program = ctypes.c_void_p()
        text = source.read_bytes()
        create = self.library.nvrtcCreateProgram
        self._check(create(ctypes.byref(program), text, str(source).encode(), 0, None, None))
        # A lambda inside of device code counts as host code by default.
        options = [*OPTIONS, "-default-device", f"-arch={_target(architecture, ptx=ptx)}"]
        options += [f"-I{path}" for path in (*includes, str(source.parent))]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if self.library.nvrtcCompileProgram(program, len(options), array) != 0:
            raise CompileError(self._bytes(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode())
        kind = "PTX" if ptx else "CUBIN"
        data = self._bytes(program, f"nvrtcGet{kind}Size", f"nvrtcGet{kind}")
        self._check(self.library.nvrtcDestroyProgram(ctypes.byref(program)))
        return data

    def _bytes(self, program: ctypes.c_void_p, size_function: str, function: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, size_function)(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, function)(program, buffer))
        return buffer.raw


def _target(architecture: str, *, ptx: bool) -> str:
    return ("compute_" if ptx else "sm_") + architecture.replace(".", "")


def _installed_nvrtc() -> Path | None:
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        return None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    found = [path for folder in folders for path in Path(folder, "lib").glob("libnvrtc.so.*")]
    return found[0] if found else None


def _installed_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    candidates = [os.environ.get("CUDACXX"), "nvcc", f"{home}/bin/nvcc" if home else None]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def find_compiler() -> Nvcc | Nvrtc | None:
    """Return the compiler to use, or None where there is none."""
    library = _installed_nvrtc()
    if library is not None:
        return Nvrtc(library)
    nvcc = _installed_nvcc()
    return Nvcc(nvcc) if nvcc is not None else None


def main() -> int:
    """Compile one file for one architecture, or say what would."""
    parser = argparse.ArgumentParser(description="Compile gdn-cuda's kernels for GPUs.")
    parser.add_argument("--which", action="store_true", help="print the compiler: its name, major and minor version")
    parser.add_argument("--arch", help="such as 9.0a")
    parser.add_argument("--include", action="append", default=[], metavar="DIR")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--ptx", action="store_true", help="PTX instead of machine code")
    parser.add_argument("source", nargs="?", type=Path)
    arguments = parser.parse_args()
    compiler = find_compiler()
    if arguments.which:
        print(f"{compiler.name};{compiler.version[0]};{compiler.version[1]}" if compiler else "")
        return 0
    if compiler is None:
        sys.exit("neither NVRTC nor nvcc was found")
    try:
        code = compiler.compile(arguments.source, arguments.arch, arguments.include, ptx=arguments.ptx)
    except CompileError as error:
        sys.exit(f"{arguments.source}, {arguments.arch}: {error}")
    arguments.output.write_bytes(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
