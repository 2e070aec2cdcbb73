#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put the figures of `gdn bench --json` into the tables of docs/benchmarks.md, and draw its picture.

python tools/benchmark_tables.py RESULTS.json ...

A table stands below a line that says what it shows:

    <!-- table: OP,... against CONTENDER,... [at LEVEL] -->

Against other libraries a row has the microseconds of both; against gdn's own other ways only how many times as long
those take. Of what several files have, the last one counts, and each is held against gdn in its own file.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
PEERS = ("vllm", "transformers")
THREADS = (1, 2)
_TABLE = re.compile(
    r"<!-- table: (?P<ops>[\w,]+) against (?P<contenders>[^>]*?)(?: at (?P<level>\w+))? -->\n+(?:\|.*\n)*\n*"
)
# Of the picture: these operations, at this number of value heads.
_DRAWN_OPS, _DRAWN_HEADS = ["decode", "spec", "replay", "prefill", "conv"], 32


class Missing(Exception):
    """A table of the document has no figures."""


Row = dict[str, Any]
# By threads and contender: its row, and that of gdn in the same run.
Pairs = dict[tuple[int, str], tuple[Row, Row]]
Case = tuple[str, str, int, str]  # level, op, value heads, label


@dataclass
class Figures:
    """Rows of results by case, in the order they were measured."""

    rows: dict[Case, Pairs] = field(default_factory=dict)

    def add(self, results: dict[str, Any]) -> None:
        """Take in what one run wrote."""
        level = results["system"]["backends"].get("cpu") or "reference"
        timed = [row for row in results["rows"] if row["timing"] is not None]
        own = {(row["threads"], case_of(level, row)): row for row in timed if row["contender"] == "gdn"}
        for row in timed:
            case = case_of(level, row)
            if row["contender"] != "gdn" and (row["threads"], case) in own:
                pair = row, own[row["threads"], case]
                self.rows.setdefault(case, {})[row["threads"], row["contender"]] = pair

    def cases(self, ops: list[str], level: str) -> list[tuple[Case, Pairs]]:
        """Return the rows of these operations: cases in the order measured, each with all its numbers of heads."""
        wanted = [item for item in self.rows.items() if item[0][0] == level and item[0][1] in ops]
        names = list(dict.fromkeys((op, label) for (_, op, _, label), _ in wanted))
        return sorted(wanted, key=lambda item: (names.index((item[0][1], item[0][3])), item[0][2]))

    def level(self, wanted: str | None) -> str:
        """Return the level that a table is of: the one it names, or that of the first results."""
        return wanted or next(iter(self.rows), ("",))[0]


def case_of(level: str, row: Row) -> Case:
    """Return what a row is a measurement of."""
    return level, row["op"], row["value_heads"], row["label"]


def microseconds(row: Row) -> str:
    """Return the median with three digits, and the mark that it deserves."""
    value = round(row["timing"]["median"] * 1e6, 2)
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}" + (" \\*" if row["void"] else " ~" if row["unsteady"] else "")


def times(row: Row) -> float:
    """Return how many times as long as gdn's own a contender's row takes: the median of the rounds."""
    return float(row["timing"]["times_first"])


