#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One command for everything that a checkout needs. It makes .venv, installs what is pinned, and then runs.

    python3 tools/dev.py demo [options of gdn demo]
    python3 tools/dev.py test [--full] [--arch MACHINE] [--wheels DIR] [options of pytest]
    python3 tools/dev.py lint
    python3 tools/dev.py build
    python3 tools/dev.py sanitize
    python3 tools/dev.py setup [--tools]

Needs Python 3.10 or newer and a C++ compiler, nothing else.
"""

import sys

# Before any import of ours, and in words that every Python 3 can read: the rest does not parse on an old one.
if sys.version_info < (3, 10):
    sys.exit(
        "dev: this is Python %d.%d, and gdn needs 3.10 or newer.\n"
        "     Run this with a newer one, for example: python3.12 tools/dev.py" % sys.version_info[:2]
    )

from devkit.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
