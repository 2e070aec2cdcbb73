#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check gdn-cuda on a GPU, and measure it, in about five minutes. Needs the wheels and torch, nothing else.

What the backend ``triton`` runs is checked and timed beside it where triton and fla-core are installed.

    python tools/gpu_check.py                   # everything
    python tools/gpu_check.py golden exact      # some of it
    python tools/gpu_check.py --write-golden    # renew tools/gpu_golden.json, from the emulator (no GPU)

Kernels use operations only that IEEE defines, so a GPU has to give the bits that the emulator gave: the golden file
holds hashes of them. Status 1 when a check fails; times are printed, not judged.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gdn_core
from gdn_core import ReplayRecords
from gdn_core.testing import inputs, oracle, packed_relative_error, relative_error, to_float64, tolerance

Arguments = dict[str, Any]

GOLDEN = Path(__file__).with_name("gpu_golden.json")
SLOTS, REPLAY = "fused_gdn_decode_post_conv_mtp", "fused_gdn_decode_post_conv_mtp_replay"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


# --- calls ------------------------------------------------------------------------------------------------------------


def _values(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    """Return numbers in [-scale, scale) that are the same everywhere, whatever torch's generators do."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return (((i * 40503 + seed * 7919) % 65536).double() / 32768 - 1).mul(scale).view(shape)


def golden_call(K: int, V: int, dtype: torch.dtype, state_dtype: torch.dtype, *, replay: bool) -> Arguments:
    """Return a small call of fixed values: ragged rows, one of padding, grouped heads."""
    H, HV, S, lengths = 1, 2, 3, (3, 1, 2)
    N, T = len(lengths), sum(lengths)
    num_slots = N if replay else N * S
    arguments: Arguments = {
        "mixed_qkv": _values((T, 2 * H * K + HV * V), 1).to(dtype),
        "a": _values((T, HV), 2, 3).to(dtype),
        "b": _values((T, HV), 3, 3).to(dtype),
        "A_log": _values((HV,), 4, 2).float(),
        "dt_bias": _values((HV,), 5).to(dtype),
        "cu_seqlens": inputs.offsets(lengths),
        "num_accepted_tokens": torch.tensor([2, 1, 3], dtype=torch.int32),
        "state": _values((num_slots, HV, V, K), 6).to(state_dtype),
        "output_gate": _values((T, HV, V), 7, 3).to(dtype),
        "norm_weight": 1 + _values((V,), 8, 0.2).float(),
        "norm_eps": 1e-6,
        "num_key_heads": H,
        "head_k_dim": K,
    }
    slots = torch.arange(num_slots, dtype=torch.int32).flip(0)
    if replay:
        records = ReplayRecords(num_slots, S, H, HV, K, V, dtype)
        records.k.copy_(_values(tuple(records.k.shape), 9))
        records.u.copy_(_values(tuple(records.u.shape), 10))
        records.decay.copy_(_values(tuple(records.decay.shape), 11).abs())
        records.live.fill_(S)
        slots[1] = -1
        arguments |= {"slot_indices": slots, "records": records}
    else:
        table = slots.view(N, S)
        table[1, 0] = -1
        arguments["state_indices"] = table
    return arguments


def golden_rows(K: int, V: int, dtype: torch.dtype, state_dtype: torch.dtype) -> Arguments:
    """Return a small call of fixed values whose rows have one slot each: one longer than what shared memory holds."""
    H, HV, lengths = 1, 2, (10, 1, 2)
    T = sum(lengths)
    return {
        "A_log": _values((HV,), 4, 2).float(),
        "dt_bias": _values((HV,), 5).to(dtype),
        "q": _values((1, T, H, K), 1).to(dtype),
        "k": _values((1, T, H, K), 12).to(dtype),
        "v": _values((1, T, HV, V), 13).to(dtype),
        "a": _values((T, HV), 2, 3).to(dtype),
        "b": _values((T, HV), 3, 3).to(dtype),
        "initial_state_source": _values((3, HV, V, K), 6).to(state_dtype),
        "initial_state_indices": torch.tensor([2, -1, 0], dtype=torch.int32),
        "cu_seqlens": inputs.offsets(lengths),
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
    }


def moved(arguments: Arguments, device: str) -> Arguments:
    """Return the call with its tensors on a device."""
    result: Arguments = {}
    for name, value in arguments.items():
        if isinstance(value, ReplayRecords):
            result[name] = ReplayRecords.from_tensors(*(x.to(device) for x in _parts(value)))
        else:
            result[name] = value.to(device) if isinstance(value, Tensor) else value
    return result


def _parts(records: ReplayRecords) -> tuple[Tensor, ...]:
    return records.k, records.u, records.decay, records.live


def run(arguments: Arguments) -> tuple[Tensor, ...]:
    """Make a call, and return all that it wrote: the outputs, the pool, and records if there are any."""
    if "q" in arguments:
        return gdn_core.fused_sigmoid_gating_delta_rule_update(**arguments), arguments["initial_state_source"]
    records = arguments.get("records")
    out: Tensor = getattr(gdn_core, SLOTS if records is None else REPLAY)(**arguments)
    return (out, arguments["state"], *(() if records is None else _parts(records)))


def digest(tensors: tuple[Tensor, ...]) -> str:
    """Return a hash of the bits."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def golden_cases() -> Iterator[tuple[str, Arguments]]:
    """Return the calls of the golden file by name: each kernel, with another dtype of activations each."""
    for i, (K, state_dtype, replay) in enumerate(product((64, 128, 256), FLOATS, (False, True))):
        V, dtype = (64, 128, 256)[(i + i // 3) % 3], FLOATS[i % 3]
        name = _name(K, V, dtype, state_dtype, "replay" if replay else "slots")
        yield name, golden_call(K, V, dtype, state_dtype, replay=replay)
    for i, (K, state_dtype) in enumerate(product((64, 128, 256), FLOATS)):
        V, dtype = (64, 128, 256)[(i + i // 3) % 3], FLOATS[i % 3]
        yield _name(K, V, dtype, state_dtype, "rows"), golden_rows(K, V, dtype, state_dtype)


def _name(K: int, V: int, dtype: torch.dtype, state_dtype: torch.dtype, form: str) -> str:
    return f"{K}x{V} {str(dtype).removeprefix('torch.')} {str(state_dtype).removeprefix('torch.')} {form}"


def golden_digests(device: str) -> dict[str, str]:
    """Run every golden call on a device."""
    return {name: digest(run(moved(arguments, device))) for name, arguments in golden_cases()}


# --- checks: each returns what is wrong, or nothing -------------------------------------------------------------------


def check_golden(device: str) -> Iterator[str]:
    """The emulator's bits."""
    expected = json.loads(GOLDEN.read_text())
    for name, found in golden_digests(device).items():
        if found != expected[name]:
            yield f"{name}: other bits than the emulator's"


def check_float64(
    device: str, activations: tuple[torch.dtype, ...] = FLOATS, states: tuple[torch.dtype, ...] = FLOATS
) -> Iterator[str]:
    """Random inputs of the models' shapes, against float64."""
    for seed, (replay, state_dtype, dtype) in enumerate(product((False, True), states, activations)):
        made, _ = inputs.fused_decode_arguments(
            (4, 1, 0, 2, 3), 4, 2, 4, 128, 128, accepted=(3, 1, 2, 0, 4), live=[4] * 5 if replay else None,
            replay=replay, dtype=dtype, state_dtype=state_dtype, seed=seed,
        )  # fmt: skip
        wide = to_float64(made)
        expected = getattr(oracle, REPLAY if replay else SLOTS)(**wide)
        out, state, *_ = run(moved(made, device))
        half = 0.0 if state_dtype == torch.float32 else tolerance("decode_half_pool", dtype)
        error = packed_relative_error(out.cpu()[None], expected[None], made["cu_seqlens"])
        state_error = relative_error(state.cpu(), wide["state"], (2, 3))
        what = f"{dtype}, state {state_dtype}, {'replay' if replay else 'several slots'}"
        if not error <= max(tolerance("fused_decode", dtype), half):
            yield f"{what}: outputs off by {error:.1e}"
        if not state_error <= max(tolerance("decode_state", dtype), half):
            yield f"{what}: states off by {state_error:.1e}"


def check_exact(device: str, N: int = 300, states: tuple[torch.dtype, ...] = FLOATS) -> Iterator[str]:
    """Replay against several slots, and a large batch (whole heads a block) against two of its rows, by torch.equal."""
    S, HV = 4, 4
    for state_dtype in states:
        shape = ([S] * N, S, 2, HV, 128, 128)
        options: Arguments = {"dtype": torch.bfloat16, "state_dtype": state_dtype}
        slots = moved(inputs.fused_decode_arguments(*shape, **options)[0], device)
        replay = moved(inputs.fused_decode_arguments(*shape, replay=True, **options)[0], device)
        small = dict(slots)
        for name in ("A_log", "dt_bias", "norm_weight"):
            replay[name] = slots[name]
        table, one = slots["state_indices"].long(), replay["slot_indices"].long()
        slots["state"][table[:, 0]] = replay["state"][one]
        small["state"] = slots["state"].clone()
        out = None
        for step in range(12):
            accepted = torch.randint(
                1, S + 1, (N,), device=device, dtype=torch.int32, generator=_generator(device, step)
            )
            tokens = moved(inputs.fused_decode_arguments(*shape, seed=step, **options)[0], device)
            for call in (slots, replay):
                call |= {name: tokens[name] for name in ("mixed_qkv", "a", "b", "output_gate")}
                call["num_accepted_tokens"] = accepted if step else None
            out = run(slots)[0]
            if not torch.equal(out, run(replay)[0]):
                yield f"step {step}, state {state_dtype}: replay is not several slots"
            if step == 0:
                rows = {name: tokens[name][: 2 * S] for name in ("mixed_qkv", "a", "b", "output_gate")}
                few = small | rows | {"state_indices": slots["state_indices"][:2], "num_accepted_tokens": None}
                few["cu_seqlens"] = slots["cu_seqlens"][:3]
                if not torch.equal(run(few)[0], out[: 2 * S]):
                    yield f"state {state_dtype}: a row depends on its batch"


def check_triton(device: str, backend: str = "triton", N: int = 20) -> Iterator[str]:
    """The Triton kernels: against float64, and replay against several slots by torch.equal."""
    with gdn_core.use_backend(backend):
        yield from check_float64(device, activations=(torch.float32, torch.bfloat16), states=(torch.float32,))
        yield from check_exact(device, N=N, states=(torch.float32,))


def check_fla(device: str, backend: str = "triton") -> Iterator[str]:
    """Packed prompts and their convolution on fla-core, from slots of a pool: against float64."""
    rule = inputs.delta_rule_arguments((70, 0, 3, 128), 2, 4, 128, 128, dtype=torch.bfloat16, initial=False)
    pool = inputs.normal((6, 4, 128, 128), _generator("cpu", 1), torch.float32)
    rule |= {"initial_state": pool, "output_final_state": False, "state_indices": torch.tensor([4, 0, -1, 2])}
    wide = to_float64(rule)
    expected = oracle.chunk_gated_delta_rule(**wide)[0]
    on_device = moved(rule, device)
    with gdn_core.use_backend(backend):
        o = gdn_core.chunk_gated_delta_rule(**on_device)[0]
    error = packed_relative_error(o.cpu(), expected, rule["cu_seqlens"])
    if not error <= tolerance("chunk", torch.bfloat16):
        yield f"prefill: outputs off by {error:.1e}"
    state_error = relative_error(on_device["initial_state"].cpu(), wide["initial_state"], (2, 3))
    if not state_error <= tolerance("chunk", torch.bfloat16):
        yield f"prefill: states off by {state_error:.1e}"


def _generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def check_graph(device: str) -> Iterator[str]:
    """Captured once, replayed with other rows live: padding rows give 0, live ones what an eager call gives."""
    for replay in (False, True):
        made, _ = inputs.fused_decode_arguments(
            [2] * 4, 2, 2, 4, 128, 128, dtype=torch.bfloat16, replay=replay, live=[0] * 4 if replay else None
        )
        static = moved(made, device)
        static["out"] = torch.empty_like(static["output_gate"])
        eager = moved(made, device)
        run(moved(made, device))  # loads the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(static)
        for call in (static, eager):
            call["cu_seqlens"].copy_(torch.tensor([0, 2, 4, 4, 4], dtype=torch.int32))
        for _ in range(3):
            graph.replay()
            expected = run(eager)
            if not torch.equal(static["out"], expected[0]) or not torch.equal(static["state"], expected[1]):
                yield f"replay {replay}: a captured call differs from an eager one"
            if bool((static["out"][4:] != 0).any()):
                yield f"replay {replay}: a padding row is not 0"


def check_compile(device: str) -> Iterator[str]:
    """torch.compile without a graph break."""
    made, _ = inputs.fused_decode_arguments([2] * 4, 2, 2, 4, 128, 128, dtype=torch.bfloat16)
    expected = run(moved(made, device))
    compiled = torch.compile(run, fullgraph=True)
    if not all(map(torch.equal, compiled(moved(made, device)), expected)):
        yield "a compiled call differs from an eager one"


def check_sanitizer(device: str) -> Iterator[str]:
    """compute-sanitizer on the golden calls, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("    no compute-sanitizer here: not run")
        return
    for kind in ("memcheck", "racecheck"):
        command = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, __file__, "golden"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            yield f"{kind}: {result.stdout[-2000:]}"


# --- times ------------------------------------------------------------------------------------------------------------


def _microseconds(calls: list[Callable[[], object]]) -> float:
    """Return the time of one call: each of `calls` in turn, captured into a graph, the fastest of several replays."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return min(times)


def copy_bandwidth(device: str) -> float:
    """Return the bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (_microseconds([lambda: target.copy_(source)]) * 1e-6)


def time_calls(device: str) -> None:
    """Print microseconds, and the share of the copy bandwidth, on states that do not fit the cache."""
    bandwidth = copy_bandwidth(device)
    print(f"    copy: {bandwidth / 1e12:.2f} TB/s")
    print("    HV  S  batch  state      form         us   of the copy bandwidth")
    grid = product((16, 32, 64), (1, 4, 8), (1, 4, 16, 64, 256), FLOATS[:2], (False, True))
    for HV, S, N, state_dtype, replay in grid:
        slot_bytes = HV * 128 * 128 * state_dtype.itemsize
        moved_bytes = N * slot_bytes * (2 if replay else 1 + S)
        # As many sets of buffers as it takes for none to be in the cache when its turn comes, within reason.
        sets = max(2, min(64, (256 << 20) // moved_bytes))
        if sets * N * slot_bytes * (1 if replay else S) > 40 << 30:
            continue
        calls = [_timed_call(device, HV, S, N, state_dtype, replay=replay) for _ in range(sets)]
        us = _microseconds(calls)
        share = moved_bytes / (us * 1e-6) / bandwidth
        form = "replay" if replay else "slots"
        name = str(state_dtype).removeprefix("torch.")
        print(f"    {HV:2} {S:2} {N:6}  {name:9}  {form:6} {us:9.2f}   {share:6.1%}", flush=True)


def time_triton(device: str) -> None:
    """Print microseconds of a step on the Triton kernels, and of the nearest that fla-core has: no rollback, one state
    written a row, the states given packed, the norm a launch of its own."""
    chain = importlib.util.find_spec("fla") is not None
    print("    HV  S  batch  state         triton us   fla us" + ("" if chain else " (fla-core is not installed)"))
    for HV, S, N, state_dtype in product((16, 32, 64), (1, 4), (1, 16, 256), FLOATS[:2]):
        with gdn_core.use_backend("triton"):
            ours = _microseconds([_timed_call(device, HV, S, N, state_dtype, replay=False) for _ in range(2)])
        theirs = _microseconds([_fla_chain(device, HV, S, N, state_dtype)] * 2) if chain else float("nan")
        name = str(state_dtype).removeprefix("torch.")
        print(f"    {HV:2} {S:2} {N:6}  {name:9} {ours:12.2f} {theirs:8.2f}", flush=True)


def _fla_chain(device: str, HV: int, S: int, N: int, state_dtype: torch.dtype) -> Callable[[], object]:
    rule = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    norm = importlib.import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
    H, K, T = 16, 128, N * S
    options: Arguments = {"dtype": torch.bfloat16, "device": device}
    q, k = (torch.randn(1, T, H, K, **options) for _ in range(2))
    v, gate = (torch.randn(1, T, HV, K, **options) for _ in range(2))
    arguments: Arguments = {
        "g": torch.randn(1, T, HV, **options),
        "beta": torch.randn(1, T, HV, **options),
        "A_log": torch.zeros(HV, device=device),
        "dt_bias": torch.ones(HV, device=device),
        "initial_state": torch.zeros(N, HV, K, K, dtype=state_dtype, device=device),
        "cu_seqlens": torch.arange(0, T + 1, S, device=device),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True,
    }
    weight = torch.ones(K, device=device)

    def run_chain() -> object:
        o, _ = rule(q, k, v, **arguments)
        return norm(o, gate, weight, None, eps=1e-6)

    return run_chain


def _timed_call(
    device: str, HV: int, S: int, N: int, state_dtype: torch.dtype, *, replay: bool
) -> Callable[[], object]:
    H, K, T = 16, 128, N * S
    num_slots = N if replay else N * S
    options: Arguments = {"dtype": torch.bfloat16, "device": device}
    arguments: Arguments = {
        "mixed_qkv": torch.randn(T, 2 * H * K + HV * K, **options),
        "a": torch.randn(T, HV, **options),
        "b": torch.randn(T, HV, **options),
        "A_log": torch.zeros(HV, device=device),
        "dt_bias": torch.ones(HV, device=device),
        "cu_seqlens": torch.arange(0, T + 1, S, dtype=torch.int32, device=device),
        "num_accepted_tokens": torch.full((N,), max(1, round(0.7 * S)), dtype=torch.int32, device=device),
        "state": torch.zeros(num_slots, HV, K, K, dtype=state_dtype, device=device),
        "output_gate": torch.randn(T, HV, K, **options),
        "norm_weight": torch.ones(K, device=device),
        "out": torch.empty(T, HV, K, **options),
        "num_key_heads": H,
    }
    slots = torch.arange(num_slots, dtype=torch.int32, device=device)
    if replay:
        arguments |= {"slot_indices": slots, "records": ReplayRecords(N, S, H, HV, K, K, torch.bfloat16, device)}
    else:
        arguments["state_indices"] = slots.view(N, S)
    return lambda: run(arguments)


# --- the program ------------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[str], Iterator[str]]] = {
    "golden": check_golden,
    "float64": check_float64,
    "exact": check_exact,
    "graph": check_graph,
    "compile": check_compile,
    "sanitizer": check_sanitizer,
}
# Of the backend `triton`, and what each needs.
TRITON_CHECKS: dict[str, tuple[Callable[[str], Iterator[str]], str]] = {
    "triton": (check_triton, "triton"),
    "fla": (check_fla, "fla"),
}


def write_golden() -> None:
    """Renew the golden file from the emulator, which the tests build."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    with importlib.import_module("cuda_emulator").forced():
        GOLDEN.write_text(json.dumps(golden_digests("cpu"), indent=1) + "\n")


def main() -> int:
    """Run the checks asked for, all by default, and print what each found."""
    parser = argparse.ArgumentParser(description="Check gdn-cuda on a GPU, and measure it.")
    names = [*CHECKS, *TRITON_CHECKS, "time"]
    parser.add_argument("names", nargs="*", choices=[[], *names], help="all of them by default")
    parser.add_argument("--write-golden", action="store_true", help="renew the golden file, without a GPU")
    options = parser.parse_args()
    if options.write_golden:
        write_golden()
        return 0
    print(torch.cuda.get_device_name(), "| torch", torch.__version__)
    gdn_core.use_backend("cuda")
    wanted = options.names or names
    has_triton = next(info for info in gdn_core.backends() if info.name == "triton").available
    checks = dict(CHECKS)
    for name, (check, module) in TRITON_CHECKS.items():
        if has_triton and importlib.util.find_spec(module) is not None:
            checks[name] = check
        elif name in wanted:
            print(f"{name}: not run, {module} is not installed")
    results = [_passes(name, checks[name]) for name in names if name in wanted and name in checks]
    if "time" in wanted:
        print("time:")
        time_calls("cuda:0")
        if has_triton:
            time_triton("cuda:0")
    return 0 if all(results) else 1


def _passes(name: str, check: Callable[[str], Iterator[str]]) -> bool:
    problems = list(check("cuda:0"))
    print(f"{name}: {'FAILED' if problems else 'ok'}", flush=True)
    for problem in problems:
        print(f"    {problem}")
    return not problems


if __name__ == "__main__":
    sys.exit(main())
