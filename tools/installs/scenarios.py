# SPDX-License-Identifier: Apache-2.0
"""What a user does with the packages, one function each: it raises Failure, or prints what it saw to be so."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from installs import older
from installs.environment import Environment, expect, make_environment

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Context:
    """The wheels, and where environments are made."""

    dist: Path
    version: str
    scratch: Path

    @property
    def third_party(self) -> Path:
        return self.scratch / "third-party"

    def environment(self, name: str) -> Environment:
        return make_environment(self.scratch / name, self.dist, self.third_party)

    def requirement(self, extras: str = "") -> str:
        return f"gdn-core{extras}=={self.version}"


# pytest's arguments for tests of tests/, which have a conftest.py.
_OF_THE_SUITE: tuple[str | Path, ...] = (f"--confcutdir={ROOT}", "-c", ROOT / "pyproject.toml")


def own_tests(*packages: str) -> list[Path]:
    """Return the tests that belong to packages."""
    return [ROOT / "packages" / package / "tests" for package in packages]


def across_backends() -> list[str | Path]:
    """Return pytest's arguments for a part of the tests that run every operation on every backend and level."""
    options: list[str | Path] = [*_OF_THE_SUITE, "-m", "not slow", "--one-in=16"]
    names = ("dispatch", "contract_values", "contract_slots", "convolution", "chunk", "speculative", "binding")
    return [*options, *(ROOT / "tests" / f"test_{name}.py" for name in names)]


def core_alone(context: Context) -> None:
    """gdn-core without a backend: the reference, and what would bring a backend."""
    environment = context.environment("core")
    environment.install(context.requirement())
    environment.test(*own_tests("gdn-core"))
    cpu = environment.info()["cpu"]
    expect("gdn info tells what brings the CPU backend", context.requirement("[cpu]") in (cpu["install"] or ""), cpu)


def cpu(context: Context) -> None:
    """gdn-core[cpu]; then the backend breaks, is put in place as gdn info says, and is removed."""
    environment = context.environment("cpu")
    environment.install(context.requirement())
    alone = environment.files()
    environment.install(context.requirement("[cpu]"))
    environment.test(*own_tests("gdn-core", "gdn-cpu"))
    _break_and_repair(environment)
    environment.pip("uninstall", "--quiet", "--yes", "gdn-cpu")
    left = environment.files() - alone
    expect("uninstalling gdn-cpu leaves nothing behind", not left, left)
    environment.test(*own_tests("gdn-core"))
    environment.pip("uninstall", "--quiet", "--yes", "gdn-core")
    ours = [path for path in environment.files() if "gdn" in path.as_posix()]
    expect("uninstalling gdn-core leaves nothing behind", not ours, ours)


def _break_and_repair(environment: Environment) -> None:
    module = environment.site_packages / "gdn_cpu" / "_C.abi3.so"
    module.write_bytes(module.read_bytes()[:100_000])
    info = environment.info()["cpu"]
    expect(f"gdn info: {info['reason']}", not info["available"] and "_C.abi3.so" in info["reason"], info)
    environment.test(*own_tests("gdn-core"))
    _follow(environment, info["install"])


def _follow(environment: Environment, advice: str) -> None:
    """Run the pip command that ``gdn info`` gives."""
    program, command, *arguments = advice.replace('"', "").split()
    expect(f"gdn info gives a command of pip: {advice}", (program, command) == ("pip", "install"), advice)
    environment.install(*arguments)
    info = environment.info()["cpu"]
    expect("after that command the CPU backend works", info["available"], info)


def cuda(context: Context) -> None:
    """gdn-core[cuda], where there may be no GPU."""
    environment = context.environment("cuda")
    environment.install(context.requirement("[cuda]"))
    environment.test(*own_tests("gdn-core", "gdn-cuda"))
    info = environment.info()["cuda"]
    expect("gdn-cuda runs or says what it needs", info["available"] or "libcuda" in info["reason"], info)


def together(context: Context) -> None:
    """Every package at once, and a part of the tests over all backends."""
    environment = context.environment("together")
    environment.install(context.requirement("[cpu,cuda]"))
    environment.test(*own_tests("gdn-core", "gdn-cpu", "gdn-cuda"))
    environment.test(*across_backends())


