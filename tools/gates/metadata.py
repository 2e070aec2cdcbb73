# SPDX-License-Identifier: Apache-2.0
"""What a wheel or an sdist declares: version, licence, requirements, entry points."""

import re
from collections.abc import Iterator
from email.parser import Parser

from gates.expected import PACKAGES


def metadata_problems(text: str, name: str, version: str) -> Iterator[str]:
    """Say what is wrong with METADATA or PKG-INFO."""
    metadata = Parser().parsestr(text)
    fixed = {
        "Name": name.replace("_", "-"),
        "Version": version,
        "Requires-Python": ">=3.10",
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
    }
    for key, value in fixed.items():
        if (given := metadata.get_all(key, [])) != [value]:
            found = ", ".join(given) or "nothing"
            yield f"metadata: expected {key}: {value}, got {found}. It comes from the package's pyproject.toml"
    wanted = {requirement.format(version=version) for requirement in PACKAGES[name].requirements}
    got = set(metadata.get_all("Requires-Dist", []))
    for requirement in sorted(wanted - got):
        yield (
            f"metadata: lacks the requirement {requirement}. Extras pin the backends to exactly this version; "
            "mend the package's pyproject.toml, or VERSION"
        )
    for requirement in sorted(got - wanted):
        yield (
            f"metadata: unexpected requirement {requirement}. Remove it from the package's pyproject.toml, "
            "or add it to tools/gates/expected.py where it is meant"
        )
    # pip takes an extra that is not declared for a mistyped one, and goes on without it.
    extras = set(re.findall(r'extra == "(\w+)"', " ".join(wanted)))
    if (declared := set(metadata.get_all("Provides-Extra", []))) != extras:
        yield f"metadata: expected the extras {sorted(extras)}, got {sorted(declared)}. Mend pyproject.toml"


def entry_point_problems(text: str, name: str) -> Iterator[str]:
    """Say what is wrong with entry_points.txt: gdn-core finds its backends by it."""
    expected, got = PACKAGES[name].entry_points, set(_entry_points(text))
    if got != expected:
        yield f"entry points: expected {sorted(expected)}, got {sorted(got)}. Mend the package's pyproject.toml"


def _entry_points(text: str) -> Iterator[tuple[str, str]]:
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[]")
        elif line:
            yield group, re.sub(r"\s*=\s*", " = ", line)
