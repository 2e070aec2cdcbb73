# SPDX-License-Identifier: Apache-2.0
"""Every field report is covered by a test."""

import ast
from pathlib import Path

import pytest

from field_reports import REPORTS


def marked():
    """Collect the ids in `pytest.mark.report(...)` of all test modules, from their source: no test needs to run."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "pytest.mark.report":
                continue
            assert not node.keywords, f"{path.name}:{node.lineno}: the marker takes ids only"
            for argument in node.args:
                assert isinstance(argument, ast.Constant), f"{path.name}:{node.lineno}: an id must be a literal"
                found.setdefault(argument.value, []).append(f"{path.name}:{node.lineno}")
    return found


MARKED = marked()


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_is_covered(report):
    assert MARKED.get(report), f"{report} ({REPORTS[report].kind}) has no test"


def test_every_marker_names_a_report():
    assert not {report: places for report, places in MARKED.items() if report not in REPORTS}


def test_the_list_is_in_order():
    assert list(REPORTS) == sorted(REPORTS)
