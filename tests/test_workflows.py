# SPDX-License-Identifier: Apache-2.0
"""tools/check_workflows.py: the workflows pass, and each kind of fault planted in a copy of them is found."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("zizmor and cibuildwheel need Python 3.11", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import check_workflows as check  # noqa: E402

CHECKOUT = re.compile(r"actions/checkout@\w{40} # v\S+")


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(ROOT / ".github", tmp_path / ".github"))


def plant(file, old, new, count=1):
    text = file.read_text()
    planted = old.sub(new, text, count) if isinstance(old, re.Pattern) else text.replace(old, new, count)
    assert planted != text, "the fault is out of date"
    file.write_text(planted)


def own_findings(folder):
    """What is found without running other linters."""
    paths = [*check.workflows(folder), *check.actions(folder)]
    return [problem for path in paths for problem in (*check.check_pins(path, folder), *check.check_commands(path))]


def job_findings(folder):
    """What is found in jobs, and between them."""
    jobs = [
        problem for path in (*check.workflows(folder), *check.actions(folder)) for problem in check.check_jobs(path)
    ]
    return [*jobs, *check.check_artifacts(folder), *check.check_publishing(folder)]


def test_the_workflows_pass():
    assert job_findings(ROOT / ".github") == []
    assert own_findings(ROOT / ".github") == []
    assert [*check.check_versions(ROOT / ".github"), *check.check_cuda(ROOT / ".github")] == []


def test_every_workflow_has_commands_of_ours():
    found = {}
    for path in check.workflows(ROOT / ".github"):
        scripts = [(step.step.get("run", ""), step.environments[0]) for step in check.steps(path)]
        found[path.stem] = [words for script, environment in scripts for words in check.commands(script, environment)]
    for words in found.values():
        assert any(word.startswith("tools/") for command in words for word in command)


@pytest.mark.parametrize("reference", ["v6", "main", "de0fac2", "de0fac2e4500dabe0009e67214ff5f5447ce83d"])
def test_an_action_that_is_not_pinned(copy, reference):
    plant(copy / "workflows" / "wheels.yml", CHECKOUT, f"actions/checkout@{reference}")
    (problem,) = own_findings(copy)
    assert problem == f"wheels.yml: sources: step 1: actions/checkout@{reference} is not pinned by the hash of a commit"


def test_an_action_that_is_not_pinned_inside_a_composite_action(copy):
    plant(copy / "actions" / "tools" / "action.yml", re.compile(r"setup-python@\w{40} # v\S+"), "setup-python@v6")
    assert [problem.split(":")[0] for problem in own_findings(copy)] == ["action.yml"]


def test_an_image_that_is_not_pinned(copy):
    plant(copy / "workflows" / "ci.yml", re.compile(r"debian:12@sha256:\w+"), "debian:12")
    assert own_findings(copy) == ["ci.yml: emulated: the image debian:12 is not pinned by digest"]


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("python3 tools/check_everything.py", "there is no tools/check_everything.py"),
        ("python3 tools/dev.py tset", "invalid choice: 'tset'"),
        ("python3 tools/dev.py test --fulll", "pytest has no option --fulll"),
        ("python3 tools/dev.py build --fast", "unrecognized arguments: --fast"),
        ("python3 tools/dev.py test --arch riscv", "invalid choice: 'riscv'"),
        ("python3 tools/dev.py test tests/test_nothing.py", "there is no tests/test_nothing.py"),
        ("python3 tools/check_version.py --label v1", "check_version.py has no option --label"),
        (".ci/walk", "there is no .ci/walk"),
        ("actionlint", "actionlint is not among the pinned tools"),
        (".venv/bin/nox", "nox is not among the pinned tools"),
        (".venv/bin/cibuildwheel --output wheelhouse", "cibuildwheel has no option --output"),
        ("python3 -m nothing_of_this_name --all", "nothing_of_this_name does not run"),
        ("python3 -m pip wheel --without-deps .", "-m pip wheel has no option --without-deps"),
        ("python3 tools/dev.py setup && { actionlint; }", "actionlint is not among"),
        ('python3 tools/dev.py test -k "$(actionlint)"', "actionlint is not among"),
        ("sudo actionlint", "actionlint is not among"),
        ("python3 tools/dev.py test -k ${{ matrix.machine }}", "an expression in a script"),
        ('python3 tools/dev.py test -k "cpu-$GDN_CPU_IS"', "nothing sets GDN_CPU_IS"),
        ("python3 tools/dev.py test -k '", "cannot be read"),
    ],
)
def test_a_command_that_does_not_exist(copy, command, complaint):
    plant(
        copy / "workflows" / "ci.yml",
        "      - run: python3 tools/dev.py sanitize\n",
        f"      - run: >-\n          {command}\n",
    )
    (problem,) = own_findings(copy)
    assert problem.startswith("ci.yml: sanitizers: step 3: ")
    assert complaint in problem


# Where CONTRIBUTING.md leaves a word to its reader.
PLACES = {"<machine>": "x86_v3", "<version>": "1.2.3", " [pytest options]": " -k name", " ...": ""}
DOCUMENT = (ROOT / "CONTRIBUTING.md").read_text()
SPANS = [
    span
    for span in re.findall(r"`([^`\n]+)`", DOCUMENT)
    if re.search(r"^\S*(python\S*|\.ci/run|/cibuildwheel)( |$)|=\S+ python", span)
]


@pytest.mark.parametrize("span", dict.fromkeys(SPANS))
def test_a_command_of_CONTRIBUTING_exists(span):
    for place, word in PLACES.items():
        span = span.replace(place, word)
    (words,) = check.commands(span, {})
    assert list(check.problems_of(words)) == []


def test_every_tool_explains_itself():
    for path in sorted((ROOT / "tools").glob("*.py")):
        if path.name in DOCUMENT and path.name != "mutant_list.py":
            assert "usage:" in (check.help_of((sys.executable, str(path))) or ""), path.name


def test_a_value_of_a_matrix_that_a_command_does_not_know(copy):
    plant(copy / "workflows" / "ci.yml", "sde_hsw", "sde_p4")
    (problem,) = own_findings(copy)
    assert problem.startswith("ci.yml: sde: step 3: ")
    assert "invalid choice: 'sde_p4'" in problem


def test_matrices_are_what_github_makes_of_them():
    matrix = {"a": ["1", "2"], "b": ["x"], "include": [{"a": "1", "c": "only with 1"}, {"d": "everywhere"}, {"a": "3"}]}
    assert check.matrices({"strategy": {"matrix": matrix}}) == [
        {"a": "1", "b": "x", "c": "only with 1", "d": "everywhere"},
        {"a": "2", "b": "x", "d": "everywhere"},
        {"a": "3"},
    ]
    assert check.matrices({"strategy": {"matrix": {"include": [{"a": "1"}, {"a": "2"}]}}}) == [{"a": "1"}, {"a": "2"}]
    assert check.matrices({}) == [{}]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("$/.github/actions/gates", "$/.github/actions/gate", "there is no $/.github/actions/gate"),
        ("          folder: dist\n", "          folders: dist\n", "has no input folders"),
        ("          folder: dist\n", "          name: dist\n", "needs the input folder"),
        ("          path: dist\n", "          paths: dist\n", "is not known to have an input paths"),
    ],
)
def test_an_action_that_is_called_wrongly(copy, old, new, complaint):
    plant(copy / "workflows" / "wheels.yml", old, new)
    assert any(complaint in problem for problem in own_findings(copy))


def test_a_workflow_that_calls_one_that_does_not_exist(copy):
    (copy / "workflows" / "wheels.yml").unlink()
    assert own_findings(copy) == ["release.yml: files: there is no $/.github/workflows/wheels.yml"]


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("workflows/gpu.yml", "    runs-on:", "    runs_on:", "runs_on"),
        ("actions/gates/action.yml", "  using: composite\n", "", "using"),
        ("dependabot.yml", "interval: monthly", "interval: sometimes", "sometimes"),
        ("workflows/ci.yml", "          persist-credentials: false\n", "          fetch-depth: 1\n", "artipacked"),
        (
            "workflows/release.yml",
            "permissions:\n  contents: read\n",
            "permissions: write-all\n",
            "excessive-permissions",
        ),
        ("workflows/gpu.yml", "  pull_request:\n", "  pull_request_target:\n", "dangerous-triggers"),
    ],
)
def test_what_the_linters_find(copy, capfd, file, old, new, words):
    plant(copy / file, old, new)
    assert list(check.check_with_tools(copy))
    assert words in capfd.readouterr().err


def test_the_linters_find_nothing_else(copy):
    assert list(check.check_with_tools(copy)) == []


@pytest.mark.parametrize("package", check.WHEELS)
def test_a_release_has_the_wheels_that_it_should(package):
    assert list(check.check_wheels(ROOT / "packages" / package)) == []


@pytest.mark.parametrize(
    ("package", "old", "new", "complaint"),
    [
        ("gdn-cpu", '"cp310-manylinux_*", ', "", "builds cp314-manylinux_x86_64 for x86_64, expected cp310-manyl"),
        ("gdn-cpu", '"cp310-manylinux_*"', '"cp310-*"', "cp310-musllinux_x86_64"),
        ("gdn-cuda", "build = [", 'skip = ["*_aarch64"]\nbuild = [', "builds nothing for aarch64"),
        ("gdn-cuda", "repair-wheel-command", "repair-command", "'repair-command' not supported"),
        ("gdn-core", 'skip = "*"', 'skip = "cp31?-*"', "expected nothing"),
    ],
)
def test_other_wheels_than_a_release_has(tmp_path, package, old, new, complaint):
    folder = tmp_path / package
    folder.mkdir()
    shutil.copy(ROOT / "packages" / package / "pyproject.toml", folder)
    plant(folder / "pyproject.toml", old, new)
    assert complaint in "\n".join(check.check_wheels(folder))


@pytest.mark.parametrize(
    ("workflow", "old", "new", "where"),
    [("ci", 'torch: "2.6.0"', 'torch: "2.7.0"', "versions"), ("wheels", '"3.14"', '"3.13"', "together")],
)
def test_another_oldest_or_newest_version(copy, workflow, old, new, where):
    plant(copy / "workflows" / f"{workflow}.yml", old, new, count=-1)
    (problem,) = check.check_versions(copy)
    assert problem.startswith(f"{workflow}.yml: {where}: tests with Python and torch")


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        (
            "workflows/release.yml",
            "needs: version",
            "needs: versions",
            "files: needs versions, which is no job above it",
        ),
        (
            "workflows/ci.yml",
            "runs-on: ${{ matrix.runner }}",
            "runs-on: ${{ matrix.runer }}",
            "there is no runer in each",
        ),
        ("workflows/ci.yml", "ubuntu-24.04-arm", "ubuntu-24.4-arm", "check: runs on ubuntu-24.4-arm, expected"),
        (
            "workflows/gpu.yml",
            "[self-hosted, linux, x64, gpu]",
            "ubuntu-latest",
            "check: runs on ubuntu-latest, expected",
        ),
        ("workflows/ci.yml", "    timeout-minutes: 60\n", "", "check: has no timeout-minutes"),
        ("workflows/release.yml", "name: gdn-core-source", "name: gdn-core", "downloads gdn-core, and nothing uploads"),
        ("workflows/release.yml", "pattern: gdn-*", "pattern: wheel-*", "downloads wheel-*, and nothing uploads that"),
        (
            "workflows/wheels.yml",
            "}}-source\n          path: dist\n          if",
            "}}\n          path: dist\n          if",
            "-source, and nothing uploads",
        ),
        ("actions/gates/action.yml", "inputs.folder", "inputs.dir", "there is no input dir"),
        ("workflows/ci.yml", "  GDN_REQUIRE: cpu", "  TOKEN: ${{ secrets.PYPI }}", "uses a secret"),
        (
            "workflows/ci.yml",
            "permissions:\n  contents: read",
            "permissions:\n  contents: write",
            "expected the permissions",
        ),
        (
            "workflows/release.yml",
            "      attestations: write",
            "      packages: write",
            "attest: expected the permissions",
        ),
        ("workflows/release.yml", "needs: publish-backends", "needs: attest", "does not wait for publish-backends"),
        ("workflows/release.yml", "name: gdn-core-source", "name: gdn-cpu-source", "published last, expected gdn-core"),
        ("workflows/release.yml", "    environment: pypi\n", "", "publishes outside of the environment pypi"),
    ],
)
def test_a_job_that_only_github_would_refuse(copy, file, old, new, complaint):
    plant(copy / file, old, new)
    assert any(complaint in problem for problem in job_findings(copy))


def test_only_what_publishes_may_identify_itself_and_gdn_core_comes_last():
    jobs = check.load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    order = ["version", "files", "attest", "publish-backends", "publish-core"]
    assert list(jobs) == order
    assert [jobs[name].get("needs") for name in order] == [None, *order[:-1]]
    for path in check.workflows(ROOT / ".github"):
        document = check.load(path)
        assert document["permissions"] == {"contents": "read"}
        allowed = {name for name, job in document["jobs"].items() if "permissions" in job}
        assert allowed == ({"attest", "publish-backends", "publish-core"} if path.stem == "release" else set())


def test_another_version_of_cuda(copy):
    plant(copy / "workflows" / "ci.yml", "nvidia/cuda:12.9.1", "nvidia/cuda:13.0.1")
    assert list(check.check_cuda(copy)) == ["ci.yml: an image of CUDA 13.0, expected 12.9"]
