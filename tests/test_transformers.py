# SPDX-License-Identifier: Apache-2.0
"""transformers' models with their Gated DeltaNet layers on gdn: the same results, and the very same code afterwards."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gdn_core

transformers = pytest.importorskip("transformers")
integration = importlib.import_module("gdn_core.integrations.transformers")
eligibility = importlib.import_module("gdn_core.integrations.transformers.eligibility")

from transformers_models import (  # noqa: E402
    FAMILIES,
    assert_same,
    forward,
    generate,
    left_padded,
    new_cache,
    relative_difference,
    small_model,
    tokens,
)

each_family = pytest.mark.parametrize("family", FAMILIES)
# Before, the cache had another interface, and layers run function by function.
_LAYER = type(integration.gated_delta_net_layers(small_model("qwen3_5"))[0])
HAS_LAYERS = "cache" in inspect.signature(_LAYER.forward).parameters
whole_layers = pytest.mark.skipif(not HAS_LAYERS, reason="transformers before 5.24")


@pytest.fixture(autouse=True)
def _on_gdn_and_unpatched_after() -> Iterator[None]:
    """Without gdn-cpu the layers run on the reference only where it is asked for."""
    is_native = any(backend.name == "cpu" and backend.available for backend in gdn_core.backends())
    with gdn_core.use_backend(None if is_native else "reference"):
        yield
    assert not integration.is_patched()


def module_of(family: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


# The same results


@each_family
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}],
    ids=["dynamic", "beams", "no-cache", "static"],
)
def test_left_padded_generation_is_the_same(family: str, options: dict[str, Any]) -> None:
    model, prompt = small_model(family), left_padded(2, 9)
    expected = generate(model, prompt, **options)
    with integration.patched(), gdn_core.record_calls() as calls:
        actual = generate(model, prompt, **options)
    assert_same(actual, expected)
    assert {"causal_conv1d_fn", "chunk_gated_delta_rule", "rms_norm_gated"} <= {op for op, _ in calls}


@each_family
def test_sampling_draws_the_same(family: str) -> None:
    model, prompt = small_model(family), left_padded(2, 9)
    settings = {"do_sample": True, "temperature": 0.7}
    torch.manual_seed(1)
    expected = generate(model, prompt, **settings)
    torch.manual_seed(1)
    with integration.patched():
        assert_same(generate(model, prompt, **settings), expected)


@each_family
def test_a_padded_row_is_as_it_is_alone(family: str) -> None:
    model, prompt = small_model(family), left_padded(3, 12)
    with integration.patched():
        together = generate(model, prompt)
        for row, mask in enumerate(prompt["attention_mask"]):
            ids = prompt["input_ids"][row, mask.bool()][None]
            sequence, logits = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            assert torch.equal(sequence[0, -7:], together[0][row, -7:])
            assert relative_difference(together[1][:, row], logits[:, 0]) < 1e-5


@each_family
@torch.no_grad()
@pytest.mark.parametrize("record", [False, True], ids=["", "recording"])
def test_cached_continuation_is_the_same(family: str, record: bool) -> None:
    """Prefill, one token, several tokens onto the cache, one token; and with a cache that records its past."""
    model, ids = small_model(family), tokens(2, 90)
    if record and not hasattr(transformers.DynamicCache, "activate_past_recording"):
        pytest.skip("caches of this transformers record nothing")

    def logits() -> torch.Tensor:
        cache = new_cache(model)
        if record:
            cache.activate_past_recording()
        pieces = [forward(model, ids[:, a:b], cache) for a, b in pairwise((0, 2, 3, 10, 11, 12, 90))]
        return torch.cat(pieces, dim=1)

    expected = logits()
    with integration.patched():
        assert relative_difference(logits(), expected) < 1e-5


@torch.no_grad()
def test_a_cache_that_was_reset_starts_anew() -> None:
    model, ids = small_model("qwen3_5"), tokens(2, 10)
    expected = forward(model, ids, new_cache(model))
    with integration.patched():
        cache = new_cache(model)
        forward(model, tokens(2, 6, seed=8), cache)
        forward(model, tokens(2, 1, seed=9), cache)
        cache.reset()
        assert relative_difference(forward(model, ids, cache)[:, -1:], expected[:, -1:]) < 1e-5 or not HAS_LAYERS


@each_family
@torch.no_grad()
def test_a_layer_in_half_precision_is_the_same_within_rounding(family: str) -> None:
    """Both round, gdn in fewer places. A layer alone: experts would turn a rounding into another choice of them."""
    model = small_model(family)
    layer = copy.deepcopy(integration.gated_delta_net_layers(model)[0]).bfloat16()
    x = torch.randn(2, 81, 64, generator=torch.Generator().manual_seed(1)).bfloat16()

    def outputs(x: torch.Tensor) -> torch.Tensor:
        cache = new_cache(model)
        name = "cache" if HAS_LAYERS else "cache_params"
        return torch.cat([layer(x[:, a:b], **{name: cache}) for a, b in pairwise((0, 79, 80, 81))], dim=1).float()

    before = outputs(x)
    with integration.patched():
        after = outputs(x)
    layer.float()
    exact = outputs(x.float())
    assert 0 < relative_difference(after, exact) < 1.05 * relative_difference(before, exact) < 0.02


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@whole_layers
@torch.no_grad()
def test_the_cache_keeps_its_own_tensors_and_dtypes(state_dtype: torch.dtype) -> None:
    """Static caches and CUDA graphs need states that stay where they are."""
    model = small_model("qwen3_5")
    cache = new_cache(model)
    with integration.patched():
        forward(model, tokens(2, 6), cache)
        layer = cache.layers[0]
        layer.recurrent_states[0] = layer.recurrent_states[0].to(state_dtype)
        state, conv_state = layer.recurrent_states[0], layer.conv_states[0]
        before = state.clone()
        forward(model, tokens(2, 1), cache)
        forward(model, tokens(2, 3), cache)
    assert layer.recurrent_states[0] is state and layer.conv_states[0] is conv_state
    assert state.dtype == state_dtype and not torch.equal(state, before)


@whole_layers
@torch.no_grad()
@pytest.mark.parametrize("family", [family for family in FAMILIES if family in ("qwen3_5", "olmo_hybrid")])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_has_no_graph_break_and_the_same_results(family: str, backend: str) -> None:
    model, ids = small_model(family), tokens(2, 12)

    def logits(run: Any) -> torch.Tensor:
        cache = new_cache(model)
        pieces = [run(ids[:, a:b], use_cache=True, cache=cache).logits for a, b in pairwise((0, 9, 10, 11))]
        return torch.cat(pieces, dim=1)

    expected = logits(model)
    torch._dynamo.reset()
    with integration.patched():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert relative_difference(logits(compiled), expected) < 1e-5
    torch._dynamo.reset()


# What a layer's first token has found out holds for the next ones, and no longer than it is true


def decoded(model: Any, between: Any = lambda: None, count: int = 4) -> torch.Tensor:
    """Decode some tokens, with a change in the middle; return their logits."""
    cache = new_cache(model)
    forward(model, tokens(1, 6), cache)
    pieces = []
    for i in range(count):
        if i == count // 2:
            between()
        pieces.append(forward(model, tokens(1, 1, seed=i), cache))
    return torch.cat(pieces, dim=1)


def replace(module: Any, name: str) -> None:
    setattr(module, name, torch.nn.Parameter(getattr(module, name) * 1.5, requires_grad=False))


CHANGES: dict[str, Any] = {
    "A_log": lambda layer: replace(layer, "A_log"),
    "dt_bias": lambda layer: replace(layer, "dt_bias"),
    "conv weight": lambda layer: replace(layer.conv1d, "weight"),
    "conv data": lambda layer: setattr(layer.conv1d.weight, "data", layer.conv1d.weight.data * 1.5),
    "conv in place": lambda layer: layer.conv1d.weight.data.mul_(1.5),
    "conv bias": lambda layer: setattr(layer.conv1d, "bias", torch.nn.Parameter(torch.ones(len(layer.conv1d.weight)))),
    "norm weight": lambda layer: replace(layer.norm, "weight"),
    "norm": lambda layer: setattr(layer, "norm", copy.deepcopy(layer.norm).apply(lambda m: replace(m, "weight"))),
    "activation": lambda layer: setattr(layer, "activation", None),
    "gate activation": lambda layer: setattr(layer.norm, "activation", "sigmoid"),
    "hook": lambda layer: layer.norm.register_forward_hook(lambda _, __, output: 1.5 * output),
    "projection": lambda layer: replace(layer.in_proj_qkv, "weight"),
    "function": lambda layer: layer.in_proj_z.register_forward_hook(lambda _, __, output: 1.5 * output),
}


@whole_layers
@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_tokens_is_seen(change: str, cpu_backend: None) -> None:
    model, ours = (copy.deepcopy(small_model("qwen3_5")) for _ in range(2))
    unchanged = decoded(model)

    def of(model: Any) -> Any:
        return lambda: CHANGES[change](integration.gated_delta_net_layers(model)[0])

    expected = decoded(model, of(model))
    assert relative_difference(expected[:, 2:], unchanged[:, 2:]) > 1e-3
    with integration.patched():
        assert relative_difference(decoded(ours, of(ours)), expected) < 1e-5


@whole_layers
@torch.no_grad()
def test_a_remembered_layer_takes_another_dtype_batch_and_cache(cpu_backend: None) -> None:
    model = copy.deepcopy(small_model("qwen3_5"))
    expected = generate(model, left_padded(3, 9))
    with integration.patched():
        single = decoded(model)
        assert_same(generate(model, left_padded(3, 9)), expected)
        cache = new_cache(model)
        cache.activate_past_recording()
        forward(model, tokens(1, 6), cache)
        recorded = [forward(model, tokens(1, 1, seed=i), cache) for i in range(4)]
        assert relative_difference(torch.cat(recorded, dim=1), single) < 1e-5
        assert 1e-3 < relative_difference(decoded(model.bfloat16()).float(), single) < 0.1
        converted = decoded(model.float())
    assert relative_difference(converted, decoded(model)) < 1e-5


@whole_layers
def test_a_remembered_layer_is_differentiated_and_counted(cpu_backend: None) -> None:
    """Whoever wants to see its calls, or a gradient, or the reference, gets that."""
    model = copy.deepcopy(small_model("qwen3_5"))
    with integration.patched(), torch.no_grad():
        expected = decoded(model)
        with gdn_core.record_calls() as calls:
            assert torch.equal(decoded(model), expected)
        assert calls["fused_gdn_decode_post_conv_mtp", "cpu"] == 3 * 4
        with gdn_core.use_backend("reference"), gdn_core.record_calls() as calls:
            assert relative_difference(decoded(model), expected) < 1e-5
        assert {backend for _, backend in calls} == {"reference"}
        with torch.autocast("cpu", torch.bfloat16):
            assert relative_difference(decoded(model).float(), expected) > 1e-4
        cache = new_cache(model)
        forward(model, tokens(1, 6), cache)
        state = cache.layers[0].recurrent_states[0]
        version = state._version
        forward(model, tokens(1, 1), cache)
        forward(model, tokens(1, 1), cache)
        assert state._version >= version + 2
    with integration.patched():
        cache = new_cache(model)
        with torch.no_grad():
            forward(model, tokens(1, 6), cache)
        embedded = torch.randn(1, 1, 64, requires_grad=True)
        with gdn_core.record_calls() as calls:
            logits = model(inputs_embeds=embedded, use_cache=True, cache=cache).logits
        assert logits.requires_grad and not calls


@whole_layers
@torch.no_grad()
def test_nothing_is_remembered_of_a_layer_that_is_gone(cpu_backend: None) -> None:
    step = importlib.import_module("gdn_core.integrations.transformers.step")
    with integration.patched():
        before = len(step._known)
        model = copy.deepcopy(small_model("qwen3_5"))
        decoded(model)
        assert len(step._known) == before + 3
        del model
        gc.collect()
        assert len(step._known) == before
        decoded(small_model("qwen3_5"))
    assert not step._known


@each_family
def test_a_saved_model_loads_without_gdn(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    with integration.patched():
        model.save_pretrained(tmp_path)
        copied = copy.deepcopy(model)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    for other in (copied, loaded):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


class Mover:
    """Moves a module's weights in before it is used, and out after, as accelerate's hooks for offloading do."""

    def __init__(self, module: Any) -> None:
        self.weights = {name: weight.data for name, weight in module.named_parameters()}
        self.inner, self.module = module.forward, module
        module._hf_hook, module.forward = self, self.run
        self.post_forward(module, None)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.pre_forward(self.module)
        result = self.inner(*args, **kwargs)
        self.post_forward(self.module, result)
        return result

    def pre_forward(self, module: Any) -> None:
        self._put({name: weight for name, weight in self.weights.items()})

    def post_forward(self, module: Any, result: Any) -> None:
        self._put({name: weight.to("meta") for name, weight in self.weights.items()})

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            setattr(self.module, name, torch.nn.Parameter(weight, requires_grad=False))


@pytest.mark.skipif(not HAS_LAYERS, reason="transformers moves these weights since 5.24")
@pytest.mark.parametrize("is_patched_first", [False, True])
def test_offloaded_weights_are_moved_in(is_patched_first: bool) -> None:
    prompt = left_padded(2, 9)
    expected = generate(small_model("qwen3_5"), prompt)
    model = copy.deepcopy(small_model("qwen3_5"))

    def offload() -> None:
        for layer in integration.gated_delta_net_layers(model):
            Mover(layer.conv1d)
            Mover(layer.norm)

    if not is_patched_first:
        offload()
    with integration.patched(), gdn_core.record_calls() as calls:
        if is_patched_first:
            offload()
        assert_same(generate(model, prompt), expected)
    assert {"causal_conv1d_update", "fused_recurrent_gated_delta_rule"} <= {op for op, _ in calls}


@whole_layers
@torch.no_grad()
def test_a_hook_on_the_norm_sees_decoded_tokens() -> None:
    model = copy.deepcopy(small_model("qwen3_5"))
    seen = []
    integration.gated_delta_net_layers(model)[0].norm.register_forward_hook(lambda *_: seen.append(1))
    with integration.patched():
        generate(model, {"input_ids": tokens(1, 4)})
    assert len(seen) == 7


# What stays with the original code


def test_training_keeps_the_original_code() -> None:
    model, ids = copy.deepcopy(small_model("qwen3_5")).requires_grad_(True), tokens(1, 8)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return model.model.layers[0].linear_attn.A_log.grad.clone()

    expected = gradient()
    with integration.patched(), gdn_core.record_calls() as calls:
        assert torch.equal(gradient(), expected)
    assert not calls


def test_frozen_weights_before_trained_ones_keep_the_graph() -> None:
    """A gradient that only passes through the layer's input counts too."""
    model, ids = copy.deepcopy(small_model("qwen3_5")), tokens(1, 8)

    def gradient() -> torch.Tensor:
        embedded = model.get_input_embeddings()(ids).requires_grad_(True)
        model(inputs_embeds=embedded).logits.sum().backward()
        return embedded.grad

    expected = gradient()
    with integration.patched(), gdn_core.record_calls() as calls:
        assert torch.equal(gradient(), expected)
    assert not calls


