# SPDX-License-Identifier: Apache-2.0
"""Plant known faults in gdn_core, one at a time, and show that the tests catch each of them.

The reference is what every backend is compared with, so a fault that its tests let through would pass for the truth
everywhere. Coverage does not tell: a line can run without anything looking at its result. A planted fault does.

Usage: ``python tools/mutants.py [--list] [--only NAME...] [--jobs N]``. Exit status 0: every fault was caught.

To add a fault, append a `Mutant` to tools/mutant_list.py: a name, the file, a text that occurs exactly once in it, what
replaces it, and a `pytest -k` expression for the few tests that should fail (of another file than those of `SUITE`:
its name too). A fault is worth a line when somebody could make it and the code would still run; where `old` no longer
occurs, the run stops, so that the list keeps up with the code. A fault that survives even the whole of `SUITE` needs a
new test, in tests/test_reference_edges.py if nowhere else.

How it works: the package is copied, the text replaced in the copy, and a forked child, which has torch and pytest
already, imports gdn_core from there and runs the tests. Native backends are hidden from it, since these faults are the
reference's own.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "packages" / "gdn-core" / "src"
PACKAGE = "gdn_core"
SUITE = ("tests/test_reference.py", "tests/test_reference_edges.py")
HIDDEN = ("gdn_cpu", "gdn_cuda")
TIME_LIMIT = 600  # seconds for one child, many times what the whole suite takes
# What a slip in the fault's own text raises: that a test notices it says nothing about the test.
SLIPS = ("NameError", "UnboundLocalError", "AttributeError", "ImportError", "ModuleNotFoundError", "SyntaxError")

CAUGHT, SURVIVED, BROKEN = "caught", "survived", "broken"


class Job(NamedTuple):
    """One run of tests on one copy of the package; without a mutant, on the package as it is."""

    mutant: Mutant | None
    tests: tuple[str, ...] = SUITE  # arguments of pytest

    @property
    def name(self) -> str:
        return self.mutant.name if self.mutant is not None else "unchanged"

    @property
    def is_thorough(self) -> bool:
        return self.tests == SUITE


def named_tests(mutant: Mutant) -> tuple[str, ...]:
    """Return the arguments that make pytest run the tests that a mutant names."""
    return (*((f"tests/{mutant.within}",) if mutant.within else SUITE), "-k", mutant.tests)


class Verdict(NamedTuple):
    """What the tests said: `test` is the first that failed, `remark` what else a reader should know."""

    job: Job
    outcome: str
    test: str
    seconds: float
    remark: str = ""


# --- in the child -----------------------------------------------------------------------------------------------------


class CopyFinder:
    """Finds the package in the copy, and no native backend, before any finder of an editable install is asked."""

    def __init__(self, source: Path) -> None:
        self._source = str(source)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in HIDDEN:
            raise ModuleNotFoundError(f"{name} is hidden from these tests", name=name)
        if name == PACKAGE:
            return PathFinder.find_spec(name, [self._source])
        return PathFinder.find_spec(name, path) if name.startswith(f"{PACKAGE}.") else None


class FirstFailure:
    """A pytest plugin that remembers the first test that failed and how."""

    def __init__(self) -> None:
        self.test = self.error = ""
        self.is_in_test = False

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        if not self.test:
            self.test, self.error = node.nodeid, call.excinfo.typename
            self.is_in_test = getattr(report, "when", "collect") == "call"


def run_tests(source: Path, job: Job) -> tuple[str, str, str]:
    """Run the job's tests on the package below `source`; return the outcome, the first failure and a remark."""
    import pytest

    for name in [name for name in os.environ if name.startswith("GDN_")]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed here, and loading them takes half the time
    sys.meta_path.insert(0, CopyFinder(source))
    try:
        importlib.import_module(PACKAGE)
    except Exception as error:
        return BROKEN, "", f"{PACKAGE} does not import: {type(error).__name__}: {error}"

    failure = FirstFailure()
    status = pytest.main([*job.tests, "-x", "-q", "-p", "no:cacheprovider"], plugins=[failure])

    strangers = [name for name in sys.modules if name.split(".")[0] == PACKAGE and not is_below(source, name)]
    if strangers:
        return BROKEN, "", f"{strangers[0]} was not imported from the copy"
    if status == pytest.ExitCode.OK:
        return SURVIVED, "", ""
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        return BROKEN, "", "no test has a name that matches"
    if status != pytest.ExitCode.TESTS_FAILED or not failure.is_in_test:
        return BROKEN, failure.test, f"the tests did not run (pytest exit status {int(status)}): {failure.error}"
    if failure.error in SLIPS:
        return BROKEN, failure.test, f"the fault does not run: {failure.error}"
    return CAUGHT, failure.test, ""


