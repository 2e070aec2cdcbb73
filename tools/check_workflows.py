#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check what GitHub and cibuildwheel would run, without either: nothing here needs a network or a container.

    python tools/check_workflows.py

- workflows, composite actions and dependabot.yml follow their schemas (check-jsonschema) and zizmor's rules;
- actions and container images are pinned by hash; actions get the inputs that they have, and local ones exist;
- jobs need jobs that exist, run where we know the machine, end in time, and use values of their matrix; what is
  downloaded was uploaded, and only what attests and publishes may identify itself (workflow/jobs.py);
- the commands of every script exist, with the options given: each is asked for its --help;
- cibuildwheel would build exactly the wheels of a release, and all places agree on the versions of Python, torch and
  CUDA.
"""

import argparse
import contextlib
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import bashlex
import bashlex.ast
import bashlex.errors

from devkit.commands import parse
from workflow.jobs import check_artifacts, check_jobs, check_publishing
from workflow.reading import EXPRESSION, UNKNOWN, Node, actions, load, matrices, steps, workflows

ROOT = Path(__file__).resolve().parents[1]
TOOLS = Path(sys.executable).parent

# Python and torch that releases are tested with.
OLDEST, NEWEST = ("3.10", "2.6.0"), ("3.14", "2.13.0")
# By package: what cibuildwheel builds or, since a wheel with the stable ABI is built once, only tests.
_BOTH = tuple(f"cp{python.replace('.', '')}-manylinux_{{}}" for python, _ in (OLDEST, NEWEST))
WHEELS: Mapping[str, tuple[str, ...]] = {"gdn-core": (), "gdn-cpu": _BOTH, "gdn-cuda": _BOTH}
PROCESSORS = ("x86_64", "aarch64")

# A variable in a script, but for those that GitHub sets.
VARIABLE = re.compile(r"\$\{?(?!GITHUB_|RUNNER_)(\w+)")
# What a runner has without us. Commands that are not here have to be in this repository or among the pinned tools.
OF_THE_SYSTEM = {"apt-get", "cat", "["}
PYTHON = re.compile(r"(\S+/)?python(3(\.\d+)?)?")
PINNED_ACTION = re.compile(r"[\w.-]+(/[\w.-]+)+@[0-9a-f]{40}")
# The inputs that we give to actions of others: GitHub ignores any other word.
INPUTS = {
    "actions/attest-build-provenance": {"subject-path"},
    "actions/checkout": {"persist-credentials"},
    "actions/download-artifact": {"merge-multiple", "name", "path", "pattern"},
    "actions/setup-python": {"python-version"},
    "actions/upload-artifact": {"if-no-files-found", "name", "path"},
    "pypa/gh-action-pypi-publish": {"attestations"},
}
PINNED_IMAGE = re.compile(r"\S+@sha256:[0-9a-f]{64}")


# --- pins -------------------------------------------------------------------------------------------------------------


def check_pins(path: Path, folder: Path) -> Iterator[str]:
    """Say which actions and images of a file may change without it, and which local ones are called wrongly."""
    document = load(path)
    for name, job in document.get("jobs", {}).items():
        if "uses" in job:
            yield from (f"{path.name}: {name}: {problem}" for problem in _check_use(job, folder))
        container = job.get("container", "")
        image = container["image"] if isinstance(container, dict) else container
        if image and not PINNED_IMAGE.fullmatch(image):
            yield f"{path.name}: {name}: the image {image} is not pinned by digest"
    for where, step, _ in steps(path):
        if "uses" in step:
            yield from (f"{where}: {problem}" for problem in _check_use(step, folder))


def _check_use(user: Node, folder: Path) -> Iterator[str]:
    used = user["uses"]
    if not used.startswith(("$/", "./")):
        if not PINNED_ACTION.fullmatch(used):
            yield f"{used} is not pinned by the hash of a commit"
        name = used.partition("@")[0]
        for word in sorted(set(user.get("with", {})) - INPUTS.get(name, set())):
            yield f"{name} is not known to have an input {word}. If it has, add it to tools/check_workflows.py"
        return
    # As from the root of a repository, wherever the folder .github lies.
    target = folder / used[2:].removeprefix(".github/")
    if target.is_file():
        return
    if not (target / "action.yml").is_file():
        yield f"there is no {used}"
        return
    declared, given = load(target / "action.yml").get("inputs", {}), set(user.get("with", {}))
    required = {name for name, about in declared.items() if about.get("required")}
    yield from (f"{used} has no input {name}" for name in sorted(given - set(declared)))
    yield from (f"{used} needs the input {name}" for name in sorted(required - given))


# --- commands ---------------------------------------------------------------------------------------------------------


def check_commands(path: Path) -> Iterator[str]:
    """Say which commands of a file's scripts do not exist, or not with these options."""
    for where, step, environments in steps(path):
        script = step.get("run", "")
        if EXPRESSION.search(script):
            yield f"{where}: an expression in a script; pass its value by env"
            continue
        found: dict[str, None] = {}
        for environment in environments:
            unset = {name for name in VARIABLE.findall(script) if name not in environment}
            found.update((f"nothing sets {name}", None) for name in sorted(unset))
            try:
                for words in commands(script, environment):
                    found.update(dict.fromkeys(problems_of(words)))
            except bashlex.errors.ParsingError as error:
                found[f"cannot be read: {error}"] = None
        yield from (f"{where}: {problem}" for problem in found)


