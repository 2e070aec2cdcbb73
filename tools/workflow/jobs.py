# SPDX-License-Identifier: Apache-2.0
"""What only GitHub would notice about jobs, when it runs them: names that lead nowhere, and who may do what."""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from workflow.reading import Node, load, matrices, resolve, workflows

# Machines by their labels: each with a fixed system, so that a run can be repeated.
RUNNERS = ("ubuntu-24.04", "ubuntu-24.04-arm", ["self-hosted", "linux", "x64", "gpu"])
_MATRIX = re.compile(r"\bmatrix\.([\w-]+)")
_INPUT = re.compile(r"\binputs\.([\w-]+)")


def check_jobs(path: Path) -> Iterator[str]:
    """Say which names in a workflow or a composite action lead nowhere, and which jobs may run for hours."""
    document = load(path)
    text = json.dumps(document)
    declared = document.get("inputs", {}) | ((document.get("on") or {}).get("workflow_call") or {}).get("inputs", {})
    for name in sorted(set(_INPUT.findall(text)) - set(declared)):
        yield f"{path.name}: there is no input {name}"
    if "secrets." in text:
        yield f"{path.name}: uses a secret. Nothing here needs one: PyPI trusts the workflow itself"
    earlier: set[str] = set()
    for name, job in document.get("jobs", {}).items():
        yield from (f"{path.name}: {name}: {problem}" for problem in _check_job(job, earlier))
        earlier.add(name)


def _check_job(job: Node, earlier: set[str]) -> Iterator[str]:
    for other in _needs(job):
        if other not in earlier:
            yield f"needs {other}, which is no job above it"
    known = set.intersection(*(set(matrix) for matrix in matrices(job)))
    for key in sorted(set(_MATRIX.findall(json.dumps(job))) - known):
        yield f"there is no {key} in each combination of its matrix"
    if "uses" in job:
        return
    if "timeout-minutes" not in job:
        yield "has no timeout-minutes: GitHub would let it run for six hours"
    runs_on = job["runs-on"]
    machines = [resolve(runs_on, matrix) for matrix in matrices(job)] if isinstance(runs_on, str) else [runs_on]
    for machine in machines:
        if machine not in RUNNERS:
            yield f"runs on {machine}, expected one of {', '.join(map(str, RUNNERS))}"


def _needs(job: Node) -> list[str]:
    needs: str | list[str] = job.get("needs", [])
    return [needs] if isinstance(needs, str) else needs


def check_artifacts(folder: Path) -> Iterator[str]:
    """Say which artifacts are downloaded that neither the workflow nor one that it calls uploads."""
    for path in workflows(folder):
        jobs = load(path)["jobs"]
        called = [folder / job["uses"][2:].removeprefix(".github/") for job in jobs.values() if "uses" in job]
        uploads = {
            name
            for file in [path, *called]
            if file.is_file()
            for name in _artifacts(load(file)["jobs"], "upload-artifact")
        }
        for wanted in _artifacts(jobs, "download-artifact"):
            if not any(fnmatchcase(name, wanted) for name in uploads):
                yield f"{path.name}: downloads {wanted}, and nothing uploads that"


def _artifacts(jobs: Node, action: str) -> Iterator[str]:
    """Return the names or patterns that an action gets, in every combination of its job's matrix."""
    for job in jobs.values():
        for step in job.get("steps", []):
            if f"actions/{action}@" in step.get("uses", ""):
                given = step.get("with", {})
                yield from (resolve(given.get("name") or given.get("pattern"), matrix) for matrix in matrices(job))


def check_publishing(folder: Path) -> Iterator[str]:
    """Say which jobs may do more or less than they have to, and what is published after gdn-core."""
    for path in workflows(folder):
        document = load(path)
        jobs = document["jobs"]
        if document.get("permissions") != {"contents": "read"}:
            yield f"{path.name}: expected the permissions contents: read, and more in the jobs that need more"
        for name, job in jobs.items():
            if (given := job.get("permissions", {})) != (wanted := _permissions(job)):
                yield f"{path.name}: {name}: expected the permissions {wanted or 'of its workflow'}, got {given}"
            if _uses(job, "pypa/gh-action-pypi-publish") and job.get("environment") != "pypi":
                yield f"{path.name}: {name}: publishes outside of the environment pypi, which PyPI and GitHub ask for"
        publishing = [name for name, job in jobs.items() if _uses(job, "pypa/gh-action-pypi-publish")]
        if publishing and set(publishing[:-1]) - _before(publishing[-1], jobs):
            yield f"{path.name}: {publishing[-1]} does not wait for {', '.join(publishing[:-1])}"
        last = {name: jobs[name] for name in publishing[-1:]}
        for artifact in _artifacts(last, "download-artifact"):
            if not artifact.startswith("gdn-core-"):
                yield f"{path.name}: {artifact} is published last, expected gdn-core: its extras want the others"


def _permissions(job: Node) -> dict[str, str]:
    """Return what a job needs beyond its workflow's permission to read."""
    if _uses(job, "actions/attest-build-provenance"):
        return {"contents": "read", "id-token": "write", "attestations": "write"}
    return {"id-token": "write"} if _uses(job, "pypa/gh-action-pypi-publish") else {}


def _uses(job: Node, action: str) -> bool:
    return any(step.get("uses", "").startswith(f"{action}@") for step in job.get("steps", []))


def _before(name: str, jobs: Node) -> set[str]:
    """Return all jobs that a job waits for."""
    direct = [other for other in _needs(jobs[name]) if other in jobs]
    return set(direct).union(*(_before(other, jobs) for other in direct))
