# SPDX-License-Identifier: Apache-2.0
"""The wheels of a folder once more, as if of an older version: what an upgrade starts from."""

import zipfile
from pathlib import Path

VERSION = "0.0.1"


def make_older(dist: Path, version: str, folder: Path) -> None:
    """Write the wheels of `version` as version 0.0.1, in names, metadata, pins and records."""
    folder.mkdir()
    for path in dist.glob("*.whl"):
        with (
            zipfile.ZipFile(path) as wheel,
            zipfile.ZipFile(folder / path.name.replace(version, VERSION), "w") as older,
        ):
            for name in wheel.namelist():
                content = wheel.read(name)
                if name.endswith("/RECORD"):
                    content = _without_hashes(content)
                if name.endswith(("/METADATA", "/RECORD")):
                    content = content.replace(version.encode(), VERSION.encode())
                older.writestr(name.replace(version, VERSION), content)


def _without_hashes(record: bytes) -> bytes:
    """Those of the changed files are wrong, and none has to be there."""
    return b"".join(line.split(b",")[0] + b",,\n" for line in record.splitlines())
