# SPDX-License-Identifier: Apache-2.0
"""torch.ops.gdn.gdn_attention: the core as one op over tensors, as compilers and tracers see it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import attention_cases as cases
from attention_cases import FORMS, Row
from contract_calls import same_bits

LAYER = cases.layer(bias=True)
ROWS = [Row(1, (1,)), Row(3, (4, 5, 6), is_speculative=True, accepted=2), Row(0, (9,)), Row(7, (10,), False)]
IN_BOTH_FORMS = pytest.mark.parametrize("form", FORMS)
WRITTEN = {"conv_states", "state", "records_k", "records_u", "records_decay", "records_live", "out"}


class Capture(TorchDispatchMode):
    """Keep the arguments with which the op is called, instead of running it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.gdn.gdn_attention.default:
            self.flat = args
            return None
        return func(*args, **(kwargs or {}))


def prepared(form, dtype=torch.float32):
    held = cases.randomized(cases.cache(form, num_slots=16, dtype=dtype))
    cases.prepare(held, ROWS)
    return cases.random_inputs(11, dtype=dtype), held, cases.metadata_of(ROWS, form)


def flat_arguments(form, dtype=torch.float32):
    batch, held, metadata = prepared(form, dtype)
    with Capture() as captured:
        batch.run(LAYER, held, metadata)
    return captured.flat


def copied(flat):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in flat]


def test_the_schema_names_exactly_what_may_change():
    schema = torch.ops.gdn.gdn_attention.default._schema
    assert {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write} == WRITTEN
    assert not schema.returns


@pytest.mark.report("D02")
@IN_BOTH_FORMS
def test_opcheck(form):
    torch.library.opcheck(torch.ops.gdn.gdn_attention.default, flat_arguments(form))


@IN_BOTH_FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_op_does_what_the_function_does(impl, form, dtype):
    batch, held, metadata = prepared(form, dtype)
    flat = copied(flat_arguments(form, dtype))
    torch.ops.gdn.gdn_attention.default(*flat)
    assert same_bits(flat[-1], batch.run(LAYER, held, metadata))
    names = [argument.name for argument in torch.ops.gdn.gdn_attention.default._schema.arguments]
    after = dict(zip(names, flat, strict=True))
    for name, pool in cases.pools(held).items():
        written = after[name.replace(".", "_")]
        assert same_bits(written, pool) if pool.is_floating_point() else torch.equal(written, pool)


@IN_BOTH_FORMS
def test_fake_tensors_give_fake_outputs(form):
    batch, held, metadata = prepared(form)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = cases.Inputs(*map(mode.from_tensor, (batch.mixed_qkv, batch.a, batch.b, batch.z)))
        out = fake.run(LAYER, held, metadata)
    assert (out.shape, out.dtype, out.stride()) == (batch.z.shape, batch.mixed_qkv.dtype, (32, 8, 1))


@pytest.mark.report("B15")
@pytest.mark.parametrize("position", [1, 22, 23, 24, 27])
def test_wrong_arguments_of_the_op_change_nothing(position):
    """Also where no metadata has been validated: a, layout, query_start_loc, slots, out."""
    flat = copied(flat_arguments("slots"))
    before = copied(flat)
    flat[position] = flat[position][..., :-1] if position != 24 else flat[position] + 100
    with pytest.raises((ValueError, IndexError), match="expected"):
        torch.ops.gdn.gdn_attention.default(*flat)
    for i in (14, 15):
        assert torch.equal(flat[i], before[i])


def test_the_op_has_no_gradient_and_says_so():
    flat = copied(flat_arguments("slots"))
    flat[0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"torch.ops.gdn.gdn_attention has no gradient"):
        torch.ops.gdn.gdn_attention.default(*flat)


@pytest.mark.parametrize(
    ("layout", "message"),
    [([[1, 0, 1], [1, 0, 3]], "rows one after the other"), ([[1, 0, 1], [1, 1, 12]], "rows one after the other"),
     ([[1, 2, 1], [1, 2, 3]], "rows one after the other"), ([[1, 0, 1], [3, 1, 3]], "a kind of row"),
     ([[1, 0, 1], [2, 1, 3]], "a kind of row"), ([[1, 0, 5], [1, 5, 11]], "at most 4 tokens in row 0")],
)  # fmt: skip
def test_wrong_layouts_change_nothing(native_impl, layout, message):
    batch, held = cases.random_inputs(11), cases.randomized(cases.cache("slots", num_slots=16))
    metadata = cases.metadata_of([Row(1, (1,)), Row(2, (4, 5, 6), is_speculative=True)], "slots")
    with Capture() as captured:
        batch.run(LAYER, held, metadata)
    flat = copied(captured.flat)
    before, flat[22] = copied(flat), torch.tensor(layout)
    with pytest.raises(ValueError, match=f"^layout: expected {message}"):
        torch.ops.gdn.gdn_attention.default(*flat)
    assert all(torch.equal(flat[i], before[i]) for i in (14, 15, 27) if not before[i].isnan().any())
