# SPDX-License-Identifier: Apache-2.0
"""Workflows and composite actions as GitHub reads them: their steps, and the combinations of a matrix."""

import itertools
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML

EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
UNKNOWN = "\0"  # in place of what only a run knows

Node = dict[str, Any]


class Step(NamedTuple):
    """One step, with what its script sees: the environment, by each combination of the job's matrix."""

    where: str
    step: Node
    environments: list[dict[str, str]]


def load(path: Path) -> Node:
    """Read a YAML file."""
    return _parsed(path.read_text())


@cache
def _parsed(text: str) -> Node:
    parsed: Node = YAML(typ="safe", pure=True).load(text)
    return parsed


def workflows(folder: Path) -> list[Path]:
    """Return the workflows of a .github folder."""
    return sorted((folder / "workflows").glob("*.y*ml"))


def actions(folder: Path) -> list[Path]:
    """Return its composite actions."""
    return sorted((folder / "actions").glob("*/action.y*ml"))


def steps(path: Path) -> Iterator[Step]:
    """Return every step of a workflow or a composite action."""
    document = load(path)
    jobs = document.get("jobs") or {"runs": document["runs"]}
    for name, job in jobs.items():
        for number, step in enumerate(job.get("steps", []), 1):
            environment = {**document.get("env", {}), **job.get("env", {}), **step.get("env", {})}
            environments = [
                {key: resolve(str(value), matrix) for key, value in environment.items()} for matrix in matrices(job)
            ]
            yield Step(f"{path.name}: {name}: step {number}", step, environments)


def matrices(job: Node) -> list[dict[str, str]]:
    """Return the combinations of a job's matrix; one, an empty one, where it has none."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    extra = [{key: str(value) for key, value in row.items()} for row in matrix.pop("include", [])]
    keys = list(matrix)
    combinations = [dict(zip(keys, map(str, row), strict=True)) for row in itertools.product(*matrix.values())]
    if not keys:
        return extra or [{}]
    # GitHub adds a row's new keys to each combination that it does not contradict, or makes one of it.
    alone = []
    for row in extra:
        fitting = [old for old in combinations if all(row.get(key, old[key]) == old[key] for key in keys)]
        for combination in fitting:
            combination.update(row)
        alone += [] if fitting else [row]
    return combinations + alone


def resolve(text: str, matrix: Mapping[str, str]) -> str:
    """Put values of the matrix into a text, and UNKNOWN in place of all other expressions."""
    return EXPRESSION.sub(lambda match: matrix.get(match[1].removeprefix("matrix."), UNKNOWN), text)
