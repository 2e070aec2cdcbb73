# SPDX-License-Identifier: Apache-2.0
"""What tests, `verify` and third-party backends need: seeded inputs, a float64 oracle, tolerances, guarded pools."""

from . import inputs, oracle
from .inputs import GuardedPool, clone, guarded_pool, to_float64
from .tolerances import TOLERANCES, packed_relative_error, relative_error, tolerance

__all__ = [
    "TOLERANCES",
    "GuardedPool",
    "clone",
    "guarded_pool",
    "inputs",
    "oracle",
    "packed_relative_error",
    "relative_error",
    "to_float64",
    "tolerance",
]