@torch.no_grad()
def test_autocast_keeps_the_original_code() -> None:
    model, ids = small_model("qwen3_5"), tokens(1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids).logits
        with integration.patched(), gdn_core.record_calls() as calls:
            assert torch.equal(model(ids).logits, expected)
    assert not calls


@torch.no_grad()
def test_an_exported_layer_holds_no_operation_of_gdn() -> None:
    layer = integration.gated_delta_net_layers(small_model("qwen3_5"))[0]
    x = torch.randn(1, 6, 64)
    with integration.patched():
        program = torch.export.export(layer, (x,), strict=False)
    assert "gdn" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), layer(x))


@torch.no_grad()
def test_another_device_keeps_the_original_code() -> None:
    model = copy.deepcopy(small_model("qwen3_5")).to("meta")
    with integration.patched(), gdn_core.use_backend(None), gdn_core.record_calls() as calls:
        model(tokens(1, 8).to("meta"))
    assert not calls


@torch.no_grad()
def test_an_activation_that_gdn_lacks_keeps_the_original_code() -> None:
    model = copy.deepcopy(small_model("qwen3_5"))
    for layer in integration.gated_delta_net_layers(model):
        layer.activation = "gelu"
    expected = model(tokens(1, 8)).logits
    with integration.patched(), gdn_core.record_calls() as calls:
        assert relative_difference(model(tokens(1, 8)).logits, expected) < 1e-5
    assert "causal_conv1d_fn" not in {op for op, _ in calls}


