# SPDX-License-Identifier: Apache-2.0
"""Machines whose figures are known: peaks that Python cannot measure, and the times of other libraries there.

A peer that takes longer here than it is known to take was disturbed, or is not called as it should be; then nothing
follows from how gdn compares with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PEER_SLACK = 1.15

# By peer: microseconds at 1 and at 2 threads.
Times = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Known:
    """A kind of machine. Pairs are figures at 1 and at 2 threads."""

    name: str
    vendor: str
    family: int
    model: int
    fp32_gflop_s: tuple[float, float]  # multiply-add instructions
    bf16_gflop_s: tuple[float, float]  # dot-product instructions
    exp_g_s: tuple[float, float]  # the exponential in vector code, 10^9 a second
    peer_us: Mapping[tuple[str, str], Times]  # by operation and case, for 16 key and 32 value heads of 128


_ZEN_4 = Known(
    name="AMD Zen 4, 2 cores",
    vendor="AuthenticAMD",
    family=25,
    model=17,
    fp32_gflop_s=(117, 231),
    bf16_gflop_s=(234, 445),
    exp_g_s=(5.8, 8.3),
    peer_us={
        ("prefill", "T=128"): {"vllm": (5180, 2757), "transformers": (21103, 11613)},
        ("prefill", "T=1024"): {"vllm": (40318, 20480), "transformers": (170244, 98187)},
        ("prefill", "T=4096"): {"vllm": (168940, 88247), "transformers": (692738, 383379)},
        ("prefill", "varlen"): {"vllm": (48495, 38987)},
        ("decode", "B1 cold"): {"vllm": (258, 144), "transformers": (945, 493)},
        ("decode", "B16 cold"): {"vllm": (4210, 2229), "transformers": (20042, 14723)},
        ("decode", "B64 cold"): {"vllm": (16026, 8970), "transformers": (85926, 69517)},
        ("decode", "B1 hot"): {"vllm": (98, 54), "transformers": (599, 422)},
        ("spec", "B1"): {"vllm": (1195, 627)},
        ("spec", "B16"): {"vllm": (19063, 9494)},
        ("conv", "T=1024"): {"vllm": (3675, 1901), "transformers": (45958, 23414)},
        ("conv", "T=4096"): {"vllm": (13845, 7335), "transformers": (329139, 166701)},
        ("conv", "update B1"): {"vllm": (8, 11), "transformers": (218, 269)},
        ("conv", "update B64"): {"vllm": (349, 177), "transformers": (7040, 4258)},
    },
)


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Known | None:
    """Return what is known of this kind of machine, if anything is."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return None
    kind = (_field(text, "vendor_id"), _field(text, "cpu family"), _field(text, "model"))
    return _ZEN_4 if kind == (_ZEN_4.vendor, str(_ZEN_4.family), str(_ZEN_4.model)) else None


def _field(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\s*: (\S+)$", text, re.MULTILINE)
    return found[1] if found else None


def at_threads(pair: tuple[float, float], threads: int) -> float | None:
    """Return the figure at `threads`, where there is one."""
    return pair[threads - 1] if threads in (1, 2) else None
