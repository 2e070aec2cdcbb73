#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turn this checkout into a release: the version and the changelog, the check on both, a commit and a tag.

    python3 tools/release.py 1.2.3

A second commit begins the development of what comes next, so that nothing built later bears the release's name.
Nothing leaves this machine, and what fails leaves the checkout as it was. Once the tag is pushed,
.github/workflows/release.yml builds, tests and publishes.
"""

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from check_version import NORMALISED

ROOT = Path(__file__).resolve().parents[1]
VERSION, CHANGELOG = ROOT / "VERSION", ROOT / "CHANGELOG.md"
UNRELEASED = re.compile(r"^## Unreleased\n(?P<body>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def git(*arguments: str) -> str:
    """Run git in the checkout, and return what it prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def order(version: str) -> tuple[object, ...]:
    """Return what sorts as the version does: 1.2.dev3 before 1.2a1, 1.2rc1, 1.2 and 1.2.post1."""
    numbers = {kind: int(number) for kind, number in re.findall(r"(a|b|rc|post|dev)(\d+)", version)}
    release = [int(part) for part in re.split(r"[^\d.]|\.(?!\d)", version)[0].split(".")]
    while release and release[-1] == 0:
        release.pop()
    before = [(rank, numbers[kind]) for rank, kind in enumerate(("a", "b", "rc"), 1) if kind in numbers]
    only_dev = not before and "post" not in numbers and "dev" in numbers
    stage = before[0] if before else ((0, 0) if only_dev else (4, 0))
    return (*release,), stage, numbers.get("post", -1), numbers.get("dev", float("inf"))


def objections(version: str) -> Iterator[str]:
    """Say why this checkout cannot become this release."""
    current = VERSION.read_text().strip()
    if not NORMALISED.fullmatch(version):
        yield f"expected a normalised version such as 1.2.3 or 1.2.3rc1, got {version!r}"
    elif order(version) <= order(current):
        yield f"expected a version newer than {current}, got {version}"
    if not git("branch", "--show-current"):
        yield "HEAD is on no branch, and a release is pushed to one (git switch)"
    if git("status", "--porcelain"):
        yield "there are changes that are not committed (git status)"
    if git("tag", "--list", f"v{version}"):
        yield f"the tag v{version} exists"
    section = UNRELEASED.search(CHANGELOG.read_text())
    if section is None:
        yield "CHANGELOG.md has no section '## Unreleased'"
    elif not re.search(r"^- \S", section["body"], re.MULTILINE):
        yield "CHANGELOG.md says nothing under '## Unreleased'"


def close_section(text: str, version: str, date: datetime.date) -> str:
    """Return the changelog with its open section named after a release, and a new one opened above."""
    heading = f"## Unreleased\n\n## {version} ({date})\n"
    return UNRELEASED.sub(lambda section: heading + section["body"], text, count=1)


def next_version(version: str) -> str:
    """Return the first version that comes after a release: 1.2.4.dev0 after 1.2.3, 1.3.0rc2.dev0 after 1.3.0rc1."""
    following = re.sub(r"\d+$", lambda number: str(int(number[0]) + 1), version)
    return following if ".dev" in version else f"{following}.dev0"


def release(version: str) -> int:
    """Make both commits and the tag, or none of them; return the status."""
    start = git("rev-parse", "HEAD")
    try:
        CHANGELOG.write_text(close_section(CHANGELOG.read_text(), version, datetime.date.today()))
        commit(version, f"Release {version}", "--tag", f"v{version}")
        git("tag", "--annotate", "--message", f"gdn {version}", f"v{version}")
        commit(next_version(version), f"Begin {next_version(version)}")
    except subprocess.CalledProcessError as failure:
        print(f"release: {' '.join(map(str, failure.cmd))} failed: {failure.stderr.strip()}", file=sys.stderr)
        # There were no other changes: objections() has seen to that.
        git("reset", "--quiet", "--hard", start)
        if git("tag", "--list", f"v{version}"):
            git("tag", "--delete", f"v{version}")
        return 1
    print(f"tagged v{version}, and began {next_version(version)}")
    print(f"to publish the release: git push --atomic origin HEAD v{version}")
    return 0


def commit(version: str, message: str, *options: str) -> None:
    """Set the version, check it with these options of check_version.py, and commit."""
    VERSION.write_text(f"{version}\n")
    check = [sys.executable, str(ROOT / "tools" / "check_version.py"), *options]
    subprocess.run(check, capture_output=True, text=True, check=True)
    git("commit", "--quiet", "--message", message, "VERSION", "CHANGELOG.md")


def main() -> int:
    """Release, or print every reason not to."""
    parser = argparse.ArgumentParser(description="Turn this checkout into a release.")
    parser.add_argument("version", help="such as 1.2.3 or 1.2.3rc1")
    version = parser.parse_args().version
    found = list(objections(version))
    for objection in found:
        print(f"release: {objection}", file=sys.stderr)
    return 1 if found else release(version)


if __name__ == "__main__":
    sys.exit(main())
