# SPDX-License-Identifier: Apache-2.0
"""GDNMetadata: classification, checks, padding for captured graphs, converters."""

from types import SimpleNamespace

import pytest
import torch

import attention_cases as cases
from attention_cases import Row
from contract_calls import same_bits
from gdn_core import GDNMetadata
from gdn_core.attention import metadata_from_sglang, metadata_from_vllm

COUNTS = ("num_prefills", "num_decodes", "num_spec_decodes")
TOKENS = ("num_prefill_tokens", "num_decode_tokens", "num_spec_decode_tokens")


def counts(metadata):
    return tuple(getattr(metadata, name) for name in COUNTS)


@pytest.mark.report("B14")
@pytest.mark.parametrize(
    ("length", "flags", "expected"),
    [
        (1, {}, "decode"),
        (2, {}, "prefill"),
        (1, {"has_initial_state": [False]}, "prefill"),
        (4, {"has_initial_state": [False]}, "prefill"),
        (1, {"is_prefill": [True]}, "prefill"),
        (1, {"is_prefill": [False]}, "decode"),
        (1, {"is_speculative": [True]}, "spec"),
        (4, {"is_speculative": [True]}, "spec"),
        (0, {}, None),
        (0, {"is_speculative": [True]}, None),
    ],
)
def test_what_a_row_is(length, flags, expected):
    for slots in ([7], [[7, 8, 9, 10]]):
        metadata = GDNMetadata.build([0, length], slots, **flags)
        assert counts(metadata) == tuple(int(kind == expected) for kind in ("prefill", "decode", "spec"))
        assert sum(getattr(metadata, name) for name in TOKENS) == length
    padding = GDNMetadata.build([0, length], [-1], **flags)
    assert counts(padding) == (0, 0, 0)


def test_token_indices_and_chunk_helpers_follow_the_order_of_the_batch():
    rows = [Row(2, (0, 1), is_speculative=True), Row(70, (8,), False), Row(1, (9,)), Row(0, (10,)), Row(64, (11,)),
            Row(3, (-1,)), Row(1, (12,))]  # fmt: skip
    metadata = cases.metadata_of(rows, "slots")
    assert counts(metadata) == (2, 2, 1)
    assert metadata.prefill_token_indices.tolist() == [*range(2, 72), *range(73, 137)]
    assert metadata.step_token_indices.tolist() == [0, 1, 72, 140]
    assert metadata.prefill_query_start_loc.tolist() == [0, 70, 134]
    assert metadata.chunk_offsets.tolist() == [0, 2, 3]
    assert metadata.chunk_indices.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert metadata.query_start_loc.tolist() == [0, 2, 72, 73, 73, 137, 140, 141]
    assert "2 prefills, 2 decodes, 1 speculative" in repr(metadata)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query_start_loc": [0, 2, 1]}, ValueError, "query_start_loc: expected non-decreasing"),
        ({"query_start_loc": [1, 2, 3]}, ValueError, "query_start_loc: expected non-decreasing"),
        ({"query_start_loc": []}, ValueError, "query_start_loc"),
        ({"query_start_loc": torch.tensor([0.0, 1, 2])}, TypeError, "query_start_loc: expected int32 or int64"),
        ({"query_start_loc": [0, 1.0, 2]}, TypeError, "query_start_loc: expected integers"),
        ({"slots": [4]}, ValueError, r"slots: expected \[2\]"),
        ({"slots": [[4], [5, 6]]}, TypeError, r"slots: expected \[N\] or \[N, S\] integers"),
        ({"slots": torch.zeros(2, 17, dtype=torch.int32)}, ValueError, "slots: expected 1 to 16 columns"),
        ({"has_initial_state": [1, 0]}, TypeError, "has_initial_state: expected booleans"),
        ({"has_initial_state": [True]}, ValueError, "has_initial_state: expected 2 values"),
        ({"num_accepted_tokens": [1, 2]}, ValueError, r"row 1, which is not speculative, got 2.*commit\(\)"),
        ({"num_accepted_tokens": [-1, 1]}, ValueError, "num_accepted_tokens: expected 1 for row 0"),
        ({"num_accepted_tokens": [1]}, ValueError, "num_accepted_tokens: expected 2 values"),
        (
            {"is_speculative": [True, False], "has_initial_state": [False, True]},
            ValueError,
            "is_speculative: expected False for row 0, which has no initial state",
        ),
        ({"is_speculative": [True, False], "is_prefill": [True, False]}, ValueError, "is_prefill: expected False"),
        (
            {"query_start_loc": [0, 1, 4], "is_prefill": [False, False]},
            ValueError,
            "is_prefill: expected True for row 1",
        ),
        (
            {"query_start_loc": [0, 3, 4], "is_speculative": [True, False], "slots": [[4, 5], [6, 7]]},
            ValueError,
            "query_start_loc: expected at most 2 tokens in row 0",
        ),
        (
            {"is_speculative": [True, False], "slots": [[4, 5], [6, 7]], "num_accepted_tokens": [3, 1]},
            ValueError,
            r"num_accepted_tokens: expected a value in \[0, 2\] for row 0, got 3",
        ),
    ],
)  # fmt: skip
def test_wrong_rows_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        GDNMetadata.build(**{"query_start_loc": [0, 1, 2], "slots": [4, 5], **arguments})


