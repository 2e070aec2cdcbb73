# SPDX-License-Identifier: Apache-2.0
"""Steps that are about some rows of their tables: the others, and their tokens, are left alone."""

import pytest
import torch

from contract_calls import agree, call_on_rows, same_bits
from gdn_core.testing import clone, inputs
from report_calls import CONV_UPDATE, FUSED, FUSED_REPLAY, on, run, run_output

LENGTHS = [2, 1, 3, 0, 1, 2]
STEPS = (FUSED, FUSED_REPLAY, CONV_UPDATE)


def call_of(op):
    if op == CONV_UPDATE:
        arguments = inputs.conv_update_arguments(LENGTHS, 7, 4, state_len=6, accepted=[1, 2, 3, 1, 1, 2])[0]
    else:
        arguments = inputs.fused_decode_arguments(LENGTHS, 3, 2, 4, 16, 8, replay=op == FUSED_REPLAY)[0]
    out = torch.full_like(run_output(op, clone(arguments)), float("nan"))
    return arguments | {"out": out}


def tensors_of(arguments):
    records = arguments.get("records")
    parts = [] if records is None else [records.k, records.u, records.decay, records.live]
    return [x for x in arguments.values() if isinstance(x, torch.Tensor)] + parts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@on(*STEPS)
def test_two_calls_with_half_the_rows_are_one_with_all(impl, op, dtype):
    arguments = call_of(op)
    whole, halves = clone(arguments), clone(arguments)
    run(op, whole)
    call_on_rows(op, halves, [4, 0, 2], dtype)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for row, length in enumerate(LENGTHS):
        tokens = slice(offsets[row], offsets[row] + length)
        if row in (0, 2, 4):
            assert agree(impl, halves["out"][tokens], whole["out"][tokens])
        else:
            assert bool(halves["out"][tokens].isnan().all())
    call_on_rows(op, halves, [1, 3, 5], dtype)
    for mine, other in zip(tensors_of(halves), tensors_of(whole), strict=True):
        assert agree(impl, mine, other) if mine.is_floating_point() else torch.equal(mine, other)


@on(*STEPS)
def test_no_rows_and_tokens_in_no_row_are_left_alone(impl, op):
    arguments = call_of(op)
    name = "query_start_loc" if op == CONV_UPDATE else "cu_seqlens"
    arguments[name] = arguments[name].clamp(max=7)
    before = clone(arguments)
    call_on_rows(op, arguments, [])
    for mine, other in zip(tensors_of(arguments), tensors_of(before), strict=True):
        assert same_bits(mine, other) if mine.is_floating_point() else torch.equal(mine, other)
    call_on_rows(op, arguments, [0, 5])
    assert bool(arguments["out"][7:].isnan().all())


@on(*STEPS)
def test_rows_of_others_are_not_checked_and_padding_may_be_long(impl, op):
    """Too many tokens or accepted ones matter only in rows that the call is about and that are no padding."""
    arguments = call_of(op)
    slots = {CONV_UPDATE: "conv_state_indices", FUSED: "state_indices", FUSED_REPLAY: "slot_indices"}[op]
    name = "query_start_loc" if op == CONV_UPDATE else "cu_seqlens"
    arguments[name] = torch.tensor([0, 1, 1, 7, 7, 8, 9])  # six tokens where three fit
    arguments["num_accepted_tokens"] = torch.tensor([1, 9, 1, 1, 1, 1])
    call_on_rows(op, arguments, [0, 4, 5])
    assert bool(arguments["out"][[0, 7, 8]].isfinite().all())
    with pytest.raises(ValueError, match="expected rows of at most"):
        call_on_rows(op, arguments, [0, 2])
    with pytest.raises(ValueError, match=r"^num_accepted_tokens: expected values"):
        call_on_rows(op, arguments, [1])
    arguments[slots][2] = -1
    call_on_rows(op, arguments, [2, 5])
    assert not bool(arguments["out"][1:7].any())


@on(*STEPS)
def test_rows_that_are_not_there(impl, op):
    for rows in ([6], [-1], [0, 99]):
        arguments = call_of(op)
        before = clone(arguments)
        with pytest.raises(IndexError, match=r"^row_indices: expected rows in \[0, 6\), got"):
            call_on_rows(op, arguments, rows)
        assert all(
            same_bits(mine, other) if mine.is_floating_point() else torch.equal(mine, other)
            for mine, other in zip(tensors_of(arguments), tensors_of(before), strict=True)
        )
