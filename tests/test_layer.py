# SPDX-License-Identifier: Apache-2.0
"""The GatedDeltaNet module: against transformers' layers, split over processes, compiled."""

import socket

import pytest
import torch

import gdn_core
import layer_ranks
from contract_calls import same_bits
from gdn_core import GatedDeltaNet, GDNMetadata

transformers = pytest.importorskip("transformers")

FAMILIES = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5"}
SIZES = {
    "hidden_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_hidden_layers": 2,
}


def theirs(family, dtype=torch.float32):
    """Return a config and transformers' layer with weights that are all different."""
    name = FAMILIES[family]
    config_class = getattr(transformers, f"{name}Config" if family == "qwen3_next" else f"{name}TextConfig")
    config = config_class(**SIZES, layer_types=["linear_attention"] * 2)
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["_"])
    torch.manual_seed(3)
    layer = getattr(module, f"{name}GatedDeltaNet")(config, layer_idx=0)
    with torch.no_grad():
        layer.dt_bias.normal_()
        layer.norm.weight.add_(0.1 * torch.randn_like(layer.norm.weight))
    return config, layer.to(dtype).eval()


def ours(config, layer, **options):
    module = GatedDeltaNet.from_config(config, dtype=layer.out_proj.weight.dtype, **options)
    module.load_state_dict(layer.state_dict())
    return module.eval()


def error(actual, expected):
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).abs().max() / expected.abs().max())


BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
FAMILY = pytest.mark.parametrize("family", FAMILIES)
DTYPE = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


@FAMILY
@DTYPE
def test_whole_sequences_are_those_of_transformers(family, dtype):
    config, layer = theirs(family, dtype)
    module = ours(config, layer)
    hidden = torch.randn(2, 70, config.hidden_size, dtype=dtype)
    with torch.no_grad():
        assert error(module(hidden), layer(hidden)) <= BOUNDS[dtype]


@FAMILY
@DTYPE
def test_cached_decoding_is_that_of_transformers(family, dtype):
    """A batch of two: their cache against ours, where the second request's prompt is cut in two."""
    config, layer = theirs(family, dtype)
    module = ours(config, layer)
    hidden = torch.randn(2, 20, config.hidden_size, dtype=dtype)
    their_cache, cache = transformers.DynamicCache(config=config), module.make_cache(8)
    with torch.no_grad():
        expected = [layer(hidden[:, :13], cache=their_cache)]
        expected += [layer(hidden[:, t : t + 1], cache=their_cache) for t in range(13, 20)]

        rows = GDNMetadata.build([0, 13, 18], [5, 2], has_initial_state=[False, False])
        first = module(torch.cat([hidden[0, :13], hidden[1, :5]]), cache, rows)
        rest = module(hidden[1, 5:13], cache, GDNMetadata.build([0, 8], [2]))
        outputs = [torch.stack([first[:13], torch.cat([first[13:], rest])])]
        both = GDNMetadata.build([0, 1, 2], [5, 2])
        outputs += [module(hidden[:, t], cache, both)[:, None] for t in range(13, 20)]
    assert error(torch.cat(outputs, 1), torch.cat(expected, 1)) <= BOUNDS[dtype]


@FAMILY
def test_state_dicts_round_trip_and_name_what_is_missing(family):
    config, layer = theirs(family)
    module = ours(config, layer)
    again = GatedDeltaNet.from_config(config)
    again.load_state_dict(module.state_dict())
    for mine, other in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, other)
    checkpoint = layer.state_dict()
    names = set(checkpoint)
    del checkpoint["A_log"]
    with pytest.raises(RuntimeError, match=r"Missing key.*A_log"):
        again.load_state_dict(checkpoint)
    assert set(checkpoint) == names - {"A_log"}
    model = torch.nn.ModuleDict({"linear_attn": GatedDeltaNet.from_config(config)})
    model.load_state_dict({f"linear_attn.{name}": value for name, value in layer.state_dict().items()})
    assert torch.equal(model["linear_attn"].in_proj.weight, module.in_proj.weight)


def test_the_layer_can_be_trained_without_a_cache():
    config, layer = theirs("qwen3_5")
    module = ours(config, layer)
    hidden = torch.randn(1, 5, config.hidden_size)
    module(hidden).square().sum().backward()
    layer(hidden).square().sum().backward()
    projections = [layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a]
    assert error(module.in_proj.weight.grad, torch.cat([p.weight.grad for p in projections])) <= 1e-5
    for name in ("A_log", "dt_bias"):
        assert error(getattr(module, name).grad, getattr(layer, name).grad) <= 1e-5
    with pytest.raises(RuntimeError, match="no_grad"):
        module(hidden[0], module.make_cache(2), GDNMetadata.build([0, 5], [0], has_initial_state=[False]))


