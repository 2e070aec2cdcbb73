# SPDX-License-Identifier: Apache-2.0
"""What the files of each package have to be like."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LICENCE = (ROOT / "LICENSE").read_bytes()

MIB = 1024 * 1024
MAX_SDIST_SIZE = 1 * MIB
# What a release's wheels run on: glibc 2.28 and newer.
RELEASE_PLATFORM = "manylinux_2_28"

_ON_OUR_MACHINES = 'platform_system == "Linux" and (platform_machine == "x86_64" or platform_machine == "aarch64")'
_NATIVE_TAG = r"cp310-abi3-manylinux_\d+_\d+_(x86_64|aarch64)"


@dataclass(frozen=True)
class Expected:
    """One package. `{version}` stands for its own version."""

    tag: str
    max_size: int
    requirements: frozenset[str]
    entry_points: frozenset[tuple[str, str]]


PACKAGES = {
    "gdn_core": Expected(
        tag=r"py3-none-any",
        max_size=1 * MIB,
        requirements=frozenset(
            {
                "torch>=2.6",
                "rich>=13",
                f'gdn-cpu=={{version}}; {_ON_OUR_MACHINES} and extra == "cpu"',
                f'gdn-cuda=={{version}}; {_ON_OUR_MACHINES} and extra == "cuda"',
                f'triton>=3.3; {_ON_OUR_MACHINES} and extra == "triton"',
                f'fla-core>=0.6; {_ON_OUR_MACHINES} and extra == "triton"',
                'transformers>=5.0; extra == "transformers"',
            }
        ),
        entry_points=frozenset({("console_scripts", "gdn = gdn_core.cli:main")}),
    ),
    "gdn_cpu": Expected(
        tag=_NATIVE_TAG,
        max_size=8 * MIB,
        requirements=frozenset({"nanobind-backend>=1.0", 'scipy-openblas32>=0.3.27; extra == "openblas"'}),
        entry_points=frozenset({("gdn_core.backends", "cpu = gdn_cpu:provider")}),
    ),
    "gdn_cuda": Expected(
        tag=_NATIVE_TAG,
        max_size=20 * MIB,
        requirements=frozenset({"nanobind-backend>=1.0"}),
        entry_points=frozenset({("gdn_core.backends", "cuda = gdn_cuda:provider")}),
    ),
}
