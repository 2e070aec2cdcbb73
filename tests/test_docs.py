# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings run, and every public operation explains every one of its parameters."""

import doctest
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import gdn_core
from gdn_core import _dispatch, _registry, ops, records
from gdn_core.attention import cache, metadata, module, op, params
from gdn_core.speculate import drafter, engine, exact

MODULES = [ops, _dispatch, _registry, records, cache, metadata, module, op, params, drafter, engine, exact]
PUBLIC = [name for name in gdn_core.__all__ if callable(getattr(gdn_core, name))]
# An operation that continues another one documents only what it adds.
CONTINUES = {
    "fused_recurrent_gated_delta_rule": "chunk_gated_delta_rule",
    "fused_sigmoid_gating_delta_rule_update": "fused_gdn_gating",
    "fused_sigmoid_gating_delta_rule_update_spec": "fused_sigmoid_gating_delta_rule_update",
    "fused_sigmoid_gating_delta_rule_update_replay": "fused_sigmoid_gating_delta_rule_update",
    "causal_conv1d_update": "causal_conv1d_fn",
    "fused_gdn_decode_post_conv_mtp_replay": "fused_gdn_decode_post_conv_mtp",
}
# Explained once, at the top of the module.
EVERYWHERE = {"null_slot", "state_v_first"}


def failures(module):
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    tests = [test for test in finder.find(module) if test.examples]
    assert tests, f"{module.__name__} has no examples"
    report = []
    for test in tests:
        runner.run(test, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_run(module):
    assert not failures(module)


def test_examples_of_gdn_cpu_run(cpu_backend):
    import gdn_cpu

    assert not failures(gdn_cpu)


@pytest.mark.parametrize("name", ["tolerances", "inputs"])
def test_examples_of_the_testing_modules_run(name):
    module = importlib.import_module(f"gdn_core.testing.{name}")
    assert doctest.testmod(module).failed == 0


README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_readme_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    documentation = inspect.getdoc(getattr(gdn_core, name)) or ""
    assert documentation
    if name not in ("BackendInfo", "Explanation"):
        assert ">>> " in documentation


def arguments_section(op):
    text = inspect.getdoc(getattr(gdn_core, op))
    return re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL).group(1)


def headed(op):
    """Return the names that have an entry of their own in the Args section of an operation."""
    heads = re.findall(r"^    ([\w, ]+):", arguments_section(op), re.MULTILINE)
    return {name.strip() for head in heads for name in head.split(",")}


def documented(op):
    """Return the parameters that the Args section of an operation, or of the one it continues, names."""
    names = set(re.findall(r"\w+", arguments_section(op)))
    return names | documented(CONTINUES[op]) if op in CONTINUES else names


@pytest.mark.parametrize("op", gdn_core.OPS)
def test_every_parameter_is_documented(op):
    parameters = set(inspect.signature(getattr(gdn_core, op)).parameters)
    assert not parameters - documented(op) - EVERYWHERE


@pytest.mark.parametrize("op", gdn_core.OPS)
def test_nothing_is_documented_that_is_no_parameter(op):
    assert headed(op) <= set(inspect.signature(getattr(gdn_core, op)).parameters)


@pytest.mark.parametrize("op", CONTINUES)
def test_an_operation_that_continues_another_one_names_it(op):
    assert f":func:`{CONTINUES[op]}`" in inspect.getdoc(getattr(gdn_core, op))


@pytest.mark.parametrize("name", sorted(EVERYWHERE))
def test_what_is_documented_once_is_documented(name):
    assert name in ops.__doc__ or all(
        name in inspect.getdoc(getattr(gdn_core, op))
        for op in gdn_core.OPS
        if name in inspect.signature(getattr(gdn_core, op)).parameters and op not in CONTINUES
    )
