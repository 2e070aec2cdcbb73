#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Install the wheels of a folder into empty environments, as users would, and see that they get what was promised.

    python tools/check_install.py dist

Installs of each extra, a broken backend, one of another version, upgrades, uninstalls, systems without backends, and
other Pythons and torches. "Empty" means without anything of ours: torch and the other third-party packages are
borrowed from the Python that runs this, since installing torch a dozen times takes minutes.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from devkit.console import Problem
from installs.environment import Failure, borrow_third_party
from installs.pythons import other_pythons
from installs.scenarios import SCENARIOS, Context
from installs.torches import other_torches

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run each scenario, all of them even when one fails."""
    parser = argparse.ArgumentParser(description="Install wheels into empty environments and test them there.")
    parser.add_argument("dist", type=Path)
    dist = parser.parse_args().dist.resolve()
    version = (ROOT / "VERSION").read_text().strip()
    failed = []
    with tempfile.TemporaryDirectory(prefix="gdn-install-") as name:
        context = Context(dist, version, Path(name))
        borrow_third_party(context.third_party)
        for scenario in (*SCENARIOS, other_pythons, other_torches):
            title, start = scenario.__name__.replace("_", " "), time.monotonic()
            print(f"== {title}: {scenario.__doc__}", flush=True)
            try:
                scenario(context)
            except (Failure, Problem, subprocess.CalledProcessError) as failure:
                failed.append(title)
                print(f"FAILED: {failure}", file=sys.stderr, flush=True)
            print(f"    {time.monotonic() - start:.0f} s", flush=True)
    print(f"installs: {', '.join(failed)} failed" if failed else "installs: all as promised")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
