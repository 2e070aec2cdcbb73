# SPDX-License-Identifier: Apache-2.0
"""When drafts are worth their pass: measured, so that speculation does not become slower than decoding without it."""

from __future__ import annotations

from dataclasses import dataclass

# The share of the newest pass in what is remembered of all.
_NEWEST = 0.25
# A pause after drafts that did not pay, in passes: at first, and at most.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 6, 96


@dataclass
class Pace:
    """Decides before each pass whether to draft, from the seconds and tokens of the passes so far.

    While passes with drafts make more tokens a second than passes without, they go on. When they fall behind, a pause
    follows, and then one pass with drafts to see whether the text has changed: each time it has not, the next pause is
    twice as long. So a text without repeats costs one pass with useless drafts in a hundred.
    """

    plain_seconds: float = 0.0  # of a pass without drafts; 0: not known yet
    drafting_seconds: float = 0.0
    tokens: float = 0.0  # new ones of a pass with drafts
    _pause: int = _SHORTEST_PAUSE
    _left: int = 1  # passes until the next drafts: the first pass is to be measured without

    @property
    def drafts(self) -> bool:
        """Say whether the next pass may have drafts."""
        return self._left == 0

    def passed(self, num_drafts: int, new_tokens: float, seconds: float) -> None:
        """Take note of a pass over decoding requests: drafts of all, new tokens of one on average."""
        if num_drafts == 0:
            self.plain_seconds = _blend(self.plain_seconds, seconds)
            self._left = max(0, self._left - 1)
            return
        self.drafting_seconds = _blend(self.drafting_seconds, seconds)
        self.tokens = _blend(self.tokens, new_tokens)
        if self.tokens * self.plain_seconds >= self.drafting_seconds:
            self._pause = _SHORTEST_PAUSE
            return
        self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        self.tokens = 0.0  # the text may be another one by then


def _blend(known: float, new: float) -> float:
    return new if known == 0 else known + _NEWEST * (new - known)
