# SPDX-License-Identifier: Apache-2.0
"""Messages, child processes and a table of stages."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Problem(Exception):
    """Something a person has to put right: what is wrong, and what to do next."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


class Unavailable(Problem):
    """What this machine cannot do through no fault of the checkout: a stage says so and goes on."""


def say(message: str) -> None:
    """Print one line of progress."""
    prefix = "\033[1mdev:\033[0m" if sys.stdout.isatty() else "dev:"
    print(prefix, message, flush=True)


def explain(problem: Problem) -> None:
    """Print a problem and its remedy to standard error."""
    sys.stdout.flush()
    print(f"dev: {problem.what}", file=sys.stderr)
    for line in problem.remedy.splitlines():
        print(f"     {line}", file=sys.stderr)


def run(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> int:
    """Run a command in the root of the checkout and return its exit status."""
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env={**os.environ, **(env or {})}, check=False
    ).returncode


def check(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
    """Run a command that has to succeed."""
    status = run(command, env)
    if status != 0:
        raise Problem(f"failed with status {status}: {' '.join(str(part) for part in command)}")


class Stages:
    """Runs named stages one after another, all of them even when one fails, and prints how long each took."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, float, str]] = []
        self.failed = False

    def run(self, name: str, stage: Callable[[], str | None]) -> None:
        """Run a stage. It raises Problem to fail, and may return a remark, such as why it was skipped."""
        say(f"== {name}")
        start = time.monotonic()
        try:
            result = stage() or "ok"
        except Unavailable as reason:
            explain(reason)
            result = f"skipped: {reason}"
        except Problem as problem:
            explain(problem)
            result = "FAILED"
            self.failed = True
        self._rows.append((name, time.monotonic() - start, result))

    def table(self) -> str:
        """Return the stages with their times."""
        width = max(len(name) for name, _, _ in self._rows)
        lines = [f"{name:<{width}}  {seconds:7.1f} s  {result}" for name, seconds, result in self._rows]
        total = sum(seconds for _, seconds, _ in self._rows)
        return "\n".join([*lines, f"{'total':<{width}}  {total:7.1f} s"])