def commands(script: str, environment: Mapping[str, str]) -> list[list[str]]:
    """Return the words of each command in a script, with the variables that are known put in."""
    found: list[list[str]] = []

    class Visitor(bashlex.ast.nodevisitor):  # type: ignore[misc]
        def visitcommand(self, node: Any, parts: list[Any]) -> None:
            words = [expand(part.word, environment) for part in parts if part.kind == "word"]
            if words:
                found.append(words)

    for tree in bashlex.parse(script) if script.strip() else ():
        Visitor().visit(tree)
    return found


def expand(word: str, environment: Mapping[str, str]) -> str:
    """Put variables into a word, UNKNOWN where this file does not set them."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+|\?))", lambda match: environment.get(match[1] or match[2], UNKNOWN), word)


def problems_of(words: Sequence[str]) -> Iterator[str]:
    """Say what is wrong with a command."""
    name, *arguments = words
    if name == "sudo":
        yield from problems_of(arguments)
    elif PYTHON.fullmatch(name):
        yield from _problems_of_python(arguments)
    elif "/" in name and not name.startswith(".venv/"):
        if not (ROOT / name).is_file():
            yield f"there is no {name}"
    elif name not in OF_THE_SYSTEM:
        program = Path(name).name
        if shutil.which(program, path=str(TOOLS)) is None:
            yield f"{program} is not among the pinned tools"
        else:
            yield from _unknown_options((str(TOOLS / program),), arguments)
    for word in arguments:
        is_ours = re.match(r"(\.github|cmake|packages|tests|tools)/", word) and UNKNOWN not in word
        if is_ours and not (ROOT / word).exists():
            yield f"there is no {word}"


def _problems_of_python(arguments: Sequence[str]) -> Iterator[str]:
    target, *rest = arguments
    if target == "-m":
        module, *rest = rest
        yield from _unknown_options((sys.executable, "-m", module, *(rest[:1] if module == "pip" else ())), rest)
    elif target == "tools/dev.py":
        yield from _problems_of_dev(rest)
    elif (ROOT / target).is_file():  # another one was named already
        yield from _unknown_options((sys.executable, str(ROOT / target)), rest)


def _problems_of_dev(arguments: Sequence[str]) -> Iterator[str]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options, rest = parse(arguments)
    except SystemExit:
        yield f"tools/dev.py {' '.join(arguments)}: {said.getvalue().strip().splitlines()[-1]}"
        return
    if options.command == "test":
        yield from _unknown_options((sys.executable, "-m", "pytest"), rest)


def _unknown_options(program: tuple[str, ...], arguments: Sequence[str]) -> Iterator[str]:
    options = [word.split("=")[0] for word in arguments if re.match(r"--?\w", word)]
    text = help_of(program) if options else ""
    shown = " ".join(Path(part).name for part in program)
    if text is None:
        yield f"{shown} does not run"
        return
    for option in options:
        if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text):
            yield f"{shown} has no option {option}"


@cache
def help_of(program: tuple[str, ...]) -> str | None:
    """Return what a program says of its options, or None where it does not run."""
    result = subprocess.run([*program, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout if result.returncode == 0 else None


# --- what other programs find -----------------------------------------------------------------------------------------


def check_with_tools(folder: Path) -> Iterator[str]:
    """Say what check-jsonschema and zizmor find; their own words go to the terminal."""
    schemas = {"github-workflows": workflows(folder), "github-actions": actions(folder)}
    schemas["dependabot"] = list(folder.glob("dependabot.yml"))
    for schema, paths in schemas.items():
        if paths:
            yield from _run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, paths))
    yield from _run("zizmor", "--offline", "--no-progress", "--quiet", "--pedantic", str(folder))


def _run(tool: str, *arguments: str) -> Iterator[str]:
    result = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.stderr.write(result.stdout + result.stderr)
        yield f"{tool} failed, see above"


# --- releases ---------------------------------------------------------------------------------------------------------


def check_wheels(package: Path) -> Iterator[str]:
    """Say what cibuildwheel would build of a package other than a release has."""
    for processor in PROCESSORS:
        expected = [name.format(processor) for name in WHEELS[package.name]]
        command = [str(TOOLS / "cibuildwheel"), "--print-build-identifiers", "--allow-empty", "--platform", "linux"]
        command += ["--archs", processor, str(package)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=package.parent)
        if result.returncode != 0:
            yield f"{package.name}: cibuildwheel: {result.stderr.strip()}"
        elif result.stdout.split() != expected:
            yield (
                f"{package.name}: cibuildwheel builds {', '.join(result.stdout.split()) or 'nothing'} for {processor}, "
                f"expected {', '.join(expected) or 'nothing'}"
            )


def check_versions(folder: Path) -> Iterator[str]:
    """Say where other versions of Python and torch are tested than the oldest and the newest that gdn-core is for."""
    packages = ROOT / "packages"
    core = (packages / "gdn-core" / "pyproject.toml").read_text()
    for claim in (f'requires-python = ">={OLDEST[0]}"', f'"torch>={OLDEST[1].removesuffix(".0")}"'):
        if claim not in core:
            yield f"packages/gdn-core/pyproject.toml does not say {claim}"
    overrides = r'select = "cp3(\d+)-\*"\ntest-requires = \["pytest", "torch==([\d.]+)"\]'
    wheels = re.findall(overrides, (packages / "gdn-cpu" / "pyproject.toml").read_text())
    tested = {"packages/gdn-cpu/pyproject.toml": {(f"3.{minor}", torch) for minor, torch in wheels}}
    for path in workflows(folder):
        for name, job in load(path)["jobs"].items():
            pairs = {(row["python"], row["torch"]) for row in matrices(job) if {"python", "torch"} <= row.keys()}
            tested |= {f"{path.name}: {name}": pairs} if pairs else {}
    for where, pairs in tested.items():
        if pairs != {OLDEST, NEWEST}:
            yield f"{where}: tests with Python and torch {sorted(pairs)}, expected {[OLDEST, NEWEST]}"


def check_cuda(folder: Path) -> Iterator[str]:
    """Say where another version of CUDA than that of architectures.txt is named."""
    package = ROOT / "packages" / "gdn-cuda"
    (cuda,) = re.findall(r"^CUDA (\S+)$", (package / "architectures.txt").read_text(), re.MULTILINE)
    texts = {path: path.read_text() for path in (ROOT / "pyproject.toml", package / "pyproject.toml")}
    pins = {path: re.findall(r"nvidia-cuda-nvrtc-cu12==([\d.]+)", text) for path, text in texts.items()}
    for path, versions in pins.items():
        if len(versions) != 1 or not versions[0].startswith(f"{cuda}."):
            yield f"{path.relative_to(ROOT)}: expected one pin of NVRTC {cuda}, got {', '.join(versions) or 'none'}"
    if len(set(map(tuple, pins.values()))) != 1:
        yield "the pins of NVRTC in pyproject.toml and packages/gdn-cuda/pyproject.toml differ"
    for path in workflows(folder):
        for version in re.findall(r"nvidia/cuda:(\d+\.\d+)", path.read_text()):
            if version != cuda:
                yield f"{path.name}: an image of CUDA {version}, expected {cuda}"
    if f"CUDA {cuda} or newer" not in (package / "README.md").read_text():
        yield f"packages/gdn-cuda/README.md does not say that nvcc has to be of CUDA {cuda} or newer"


def problems(folder: Path) -> Iterator[str]:
    """Say everything that is wrong with a .github folder and with what it builds."""
    yield from check_with_tools(folder)
    for path in [*workflows(folder), *actions(folder)]:
        yield from check_pins(path, folder)
        yield from check_commands(path)
        yield from check_jobs(path)
    yield from check_artifacts(folder)
    yield from check_publishing(folder)
    for package in WHEELS:
        yield from check_wheels(ROOT / "packages" / package)
    yield from check_versions(folder)
    yield from check_cuda(folder)


def main() -> int:
    """Print every problem; return 1 when there is one."""
    argparse.ArgumentParser(description="Check what GitHub and cibuildwheel would run, without either.").parse_args()
    if sys.version_info < (3, 11):
        print("zizmor and cibuildwheel need Python 3.11: nothing was checked")
        return 0
    folder = ROOT / ".github"
    found = list(problems(folder))
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        count = sum(len(matrices(job)) for path in workflows(folder) for job in load(path)["jobs"].values())
        print(f"{len(workflows(folder))} workflows of {count} jobs, {len(actions(folder))} composite actions: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