@pytest.mark.report("E08")
@torch.no_grad()
def test_without_a_native_backend_the_original_code_runs_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = eligibility._registry
    monkeypatch.setattr(eligibility, "_kernels", {})
    monkeypatch.setattr(registry, "provider", lambda name: None)
    missing = gdn_core.BackendInfo("cpu", None, False, reason="gdn-cpu is not installed", install="pip install it")
    monkeypatch.setattr(registry, "info", lambda name: missing)
    with gdn_core.use_backend(None), integration.patched(), gdn_core.record_calls() as calls:
        small_model("qwen3_5")(tokens(1, 8))
    assert not calls
    messages = [record.getMessage() for record in caplog.records if "qwen3_5 keeps" in record.getMessage()]
    assert messages == [
        "transformers' qwen3_5 keeps its own slow code on the CPU: backend 'cpu': gdn-cpu is not installed. "
        "To make it fast: pip install it"
    ]


@pytest.mark.report("E08")
def test_the_log_says_what_runs(cpu_backend: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gdn_core"), integration.patched():
        pass
    messages = {record.getMessage() for record in caplog.records}
    assert "transformers' qwen3_5: Gated DeltaNet layers on cpu run on gdn (cpu)" in messages


# In and out


def everything(module: ModuleType) -> dict[str, Any]:
    """The module's objects, and what its classes hold."""
    found = dict(vars(module))
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            found |= {f"{name}.{attribute}": member for attribute, member in vars(value).items()}
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}


