# SPDX-License-Identifier: Apache-2.0
"""A small continuous-batching loop: prompts in chunks, decoding, and whole blocks of drafts verified in one pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from .._validate import CHUNK
from ..attention import GDNMetadata, GDNStateCache
from .drafter import Drafter
from .exact import row_by_row
from .pace import Pace
from .sampling import Sampler, TemperatureSampler, greedy


@dataclass(frozen=True)
class Batch:
    """One pass of the target.

    Attributes:
        tokens: int64 [T].
        positions: int64 [T], of each token in its request.
        metadata: the rows.
        slots: the first slot of each row, by which a target may keep more of a request than its GDN states: keys and
            values of attention layers, which the tokens of the next pass overwrite from their positions on.
        needed: int64 [n], the tokens whose logits are asked for: of a prompt only the last one's.
    """

    tokens: Tensor
    positions: Tensor
    metadata: GDNMetadata
    slots: tuple[int, ...]
    needed: Tensor


class Target(Protocol):
    """A model whose tokens are to be generated.

    Attributes:
        caches: one for each Gated DeltaNet layer, all with the same slots and the same form of speculation.
    """

    caches: Sequence[GDNStateCache]

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return hidden states [T, hidden], for the drafter, and logits [n, vocabulary] of the tokens ``needed``."""
        ...