def is_below(source: Path, module: str) -> bool:
    """Tell whether a loaded module comes from a file below `source`."""
    return Path(sys.modules[module].__file__ or "/").is_relative_to(source)


# --- in the parent ----------------------------------------------------------------------------------------------------


class Workshop:
    """Runs jobs in forked children, each on a copy of the package of its own."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._started: dict[int, tuple[Job, float]] = {}
        shutil.copytree(SOURCE, self._source("unchanged"))

    def _source(self, name: str) -> Path:
        return self._scratch / name / "src"

    def __len__(self) -> int:
        return len(self._started)

    def start(self, job: Job) -> None:
        """Fork a child that runs a job."""
        source = self._source(job.name)
        if not source.exists() and job.mutant is not None:
            # From the unchanged copy: others may be editing the checkout, and its bytecode is there already.
            shutil.copytree(self._source("unchanged"), source)
            path = source / PACKAGE / job.mutant.file
            path.write_text(plant(job.mutant, path.read_text()))
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            self._started[pid] = (job, time.monotonic())
            return
        status = 1
        try:
            signal.alarm(TIME_LIMIT)
            log = os.open(source.parent / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            (source.parent / "result.json").write_text(json.dumps(run_tests(source, job)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def wait(self) -> Verdict:
        """Wait for any child and return its verdict."""
        pid, status = os.wait()
        job, start = self._started.pop(pid)
        seconds = time.monotonic() - start
        folder = self._source(job.name).parent
        if status != 0:
            return Verdict(job, BROKEN, "", seconds, f"the tests ended with status {status}: {tail(folder / 'log')}")
        outcome, test, remark = json.loads((folder / "result.json").read_text())
        if outcome == BROKEN:
            remark += f"\n{tail(folder / 'log')}"
        return Verdict(job, outcome, test, seconds, remark)


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a child's output."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def plant(mutant: Mutant, text: str) -> str:
    """Return a file's text with the fault in it."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.name}: its text occurs {count} times in {mutant.file}, not once; adapt the mutant")
    return text.replace(mutant.old, mutant.new)


def stale(mutants: Sequence[Mutant]) -> list[str]:
    """Return what is wrong with the list: names used twice, texts that do not occur exactly once."""
    problems = [f"{name}: two mutants have this name" for name, n in Counter(m.name for m in mutants).items() if n > 1]
    for mutant in mutants:
        try:
            plant(mutant, (SOURCE / PACKAGE / mutant.file).read_text())
        except (OSError, ValueError) as error:
            problems.append(str(error))
    return problems


def check_unchanged(workshop: Workshop, mutants: Sequence[Mutant]) -> None:
    """Exit unless the tests pass without any fault: else they would seem to catch everything."""
    elsewhere = sorted({mutant.within for mutant in mutants if mutant.within})
    names = {file: " or ".join(sorted({m.tests for m in mutants if m.within == file})) for file in elsewhere}
    jobs = [Job(None), *(Job(None, (f"tests/{file}", "-k", names[file])) for file in elsewhere)]
    for job in jobs:
        workshop.start(job)
        verdict = workshop.wait()
        if verdict.outcome != SURVIVED:
            sys.exit(f"the tests fail without any fault: {verdict.test} {verdict.remark}")
        print(f"unchanged: {' '.join(job.tests)} ({verdict.seconds:.1f} s)", flush=True)