@each_family
def test_unpatch_restores_the_very_functions(family: str) -> None:
    module = module_of(family)
    before = everything(module)
    integration.patch()
    patched = everything(module)
    names = {name.partition(".")[2] or name for name in changed(before, patched)}
    functions = {
        "causal_conv1d_fn", "causal_conv1d_update", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
    }  # fmt: skip
    assert names == functions | {"forward"}
    integration.patch()
    assert not changed(everything(module), patched)
    integration.unpatch()
    assert not changed(everything(module), before)
    integration.unpatch()


@pytest.mark.parametrize("family", ["kimi_linear", "mamba2", "llama"])
def test_other_families_are_untouched(family: str) -> None:
    """Also those that share the convolution's names."""
    if not hasattr(transformers.models, family):
        pytest.skip("transformers is too old for it")
    module = module_of(family)
    before = everything(module)
    with integration.patched():
        assert not changed(everything(module), before)


def test_nested_blocks_and_exceptions() -> None:
    module = module_of("qwen3_5")
    before = everything(module)
    with pytest.raises(KeyError), integration.patched():
        with integration.patched():
            pass
        assert changed(everything(module), before)
        integration.unpatch()  # undoes patch(), not the block
        assert changed(everything(module), before)
        raise KeyError
    assert not changed(everything(module), before)
    integration.patch()
    with integration.patched():
        pass
    assert integration.is_patched() and changed(everything(module), before)
    integration.unpatch()
    assert not changed(everything(module), before)


