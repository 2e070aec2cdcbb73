# SPDX-License-Identifier: Apache-2.0
"""The forward of a Gated DeltaNet layer: transformers' projections and cache, everything between them on gdn."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import gdn_core

from .eligibility import CONV_ACTIVATIONS, GATE_ACTIVATIONS, takes
from .parts import Weights, doubles_beta, gated_norm, is_hooked, layout, output_projection, projections
from .step import fused_step, known_step, remember_step

PREFILL_OPS = ("causal_conv1d_fn", "fused_gdn_gating", "chunk_gated_delta_rule", "rms_norm_gated")
DECODE_OPS = ("causal_conv1d_update", "fused_gdn_decode_post_conv_mtp")
# The fused step has no doubled beta: there the recurrence and the norm are calls of their own.
DOUBLED_BETA_DECODE_OPS = ("causal_conv1d_update", "fused_recurrent_gated_delta_rule", "rms_norm_gated")


def is_layer_class(cls: type) -> bool:
    """Tell whether a class of a modeling module is a Gated DeltaNet layer."""
    return cls.__name__.endswith("GatedDeltaNet") and issubclass(cls, torch.nn.Module)


def gated_delta_net_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the Gated DeltaNet layers of `model`."""
    return [module for module in model.modules() if is_layer_class(type(module))]


def layer_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a layer whose cache is transformers' since 5.24."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if cache is not None and attention_mask is None and not torch.compiler.is_compiling():
            known = known_step(self, hidden_states)
            states = known.states(self, cache) if known is not None and not _is_packed(kwargs) else None
            if known is not None and states is not None:
                return known.run(self, hidden_states, states)
        packed = None if cache is None else getattr(cache.layers[self.layer_idx], "run_core", None)
        if packed is not None:
            return output_projection(self)(packed(*projections(self, hidden_states)))
        is_step = _is_step(self, hidden_states, cache)
        if not (_is_plain_call(cache, self.layer_idx, kwargs) and _is_eligible(self, hidden_states, cache, is_step)):
            return original(self, hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        return _step(self, hidden_states, cache) if is_step else _prefill(self, hidden_states, cache)

    return forward


# Whether


def why_not(layer: Any) -> str | None:
    """Return what keeps a layer's core with the original code whatever the call, or None."""
    if "cache" not in inspect.signature(type(layer).forward).parameters:
        return "the layer's interface is that of transformers before 5.24: function by function"
    if gated_norm(layer) is None or not hasattr(layer, "conv1d") or layout(layer) is None:
        return f"gdn does not know the projections of a {type(layer).__name__}"
    if layer.activation not in CONV_ACTIVATIONS:
        return f"gdn has no convolution with {layer.activation}"
    if gated_norm(layer).activation not in GATE_ACTIVATIONS:
        return f"gdn has no gated norm with {gated_norm(layer).activation}"
    if is_hooked(layer.conv1d, gated_norm(layer)):
        return "hooks are on its parts (offloaded weights, or someone who watches)"
    return None


def decode_ops(layer: Any) -> tuple[str, ...]:
    """Return the operations of one decoded token."""
    return DOUBLED_BETA_DECODE_OPS if doubles_beta(layer) else DECODE_OPS


def _is_step(layer: Any, hidden_states: torch.Tensor, cache: Any) -> bool:
    return cache is not None and hidden_states.shape[1] == 1 and cache.get_conv_state(layer.layer_idx) is not None


def _is_packed(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None


def _is_plain_call(cache: Any, layer_idx: int, kwargs: dict[str, Any]) -> bool:
    if _is_packed(kwargs) or kwargs.get("cache_params") is not None:
        return False
    return cache is None or not cache.is_recording_past(layer_idx)


def _is_eligible(layer: Any, hidden_states: torch.Tensor, cache: Any, is_step: bool) -> bool:
    norm, conv1d = gated_norm(layer), layer.conv1d
    if norm is None or layout(layer) is None or is_hooked(conv1d, norm):
        return False
    if layer.activation not in CONV_ACTIVATIONS or norm.activation not in GATE_ACTIVATIONS:
        return False
    weight = conv1d.weight
    if hidden_states.dtype != weight.dtype:
        return False
    states: tuple[torch.Tensor, ...] = ()
    if is_step:
        states = (cache.get_conv_state(layer.layer_idx), cache.get_recurrent_state(layer.layer_idx))
        if states[0].dtype != weight.dtype or not all(state.is_contiguous() for state in states):
            return False
    ops = decode_ops(layer) if is_step else PREFILL_OPS
    weights = (weight, conv1d.bias, layer.A_log, layer.dt_bias, norm.weight)
    return takes(ops, hidden_states, *weights, *states)


# The core


def _split(layer: Any, mixed_qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View mixed_qkv [B, T, C] as q, k [B, T, H, K] and v [B, T, HV, V]."""
    q, k, v = mixed_qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    return (
        q.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
    )


def _finished(layer: Any, core: torch.Tensor, z: torch.Tensor, hidden_states: torch.Tensor) -> Any:
    """Norm, gate and project what the recurrence has put out."""
    normed = gated_norm(layer)(core.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    return output_projection(layer)(normed.reshape(*hidden_states.shape[:2], -1))


def _step(layer: Any, hidden_states: torch.Tensor, cache: Any) -> Any:
    """Advance each sequence by one token, on the cache's own tensors."""
    conv_state, state = cache.get_conv_state(layer.layer_idx), cache.get_recurrent_state(layer.layer_idx)
    if doubles_beta(layer):
        return _doubled_step(layer, hidden_states, conv_state, state)
    if not torch.compiler.is_compiling():
        remember_step(layer, hidden_states, cache)
    return fused_step(layer, Weights.of(layer), hidden_states, conv_state, state)


def _doubled_step(layer: Any, hidden_states: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor) -> Any:
    mixed_qkv, z, a, b = projections(layer, hidden_states)
    convolved = gdn_core.causal_conv1d_update(
        mixed_qkv[:, 0], conv_state, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.activation
    )
    q, k, v = _split(layer, convolved[:, None])
    core, _ = gdn_core.fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        a,
        beta=b,
        initial_state=state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        state_indices=torch.arange(len(state), dtype=torch.int32, device=state.device),
    )
    return _finished(layer, core, z, hidden_states)


def _prefill(layer: Any, hidden_states: torch.Tensor, cache: Any) -> Any:
    """Run any number of tokens, from the cache's states where there are some."""
    mixed_qkv, z, a, b = projections(layer, hidden_states)
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
        allow_neg_eigval=doubles_beta(layer),
    )
    if cache is not None:
        cache.update_recurrent_state(result[1], layer.layer_idx)
    return _finished(layer, result[0], z, hidden_states)