@pytest.mark.report("C18")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_any_dtype_and_stride(dtype):
    table = torch.tensor([[4, 0], [5, 0]], dtype=dtype)
    starts = torch.tensor([0, 9, 1, 9, 2], dtype=dtype)[::2]
    metadata = GDNMetadata.build(starts, table[:, 0], num_accepted_tokens=torch.tensor([1, 0], dtype=dtype))
    assert metadata.slots.tolist() == [[4], [5]]
    assert metadata.slots.dtype == torch.int32


# --- captured graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", cases.FORMS)
def test_one_padded_batch_stands_for_many(native_impl, form):
    """What a captured graph does: fixed tensors, filled anew for each batch, rows and tokens to spare."""
    spec = form == "replay"  # of one kind, as a graph needs
    batches = [
        [Row(1, (3,), is_speculative=spec), Row(2, (8, 9), is_speculative=True)],
        [Row(2, (8, 9), is_speculative=True, accepted=2)],
        [Row(1, (30,), is_speculative=spec), Row(0, (3,), is_speculative=spec), Row(3, (8, 9, 10), True, True),
         Row(1, (20,), is_speculative=spec)],
    ]  # fmt: skip
    layer, held, plain = cases.layer(), cases.cache(form), cases.cache(form)
    fixed = cases.metadata_of(batches[0], form).pad_to(5)
    places = [fixed.slots.data_ptr(), fixed.query_start_loc.data_ptr(), fixed.groups[0].table.data_ptr()]
    assert fixed.query_start_loc.tolist() == [0, 1, 3, 3, 3, 3]
    assert fixed.num_accepted_tokens.tolist() == [1] * 5
    buffers = cases.random_inputs(8, 0)
    for number, rows in enumerate(batches):
        metadata = cases.metadata_of(rows, form)
        new = cases.random_inputs(metadata.num_tokens, number)
        for name in ("mixed_qkv", "a", "b", "z"):
            getattr(buffers, name)[: metadata.num_tokens] = getattr(new, name)
            getattr(buffers, name)[metadata.num_tokens :] = float("nan")
        fixed.copy_(metadata.pad_to(5))
        assert counts(fixed) == counts(metadata)
        out = buffers.run(layer, held, fixed)
        assert same_bits(out[: metadata.num_tokens], new.run(layer, plain, metadata))
        assert not out[metadata.num_tokens :].any()
    assert places == [fixed.slots.data_ptr(), fixed.query_start_loc.data_ptr(), fixed.groups[0].table.data_ptr()]
    assert same_bits(held.state, plain.state)


