# SPDX-License-Identifier: Apache-2.0
"""Every field report is either covered by a test or still to come, as the list says."""

import ast
from pathlib import Path

import pytest

from field_reports import REPORTS, TO_COME


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
def test_a_report_is_covered_or_still_to_come(report):
    state, places = REPORTS[report].state, MARKED.get(report, [])
    assert state in ("tested", TO_COME)
    if state == TO_COME:
        assert not places, f"{report} is listed as to come, but {places[0]} covers it"
    else:
        assert places, f"{report} ({REPORTS[report].kind}) has no test and is not listed as to come"


def test_every_marker_names_a_report():
    assert not {report: places for report, places in MARKED.items() if report not in REPORTS}


def test_only_reports_of_absent_operations_are_to_come():
    """What concerns an operation, the packages or the dispatcher that exist is tested."""
    assert {report for report, entry in REPORTS.items() if entry.state == TO_COME} == {"D11"}


def test_the_list_is_in_order():
    assert list(REPORTS) == sorted(REPORTS)
