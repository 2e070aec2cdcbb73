# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of models with Gated DeltaNet layers, for several requests at once.

A drafter proposes a block of tokens for each request; the target verifies all blocks in one pass, together with the
prompts of other requests; what was rejected is taken back from the states by the number of accepted tokens alone.
"""

from __future__ import annotations

from .drafter import ContextCache, Drafter, PromptLookup
from .engine import Batch, Engine, Request, Target
from .exact import row_by_row
from .pace import Pace
from .sampling import Sampler, TemperatureSampler

__all__ = [
    "Batch",
    "ContextCache",
    "Drafter",
    "Engine",
    "Pace",
    "PromptLookup",
    "Request",
    "Sampler",
    "Target",
    "TemperatureSampler",
    "row_by_row",
]
