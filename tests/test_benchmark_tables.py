# SPDX-License-Identifier: Apache-2.0
"""tools/benchmark_tables.py puts what `gdn bench --json` wrote into tables: each figure in its row, none made up."""

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from benchmark_tables import DOCS, Figures, Missing, fill, picture


def row(
    contender: str, us: float, *, heads: int = 32, threads: int = 1, times: float = 1.0, **others: Any
) -> dict[str, Any]:
    case = {"op": "decode", "label": "B1 cold", "value_heads": heads, "threads": threads, "contender": contender}
    state = {"floor": 80e-6, "void": False, "unsteady": False}
    return {**case, **state, "timing": {"median": us * 1e-6, "times_first": times}, **others}


def figures(*rows: dict[str, Any], level: str = "x86_v4") -> Figures:
    found = Figures()
    found.add({"system": {"backends": {"cpu": level}}, "rows": list(rows)})
    return found


PEER = "<!-- table: decode against vllm -->\n"
OWN = "<!-- table: decode against V-first,separate -->\n"


def test_a_table_against_a_peer() -> None:
    measured = figures(
        row("gdn", 100),
        row("vllm", 250, times=2.47, void=True),
        row("gdn", 50.2, threads=2),
        row("vllm", 100.4, times=2.0, threads=2),
    )
    lines = fill(f"before\n{PEER}\n| of | the last time |\n\nafter\n", measured).splitlines()
    assert lines[0] == "before" and lines[-1] == "after"
    assert lines[5] == r"| decode B1 cold | 32 | 100 | 80% | 250 \* | 2.47 | 50.2 | 159% | 100 | 2.00 |"
    assert len(lines) == 8 and lines[6] == ""


def test_heads_of_a_case_stand_together_and_the_last_run_counts() -> None:
    first = figures(row("gdn", 10, heads=64), row("vllm", 20, heads=64), row("gdn", 10), row("vllm", 20))
    first.add({"system": {"backends": {"cpu": "x86_v4"}}, "rows": [row("gdn", 5.123), row("vllm", 20.5)]})
    rows = fill(PEER, first).splitlines()[4:]
    assert [line.split("|")[2].strip() for line in rows] == ["32", "64"]
    assert "| 5.12 |" in rows[0] and "| 20.5 |" in rows[0]


def test_a_ratio_is_of_one_run() -> None:
    measured = figures(row("gdn", 100), row("vllm", 250, times=2.5))
    second = [row("gdn", 200), row("transformers", 600, times=3.0)]
    measured.add({"system": {"backends": {"cpu": "x86_v4"}}, "rows": second})
    assert "| 100 | 80% | 250 | 2.50 |" in fill(PEER, measured)
    assert "| 200 | 40% | 600 | 3.00 |" in fill("<!-- table: decode against transformers -->\n", measured)


def test_a_table_against_our_own_other_ways() -> None:
    measured = figures(row("gdn", 100), row("V-first", 110, times=1.1), row("vllm", 1), row("V-first", 9, threads=2))
    assert fill(OWN, measured).splitlines()[-1] == "| decode B1 cold | V-first | 32 | 1.10 |  |"


def test_a_level_has_a_table_of_its_own() -> None:
    measured = figures(row("gdn", 100), row("vllm", 200))
    with pytest.raises(Missing, match="x86_v3"):
        fill("<!-- table: decode against vllm at x86_v3 -->\n", measured)
    measured.add({"system": {"backends": {"cpu": "x86_v3"}}, "rows": [row("gdn", 7), row("vllm", 77, times=11.0)]})
    assert "| 11.00 |" in fill("<!-- table: decode against vllm at x86_v3 -->\n", measured)


def test_what_was_not_timed_is_no_row() -> None:
    with pytest.raises(Missing, match="decode against vllm"):
        fill(PEER, figures(row("gdn", 100), row("vllm", 1, timing=None)))


def test_the_picture_has_a_bar_a_thread_count() -> None:
    ours = row("gdn", 100), row("gdn", 50, threads=2)
    measured = figures(*ours, row("vllm", 250, times=2.5), row("vllm", 100, threads=2, times=2.0))
    bars = [e for e in ElementTree.fromstring(picture(measured)).iter() if e.get("height") == "9"]
    assert [bar.get("width") for bar in bars] == ["325", "260"]


def test_the_document_has_tables() -> None:
    document = (DOCS / "benchmarks.md").read_text()
    assert document.count("<!-- table: ") == document.count(" -->\n\n| operation |") > 0
