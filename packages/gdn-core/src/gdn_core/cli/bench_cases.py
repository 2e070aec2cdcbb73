# SPDX-License-Identifier: Apache-2.0
"""The operations that `gdn bench` times, and their cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .bench_attention import core_plans
from .bench_case import Plan, Sizes
from .bench_elementwise import conv_plans, gating_plans, norm_plans
from .bench_recurrence import decode_plans, draft_plans, fused_plans
from .bench_sequences import prefill_plans, recurrent_plans
from .peers import Peers

_PLANS: dict[str, Callable[[Sizes, Peers], list[Plan]]] = {
    "decode": decode_plans,
    "spec": partial(draft_plans, "spec"),
    "replay": partial(draft_plans, "replay"),
    "fused": fused_plans,
    "core": core_plans,
    "prefill": prefill_plans,
    "recurrent": recurrent_plans,
    "conv": conv_plans,
    "gating": gating_plans,
    "norm": norm_plans,
}
OPS = tuple(_PLANS)


def plans(op: str, sizes: Sizes, peers: Peers) -> list[Plan]:
    """Return the cases of an operation, to be built one at a time."""
    return _PLANS[op](sizes, peers)