def plant_each(workshop: Workshop, mutants: Sequence[Mutant], jobs: int) -> list[Verdict]:
    """Run every mutant, first on the tests that it names, then, should it survive, on the whole suite."""
    queue = deque(Job(mutant, named_tests(mutant)) for mutant in mutants)
    verdicts: list[Verdict] = []
    while queue or len(workshop):
        while queue and len(workshop) < jobs:
            workshop.start(queue.popleft())
        verdict = workshop.wait()
        if verdict.outcome == SURVIVED and not verdict.job.is_thorough:
            queue.appendleft(Job(verdict.job.mutant))
            continue
        if verdict.outcome == CAUGHT and verdict.job.is_thorough:
            verdict = verdict._replace(remark="not by the tests it names")
        verdicts.append(verdict)
        print(f"[{len(verdicts):3}/{len(mutants)}] {verdict.outcome}: {verdict.job.name}", flush=True)
    return verdicts


def print_table(verdicts: Sequence[Verdict]) -> None:
    """Print each fault, where it was planted, the test that caught it and the time that took."""
    rows = [("fault", "file", "caught by", "s")]
    order = {mutant.name: number for number, mutant in enumerate(MUTANTS)}
    for verdict in sorted(verdicts, key=lambda verdict: order[verdict.job.name]):
        by = verdict.test.removeprefix("tests/") if verdict.outcome == CAUGHT else verdict.outcome.upper()
        by += f" ({verdict.remark.splitlines()[0]})" if verdict.remark else ""
        file = verdict.job.mutant.file if verdict.job.mutant is not None else ""
        rows.append((verdict.job.name, file, by, f"{verdict.seconds:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print()
    for name, file, by, seconds in rows:
        print(f"{name:<{widths[0]}}  {file:<{widths[1]}}  {seconds:>{widths[3]}}  {by}")


def report(verdicts: Sequence[Verdict]) -> int:
    """Print the table, what to do about the rest, and the counts; return the exit status."""
    print_table(verdicts)
    for verdict in verdicts:
        if verdict.outcome == BROKEN:
            print(f"\n{verdict.job.name}: {verdict.remark}")
        if verdict.outcome == SURVIVED:
            print(f"\n{verdict.job.name}: no test in {' or '.join(SUITE)} fails with this fault; add one that does")
    count = Counter(verdict.outcome for verdict in verdicts)
    broken = f", {count[BROKEN]} broken" if count[BROKEN] else ""
    print(f"\n{count[CAUGHT]} caught, {count[SURVIVED]} survived{broken}")
    return 0 if count[CAUGHT] == len(verdicts) else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plant known faults in gdn_core and show that the tests catch each.")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="plant these faults only")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="faults at a time (default 2)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.only or ()) - {mutant.name for mutant in MUTANTS})
    if unknown:
        parser.error(f"--only: no fault is called {', '.join(unknown)}; --list prints all")
    if options.jobs < 1:
        parser.error("--jobs: expected at least 1")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    options = parse(arguments)
    mutants = [mutant for mutant in MUTANTS if options.only is None or mutant.name in options.only]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:<40}  {mutant.file}")
        return 0
    problems = stale(MUTANTS)
    if problems:
        sys.exit("\n".join(problems))

    os.chdir(ROOT)
    # Once, here, for all children. One thread: the shapes are small, and a pool of threads would not survive the fork.
    for module in ("pytest", "torch", "torch._dynamo"):
        importlib.import_module(module)
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # what is loaded by now stays: the children need not look through it again
    with tempfile.TemporaryDirectory(prefix="gdn-mutants-") as scratch:
        workshop = Workshop(Path(scratch).resolve())
        check_unchanged(workshop, mutants)
        return report(plant_each(workshop, mutants, options.jobs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
