# SPDX-License-Identifier: Apache-2.0
"""Run the Gated DeltaNet layers of transformers' Qwen3-Next and Qwen3.5 models on gdn's operations.

    import gdn_core.integrations.transformers as gdn_transformers

    gdn_transformers.patch()        # every model of these families, loaded before or after
    model.generate(...)
    gdn_transformers.unpatch()      # the very functions that were there before

Two levels are replaced in each modeling module:

- the layer's forward, so that gating too runs in gdn: a decode step is convolution update, gating with the delta
  rule, gated norm, on the states that transformers' own cache holds;
- the module's functions and the gated norm, which the original forward calls wherever the layer's is not eligible
  (a cache that records its past, packed sequences, offloaded weights).

Only CPU tensors that need no gradient go to gdn. Training, export and other devices keep the original code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import gdn_core

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")

_HALF_OR_FLOAT = (torch.bfloat16, torch.float16, torch.float32)
_lock = threading.RLock()
_replaced: list[tuple[Any, str, Any]] = []


def patch() -> None:
    """Replace the Gated DeltaNet code of every family that the installed transformers has; further calls do nothing."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError('transformers is not installed: pip install "gdn-core[transformers]"')
    with _lock:
        if _replaced:
            return
        for family in FAMILIES:
            name = f"transformers.models.{family}.modeling_{family}"
            if importlib.util.find_spec(f"transformers.models.{family}") is not None:
                _patch_module(importlib.import_module(name))


def unpatch() -> None:
    """Put back what patch() replaced."""
    with _lock:
        while _replaced:
            owner, name, original = _replaced.pop()
            setattr(owner, name, original)


def is_patched() -> bool:
    """Say whether patch() is in force."""
    return bool(_replaced)


@contextmanager
def patched() -> Iterator[None]:
    """Patch inside a `with` block; a patch that was in force before stays in force after."""
    was_patched = is_patched()
    patch()
    try:
        yield
    finally:
        if not was_patched:
            unpatch()


def gated_delta_net_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the layers of `model` whose forward patch() replaces."""
    return [module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")]


def _patch_module(module: Any) -> None:
    for name, wrap in _FUNCTIONS.items():
        if hasattr(module, name):
            _replace(module, name, wrap)
    classes: list[tuple[str, Any]] = inspect.getmembers(module, inspect.isclass)
    for name, cls in classes:
        if cls.__module__ != module.__name__:
            continue
        if name.endswith("RMSNormGated"):
            _replace(cls, "forward", _norm_forward)
        # Before transformers 5 the cache had another interface; there the functions alone are replaced.
        elif name.endswith("GatedDeltaNet") and "cache" in inspect.signature(cls.forward).parameters:
            _replace(cls, "forward", _layer_forward)


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    _replaced.append((owner, name, original))
    setattr(owner, name, functools.wraps(original)(wrap(original)))


def _eligible(*tensors: torch.Tensor | None) -> bool:
    if getattr(torch.compiler, "is_exporting", bool)():
        return False
    needs_grad = torch.is_grad_enabled()
    return all(
        tensor is None
        or (
            tensor.device.type == "cpu" and tensor.dtype in _HALF_OR_FLOAT and not (needs_grad and tensor.requires_grad)
        )
        for tensor in tensors
    )


# The functions. Parameters keep transformers' names; what a replacement does not name is for the original alone.


def _conv_fn(original: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        same_dtype = hidden_states.dtype == weight.dtype
        if not same_dtype or kwargs.get("seq_idx") is not None or not _eligible(hidden_states, weight, bias):
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        return gdn_core.causal_conv1d_fn(hidden_states, weight, bias, activation=activation)

    return causal_conv1d_fn


def _conv_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d_update(
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        same_dtype = hidden_states.dtype == weight.dtype == conv_state.dtype
        if not same_dtype or not _eligible(hidden_states, conv_state, weight, bias):
            return original(hidden_states, conv_state, weight, bias, activation)
        return gdn_core.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)

    return causal_conv1d_update


def _delta_rule(operation: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def gated_delta_rule(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            g: torch.Tensor,
            beta: torch.Tensor,
            initial_state: torch.Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> Any:
            options = {
                "g": g,
                "beta": beta,
                "initial_state": initial_state,
                "output_final_state": output_final_state,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
            }
            packed = kwargs.get("cu_seqlens") is not None
            if packed or not _eligible(query, key, value, g, beta, initial_state):
                return original(query, key, value, **options, **kwargs)
            return operation(query, key, value, **options)

        return gated_delta_rule

    return wrap


def _norm_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if not _eligible(hidden_states, gate, self.weight):
            return original(self, hidden_states, gate)
        return gdn_core.rms_norm_gated(
            hidden_states, gate, self.weight, self.variance_epsilon, activation=self.activation
        )

    return forward


_FUNCTIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "causal_conv1d_fn": _conv_fn,
    "causal_conv1d_update": _conv_update,
    "torch_chunk_gated_delta_rule": _delta_rule(gdn_core.chunk_gated_delta_rule),
    "torch_recurrent_gated_delta_rule": _delta_rule(gdn_core.fused_recurrent_gated_delta_rule),
}


# The layer


def _layer_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not _layer_eligible(self, hidden_states, cache, kwargs):
            return original(self, hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        mixed_qkv, z, a, b = _projections(self, hidden_states)
        if cache is not None and hidden_states.shape[1] == 1 and cache.get_conv_state(self.layer_idx) is not None:
            core = _decode(self, mixed_qkv, z, a, b, cache)
        else:
            core = _prefill(self, mixed_qkv, a, b, cache)
            core = self.norm(core.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        return self.out_proj(core.reshape(*hidden_states.shape[:2], -1))

    return forward


def _layer_eligible(layer: Any, hidden_states: torch.Tensor, cache: Any, kwargs: dict[str, Any]) -> bool:
    packed = kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None
    if packed or kwargs.get("cache_params") is not None:
        return False
    # accelerate moves an offloaded weight in when the module is called; these are used without a call.
    is_offloaded = hasattr(layer.conv1d, "_hf_hook") or hasattr(layer.norm, "_hf_hook")
    if is_offloaded or (cache is not None and cache.is_recording_past(layer.layer_idx)):
        return False
    weight = layer.conv1d.weight
    return hidden_states.dtype == weight.dtype and _eligible(
        hidden_states, weight, layer.conv1d.bias, layer.A_log, layer.dt_bias
    )


def _projections(layer: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return mixed_qkv [B, T, C], z, a and b, from Qwen3.5's four projections or Qwen3-Next's two interleaved ones."""
    if hasattr(layer, "in_proj_qkv"):
        z, a, b = layer.in_proj_z(hidden_states), layer.in_proj_a(hidden_states), layer.in_proj_b(hidden_states)
        return layer.in_proj_qkv(hidden_states), z, a, b
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(
        layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
    )
    return torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1), z, a, b


