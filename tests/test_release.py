# SPDX-License-Identifier: Apache-2.0
"""tools/release.py, in a clone of this checkout: what it makes, and what it refuses with everything as it was."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FILES = ("VERSION", "CHANGELOG.md", "tools/release.py", "tools/check_version.py")
SOMEBODY = {
    f"GIT_{role}_{what}": "somebody@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}

sys.path.insert(0, str(ROOT / "tools"))

import check_version  # noqa: E402
from release import close_section, next_version, order  # noqa: E402

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


class Clone:
    """A clone with this checkout's state of the files that a release is made of, committed."""

    def __init__(self, path):
        self.path = path
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(path)], check=True)
        # Where this checkout is on no branch, its clone is not either.
        self.git("switch", "--quiet", "--force-create", "work")
        for name in FILES:
            shutil.copy(ROOT / name, path / name)
        self.write("VERSION", "1.2.0\n")
        self.write(
            "CHANGELOG.md", "# Changelog\n\n## Unreleased\n\n- Something new.\n\n## 1.2.0 (2026-01-01)\n\n- Old.\n"
        )
        self.commit()

    def git(self, *arguments):
        command = ["git", "-C", str(self.path), *arguments]
        return subprocess.run(
            command, env=os.environ | SOMEBODY, capture_output=True, text=True, check=True
        ).stdout.strip()

    def write(self, name, text):
        (self.path / name).write_text(text)

    def read(self, name):
        return (self.path / name).read_text()

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "as it is")

    def state(self):
        return self.git("rev-parse", "HEAD"), self.git("tag"), self.git("status", "--porcelain"), self.read("VERSION")

    def release(self, version):
        command = [sys.executable, str(self.path / "tools" / "release.py"), version]
        return subprocess.run(command, env=os.environ | SOMEBODY, capture_output=True, text=True, check=False)


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path / "clone")


def test_a_release(clone):
    before = clone.git("rev-parse", "HEAD")
    done = clone.release("1.3.0rc1")
    assert done.returncode == 0, done.stderr
    assert clone.git("show", "v1.3.0rc1:VERSION") == "1.3.0rc1"
    today = datetime.date.today()
    changelog = (
        "# Changelog\n\n## Unreleased\n\n## 1.3.0rc1 ({})\n\n- Something new.\n\n## 1.2.0 (2026-01-01)\n\n- Old.\n"
    )
    assert clone.read("CHANGELOG.md") in {changelog.format(today), changelog.format(today - datetime.timedelta(days=1))}
    assert clone.git("rev-parse", "v1.3.0rc1~") == before
    assert clone.git("log", "-1", "--format=%s", "v1.3.0rc1") == "Release 1.3.0rc1"
    assert clone.git("diff", "--name-only", before, "v1.3.0rc1").split() == ["CHANGELOG.md", "VERSION"]
    assert clone.git("cat-file", "-t", "v1.3.0rc1") == "tag"
    assert clone.git("status", "--porcelain") == ""
    assert "git push --atomic origin HEAD v1.3.0rc1" in done.stdout


def test_what_comes_after_a_release_has_a_version_of_its_own(clone):
    assert clone.release("1.3.0").returncode == 0
    assert clone.read("VERSION") == clone.read("packages/gdn-core/VERSION") == "1.3.1.dev0\n"
    assert clone.git("rev-parse", "HEAD~") == clone.git("rev-parse", "v1.3.0^{commit}")
    assert clone.git("log", "-1", "--format=%s") == "Begin 1.3.1.dev0"
    assert clone.git("diff", "--name-only", "HEAD~").split() == ["VERSION"]
    check = [sys.executable, str(clone.path / "tools" / "check_version.py"), "--tag", "v1.3.0"]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize(
    ("version", "following"),
    [
        ("1.2.3", "1.2.4.dev0"),
        ("1.9", "1.10.dev0"),
        ("1.3.0rc9", "1.3.0rc10.dev0"),
        ("1.3.0.post1", "1.3.0.post2.dev0"),
        ("1.3.0.dev4", "1.3.0.dev5"),
    ],
)
def test_the_version_that_follows(version, following):
    assert next_version(version) == following
    assert Version(following) > Version(version)


def test_the_next_release_wants_a_changelog_of_its_own(clone):
    assert clone.release("1.3.0").returncode == 0
    state = clone.state()
    refused = clone.release("1.3.1")
    assert (refused.returncode, refused.stderr) == (1, "release: CHANGELOG.md says nothing under '## Unreleased'\n")
    assert clone.state() == state


@pytest.mark.parametrize("version", ["1.2.0", "1.2", "1.2.0rc1", "1.2.0.dev5", "1.1.9", "0.99"])
def test_a_version_that_is_not_newer(clone, version):
    state = clone.state()
    refused = clone.release(version)
    assert (refused.returncode, refused.stderr) == (
        1,
        f"release: expected a version newer than 1.2.0, got {version}\n",
    )
    assert clone.state() == state