@dataclass
class Request:
    """A prompt and what has been generated for it.

    Attributes:
        prompt: its tokens.
        max_new_tokens: when to stop.
        stop_tokens: also stop after one of these.
        sampler: what chooses tokens from the target's logits.
        generated: the tokens so far.
        num_drafted, num_accepted: draft tokens that were verified, and those that were right.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    sampler: Sampler = greedy
    generated: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    _slots: tuple[int, ...] = ()
    _num_seen: int = 0  # tokens that the target's states stand for
    _accepted: int = 1  # of the last pass, for the next one

    @property
    def is_finished(self) -> bool:
        """Say whether the request is complete."""
        stopped = not self.stop_tokens.isdisjoint(self.generated[-1:])
        return stopped or len(self.generated) >= self.max_new_tokens

    @property
    def _is_prefilling(self) -> bool:
        return self._num_seen < len(self.prompt)


@dataclass(frozen=True)
class _Row:
    request: Request
    tokens: tuple[int, ...]
    is_prefill: bool

    @property
    def num_needed(self) -> int:
        """Return how many tokens, from the last one backwards, have logits that matter."""
        if not self.is_prefill:
            return len(self.tokens)
        return int(self.request._num_seen + len(self.tokens) == len(self.request.prompt))


class Engine:
    """Generate for several requests at once.

    Each pass of the target holds the decoding requests, each with a block of drafts, and parts of new prompts. Of a
    block the longest prefix is kept that decoding would have chosen too, greedily or by the request's random numbers
    (see :class:`TemperatureSampler`), and one token more. The states of rejected tokens are taken back in the form
    that the target's caches have; with caches of S = 1 there are no drafts.

    Args:
        target: the model.
        drafter: what proposes tokens; None decodes one token a pass.
        max_rows: most requests in a batch.
        prefill_tokens: most prompt tokens in a pass, at least 64. Prompts are cut at multiples of 64, where a cut
            changes no bit.
        exact: run the target :class:`row_by_row`, so that tokens do not depend on drafts or on other requests at all.
        pace: decides before each pass, from what earlier ones took, whether drafts are worth it; None drafts always.

    Raises:
        ValueError: the caches differ, or a limit is too low.

    Example:
        >>> import torch, gdn_core
        >>> from gdn_core.speculate import Engine, PromptLookup
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding, self.head = torch.nn.Embedding(9, 32), torch.nn.Linear(32, 9)
        ...         self.layer = gdn_core.GatedDeltaNet(32, 2, 4, 16, 16)
        ...         self.caches = [self.layer.make_cache(8, S=4, replay=True)]
        ...     def forward(self, batch):
        ...         x = self.embedding(batch.tokens)
        ...         x = x + self.layer(x, self.caches[0], batch.metadata)
        ...         return x, self.head(x[batch.needed])
        >>> engine = Engine(Model(), PromptLookup())
        >>> request = engine.add([1, 2, 3], max_new_tokens=5)
        >>> engine.run()
        >>> len(request.generated)
        5
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        max_rows: int = 8,
        prefill_tokens: int = 512,
        exact: bool = False,
        pace: Pace | None = None,
    ) -> None:
        if not target.caches:
            raise ValueError("target.caches: expected at least one cache, got none")
        cache = target.caches[0]
        for other in target.caches:
            same = (other.num_slots, other.S, other.records is None, other.null_slot)
            if same != (cache.num_slots, cache.S, cache.records is None, cache.null_slot):
                raise ValueError(f"target.caches: expected caches alike, got {cache} and {other}")
        if max_rows < 1:
            raise ValueError(f"max_rows: expected at least 1, got {max_rows}")
        if prefill_tokens < CHUNK:
            raise ValueError(f"prefill_tokens: expected at least {CHUNK}, got {prefill_tokens}")
        self._target, self._drafter, self._cache = target, drafter, cache
        self._max_rows, self._prefill_tokens = max_rows, prefill_tokens
        self._exact, self._pace = exact, pace
        self._is_speculative = drafter is not None and cache.S > 1
        self._slots_each = cache.S if self._is_speculative and cache.records is None else 1
        self._free = deque(slot for slot in range(cache.num_slots) if slot != cache.null_slot)
        if len(self._free) < self._slots_each:
            raise ValueError(f"target.caches: expected at least {self._slots_each} slots, got {len(self._free)}")
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self.num_passes = 0

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_tokens: Collection[int] = (),
        *,
        temperature: float = 0.0,
        seed: int = 0,
        sampler: Sampler | None = None,
    ) -> Request:
        """Queue a request; it is worked on as soon as there are slots and rows for it.

        Args:
            prompt: its tokens.
            max_new_tokens: when to stop.
            stop_tokens: also stop after one of these.
            temperature: 0 takes the likeliest token, more draws from ``softmax(logits / temperature)``.
            seed: of the random numbers of a temperature.
            sampler: chooses tokens in another way than these two.
        """
        if len(prompt) < 1:
            raise ValueError("prompt: expected at least one token, got none")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
        if sampler is None:
            sampler = TemperatureSampler(temperature, seed) if temperature else greedy
        request = Request(tuple(prompt), max_new_tokens, frozenset(stop_tokens), sampler)
        self._waiting.append(request)
        return request

    def run(self) -> None:
        """Work until all requests are finished."""
        while self._waiting or self._running:
            self.step()

    def step(self) -> list[Request]:
        """Run one pass of the target; return the requests that it finished."""
        self._admit()
        started = perf_counter()
        rows = self._decode_rows() + self._prefill_rows()
        if not rows:
            return []
        batch = self._batch(rows)
        mode: AbstractContextManager[Any] = row_by_row() if self._exact else nullcontext()
        with torch.inference_mode(), mode:
            hidden_states, logits = self._target(batch)
            self._choose(rows, hidden_states, logits)
        self.num_passes += 1
        if self._pace is not None and not any(row.is_prefill for row in rows):
            drafted = sum(len(row.tokens) - 1 for row in rows)
            accepted = sum(row.request._accepted for row in rows)
            self._pace.passed(drafted, accepted / len(rows), perf_counter() - started)
        finished = [request for request in self._running if request.is_finished]
        for request in finished:
            self._running.remove(request)
            self._free.extend(request._slots)
        return finished

    # --- before the pass ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_rows and len(self._free) >= self._slots_each:
            request = self._waiting.popleft()
            request._slots = tuple(self._free.popleft() for _ in range(self._slots_each))
            self._running.append(request)
            if self._drafter is not None:
                self._drafter.start(request._slots[0])

    def _decode_rows(self) -> list[_Row]:
        requests = [request for request in self._running if not request._is_prefilling]
        drafts: list[list[int]] = [[] for _ in requests]
        is_worth_it = self._pace is None or self._pace.drafts
        if self._is_speculative and self._drafter is not None and requests and is_worth_it:
            # The last token of a request needs no state after it, and so no draft.
            limits = [min(self._cache.S - 1, r.max_new_tokens - len(r.generated) - 1) for r in requests]
            drafts = self._drafter.propose([r._slots[0] for r in requests], [r.generated[-1] for r in requests], limits)
            for draft, limit in zip(drafts, limits, strict=True):
                if len(draft) > limit:
                    raise ValueError(f"drafter: expected at most {limit} tokens, got {len(draft)}")
        return [_Row(r, (r.generated[-1], *draft), False) for r, draft in zip(requests, drafts, strict=True)]

    def _prefill_rows(self) -> list[_Row]:
        rows, budget = [], self._prefill_tokens
        for request in self._running:
            if not request._is_prefilling:
                continue
            rest = request.prompt[request._num_seen :]
            count = len(rest) if len(rest) <= budget else budget // CHUNK * CHUNK
            if count == 0:
                break
            rows.append(_Row(request, rest[:count], True))
            budget -= count
        return rows

    def _batch(self, rows: list[_Row]) -> Batch:
        device = self._cache.state.device
        speculates = [self._is_speculative and not row.is_prefill for row in rows]
        slots = [row.request._slots for row in rows]
        metadata = GDNMetadata.build(
            [0, *accumulate(len(row.tokens) for row in rows)],
            [row_slots[0] for row_slots in slots] if self._slots_each == 1 else [list(s) for s in slots],
            has_initial_state=[row.request._num_seen > 0 for row in rows],
            is_speculative=speculates,
            num_accepted_tokens=[row.request._accepted for row in rows],
            is_prefill=[row.is_prefill for row in rows],
            null_slot=self._cache.null_slot,
            device=device,
        )
        tokens = [token for row in rows for token in row.tokens]
        positions = [row.request._num_seen + i for row in rows for i in range(len(row.tokens))]
        ends = accumulate(len(row.tokens) for row in rows)
        needed = [i for row, end in zip(rows, ends, strict=True) for i in range(end - row.num_needed, end)]
        return Batch(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), metadata,
            tuple(row_slots[0] for row_slots in slots), torch.tensor(needed, dtype=torch.int64, device=device),
        )  # fmt: skip

    # --- after the pass -----------------------------------------------------------------------------------------------

    def _choose(self, rows: list[_Row], hidden_states: Tensor, logits: Tensor) -> None:
        """Choose the tokens that follow a pass."""
        end = end_of_logits = 0
        for row in rows:
            start, end = end, end + len(row.tokens)
            start_of_logits, end_of_logits = end_of_logits, end_of_logits + row.num_needed
            request = row.request
            choices = []
            if row.num_needed:
                choices = request.sampler(logits[start_of_logits:end_of_logits], len(request.generated))
            self._take(row, choices, hidden_states[start:end])

    def _take(self, row: _Row, choices: list[int], hidden_states: Tensor) -> None:
        """Keep what decoding without drafts would have chosen of a row's tokens too."""
        request = row.request
        if row.is_prefill:
            kept, new = len(row.tokens), choices
        else:
            drafts = row.tokens[1:]
            right = next((i for i, draft in enumerate(drafts) if draft != choices[i]), len(drafts))
            kept, new = right + 1, choices[: right + 1]
            request.num_drafted += len(drafts)
            request.num_accepted += right
            request._accepted = kept if self._is_speculative else 1
        request._num_seen += kept
        if self._drafter is not None:
            self._drafter.extend(request._slots[0], row.tokens, hidden_states)
            self._drafter.rollback(request._slots[0], request._num_seen)
        new = new[: request.max_new_tokens - len(request.generated)]
        stop = next((i for i, token in enumerate(new) if token in request.stop_tokens), len(new))
        request.generated += new[: stop + 1]