def test_only_steps_can_be_padded():
    with pytest.raises(ValueError, match="at least the 2 rows"):
        cases.metadata_of([Row(1, (0,)), Row(1, (1,))], "slots").pad_to(1)
    with pytest.raises(ValueError, match="decode and speculative rows only"):
        cases.metadata_of([Row(5, (0,), False)], "slots").pad_to(4)
    with pytest.raises(ValueError, match="expected rows as in"):
        cases.metadata_of([Row(1, (0,))], "slots").copy_(cases.metadata_of([Row(1, (0,))] * 2, "slots"))


# --- converters -------------------------------------------------------------------------------------------------------


def vllm(**fields):
    empty = dict.fromkeys(
        ("non_spec_query_start_loc", "non_spec_state_indices_tensor", "has_initial_state", "spec_query_start_loc",
         "spec_state_indices_tensor", "num_accepted_tokens", "spec_sequence_masks")
    )  # fmt: skip
    return SimpleNamespace(**{**empty, "num_decodes": 0, **fields})


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_vllm_decodes_and_prefills():
    fields = vllm(
        num_decodes=2,
        non_spec_query_start_loc=ints(0, 1, 2, 7, 8),
        non_spec_state_indices_tensor=ints(4, 5, 6, 7),
        has_initial_state=torch.tensor([True, True, False, False]),
    )
    metadata = metadata_from_vllm(fields)
    assert counts(metadata) == (2, 2, 0)
    assert metadata.null_slot == 0
    decodes = vllm(
        num_decodes=2, non_spec_query_start_loc=ints(0, 1, 2, 2), non_spec_state_indices_tensor=ints(4, 5, 0)
    )
    assert counts(metadata_from_vllm(decodes)) == (0, 2, 0)


def test_vllm_rows_are_put_back_in_order_and_decodes_stay_decodes():
    fields = vllm(
        spec_sequence_masks=torch.tensor([False, True, False, True]),
        non_spec_query_start_loc=ints(0, 1, 6),
        non_spec_state_indices_tensor=ints(4, 5),
        has_initial_state=torch.tensor([True, False]),
        spec_query_start_loc=ints(0, 3, 4),
        spec_state_indices_tensor=torch.tensor([[6, 7, 8], [9, 10, 11]]),
        num_accepted_tokens=ints(2, 0),
    )
    metadata = metadata_from_vllm(fields)
    assert counts(metadata) == (1, 1, 2)
    assert metadata.row_ends == (0, 1, 4, 9, 10)
    assert metadata.slots.tolist() == [[4, -1, -1], [6, 7, 8], [5, -1, -1], [9, 10, 11]]
    assert metadata.num_accepted_tokens.tolist() == [1, 2, 1, 0]
    assert metadata.has_initial_state.tolist() == [True, True, False, True]


def test_vllm_padding_of_a_graph():
    fields = vllm(
        spec_sequence_masks=torch.tensor([True]),
        spec_query_start_loc=ints(0, 3, 3, 3),
        spec_state_indices_tensor=torch.tensor([[6, 7, 8], [0, 0, 0], [0, 0, 0]]),
        num_accepted_tokens=ints(2, 1, 1),
    )
    metadata = metadata_from_vllm(fields)
    assert counts(metadata) == (0, 0, 1)
    assert metadata.slots.tolist() == [[6, 7, 8], [-1] * 3, [-1] * 3]
    fields.spec_sequence_masks = torch.tensor([True, False])
    with pytest.raises(ValueError, match="spec_sequence_masks: expected 3 speculative rows and 0 others"):
        metadata_from_vllm(fields)


def test_sglang():
    extend = metadata_from_sglang(ints(0, 5, 6), ints(3, 4), has_initial_states=torch.tensor([False, True]))
    assert counts(extend) == (1, 1, 0)
    decode = metadata_from_sglang(ints(0, 1, 2, 3), ints(3, 4, -1))
    assert counts(decode) == (0, 2, 0)
    verify = metadata_from_sglang(ints(0, 4, 8), ints(3, 4), is_target_verify=True, num_accepted_tokens=[4, 1])
    assert counts(verify) == (0, 0, 2)
    assert verify.is_replay