@pytest.mark.parametrize("version", ["v1.3.0", "1.3-rc1", "1.3.0+local", "next"])
def test_a_version_that_is_none(clone, version):
    refused = clone.release(version)
    assert refused.returncode == 1
    assert f"got {version!r}" in refused.stderr


@pytest.mark.parametrize("name", ["README.md", "new.txt"])
def test_changes_that_are_not_committed(clone, name):
    clone.write(name, "changed\n")
    state = clone.state()
    refused = clone.release("1.3.0")
    assert (refused.returncode, refused.stderr) == (
        1,
        "release: there are changes that are not committed (git status)\n",
    )
    assert clone.state() == state


@pytest.mark.parametrize(
    ("changelog", "complaint"),
    [
        ("# Changelog\n\n## 1.2.0\n\n- Old.\n", "CHANGELOG.md has no section '## Unreleased'"),
        ("# Changelog\n\n## Unreleased\n\n## 1.2.0\n\n- Old.\n", "CHANGELOG.md says nothing under '## Unreleased'"),
        ("# Changelog\n\n## Unreleased\n\n### Added\n\n## 1.2.0\n\n- Old.\n", "CHANGELOG.md says nothing"),
    ],
)
def test_a_changelog_that_says_nothing(clone, changelog, complaint):
    clone.write("CHANGELOG.md", changelog)
    clone.commit()
    state = clone.state()
    refused = clone.release("1.3.0")
    assert refused.returncode == 1
    assert complaint in refused.stderr
    assert clone.state() == state


def test_a_checkout_on_no_branch(clone):
    clone.git("switch", "--quiet", "--detach")
    state = clone.state()
    refused = clone.release("1.3.0")
    assert refused.returncode == 1
    assert refused.stderr.startswith("release: HEAD is on no branch")
    assert clone.state() == state


def test_a_tag_that_exists(clone):
    clone.git("tag", "v1.3.0")
    refused = clone.release("1.3.0")
    assert (refused.returncode, refused.stderr) == (1, "release: the tag v1.3.0 exists\n")


def test_a_check_that_fails_leaves_everything_as_it_was(clone):
    link = clone.path / "packages" / "gdn-cpu" / "VERSION"
    link.unlink()
    link.write_text("1.2.0\n")
    clone.commit()
    state = clone.state()
    refused = clone.release("1.3.0")
    assert refused.returncode == 1
    assert "packages/gdn-cpu/VERSION: expected a symbolic link" in refused.stderr
    assert clone.state() == state


@pytest.mark.parametrize("refused_message", ["Release 1.3.0", "Begin 1.3.1.dev0"])
def test_a_commit_that_a_hook_refuses_leaves_everything_as_it_was(clone, refused_message):
    hook = clone.path / ".git" / "hooks" / "commit-msg"
    hook.write_text(f"#!/bin/sh\n! grep -q '{refused_message}' \"$1\" || {{ echo the hook says no >&2; exit 1; }}\n")
    hook.chmod(0o755)
    state = clone.state()
    refused = clone.release("1.3.0")
    assert refused.returncode == 1
    assert "the hook says no" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert clone.state() == state


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("gdn_cpu-1.2.0-cp310-abi3-manylinux_2_28_x86_64.whl", None),
        ("gdn_core-1.2.0.tar.gz", None),
        ("gdn_core-1.2.0.dev0.tar.gz", "1.2.0.dev0"),
        ("gdn_cpu-1.2.1-cp310-abi3-manylinux_2_28_x86_64.whl", "1.2.1"),
        ("notes.txt", "none"),
    ],
)
def test_a_file_of_another_version(name, got):
    found = check_version.problems("1.2.0", "v1.2.0", [Path("dist", name)])
    assert found == ([] if got is None else [f"{name}: expected version 1.2.0, got {got}"])


def test_versions_sort_as_pep_440_says():
    versions = "0.9 1.0.dev0 1.0.dev1 1.0a1 1.0a2 1.0b1 1.0rc1 1.0rc1.post2 1.0 1.0.post1 1.0.1 1.1.dev0 1.10 2 10.0.0"
    listed = versions.split()
    assert sorted(listed, key=Version) == listed
    assert sorted(reversed(listed), key=order) == listed
    assert order("1.0") == order("1.0.0") == order("1")


def test_this_checkout_s_changelog_can_be_closed():
    text = (ROOT / "CHANGELOG.md").read_text()
    closed = close_section(text, "9.0.0", datetime.date(2030, 1, 2))
    assert closed == text.replace("## Unreleased\n", "## Unreleased\n\n## 9.0.0 (2030-01-02)\n", 1) != text
