# SPDX-License-Identifier: Apache-2.0
"""The causal convolution over the grid of sizes, dtypes, layouts and forms, against float64 and against itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gdn_core
from conftest import Implementation
from contract_calls import FLOATS, THREADS, agree, same_bits, untouched
from gdn_core.testing import clone, inputs, relative_error, tolerance
from gdn_core.testing.inputs import normal

CHANNELS = (1, 3, 16, 48, 65, 96, 6144, 6160)
WIDTHS = (2, 3, 4, 5)
LENGTHS = (*range(1, 10), 63, 64, 65, 1000)
RAGGED = (3, 0, 70, 1, 0, 9, 2)


def expected_of(histories: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Return y [N, C, L] in float64, from its definition: histories [N, C, W-1] are the inputs before x [N, C, L]."""
    windows = torch.cat([histories.double(), x.double()], dim=-1).unfold(-1, weight.shape[1], 1)
    y = (windows * weight.double()[:, None]).sum(-1)
    y = y if bias is None else y + bias.double()[:, None]
    return y if activation is None else y / (1 + torch.exp(-y))


def time_fastest(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def channel_fastest(x: Tensor) -> Tensor:
    return x.mT.clone(memory_format=torch.contiguous_format).mT


def strided(x: Tensor) -> Tensor:
    """Lay x out with gaps in every dimension."""
    padded = x.new_zeros([2 * size + 1 for size in x.shape])
    view = padded[tuple(slice(1, None, 2) for _ in x.shape)]
    return view.copy_(x)


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (channel_fastest, time_fastest, strided)


def weights(C: int, W: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    rng = inputs.generator(seed)
    return normal((C, W), rng, dtype, W**-0.5), normal((C,), rng, dtype, 0.1)


def bound(dtype: torch.dtype, size: int) -> float:
    return tolerance("convolution", dtype, slice_size=size)


def close(y: Tensor, wanted: Tensor) -> bool:
    """Tell whether each sequence y[n] [C, L] is within the tolerance."""
    return relative_error(y, wanted, (-2, -1)) <= bound(y.dtype, y[0].numel())


# --- prefill ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("C", CHANNELS)
def test_prefill_of_any_channels_and_width(impl: Implementation, C: int, W: int) -> None:
    rng = inputs.generator(0)
    length = 67 if C < 1000 else 10
    for dtype in FLOATS:
        weight, bias = weights(C, W, dtype)
        x = channel_fastest(normal((2, C, length), rng, dtype))
        history = channel_fastest(normal((2, C, W - 1), rng, dtype))
        for activation in ("silu", None):
            y, final = gdn_core.causal_conv1d_fn(x, weight, bias, None, history, True, activation=activation)
            assert close(y, expected_of(history, x, weight, bias, activation))
            assert same_bits(final, torch.cat([history, x], dim=-1)[..., -(W - 1) :])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_of_any_length(impl: Implementation, length: int, layout: Callable[[Tensor], Tensor]) -> None:
    rng, W, C = inputs.generator(length), 4, 48
    for dtype in FLOATS:
        weight, bias = weights(C, W, dtype)
        x = layout(normal((1, C, length), rng, dtype))
        history = layout(normal((1, C, W - 1), rng, dtype))
        wanted = expected_of(history, x, weight, bias, "silu")
        y, final = gdn_core.causal_conv1d_fn(x, weight, bias, None, history, True, activation="silu")
        assert close(y, wanted)
        assert same_bits(final, torch.cat([history, x], dim=-1)[..., -(W - 1) :])
        for out_layout in LAYOUTS:
            out = out_layout(torch.full_like(x, 7.0))
            gdn_core.causal_conv1d_fn(x, weight, bias, None, history, activation="silu", out=out)
            assert agree(impl, out, y)


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("C", [3, 65, 560])
def test_ragged_packs_on_a_pool(impl: Implementation, C: int, W: int) -> None:
    for dtype in FLOATS:
        arguments, guarded = inputs.conv_fn_arguments(RAGGED, C, W, state_len=W + 1, dtype=dtype)
        fresh = torch.tensor([False, False, True, True, True, False, True])
        arguments["has_initial_state"] = fresh
        slots, before = arguments["cache_indices"], guarded.pool.clone()
        slots[5] = -1
        guarded.pool[slots[0]] = torch.nan  # never read
        before[slots[0]] = torch.nan
        with untouched(arguments, "conv_states"):
            y = gdn_core.causal_conv1d_fn(**arguments)
        begin = 0
        for n, length in enumerate(RAGGED):
            x, slot = arguments["x"][:, begin : begin + length], slots[n]
            result = y[:, begin : begin + length]
            begin += length
            if slot < 0:
                assert same_bits(result, torch.zeros_like(result))
                continue
            history = before[slot, :, : W - 1] * 1 if fresh[n] else torch.zeros(C, W - 1, dtype=dtype)
            if length:
                wanted = expected_of(history[None], x[None], arguments["weight"], arguments["bias"], "silu")
                assert close(result[None], wanted)
                before[slot, :, : W - 1] = torch.cat([history, x], dim=-1)[:, length:]
        assert same_bits(guarded.pool, before)
        guarded.check()


def test_an_empty_sequence_hands_its_state_on(native_impl: Implementation) -> None:
    arguments, _ = inputs.conv_fn_arguments([2, 0, 0], 5, 4)
    arguments["has_initial_state"] = torch.tensor([True, True, False])
    before = arguments["conv_states"].clone()
    _, final = gdn_core.causal_conv1d_fn(**arguments, return_final_states=True)
    slots = arguments["cache_indices"]
    assert same_bits(final[1:], before[slots[1:]])
    assert same_bits(arguments["conv_states"][slots[1:]], before[slots[1:]])


def test_an_empty_sequence_of_a_pool_returns_its_state(impl: Implementation) -> None:
    weight, _ = weights(3, 4, torch.float32)
    pool, slots = torch.randn(5, 3, 6), torch.tensor([4, -1, 0, 2])
    before, starts = pool.clone(), torch.tensor([0, 0, 0, 5, 5])
    _, final = gdn_core.causal_conv1d_fn(
        torch.randn(3, 5), weight, None, conv_states=pool, cache_indices=slots, query_start_loc=starts,
        return_final_states=True,
    )  # fmt: skip
    assert same_bits(final[[0, 3]], before[[4, 2], :, :3]) and same_bits(final[2], pool[0, :, :3])
    assert not final[1].any()


def test_final_states_are_not_rounded_to_the_dtype_of_the_initial_ones(impl: Implementation) -> None:
    weight, _ = weights(3, 4, torch.float32)
    x, initial = torch.randn(1, 3, 5) * 1e5, torch.randn(1, 3, 3).half()
    _, final = gdn_core.causal_conv1d_fn(x, weight, initial_states=initial, return_final_states=True)
    assert same_bits(final, x[..., 2:])


def test_final_states_may_be_the_initial_ones(impl: Implementation) -> None:
    for length in (1, 2, 5):
        x, states = torch.randn(2, 33, length), torch.randn(2, 33, 3)
        weight, bias = weights(33, 4, torch.float32)
        wanted = gdn_core.causal_conv1d_fn(x, weight, bias, None, states.clone(), True)
        y, final = gdn_core.causal_conv1d_fn(x, weight, bias, None, states, True, states)
        assert same_bits(y, wanted[0])
        assert final is states
        assert same_bits(states, wanted[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 9, 200])
def test_in_place(impl: Implementation, length: int, layout: Callable[[Tensor], Tensor]) -> None:
    """y may be x itself: each input is read before it is overwritten, by the sum and by the state."""
    weight, bias = weights(40, 4, torch.float32)
    x, pool = layout(torch.randn(2, 40, length)), torch.randn(2, 40, 4)
    options: dict[str, Any] = {"activation": "silu"}
    torch.set_num_threads(3)
    for run in (
        lambda x, pool, out: gdn_core.causal_conv1d_fn(x, weight, bias, conv_states=pool, out=out, **options),
        lambda x, pool, out: gdn_core.causal_conv1d_update(x, pool, weight, bias, "silu", out=out),
    ):
        own, expected_pool = layout(x.clone()), pool.clone()
        own_pool = pool.clone()
        wanted = run(x, expected_pool, None)
        run(own, own_pool, own)
        assert agree(impl, own, wanted)
        assert same_bits(own_pool, expected_pool)


@pytest.mark.parametrize("C", [32, 45, 64, 1000, 2048, 4100])
@pytest.mark.parametrize("length", [3, 9])
def test_where_an_output_lies_changes_nothing(native_impl: Implementation, length: int, C: int) -> None:
    """Loads wait for stores to the same places of other pages, wherefore the order of channels depends on both."""
    rng = inputs.generator(8)
    for dtype in (torch.bfloat16, torch.float32):
        line, page = (size // dtype.itemsize for size in (64, 4096))
        weight, bias = weights(C, 4, dtype)
        rows = -(-length * C // page) + 1  # pages of one operand
        memory = torch.zeros((2 * rows + 2) * page, dtype=dtype)
        first = -memory.data_ptr() % 4096 // dtype.itemsize
        x = memory[first : first + length * C].view(1, length, C).mT
        x.copy_(normal((1, C, length), rng, dtype))
        wanted = gdn_core.causal_conv1d_fn(x, weight, bias, activation="silu")
        assert close(wanted, expected_of(x.new_zeros(1, C, 3), x, weight, bias, "silu"))
        for distance in (0, 1, line // 2, line, 2 * line, 4 * line, 5 * line, page - line):
            y = memory[first + rows * page + distance :][: length * C].view(1, length, C).mT
            y.fill_(7.0)
            gdn_core.causal_conv1d_fn(x, weight, bias, activation="silu", out=y)
            assert same_bits(y, wanted), distance


@pytest.mark.parametrize("shift", [1, 3, 40, 41, 80])
def test_an_output_that_overlaps_x(native_impl: Implementation, shift: int) -> None:
    """Whatever part of x the output lies on, what is computed is that of x as it was."""
    weight, bias = weights(40, 4, torch.float32)
    memory = torch.randn(101, 40)
    flat = memory.view(-1)
    x = flat[: 80 * 40].view(80, 40).mT[None]
    out = flat[shift : shift + 80 * 40].view(80, 40).mT[None]
    wanted = gdn_core.causal_conv1d_fn(x.clone(), weight, bias, activation="silu")
    gdn_core.causal_conv1d_fn(x, weight, bias, activation="silu", out=out)
    assert same_bits(out, wanted)


def test_columns_of_one_buffer(native_impl: Implementation) -> None:
    buffer = torch.randn(90, 100)
    x, out = buffer[:, 5:45].mT, buffer[:, 45:85].mT
    weight, bias = weights(40, 4, torch.float32)
    bounds = inputs.offsets([90])
    wanted = gdn_core.causal_conv1d_fn(x.clone(), weight, bias, query_start_loc=bounds)
    before = buffer.clone()
    gdn_core.causal_conv1d_fn(x, weight, bias, query_start_loc=bounds, out=out)
    assert same_bits(out, wanted)
    before[:, 45:85] = out.mT
    assert same_bits(buffer, before)


@pytest.mark.parametrize("segments", [[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 5, -1, 5, 7, 5, 5, 7, 7], list(range(9))])
def test_segments(impl: Implementation, segments: list[int]) -> None:
    """A token sees the tokens of its own segment among the W - 1 before it, wherever the segment began."""
    W, C = 4, 19
    weight, bias = weights(C, W, torch.float32)
    x, seq_idx = torch.randn(2, C, 9), torch.tensor([segments, segments[::-1]])
    wanted = torch.zeros(2, C, 9, dtype=torch.float64)
    for b in range(2):
        for t in range(9):
            own = [t - W + 1 + j >= 0 and seq_idx[b, t - W + 1 + j] == seq_idx[b, t] for j in range(W)]
            window = torch.stack([x[b, :, t - W + 1 + j] if own[j] else torch.zeros(C) for j in range(W)], dim=1)
            if seq_idx[b, t] >= 0:
                row = expected_of(window[None, :, :-1], window[None, :, -1:], weight, bias, "silu")
                wanted[b, :, t] = row[0, :, 0]
    for layout in LAYOUTS:
        y = gdn_core.causal_conv1d_fn(layout(x), weight, bias, seq_idx.int(), activation="silu")
        assert relative_error(y, wanted, 1) <= tolerance("convolution", torch.float32)
        in_place = layout(x)
        gdn_core.causal_conv1d_fn(in_place, weight, bias, seq_idx, activation="silu", out=in_place)
        assert same_bits(in_place, y)


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("C", CHANNELS)
def test_the_forms_of_a_step_agree(native_impl: Implementation, C: int, W: int) -> None:
    """Prefill, single tokens, several tokens, drafts and the ring: the same bits, in either layout of the pool."""
    tokens = 6 if C < 1000 else 3
    for dtype in FLOATS:
        weight, bias = weights(C, W, dtype)
        rng = inputs.generator(7)
        x, history = normal((2, C, tokens), rng, dtype), normal((2, C, W - 1), rng, dtype)
        wanted = gdn_core.causal_conv1d_fn(x, weight, bias, None, history, activation="silu")
        last = torch.cat([history, x], dim=-1)
        for layout in LAYOUTS[:2]:
            for y, state in (
                single_tokens(x, layout(history), weight, bias),
                several_tokens(x, layout(history), weight, bias),
                ring_tokens(x, layout(history), weight, bias),
            ):
                assert same_bits(y, wanted)
                assert same_bits(state, last[..., -(W - 1) :])
            y, state = draft_tokens(x, layout(history), weight, bias)
            assert same_bits(y, wanted)
            assert same_bits(state[..., : W - 2 + tokens], last[..., 1:])


def single_tokens(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    steps = [gdn_core.causal_conv1d_update(step, state, weight, bias, "silu") for step in x.unbind(-1)]
    return torch.stack(steps, dim=-1), state


def several_tokens(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = gdn_core.causal_conv1d_update(channel_fastest(x), state, weight, bias, "silu")
    return y, state


def ring_tokens(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A ring that is full: the oldest input lies where the next one goes."""
    size = state.shape[-1]
    ring = torch.stack([state[0].roll(1, -1), state[1].roll(2, -1)])
    positions = torch.tensor([size + 1, size + 2])
    y = gdn_core.causal_conv1d_update(x, ring, weight, bias, "silu", positions)
    after = positions + x.shape[-1]
    return y, torch.stack([ring[n].roll(-int(after[n] % size), -1) for n in range(2)])


def draft_tokens(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The history lies at columns 1 on, as after a step of which two tokens were accepted."""
    wide = torch.cat([state[..., :1], state, state.new_zeros(*state.shape[:2], x.shape[-1])], dim=-1)
    wide = wide if state.is_contiguous() else channel_fastest(wide)
    accepted = torch.tensor([2, 2], dtype=torch.int32)
    y = gdn_core.causal_conv1d_update(x, wide, weight, bias, "silu", num_accepted_tokens=accepted)
    return y, wide


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("state_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_of_the_state(
    impl: Implementation, dtype: torch.dtype, state_dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    """Inputs are rounded to the state's dtype where they are stored, histories read as they were stored."""
    rng, C, W = inputs.generator(3), 37, 4
    weight, bias = weights(C, W, torch.float32)
    pool = layout(normal((3, C, 5), rng, state_dtype))
    before, x = pool.clone(), normal((3, C), rng, dtype)
    y = gdn_core.causal_conv1d_update(x, pool, weight, bias, "silu")
    wanted = expected_of(before[..., 2:], x[..., None], weight, bias, "silu")
    assert close(y[..., None], wanted)
    assert same_bits(pool, torch.cat([before[..., 1:], x.to(state_dtype)[..., None]], dim=-1))


@pytest.mark.parametrize("C", [19, 560])
@pytest.mark.parametrize("form", ["shift", "drafts", "ring"])
def test_guards_of_the_pool(impl: Implementation, form: str, C: int) -> None:
    """Nothing beside the slots is read or written, whatever the state, and a row of padding leaves the pool alone."""
    options: dict[str, Any] = {"shift": {}, "drafts": {"accepted": (2, 0, 3)}, "ring": {"positions": (0, 4, 9)}}[form]
    for dtype in FLOATS:
        arguments, guarded = inputs.conv_update_arguments(
            (2, 2, 2), C, 4, state_len=6, is_dense=form == "ring", dtype=dtype, **options
        )
        arguments["conv_state_indices"][1] = -7
        idle = sorted(set(range(len(guarded.pool))) - set(arguments["conv_state_indices"].tolist()))
        before = guarded.pool[idle].clone()
        y = gdn_core.causal_conv1d_update(**arguments)
        assert bool(y.isfinite().all())
        assert not bool((y[1] if form == "ring" else y[2:4]).any())
        assert same_bits(guarded.pool[idle], before)
        guarded.check()


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("C", [5, 16, 37, 600])
def test_guards_of_columns_side_by_side(impl: Implementation, C: int, W: int) -> None:
    """A slot of time-fastest columns without gaps is shifted, and its neighbours in memory are left alone."""
    for dtype in FLOATS:
        weight, bias = weights(C, W, dtype)
        rng = inputs.generator(2)
        pool, x = normal((3, C, W - 1), rng, dtype), normal((1, C), rng, dtype)
        before = pool.clone()
        y = gdn_core.causal_conv1d_update(x, pool, weight, bias, "silu", conv_state_indices=torch.tensor([1]))
        assert close(y[..., None], expected_of(before[1:2], x[..., None], weight, bias, "silu"))
        assert same_bits(pool[1], torch.cat([before[1, :, 1:], x.mT], dim=-1))
        assert same_bits(pool[::2], before[::2])


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("C", [5, 32, 37, 600])
@pytest.mark.parametrize("most", [1, 2, 5, 16])
def test_drafts_on_columns_side_by_side(native_impl: Implementation, most: int, C: int, W: int) -> None:
    """The same bits as on columns apart; columns beyond the row's own and the slots beside it are left alone."""
    lengths = [most, 1, max(1, most - 1)]
    accepted = torch.tensor([most, 1, 0], dtype=torch.int32)
    slots = torch.tensor([3, 1, 5], dtype=torch.int32)
    for dtype in FLOATS:
        weight, bias = weights(C, W, dtype)
        rng = inputs.generator(most)
        pool, x = normal((7, C, W + most - 2), rng, dtype), normal((sum(lengths), C), rng, dtype)
        before, apart = pool.clone(), channel_fastest(pool)
        y, wanted = (
            gdn_core.causal_conv1d_update(
                x, states, weight, bias, "silu", conv_state_indices=slots, num_accepted_tokens=accepted,
                query_start_loc=inputs.offsets(lengths),
            )
            for states in (pool, apart)
        )  # fmt: skip
        assert same_bits(y, wanted)
        for slot, length in zip(slots.tolist(), lengths, strict=True):
            kept = W - 2 + length
            assert same_bits(pool[slot, :, :kept], apart[slot, :, :kept])
            assert same_bits(pool[slot, :, kept:], before[slot, :, kept:])
        assert same_bits(pool[::2], before[::2])


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("C", [5, 32, 37, 600])
def test_a_row_alone_is_as_among_others(native_impl: Implementation, C: int, W: int) -> None:
    """Whatever the dtype and the layout of the filter."""
    for dtype in FLOATS:
        weight, bias = weights(C, W, dtype)
        rng = inputs.generator(5)
        x, history = normal((3, C), rng, dtype), channel_fastest(normal((3, C, W - 1), rng, dtype))
        filters = [(weight, bias), (weight, None), (weight.float(), bias), (weight.mT.contiguous().mT, bias)]
        for taps, offset in filters:
            together, alone = history.clone(), history.clone()
            y = gdn_core.causal_conv1d_update(x, together, taps, offset, "silu")
            for n in range(3):
                row = gdn_core.causal_conv1d_update(x[n : n + 1], alone[n : n + 1], taps, offset, "silu")
                assert same_bits(row[0], y[n])
            assert same_bits(alone, together)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_every_length_in_one_call(
    native_impl: Implementation, has_bias: bool, layout: Callable[[Tensor], Tensor]
) -> None:
    """Single tokens, a few and many in turn: each row is as it is alone."""
    lengths, C = [1, 1, 70, 1, 5, 64, 2, 1, 67, 1], 97
    for dtype in FLOATS:
        arguments, _ = inputs.conv_fn_arguments(lengths, C, 4, has_bias=has_bias, dtype=dtype)
        arguments |= {"cache_indices": torch.arange(10), "has_initial_state": torch.ones(10, dtype=torch.bool)}
        arguments["conv_states"] = layout(arguments["conv_states"])
        alone = clone(arguments)
        y = gdn_core.causal_conv1d_fn(**arguments)
        for n, x in enumerate(alone["x"].split(lengths, dim=1)):
            row = {"x": x, "query_start_loc": inputs.offsets([lengths[n]]), "cache_indices": torch.tensor([n])}
            part = gdn_core.causal_conv1d_fn(**alone | row | {"has_initial_state": torch.ones(1, dtype=torch.bool)})
            assert same_bits(part, y.split(lengths, dim=1)[n])
        assert same_bits(arguments["conv_states"], alone["conv_states"])


# --- how the work is shared out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
def test_threads_and_companions_change_nothing(native_impl: Implementation, threads: int) -> None:
    arguments, _ = inputs.conv_fn_arguments([700, 0, 3, 64, 129], 1030, 4, dtype=torch.bfloat16)
    alone = clone(arguments)
    torch.set_num_threads(1)
    bounds = arguments["query_start_loc"].tolist()
    parts = []
    for n, slot in enumerate(alone["cache_indices"].split(1)):
        x = alone["x"][:, bounds[n] : bounds[n + 1]]
        row = {"x": x, "query_start_loc": inputs.offsets([x.shape[1]]), "cache_indices": slot}
        parts.append(gdn_core.causal_conv1d_fn(**alone | row))
    torch.set_num_threads(threads)
    y = gdn_core.causal_conv1d_fn(**arguments)
    assert same_bits(y, torch.cat(parts, dim=1))
    assert same_bits(arguments["conv_states"], alone["conv_states"])


@pytest.mark.parametrize("threads", THREADS)
def test_threads_share_the_rows_of_a_step(native_impl: Implementation, threads: int) -> None:
    """Rows enough for several threads, of one to three tokens: each is as it is alone."""
    lengths, C, W = [1 + n % 3 for n in range(35)], 1030, 4
    weight, bias = weights(C, W, torch.bfloat16)
    rng = inputs.generator(6)
    x, pool = normal((sum(lengths), C), rng, torch.bfloat16), normal((35, C, W + 1), rng, torch.bfloat16)
    for layout in LAYOUTS[:2]:
        together, alone = layout(pool), layout(pool)
        options: dict[str, Any] = {"weight": weight, "bias": bias, "activation": "silu"}
        torch.set_num_threads(1)
        parts = [
            gdn_core.causal_conv1d_update(
                row, alone[n : n + 1], **options, num_accepted_tokens=torch.tensor([1 + n % 3]),
                query_start_loc=inputs.offsets([len(row)]),
            )
            for n, row in enumerate(x.split(lengths))
        ]  # fmt: skip
        torch.set_num_threads(threads)
        y = gdn_core.causal_conv1d_update(
            x, together, **options, num_accepted_tokens=torch.tensor([1 + n % 3 for n in range(35)]),
            query_start_loc=inputs.offsets(lengths),
        )  # fmt: skip
        assert same_bits(y, torch.cat(parts))
        assert same_bits(together, alone)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(
    ("dtype", "C", "pitch"),
    [(torch.bfloat16, 2112, 2112), (torch.float16, 1055, 1056), (torch.float32, 1033, 1040)],
)
def test_outputs_too_large_for_the_caches(
    native_impl: Implementation, dtype: torch.dtype, C: int, pitch: int, activation: str | None
) -> None:
    """Streamed past them from 1 MiB on; rows may end within a cache line."""
    weight, bias = weights(C, 4, dtype)
    x = channel_fastest(normal((1, C, 1019), inputs.generator(0), dtype))
    memory = torch.full((1, 1019, pitch), 7.0, dtype=dtype)
    y = memory.mT[:, :C]
    assert y.nbytes >= 1 << 20
    gdn_core.causal_conv1d_fn(x, weight, bias, activation=activation, out=y)
    for first, last in ((0, 500), (500, 1019)):
        before = max(first - 3, 0)
        part = gdn_core.causal_conv1d_fn(x[..., before:last], weight, bias, activation=activation)
        assert same_bits(part[..., first - before :], y[..., first:last])
    assert bool((memory[..., C:] == 7).all())


def test_a_channel_does_not_depend_on_the_others(native_impl: Implementation) -> None:
    """Neither on its place in a vector, nor on the tail of a block."""
    for dtype in FLOATS:
        weight, bias = weights(600, 4, dtype)
        x = channel_fastest(normal((1, 600, 30), inputs.generator(0), dtype))
        y = gdn_core.causal_conv1d_fn(x, weight, bias, activation="silu")
        for first, last in ((0, 1), (7, 40), (511, 513), (583, 600)):
            part = slice(first, last)
            alone = gdn_core.causal_conv1d_fn(x[:, part], weight[part], bias[part], activation="silu")
            assert same_bits(alone, y[:, part])


@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_of_large_values(impl: Implementation, dtype: torch.dtype) -> None:
    values = [-3e4, -200.0, -88.0, -20.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 20.0, 88.0, 200.0, 3e4]
    x = torch.tensor(values, dtype=dtype)[:, None].expand(-1, 33).reshape(1, -1, 1).mT.contiguous().mT
    x = x.reshape(1, len(values) * 33, 1)
    weight = torch.tensor([0.0, 1.0], dtype=dtype).expand(x.shape[1], 2)
    y = gdn_core.causal_conv1d_fn(x, weight, activation="silu")[0, :, 0]
    wanted = x.double()[0, :, 0] / (1 + torch.exp(-x.double()[0, :, 0]))
    ulp = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7.9, torch.float16: 2.0**-10}[dtype]
    assert bool(((y.double() - wanted).abs() <= ulp * wanted.abs() + 1e-7).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_of_the_largest_values(impl: Implementation, dtype: torch.dtype) -> None:
    """Up to the largest of the dtype nothing overflows on the way: the result is x itself, or 0 where x is negative."""
    large = torch.tensor([1.0, 0.73, 0.5, 1e-4], dtype=torch.float64) * torch.finfo(dtype).max
    x = torch.cat([large, -large]).to(dtype).repeat(5)
    wanted = x.double() / (1 + torch.exp(-x.double()))
    weight = torch.tensor([0.0, 1.0], dtype=dtype).expand(len(x), 2)
    ulp = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7.9, torch.float16: 2.0**-10}[dtype]
    for layout in LAYOUTS:
        prefilled = gdn_core.causal_conv1d_fn(layout(x[None, :, None]), weight, activation="silu")[0, :, 0]
        stepped = gdn_core.causal_conv1d_update(x[None], layout(x.new_zeros(1, len(x), 1)), weight, None, "silu")[0]
        for y in (prefilled, stepped):
            assert bool(((y.double() - wanted).abs() <= ulp * wanted.abs() + 1e-30).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_that_are_not_finite(impl: Implementation, dtype: torch.dtype) -> None:
    """As torch has it: silu(-inf) is NaN, silu(inf) is inf, and a NaN of any bits stays one."""
    x = torch.randn(1, 40, 12).to(dtype)
    x[0, 3, 5], x[0, 20, 5], x[0, 37, 5] = torch.inf, -torch.inf, torch.nan
    all_ones = torch.full((40,), -1, dtype={2: torch.int16, 4: torch.int32}[x.element_size()]).view(dtype)
    weight = torch.ones(40, 2, dtype=dtype)
    bias = torch.zeros(40, dtype=torch.float32)
    bias[11] = torch.full((1,), -1, dtype=torch.int32).view(torch.float32)[0]
    for layout in LAYOUTS:
        y = gdn_core.causal_conv1d_fn(layout(x), weight, bias, activation="silu")[0]
        wanted = x.float()[0] + torch.cat([torch.zeros(40, 1), x.float()[0, :, :-1]], dim=-1) + bias[:, None]
        wanted = torch.nn.functional.silu(wanted)
        assert torch.equal(y.isnan(), wanted.isnan())
        assert torch.equal(y.isinf(), wanted.isinf())
    pool = torch.zeros(1, 40, 1, dtype=dtype)
    pool[0, :, 0] = all_ones
    assert bool(gdn_core.causal_conv1d_update(x[..., 0], pool, weight, bias, "silu").isnan().all())
