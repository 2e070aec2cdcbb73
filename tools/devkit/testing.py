# SPDX-License-Identifier: Apache-2.0
"""Runs of the test suite, here or on an emulated machine."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from devkit.console import ROOT, run
from devkit.environment import PYTHON


def run_tests(
    arguments: Sequence[str], python: Path = PYTHON, env: Mapping[str, str] | None = None, name: str = "tests"
) -> int:
    """Run pytest with these arguments, print its counts in one line, and return its status."""
    report = ROOT / "build" / "reports" / f"{name}.xml"
    report.unlink(missing_ok=True)
    status = run([python, "-m", "pytest", f"--junitxml={report}", *arguments], env)
    if report.exists():
        print(_counts(report), flush=True)
    return status


def _counts(report: Path) -> str:
    """Return pytest's counts in one line, the skips among them: a green run must not hide what it left out."""
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for name in total:
            total[name] += int(suite.get(name, "0"))
    failed = total["failures"] + total["errors"]
    return f"tests: {total['tests'] - failed - total['skipped']} passed, {failed} failed, {total['skipped']} skipped"