def test_a_model_s_own_modules_alone_are_patched() -> None:
    ours, other = module_of("qwen3_5"), module_of("qwen3_next")
    before = everything(other)
    integration.patch(small_model("qwen3_5"))
    assert vars(ours)["torch_chunk_gated_delta_rule"].__module__ == ours.__name__  # wraps what it replaces
    assert not changed(everything(other), before)
    with integration.patched():
        assert changed(everything(other), before)
    assert not changed(everything(other), before) and integration.is_patched()
    integration.unpatch()
    with pytest.raises(ValueError, match="model: expected a model with Gated DeltaNet layers, got a Linear"):
        integration.patch(torch.nn.Linear(2, 2))


def test_what_someone_else_replaced_since_is_left(caplog: pytest.LogCaptureFixture) -> None:
    module: Any = module_of("qwen3_5")
    original = module.causal_conv1d_fn
    integration.patch()
    module.causal_conv1d_fn = theirs = lambda *_: None
    integration.unpatch()
    assert module.causal_conv1d_fn is theirs
    assert "modeling_qwen3_5.causal_conv1d_fn was replaced again" in caplog.text
    module.causal_conv1d_fn = original


def test_threads_that_patch_at_once() -> None:
    module, model, prompt = module_of("qwen3_5"), small_model("qwen3_5"), left_padded(2, 9)
    before, expected = everything(module), generate(model, prompt)
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            start.wait()
            for _ in range(3):
                with integration.patched(), gdn_core.record_calls() as calls:
                    assert_same(generate(model, prompt, max_new_tokens=7), expected)
                assert calls
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not failures
    assert not changed(everything(module), before)