def libraries_of_others(context: Context) -> None:
    """The extras that want packages of others, with what an index has of them, and the signatures of those."""
    environment = context.environment("others")
    openblas = f"gdn-cpu[openblas]=={context.version}"
    environment.install("--no-deps", context.requirement(), openblas)
    environment.install_from_index(context.requirement("[triton,transformers]"), openblas)
    versions = json.loads(environment.run(environment.python, "-c", _VERSIONS))
    expect(f"the extras brought {', '.join(f'{name} {version}' for name, version in versions.items())}", True)
    environment.test(*own_tests("gdn-core", "gdn-cpu"))
    triton = environment.info()["triton"]
    is_complete = triton["available"] or triton["install"] is None
    expect(f"the backend triton wants no package more: {triton['reason'] or 'available'}", is_complete, triton)
    environment.test(*_OF_THE_SUITE, ROOT / "tests" / "test_triton_libraries.py", "-k", "signatures and fla")


def upgrade(context: Context) -> None:
    """An older version of all packages; gdn-core is upgraded alone, and then the backends as gdn info says."""
    old = context.scratch / "older"
    older.make_older(context.dist, context.version, old)
    environment = context.environment("upgrade")
    environment.install(f"gdn-core[cpu,cuda]=={older.VERSION}", source=old)
    info = environment.info()["cpu"]
    expect(f"version {older.VERSION} works", info["available"] and info["version"] == older.VERSION, info)
    environment.install("--upgrade", context.requirement())
    info = environment.info()["cpu"]
    both = older.VERSION in (info["reason"] or "") and context.version in (info["reason"] or "")
    expect(f"gdn info says of the older backend: {info['reason']}", not info["available"] and both, info)
    environment.test(*own_tests("gdn-core"), "-k", "test_an_op_runs")
    _follow(environment, info["install"])
    environment.install("--upgrade", context.requirement("[cpu,cuda]"))
    left = [path for path in environment.files() if older.VERSION in path.as_posix()]
    expect(f"no file of {older.VERSION} is left", not left, left)


def excluded_platforms(context: Context) -> None:
    """Systems for which there are no backends: the extras bring gdn-core alone, and gdn info says why."""
    for system, machine in (("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "ppc64le")):
        environment = context.environment(f"on-{system}-{machine}")
        elsewhere = (system, machine, "install", "--quiet", "--no-compile", "--no-index", "--find-links", context.dist)
        environment.run(environment.python, "-c", _PIP_ELSEWHERE, *elsewhere, context.requirement("[cpu,cuda,triton]"))
        names = [path.name for path in environment.site_packages.glob("*.dist-info")]
        expect(
            f"{system} {machine}: gdn-core is installed alone",
            names == [f"gdn_core-{context.version}.dist-info"],
            names,
        )
        output = environment.run(environment.python, "-c", _INFO_ELSEWHERE, system, machine)
        cpu = next(backend for backend in json.loads(output)["backends"] if backend["name"] == "cpu")
        why = cpu["reason"].endswith(f"this is {system} {machine}") and cpu["install"] is None
        expect(f"gdn info: {cpu['reason']}", why, cpu)


# pip, with conditions as they are evaluated on another system.
_PIP_ELSEWHERE = """
import sys
from pip._vendor.packaging import markers
here = markers.default_environment()
markers.default_environment = lambda: here | {"platform_system": sys.argv[1], "platform_machine": sys.argv[2]}
from pip._internal.cli.main import main
sys.exit(main(sys.argv[3:]))
"""

# torch is loaded first: it looks for the libraries of the system that it is told.
_INFO_ELSEWHERE = """
import platform, sys
import torch
platform.system, platform.machine = lambda: sys.argv[1], lambda: sys.argv[2]
from gdn_core.cli import main
main(["info", "--json"])
"""

_VERSIONS = """
import importlib.metadata, json
names = ("triton", "fla-core", "transformers", "scipy-openblas32")
print(json.dumps({name: importlib.metadata.version(name) for name in names}))
"""

SCENARIOS: tuple[Callable[[Context], None], ...] = (
    core_alone,
    cpu,
    cuda,
    together,
    libraries_of_others,
    upgrade,
    excluded_platforms,
)
