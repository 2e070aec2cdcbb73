# SPDX-License-Identifier: Apache-2.0
"""How the commands print: tables and JSON on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import CommandError

# In a log or a pipe there is no terminal to measure; rich's 80 columns would fold most tables.
_PIPE_WIDTH = 120


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr, wide enough for the tables when it is not a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False)


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Start a table: names in the first column, numbers, aligned to the right, in those that `right` lists.

    Where the terminal is narrow, text is folded: the names only where numbers need the space, and numbers never.
    """
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        if column in right or (column == columns[0] and not right):
            result.add_column(column, justify="right" if column in right else "left", no_wrap=True)
        else:
            result.add_column(column, overflow="fold")
    return result


def words(arguments: Sequence[str]) -> list[str]:
    """Split arguments at commas too: "a b,c" names three things."""
    return [word for argument in arguments for word in argument.split(",") if word]


def positive(text: str) -> int:
    """Parse the value of an option that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def count(number: int, noun: str) -> str:
    """Return "1 thread", "2 threads"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Steps:
    """Progress through a known number of steps: a bar on a terminal, a line per stage in a log."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task("", total=total)
        self._stage = ""

    def step(self, stage: str, detail: str = "") -> None:
        """Say what is about to run; the step before it is done."""
        if self._progress is not None and self._task is not None:
            text = f"{stage}: {detail}" if detail else stage
            self._progress.update(self._task, description=text, advance=int(bool(self._stage)))
        elif stage != self._stage:
            print(f"{stage} ...", file=sys.stderr, flush=True)
        self._stage = stage

    def detail(self, text: str) -> None:
        """Say what the current step is at."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=f"{self._stage}: {text}")


@contextmanager
def steps(total: int) -> Iterator[Steps]:
    """Show progress on stderr while the block runs."""
    if not sys.stderr.isatty():
        yield Steps(total, None)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        yield Steps(total, progress)


def check_json_path(path: str | None) -> None:
    """Refuse, before a long run, a file that could not be written after it."""
    if path not in (None, "-") and not Path(str(path)).absolute().parent.is_dir():
        raise CommandError(f"--json {path}: name a file in a directory that exists")


def write_json(path: str, value: Any) -> None:
    """Write `value` to the file `path`, or to stdout when it is "-"."""
    text = json.dumps(value, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise CommandError(f"--json {path}: {error.strerror}; name another file") from error


def console_for(json_path: str | None) -> Console:
    """Return where tables go: to stderr when JSON takes stdout."""
    return console(stderr=json_path == "-")