@pytest.mark.report("C20")
@each_family
def test_replacements_show_the_signature_of_what_they_replace(family: str) -> None:
    """Callers that filter keywords by it lose nothing."""
    module = module_of(family)
    functions = (
        "causal_conv1d_fn", "causal_conv1d_update", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
    )  # fmt: skip
    before = [inspect.signature(getattr(module, name)) for name in functions]
    with integration.patched():
        assert [inspect.signature(getattr(module, name)) for name in functions] == before


def run_python(code: str, *paths: Path, **environment: str) -> Any:
    """Run code in a fresh process, with directories on its path, and return what it prints as JSON."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("GDN_")}
    if paths:
        others["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=others | environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


IMPORTED_LATER = """
    import json, sys
    import gdn_core
    is_light = "transformers" not in sys.modules
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    from transformers import LlamaForCausalLM
    place = modeling.torch_chunk_gated_delta_rule.__code__.co_filename
    print(json.dumps([is_light, "gdn_core" in place]))
"""


@pytest.mark.parametrize(("value", "is_patched"), [("1", True), ("0", False), ("", False)])
def test_the_variable_patches_what_is_imported_after_gdn(value: str, is_patched: bool) -> None:
    assert run_python(IMPORTED_LATER, GDN_PATCH_TRANSFORMERS=value) == [True, is_patched]


def test_the_variable_patches_what_was_imported_before_gdn() -> None:
    code = "import transformers.models.qwen3_5.modeling_qwen3_5\n" + textwrap.dedent(IMPORTED_LATER)
    assert run_python(code, GDN_PATCH_TRANSFORMERS="1")[1]


def test_the_variable_does_no_harm_without_transformers() -> None:
    code = """
        import importlib.util, json
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else find(name, *rest)
        import gdn_core
        import gdn_core.integrations.transformers as integration
        try:
            integration.patch()
        except ImportError as error:
            print(json.dumps([integration.is_patched(), str(error)]))
    """
    expected = [False, 'transformers is not installed: pip install "gdn-core[transformers]"']
    assert run_python(code, GDN_PATCH_TRANSFORMERS="1") == expected


def test_the_hook_on_imports_goes_with_the_patch() -> None:
    before = list(sys.meta_path)
    with integration.patched():
        assert len(sys.meta_path) == len(before) + 1
    assert sys.meta_path == before


FAKE_PACKAGES = {
    "fla/ops/gated_delta_rule.py": """
        def refuse(device):
            if device.type == "cpu":
                raise RuntimeError("0 active drivers ([]). There should only be one.")

        def chunk_gated_delta_rule(q, k, v, g=None, beta=None, scale=None, initial_state=None,
                                   output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
            refuse(q.device)
            return v, v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])

        fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
    """,
    "causal_conv1d/__init__.py": """
        def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
            if x.device.type == "cpu":
                raise RuntimeError("Expected x.is_cuda() to be true")
            return x

        def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
            return causal_conv1d_fn(x, weight)
    """,
}

WITH_FLA = """
    import json
    import torch
    import gdn_core, gdn_core.integrations.transformers as integration
    from transformers_models import small_model, tokens
    model, found = small_model("qwen3_5"), {}

    def attempt(name, function):
        try:
            found[name] = function()
        except RuntimeError as error:
            found[name] = str(error)

    def calls(device="cpu"):
        with torch.no_grad(), gdn_core.record_calls() as counted:
            model.to(device)(tokens(1, 8).to(device))
        return sorted({op for op, _ in counted})

    def gradient():
        model.to("cpu").requires_grad_(True)(tokens(1, 8)).logits.sum().backward()
        return bool(model.model.layers[0].linear_attn.A_log.grad.isfinite().all())

    attempt("alone", calls)
    with integration.patched():
        attempt("patched", calls)
        attempt("training", gradient)
        attempt("another device", lambda: calls("meta"))
    print(json.dumps(found))
