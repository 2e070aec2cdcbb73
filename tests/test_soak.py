# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive, speculate, finish and hand on their slots, for thousands of steps, against float64 shadows."""

import random
import resource
from dataclasses import dataclass, field

import pytest
import torch

import attention_cases as cases
from attention_cases import FORMS, Row, S, Shadow
from gdn_core.testing import relative_error

LAYER = cases.layer(7)
SLOTS = 40
BOUND = 1e-5  # of chunked prefill; every later token continues from it. Of outputs, after their condition


@dataclass
class Request:
    slots: tuple[int, ...]
    shadow: Shadow = field(default_factory=Shadow.fresh)  # as of the last accepted token
    has_state: bool = False
    accepted: int = 1
    speculates: bool = False


class Server:
    """Random steps on one cache, each compared with the shadows of its requests."""

    def __init__(self, form, seed):
        self.form, self.rng = form, random.Random(seed)
        self.cache = cases.randomized(cases.cache(form, SLOTS), seed)  # stale states of former owners
        self.free, self.requests, self.snapshots, self.seed = list(range(SLOTS)), [], [], seed
        self.worst = 0.0

    def step(self):
        rng = self.rng
        self.arrive()
        self.leave()
        chosen = rng.sample(self.requests, rng.randint(0, min(8, len(self.requests))))
        rows = [self.row(request) for request in chosen]
        for _ in range(rng.randint(0, 2)):
            chosen.insert(place := rng.randint(0, len(rows)), None)
            rows.insert(place, Row(rng.choice([0, 1, 2]), (-1,)))
        self.seed += 1
        batch = cases.random_inputs(sum(row.length for row in rows), self.seed)
        out = batch.run(LAYER, self.cache, cases.metadata_of(rows, self.form))
        for request, row, tokens in zip(chosen, rows, cases.token_slices(rows), strict=True):
            self.check(request, row, batch.tokens(tokens), out[tokens])

    def arrive(self):
        need = S if self.form == "slots" else 1
        while len(self.free) >= need and self.rng.random() < 0.3:
            self.rng.shuffle(self.free)
            request = Request(tuple(self.free.pop() for _ in range(need)))
            if self.snapshots and self.rng.random() < 0.3:  # a prompt that begins like an earlier one
                snapshot, request.shadow = self.rng.choice(self.snapshots)
                self.cache.restore(snapshot, request.slots[:1])
                request.has_state = True
            self.requests.append(request)

    def leave(self):
        for request in [r for r in self.requests if self.rng.random() < 0.04]:
            self.requests.remove(request)
            self.free += request.slots
        for request in self.requests:
            if request.speculates and self.rng.random() < 0.1:
                slots = list(request.slots)
                self.cache.commit([slots] if self.form == "slots" else slots, [request.accepted])
                request.speculates, request.accepted = False, 1
            if request.has_state and not request.speculates and self.rng.random() < 0.02:
                self.snapshots = [*self.snapshots[-7:], (self.cache.snapshot(request.slots[:1]), request.shadow)]

    def row(self, request):
        rng = self.rng
        if not request.has_state:
            return Row(rng.choice([1, 2, 5, 9, 66]) if rng.random() < 0.9 else 0, request.slots, False)
        if not request.speculates and rng.random() < 0.5:
            return Row(rng.choice([0, 1, 1, 1, 1, 3, 17]), request.slots)
        return Row(rng.randint(0, S), request.slots, is_speculative=True, accepted=request.accepted)

    def check(self, request, row, new, out):
        if request is None:
            assert not out.any()
            return
        if row.length == 0:
            return
        expected, after = request.shadow.advance(LAYER, new)
        condition = torch.stack([shadow.condition for shadow in after])[..., None]
        self.worst = max(self.worst, relative_error(expected + (out - expected) / condition, expected, 2))
        request.has_state = True
        if row.is_speculative:
            request.speculates, request.accepted = True, self.rng.randint(1, row.length)
        request.shadow = after[(request.accepted if row.is_speculative else row.length) - 1]
        if not request.speculates:
            held = Shadow.of_slot(self.cache, request.slots[0])
            self.worst = max(self.worst, relative_error(held.state, request.shadow.state, (1, 2)))
        assert self.worst <= BOUND


def soak(form, steps, seed):
    server = Server(form, seed)
    for _ in range(steps):
        server.step()
    return server


@pytest.mark.parametrize("form", FORMS)
def test_a_few_hundred_random_steps(form):
    with torch.inference_mode():
        soak(form, 150, 1)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_ten_thousand_random_steps_of_each_form_in_flat_memory(form):
    with torch.inference_mode():
        server = soak(form, 1_000, 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(10_000):
            server.step()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 16 * 1024  # KiB