# --- tensor parallelism -----------------------------------------------------------------------------------------------


def test_two_ranks_sum_to_one(tmp_path):
    sizes = {
        "hidden_size": SIZES["hidden_size"],
        "num_key_heads": SIZES["linear_num_key_heads"],
        "num_value_heads": SIZES["linear_num_value_heads"],
        "head_k_dim": SIZES["linear_key_head_dim"],
        "head_v_dim": SIZES["linear_value_head_dim"],
    }
    for family in FAMILIES:
        torch.save((sizes, theirs(family)[1].state_dict()), tmp_path / f"{family}.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(layer_ranks.main, (port, tmp_path, list(FAMILIES)), nprocs=2)
    for family in FAMILIES:
        expected = layer_ranks.outputs(sizes, torch.load(tmp_path / f"{family}.pt")[1])
        assert error(torch.load(tmp_path / f"{family}.out.pt"), expected) <= 1e-5


@pytest.mark.parametrize("key_heads", [(0, 3), (1, 1), (-1, 1)])
def test_key_heads_have_to_be_there(key_heads):
    with pytest.raises(ValueError, match="key_heads: expected a range of the 2 key heads"):
        GatedDeltaNet(8, 2, 2, 4, 4, key_heads=key_heads)


# --- compilers --------------------------------------------------------------------------------------------------------


def steps(config, count):
    """Yield batches of ever other rows: prefills, decodes, speculative rows, padding."""
    rng = torch.Generator().manual_seed(2)
    kinds = [
        {"query_start_loc": [0, 5, 6], "slots": [[0, 1, 2], [7, -1, -1]], "has_initial_state": [False, True]},
        {"query_start_loc": [0, 3, 4], "slots": [[0, 1, 2], [7, -1, -1]], "is_speculative": [True, False]},
        {"query_start_loc": [0, 1, 3], "slots": [[-1] * 3, [0, 1, 2]], "is_speculative": [False, True],
         "num_accepted_tokens": [1, 2]},
    ]  # fmt: skip
    for step in range(count):
        metadata = GDNMetadata.build(**kinds[step % 3])
        yield metadata, torch.randn(metadata.num_tokens, config.hidden_size, generator=rng)


def split_at_core(graph_module, example_inputs):
    """Compile piecewise, as engines with CUDA graphs do: cut the graph at the splitting ops, keep each piece."""
    from torch.fx.passes.split_module import split_module

    pieces, owner = 0, {}
    for node in graph_module.graph.nodes:
        is_core = node.op == "call_function" and getattr(node.target, "_name", "") in gdn_core.SPLITTING_OPS
        pieces += is_core
        owner[node] = pieces
        pieces += is_core
    # What an op changes in place, no edge of the graph shows: only the order does.
    split = split_module(graph_module, None, lambda node: owner[node], keep_original_order=True)
    split_at_core.pieces.append(len(list(split.children())))
    return split


BACKENDS = {"eager": "eager", "aot_eager": "aot_eager", "split": split_at_core}


@pytest.mark.report("D02")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_layer_equals_eager(backend):
    """100 steps, the state pool in its place; aot_eager clones what an op changes, and has to put it back."""
    config, layer = theirs("qwen3_5")
    module = ours(config, layer)
    split_at_core.pieces = []
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=BACKENDS[backend], fullgraph=True, dynamic=True)
    eager_cache, cache = module.make_cache(8, S=3), module.make_cache(8, S=3)
    places = [pool.data_ptr() for pool in (cache.state, cache.conv_states)]
    with torch.no_grad():
        for metadata, hidden in steps(config, 100):
            expected = module(hidden, eager_cache, metadata)
            assert same_bits(compiled(hidden, cache, metadata), expected)
    assert same_bits(cache.state, eager_cache.state)
    assert [pool.data_ptr() for pool in (cache.state, cache.conv_states)] == places
    if backend == "split":  # projections, core, output projection
        assert set(split_at_core.pieces) == {3}


def test_the_core_is_one_opaque_node():
    config, layer = theirs("qwen3_5")
    module, graphs = ours(config, layer), []

    def keep(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module

    torch._dynamo.reset()
    metadata, hidden = next(steps(config, 1))
    with torch.no_grad():
        torch.compile(module, backend=keep, fullgraph=True)(hidden, module.make_cache(8, S=3), metadata)
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert [target for target in targets if target.startswith("gdn")] == ["gdn.gdn_attention.default"]