"""


@pytest.mark.report("E09")
@whole_layers
def test_with_fla_installed_CPU_tensors_come_to_gdn_and_others_go_to_fla(cpu_backend: None, tmp_path: Path) -> None:
    for name, code in FAKE_PACKAGES.items():
        path = tmp_path / name
        for package in [path.parent, *path.parent.parents]:
            if package == tmp_path:
                break
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
        path.write_text(textwrap.dedent(code))
    # The last attempt leaves the weights on the meta device, so training comes before.
    found = run_python(WITH_FLA, tmp_path, Path(__file__).parent)
    assert found == {
        "alone": "Expected x.is_cuda() to be true",
        "patched": ["causal_conv1d_fn", "chunk_gated_delta_rule", "fused_gdn_gating", "rms_norm_gated"],
        "training": True,
        "another device": [],
    }


EARLY_MODULE = """
    import torch
    from torch.nn.functional import silu
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        causal_conv1d_update, torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule,
    )

    causal_conv1d_fn = chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = None

    class EarlyGatedDeltaNet(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1d = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3, bias=False)
            self.causal_conv1d_fn = causal_conv1d_fn
            self.causal_conv1d_update = causal_conv1d_update
            self.chunk_gated_delta_rule = chunk_gated_delta_rule or torch_chunk_gated_delta_rule
            self.recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule or torch_recurrent_gated_delta_rule

        def forward(self, x, cache_params=None):
            weight = self.conv1d.weight.squeeze(1)
            if self.causal_conv1d_fn is not None:
                y = self.causal_conv1d_fn(x=x, weight=weight, bias=None, activation="silu", seq_idx=None)
            else:
                y = silu(self.conv1d(x)[:, :, : x.shape[-1]])
            last = self.causal_conv1d_update(x[..., -1:], x[..., -5:-1].clone(), weight, None, "silu")
            q, k, v = (part[:, :, None] for part in y.transpose(1, 2).split(2, dim=-1))
            gates = {"g": -torch.ones(q.shape[:-1]), "beta": torch.ones(q.shape[:-1])}
            o, state = self.chunk_gated_delta_rule(q, k, v, **gates, initial_state=None, output_final_state=True)
            gates = {name: gate[:, :1] for name, gate in gates.items()}
            step = self.recurrent_gated_delta_rule(
                q[:, :1], k[:, :1], v[:, :1], **gates, initial_state=state, output_final_state=True
            )
            return torch.cat([part.flatten() for part in (y, last, o, *step)])
"""


@torch.no_grad()
def test_layers_that_keep_their_functions_are_patched_made_before_or_after(
    cpu_backend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers before 5.16 makes them."""
    (tmp_path / "modeling_early.py").write_text(textwrap.dedent(EARLY_MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("modeling_early")
    before, x = module.EarlyGatedDeltaNet(), torch.randn(1, 6, 9)
    kept, expected = dict(vars(before)), before(x)
    names = set(vars(module.EarlyGatedDeltaNet))
    with integration.patched(before):
        after = module.EarlyGatedDeltaNet()
        after.load_state_dict(before.state_dict())
        for layer in (before, after):
            with gdn_core.record_calls() as calls:
                assert relative_difference(layer(x), expected) < 1e-6
            convolutions, rules = ("_fn", "_update"), ("chunk", "fused_recurrent")
            ours = {f"causal_conv1d{name}" for name in convolutions} | {f"{name}_gated_delta_rule" for name in rules}
            assert {op for op, _ in calls} == ours
    assert set(vars(module.EarlyGatedDeltaNet)) == names and vars(before) == kept
    for layer in (before, after):
        with gdn_core.record_calls() as calls:
            assert torch.equal(layer(x), expected)
        assert not calls


def test_the_plan_of_a_model_without_weights(cpu_backend: None) -> None:
    with torch.device("meta"):
        model = type(small_model("qwen3_5"))(small_model("qwen3_5").config)
    plans = integration.plan_layers(model, torch.bfloat16)
    assert [plan.index for plan in plans] == [0, 1, 2]
    for plan in plans:
        assert plan.heads == "2 x 16, 4 x 24"
        if HAS_LAYERS:
            assert plan.reason is None and set(plan.prefill.values()) == set(plan.decode.values()) == {"cpu"}
            assert "fused_gdn_decode_post_conv_mtp" in plan.decode
        else:
            assert "before 5.24" in plan.reason
    layer: Any = integration.gated_delta_net_layers(model)[0]
    layer.activation = "gelu"
    if HAS_LAYERS:
        assert integration.plan_layers(layer, torch.bfloat16)[0].reason == "gdn has no convolution with gelu"
