# SPDX-License-Identifier: Apache-2.0
"""The oldest and the newest torch, from other releases of Debian."""

from devkit import debian, sysroot
from devkit.console import Problem
from installs.environment import Environment, expect
from installs.scenarios import Context, across_backends, own_tests


def other_torches(context: Context) -> None:
    """The torches and Pythons of other releases of Debian, with the wheels installed together."""
    for release in debian.RELEASES:
        try:
            home, root = debian.environment(release)
            tools = [f"{tag}_x86_64" for tag in sysroot.GLIBC_TAGS]
            sysroot.pip_install(root, sysroot.test_tools(), tools)
        except Problem as reason:
            # Their archive is not ours to repair: a release in the making is not always whole.
            print(f"    Debian {release} is not to be had: {reason}", flush=True)
            continue
        wheels = [path for path in context.dist.glob("*.whl") if path.stem.endswith(("-any", "_x86_64"))]
        sysroot.pip_install(root, wheels, [path.stem.split("-")[-1] for path in wheels])
        environment = Environment(home, context.dist)
        versions = environment.run(environment.python, "-c", _VERSIONS).strip()
        expect(f"Debian {release}: {versions}", versions.endswith("cpu available"), versions)
        environment.test(*own_tests("gdn-core", "gdn-cpu", "gdn-cuda"))
        environment.test(*across_backends())


_VERSIONS = """
import sys, torch, gdn_core
cpu = next(backend for backend in gdn_core.backends() if backend.name == "cpu")
found = "available" if cpu.available else cpu.reason
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, backend cpu {found}")
"""
