# SPDX-License-Identifier: Apache-2.0
"""What a call writes to: no two elements in one place, nothing that torch refuses to change, and slots of records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gdn_core
from contract_calls import DECODE, RULES, S, call, small_call, untouched
from gdn_core import ReplayRecords

CONV = "causal_conv1d_fn"
BACKENDS = (None, "reference", "cpu")
PARTS = ("k", "u", "decay", "live")


def written_tensors() -> Iterator[tuple[str, str]]:
    """(op, argument) of everything that a caller hands over to be written; parts of records as `records.k`."""
    pools = ("initial_state", "initial_state_source", "state", "conv_states", "conv_state")
    for op in gdn_core.OPS:
        for name, value in small_call(op).items():
            if isinstance(value, ReplayRecords):
                yield from ((op, f"{name}.{part}") for part in PARTS)
            elif name == "out" or name in pools:
                yield op, name
    yield CONV, "final_states_out"


def written_call(op: str, name: str) -> dict[str, Any]:
    arguments = small_call(op)
    if name == "final_states_out":
        arguments |= {name: torch.zeros(2, arguments["weight"].shape[0], 3), "return_final_states": True}
    return arguments


def replaced(arguments: dict[str, Any], name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    owner, _, part = name.partition(".")
    if not part:
        return {**arguments, name: change(arguments[name])}
    parts = {each: getattr(arguments[owner], each) for each in PARTS}
    parts[part] = change(parts[part])
    return {**arguments, owner: ReplayRecords.from_tensors(**parts)}


def written_tensor(arguments: dict[str, Any], name: str) -> Tensor:
    owner, _, part = name.partition(".")
    return getattr(arguments[owner], part) if part else arguments[owner]


def overlaps(value: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield ways to overlap: expanded in one of the dimensions, and windows that slide by half of their length."""
    for dim, size in enumerate(value.shape):
        if size > 1:
            yield lambda x, dim=dim: x.narrow(dim, 0, 1).clone().expand_as(x)
    if value.dim() > 1:
        yield lambda x: x.clone().as_strided(x.shape, [max(stride // 2, 1) for stride in x.contiguous().stride()])


CASES = [(backend, *case) for case in written_tensors() for backend in BACKENDS]


@pytest.fixture(autouse=True)
def _needs_cpu(request: pytest.FixtureRequest) -> None:
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend") == "cpu":
        request.getfixturevalue("cpu_backend")


@pytest.mark.parametrize(("backend", "op", "name"), CASES)
def test_elements_that_share_memory(backend: str | None, op: str, name: str) -> None:
    value = written_tensor(written_call(op, name), name)
    for overlap in overlaps(value):
        arguments = replaced(written_call(op, name), name, overlap)
        with untouched(arguments), gdn_core.use_backend(backend), pytest.raises(ValueError, match=f"^{name}: expected"):
            call(op, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_message_about_shared_memory(backend: str | None) -> None:
    arguments = small_call(DECODE)
    arguments["out"] = arguments["out"][:, :1].expand_as(arguments["out"])
    expected = f"out: expected elements that do not overlap, got strides {list(arguments['out'].stride())}"
    with gdn_core.use_backend(backend), pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        call(DECODE, arguments)


@pytest.mark.parametrize(("backend", "op", "name"), [case for case in CASES if case[2] == "out"])
def test_outputs_of_any_order_of_dimensions(backend: str | None, op: str, name: str) -> None:
    """Not packed, dimensions swapped, the last one of unit stride: as good as a packed one."""
    expected, arguments = small_call(op), small_call(op)
    out = arguments[name]
    padded = out.new_zeros([size + 1 for size in out.shape])
    arguments[name] = padded[tuple(slice(size) for size in out.shape)]
    if out.dim() > 2:
        swapped = out.transpose(-2, -3).contiguous().transpose(-2, -3)
        arguments[name] = swapped
    with gdn_core.use_backend(backend):
        call(op, expected)
        call(op, arguments)
    assert torch.equal(arguments[name], expected[name])


def on_top_of(value: Tensor, shape: torch.Size, shift: int) -> tuple[Tensor, Tensor]:
    """Return a packed copy of `value`, and an output of that shape which begins at the copy's element `shift`."""
    memory = value.new_zeros(max(value.numel(), shift + shape.numel()))
    copy = memory[: value.numel()].view(value.shape).copy_(value)
    return copy, memory[shift : shift + shape.numel()].view(shape)


READ = [
    (op, name)
    for op in gdn_core.OPS
    for name in ("q", "k", "v", "mixed_qkv", "output_gate", "g", "beta", "a", "b", "x", "gate")
    if "out" in small_call(op) and name in small_call(op)
]


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize(("op", "name"), READ)
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_on_the_memory_of_an_input(backend: str | None, op: str, name: str, shift: int) -> None:
    """A kernel still reads an input after it has begun to write: the output is nevertheless that of another place."""
    expected, arguments = small_call(op), small_call(op)
    arguments[name], arguments["out"] = on_top_of(arguments[name], arguments["out"].shape, shift)
    with gdn_core.use_backend(backend):
        call(op, expected)
        call(op, arguments)
    assert torch.equal(arguments["out"], expected["out"])
    for pool in ("initial_state", "initial_state_source", "state"):
        if pool in expected:
            assert torch.equal(arguments[pool], expected[pool])


@pytest.mark.parametrize(("backend", "op", "name"), [case for case in CASES if case[0] is not None])
def test_tensors_made_under_inference_mode(backend: str | None, op: str, name: str) -> None:
    """The reference cannot update them outside, and says so first; native backends can."""
    arguments = written_call(op, name)
    with torch.inference_mode():
        arguments = replaced(arguments, name, Tensor.clone)
    with gdn_core.use_backend(backend):
        if backend == "reference":
            with untouched(arguments), pytest.raises(RuntimeError, match=rf"^{name}: expected .*inference_mode.*, got"):
                call(op, arguments)
        else:
            call(op, arguments)
        with torch.inference_mode():
            call(op, written_call(op, name))


@pytest.mark.parametrize(
    ("backend", "op", "name"),
    [case for case in CASES if case[2] in ("out", "final_states_out", "records.k", "records.u", "records.decay")],
)
def test_an_output_that_requires_a_gradient(backend: str | None, op: str, name: str) -> None:
    arguments = replaced(written_call(op, name), name, lambda x: x.clone().requires_grad_())
    with (
        untouched(arguments),
        gdn_core.use_backend(backend),
        pytest.raises(RuntimeError, match=r"requires a gradient.*torch\.no_grad"),
    ):
        call(op, arguments)
    with gdn_core.use_backend(backend), torch.no_grad():
        call(op, arguments)


@pytest.mark.parametrize("op", [*RULES, DECODE, f"{DECODE}_replay", CONV])
@pytest.mark.parametrize("backend", ["reference", None])
def test_a_default_device_changes_nothing(backend: str | None, op: str) -> None:
    """A factory that forgot its device would make a tensor on the default one, meta here."""
    expected, arguments = small_call(op), small_call(op)
    if op == RULES[0]:
        expected["output_chunk_states"] = arguments["output_chunk_states"] = True
    with gdn_core.use_backend(backend):
        call(op, expected)
        with torch.device("meta"):
            call(op, arguments)
    assert torch.equal(arguments["out"], expected["out"])


# --- records ----------------------------------------------------------------------------------------------------------


def used_records() -> ReplayRecords:
    records = ReplayRecords(5, S, 2, 4, 6, 5, torch.float32)
    records.live.copy_(torch.tensor([3, 1, 2, 3, 2]))
    return records


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("slots", "live"),
    [
        ([1, 3], [3, 0, 2, 0, 2]),
        ([-1, 2, -5], [3, 1, 0, 3, 2]),
        ([-1], [3, 1, 2, 3, 2]),
        ([], [3, 1, 2, 3, 2]),
        ([4, 4, 0], [0, 1, 2, 3, 0]),
        ([[1, -1], [2, 1]], [3, 0, 0, 3, 2]),
        (2, [3, 1, 0, 3, 2]),
    ],
)
def test_reset_of_slots(slots: Any, live: list[int], dtype: torch.dtype) -> None:
    """Padding resets nothing, the last slot least of all."""
    records = used_records()
    records.reset(torch.tensor(slots, dtype=dtype))
    assert records.live.tolist() == live and records.live.dtype == torch.int32


def test_reset_of_every_slot() -> None:
    records = used_records()
    records.reset()
    assert not records.live.any()


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        (torch.tensor([0, 5]), IndexError),
        (torch.tensor([0, 2**40]), IndexError),
        (torch.tensor([True, False, False, False, True]), TypeError),
        (torch.tensor([0.0]), TypeError),
        (torch.tensor([0], dtype=torch.uint8), TypeError),
        ([0, 1], TypeError),
        (3, TypeError),
        ("1", TypeError),
    ],
)
def test_reset_of_what_is_no_slot(slots: Any, error: type[Exception]) -> None:
    records = used_records()
    with pytest.raises(error, match=r"^slots: expected .*, got"):
        records.reset(slots)
    assert records.live.tolist() == [3, 1, 2, 3, 2]
