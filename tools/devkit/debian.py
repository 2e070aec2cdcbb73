# SPDX-License-Identifier: Apache-2.0
"""The Python and the torch of another release of Debian, on this machine: unpacked, and run by their own loader.

torch's own wheels for other Pythons than this one bring gigabytes of CUDA; Debian builds torch for the CPU.
"""

import platform
import sys
from pathlib import Path

from devkit import sysroot
from devkit.console import ROOT, Unavailable, say

# trixie: the oldest torch that gdn-core takes. sid: the newest Python, and a torch as new as that.
RELEASES = ("trixie", "sid")
_LOADER, _TRIPLE = "ld-linux-x86-64.so.2", "x86_64-linux-gnu"


def environment(release: str) -> tuple[Path, Path]:
    """Return a folder with the release's Python as ``bin/python``, and the root of its files."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unavailable("other releases of Debian run on x86-64 Linux only.")
    home = ROOT / "build" / "machines" / f"debian-{release}"
    root = home / "sysroot"
    if not root.exists():
        say(f"unpacking Python and torch of Debian {release} into {root} (about 250 MB to download)")
    sysroot.make(root, ("python3", "python3-torch"), "amd64", release)
    library = root / "usr" / "lib"
    # Where Debian's alternatives would lead, had they been set up: the plain BLAS and LAPACK.
    folders = [library / _TRIPLE, library, *(library / _TRIPLE / name for name in ("blas", "lapack"))]
    loader = next(path for path in (library / _TRIPLE / _LOADER, root / "usr" / "lib64" / _LOADER) if path.exists())
    script = home / "bin" / "python"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        f"#!/bin/sh\nexport PYTHONHOME='{root / 'usr'}'\n"
        f"exec '{loader}' --library-path '{':'.join(map(str, folders))}' --argv0 \"$0\" "
        f"'{sysroot.python(root)[0]}' \"$@\"\n"
    )
    script.chmod(0o755)
    return home, root