def peer_table(figures: Figures, ops: list[str], contender: str, level: str) -> list[str]:
    """Return the rows of a table against another library."""
    header = ["operation", "value heads"]
    for threads in THREADS:
        header += [f"gdn, {_count(threads)}", "floor", contender, "times"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for (_, op, heads, label), pairs in figures.cases(ops, level):
        if not any((n, contender) in pairs for n in THREADS):
            continue
        cells = [f"{op} {label}", str(heads)]
        for threads in THREADS:
            if (threads, contender) not in pairs:
                cells += ["", "", "", ""]
            else:
                other, own = pairs[threads, contender]
                share = f"{own['floor'] / own['timing']['median']:.0%}" if own["floor"] else ""
                cells += [microseconds(own), share, microseconds(other), f"{times(other):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def own_table(figures: Figures, ops: list[str], contenders: list[str], level: str) -> list[str]:
    """Return the rows of a table against gdn's own other ways: how many times as long they take."""
    header = ["operation", "against", "value heads", *(_count(threads) for threads in THREADS)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for (_, op, heads, label), pairs in figures.cases(ops, level):
        for contender in contenders:
            found = [pairs.get((n, contender)) for n in THREADS]
            ratios = ["" if pair is None else f"{times(pair[0]):.2f}" for pair in found]
            if any(ratios):
                lines.append("| " + " | ".join([f"{op} {label}", contender, str(heads), *ratios]) + " |")
    return lines


def fill(document: str, figures: Figures) -> str:
    """Return the document with new tables."""

    def table(match: re.Match[str]) -> str:
        ops, contenders = match["ops"].split(","), match["contenders"].split(",")
        level = figures.level(match["level"])
        if contenders[0] in PEERS:
            lines = peer_table(figures, ops, contenders[0], level)
        else:
            lines = own_table(figures, ops, contenders, level)
        marker = match[0].split("\n")[0]
        if len(lines) == 2:
            raise Missing(f"{marker}: expected results of these operations, got none")
        return "\n".join([marker, "", *lines, "", ""])

    return _TABLE.sub(table, document).rstrip() + "\n"


def picture(figures: Figures) -> str:
    """Return an SVG: how many times as long vLLM takes, a pair of bars a case."""
    cases = [
        (f"{op} {label}", [(n, times(pairs[n, "vllm"][0])) for n in THREADS if (n, "vllm") in pairs])
        for (_, op, heads, label), pairs in figures.cases(_DRAWN_OPS, figures.level(None))
        if heads == _DRAWN_HEADS and (1, "vllm") in pairs
    ]
    left, unit, height, top = 170, 130, 26, 44
    most = max(ratio for _, ratios in cases for _, ratio in ratios)
    width = left + int(unit * (most + 0.5))
    bottom = top + height * len(cases)
    colours = dict(zip(THREADS, ("#4878a8", "#e0a040"), strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 10}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="How many times as long vLLM takes">',
        f'<rect width="{width}" height="{bottom + 10}" fill="#ffffff"/>',
    ]
    for i, threads in enumerate(THREADS):
        x = left + 110 * i
        parts.append(f'<rect x="{x}" y="6" width="10" height="10" fill="{colours[threads]}"/>')
        parts.append(f'<text x="{x + 15}" y="15">{_count(threads)}</text>')
    for tick in range(int(most) + 1):
        x, dash = left + unit * tick, "" if tick == 1 else ' stroke-dasharray="2 3"'
        parts.append(f'<line x1="{x}" y1="{top - 6}" x2="{x}" y2="{bottom}" stroke="#999999"{dash}/>')
        parts.append(f'<text x="{x}" y="{top - 10}" text-anchor="middle" fill="#666666">{tick}x</text>')
    for i, (name, ratios) in enumerate(cases):
        y = top + height * i
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{name}</text>')
        for j, (threads, ratio) in enumerate(ratios):
            bar = f'y="{y + 2 + 10 * j}" width="{unit * ratio:.0f}" height="9" fill="{colours[threads]}"'
            parts.append(f'<rect x="{left}" {bar}/>')
    return "\n".join([*parts, "</svg>", ""])


def _count(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def main() -> int:
    """Rewrite the tables and the picture; return 1 when a table has no figures."""
    parser = argparse.ArgumentParser(description="Put results of gdn bench into docs/benchmarks.md.")
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    figures = Figures()
    for path in parser.parse_args().results:
        figures.add(json.loads(path.read_text()))
    document = DOCS / "benchmarks.md"
    try:
        document.write_text(fill(document.read_text(), figures))
    except Missing as problem:
        print(problem, file=sys.stderr)
        return 1
    (DOCS / "benchmarks.svg").write_text(picture(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
