# SPDX-License-Identifier: Apache-2.0
"""Whether two runs of one model agree, as far as the model's dtype can tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Comparison:
    """Greedy tokens of both runs, and the logits along the first run's tokens.

    Rounding, at a step, is how far the first run's own logits are from the same model's in float32; two logits may
    each move that far, so a choice between two that are closer than twice the rounding is open. Without a float32
    model it is the spacing of the dtype's numbers at the best logit.
    """

    tokens: int
    equal_tokens: int  # before the first difference, each run left to itself
    equal_choices: int  # along the first run's tokens
    open_choices: int  # differing choices that rounding explains
    worst_gap: float  # of the two best logits, over the differing choices
    worst_gap_rounding: float  # what rounding explains there
    logit_difference: float  # the largest
    distance_before: float | None  # of the logits from float32, relative L2
    distance_after: float | None
    passed: bool


def compare(
    tokens_before: list[int],
    tokens_after: list[int],
    before: torch.Tensor,
    after: torch.Tensor,
    exact: torch.Tensor | None,
    dtype: torch.dtype,
) -> Comparison:
    """Compare two runs whose logits [tokens, vocabulary] follow the same tokens."""
    same = [a == b for a, b in zip(tokens_before, tokens_after, strict=True)]
    differing = (before.argmax(-1) != after.argmax(-1)).nonzero().flatten()
    gaps = _gap(before, differing)
    explained = 2 * _rounding(before, exact, dtype)[differing]
    is_open = gaps <= explained
    # The step whose gap exceeds what rounding explains by most, or comes closest to it.
    worst = int((gaps - explained).argmax()) if len(differing) else None
    must_be_equal = dtype == torch.float32
    return Comparison(
        tokens=len(same),
        equal_tokens=same.index(False) if False in same else len(same),
        equal_choices=len(before) - len(differing),
        open_choices=int(is_open.sum()),
        worst_gap=0.0 if worst is None else float(gaps[worst]),
        worst_gap_rounding=0.0 if worst is None else float(explained[worst]),
        logit_difference=float((before - after).abs().max()),
        distance_before=None if exact is None else _distance(before, exact),
        distance_after=None if exact is None else _distance(after, exact),
        passed=all(same) if must_be_equal else bool(is_open.all()),
    )


def explains_difference(
    tokens: list[int], others: list[int], logits: torch.Tensor, exact: torch.Tensor | None, dtype: torch.dtype
) -> tuple[int | None, float, float]:
    """Say where two texts part, and whether rounding may have decided between the two best tokens there.

    Args:
        tokens, others: the texts.
        logits: [tokens, vocabulary], from which the first one was chosen.
        exact: the same of the model in float32, or None.

    Returns:
        The first difference (None: there is none), how far the two best logits are apart there, and how far they may
        be for rounding to explain it.
    """
    step = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)
    if step is None:
        return None, 0.0, 0.0
    here = torch.tensor([step])
    return step, float(_gap(logits, here)[0]), 2 * float(_rounding(logits, exact, dtype)[step])


def _gap(logits: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    best = logits[steps].topk(2).values
    return best[:, 0] - best[:, 1]


def _rounding(logits: torch.Tensor, exact: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    spacing = torch.finfo(dtype).eps * logits.abs().amax(-1).log2().floor().exp2()
    return spacing if exact is None else torch.maximum(spacing, (logits - exact).abs().amax(-1))


def _distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())