def _split(layer: Any, mixed_qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View mixed_qkv [B, T, C] as q, k [B, T, H, K] and v [B, T, HV, V]."""
    q, k, v = mixed_qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    return (
        q.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
    )


def _decode(
    layer: Any, mixed_qkv: torch.Tensor, z: torch.Tensor, a: torch.Tensor, b: torch.Tensor, cache: Any
) -> torch.Tensor:
    """Advance each sequence by one token, up to the gated norm. Both states are updated in the cache's own tensors."""
    batch = mixed_qkv.shape[0]
    conv_state, state = cache.get_conv_state(layer.layer_idx), cache.get_recurrent_state(layer.layer_idx)
    mixed_qkv = gdn_core.causal_conv1d_update(
        mixed_qkv[:, 0], conv_state, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.activation
    )
    core = gdn_core.fused_gdn_decode_post_conv_mtp(
        mixed_qkv,
        a.reshape(batch, -1),
        b.reshape(batch, -1),
        layer.A_log,
        layer.dt_bias,
        torch.arange(batch, dtype=torch.int32)[:, None],  # one slot a sequence: the batch is the pool
        torch.arange(batch + 1, dtype=torch.int32),
        None,
        state,
        z.reshape(batch, layer.num_v_heads, layer.head_v_dim),
        layer.norm.weight,
        norm_eps=layer.norm.variance_epsilon,
        output_gate_activation=layer.norm.activation,
        num_key_heads=layer.num_k_heads,
        head_k_dim=layer.head_k_dim,
        state_v_first=False,
    )
    cache.update_recurrent_state(state, layer.layer_idx)
    return core


def _prefill(layer: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, cache: Any) -> torch.Tensor:
    """Run any number of tokens, from the cache's states where there are some."""
    tokens = mixed_qkv.shape[1]
    initial_state = None if cache is None else cache.get_recurrent_state(layer.layer_idx)
    mixed_qkv = mixed_qkv.transpose(1, 2)
    if cache is not None:
        # Earlier inputs come in front, so that the convolution sees its left context.
        mixed_qkv = cache.update_conv_state(mixed_qkv, layer.layer_idx, conv_kernel_size=layer.conv_kernel_size)
    convolved: Any = gdn_core.causal_conv1d_fn(
        mixed_qkv, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, activation=layer.activation
    )
    q, k, v = _split(layer, convolved[:, :, -tokens:].transpose(1, 2))
    g, beta = gdn_core.fused_gdn_gating(layer.A_log, a, b, layer.dt_bias)
    result: Any = gdn_core.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=cache is not None,
        use_qk_l2norm_in_kernel=True,
    )
    core: torch.Tensor = result[0]
    if cache is not None:
        cache.update_recurrent_state(result[1], layer.layer_idx)
    return core
