# SPDX-License-Identifier: Apache-2.0
"""One decoded token of each sequence: two native calls between the projections, and little beside them.

Between two uses of this code a token streams the weights of a whole layer through the caches, so every line of Python
and every object it touches comes from memory. Hence what a layer's first step found out is remembered, and a later one
only looks whether it still holds: the same modules and weights, the same backend, nothing that has to see the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..._dispatch import Kernel, eager_kernels, mark_written, run
from ..._schema import arguments_of
from .parts import Weights, doubles_beta, gated_norm, layout, output_projection, projections

_CONVOLUTION, _RULE = "causal_conv1d_update", "fused_gdn_decode_post_conv_mtp"
_ConvolutionArguments, _RuleArguments = arguments_of(_CONVOLUTION), arguments_of(_RULE)
_Call = Callable[[str, torch.Tensor, tuple[Any, ...]], None]


def fused_step(
    layer: Any,
    weights: Weights,
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    call: _Call = run,
) -> Any:
    """Advance each sequence by one token. Both states are updated in the cache's own tensors: the batch is the pool."""
    mixed_qkv, z, a, b = _one_token(layer, hidden_states)
    batch = mixed_qkv.shape[0]
    convolved = torch.empty_like(mixed_qkv)
    inputs = _ConvolutionArguments(
        x=mixed_qkv,
        conv_state=conv_state,
        weight=weights.conv_weight,
        bias=weights.conv_bias,
        activation=layer.activation,
        cache_seqlens=None,
        conv_state_indices=None,
        num_accepted_tokens=None,
        query_start_loc=None,
        null_slot=None,
        row_indices=None,
        out=convolved,
    )
    call(_CONVOLUTION, convolved, inputs)
    z = z.view(batch, layer.num_v_heads, layer.head_v_dim)
    core = torch.empty_like(z)
    slots, offsets = _rows(batch, state.device)
    inputs = _RuleArguments(
        mixed_qkv=convolved,
        a=a,
        b=b,
        A_log=weights.A_log,
        dt_bias=weights.dt_bias,
        state_indices=slots,
        cu_seqlens=offsets,
        num_accepted_tokens=None,
        state=state,
        output_gate=z,
        norm_weight=weights.norm_weight,
        scale=None,
        norm_eps=weights.norm_eps,
        output_gate_activation=weights.gate_activation,
        num_key_heads=layer.num_k_heads,
        head_k_dim=layer.head_k_dim,
        state_v_first=False,
        null_slot=None,
        row_indices=None,
        out=core,
    )
    call(_RULE, core, inputs)
    return output_projection(layer)(core.view(batch, 1, -1))


def _one_token(layer: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return mixed_qkv [B, C], z, and a, b [B, HV]."""
    modules = layer._modules  # an attribute of a module that is itself a module takes a search to find
    if "in_proj_qkv" in modules:
        x = hidden_states.squeeze(1)
        return modules["in_proj_qkv"](x), modules["in_proj_z"](x), modules["in_proj_a"](x), modules["in_proj_b"](x)
    mixed_qkv, z, a, b = projections(layer, hidden_states)
    return mixed_qkv.squeeze(1), z.contiguous(), a.reshape(len(a), -1), b.reshape(len(b), -1)


_row_tensors: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def _rows(batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots [B, 1] and offsets [B + 1] of sequences that have a slot and a token each."""
    if torch.compiler.is_compiling():
        return _new_rows(batch, device)
    known = _row_tensors.get((batch, device))
    if known is None:
        known = _row_tensors[batch, device] = _new_rows(batch, device)
    return known


def _new_rows(batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return offsets[:-1, None], offsets


class KnownStep:
    """A layer whose single tokens take :func:`fused_step` on the CPU, as found by its first one."""

    def __init__(self, layer: Any, hidden_states: torch.Tensor, cache: Any, kernels: dict[str, Kernel]) -> None:
        self.weights, self.kernels = Weights.of(layer), kernels
        self.conv1d, self.norm = layer.conv1d, gated_norm(layer)
        self.conv_weight, self.activation, self.dtype = self.conv1d.weight, layer.activation, hidden_states.dtype
        self.address = self.conv_weight.data_ptr()
        self.states_type = type(cache.layers[layer.layer_idx])
        # A layer that is gone takes what is remembered of it with it, before another one can have its id.
        self.watch = weakref.ref(layer, partial(_forget, id(layer)))

    def still_holds(self, layer: Any, hidden_states: torch.Tensor) -> bool:
        """Say whether the layer's next call is as the first one was, its states aside."""
        conv1d, norm, weights = self.conv1d, self.norm, self.weights
        modules, parameters, of_conv1d, of_norm = layer._modules, layer._parameters, conv1d.__dict__, norm.__dict__
        return (
            hidden_states.shape[1] == 1
            and hidden_states.dtype is self.dtype
            and type(hidden_states) is torch.Tensor
            and modules["conv1d"] is conv1d
            and (modules.get("norm") or modules.get("o_norm")) is norm
            and of_conv1d["_parameters"].get("weight") is self.conv_weight
            and self.conv_weight.data_ptr() == self.address  # not moved or converted in place
            and self.conv_weight.dtype is self.dtype
            and of_conv1d["_parameters"].get("bias") is weights.conv_bias
            and parameters.get("A_log") is weights.A_log
            and parameters.get("dt_bias") is weights.dt_bias
            and of_norm["_parameters"].get("weight") is weights.norm_weight
            and of_norm["activation"] == weights.gate_activation
            and layer.activation == self.activation
            and not (of_norm["_forward_hooks"] or of_norm["_forward_pre_hooks"])
            and "_hf_hook" not in of_conv1d
            and "_hf_hook" not in of_norm
            and eager_kernels() is self.kernels
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )

    def states(self, layer: Any, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the two states of a cache that is like the first one, if the kernels update them in place."""
        held = cache.layers[layer.layer_idx]
        if type(held) is not self.states_type or held.record_past or not held.has_previous_state[0]:
            return None
        conv_state, state = held.conv_states[0], held.recurrent_states[0]
        if conv_state.dtype is self.dtype and conv_state.is_contiguous() and state.is_contiguous() and state.is_cpu:
            return conv_state, state
        return None

    def run(self, layer: Any, hidden_states: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """Run the step."""
        output = fused_step(layer, self.weights, hidden_states, *states, self._call)
        mark_written(list(states))
        return output

    def _call(self, op: str, like: torch.Tensor, flat: tuple[Any, ...]) -> None:
        try:
            self.kernels[op](*flat)
        except NotImplementedError:  # declined, before anything changed
            run(op, like, flat)


_known: dict[int, KnownStep] = {}  # by id of the layer


def _forget(key: int, _: object) -> None:
    _known.pop(key, None)


def known_step(layer: Any, hidden_states: torch.Tensor) -> KnownStep | None:
    """Return what is remembered of a layer, if it holds for this call."""
    known = _known.get(id(layer))
    return known if known is not None and known.still_holds(layer, hidden_states) else None


def remember_step(layer: Any, hidden_states: torch.Tensor, cache: Any) -> None:
    """Remember that a single token of this layer, which :mod:`.layer` has found eligible, takes the fused step."""
    kernels = eager_kernels()
    held = cache.layers[layer.layer_idx]
    states = getattr(held, "conv_states", {}).get(0), getattr(held, "recurrent_states", {}).get(0)
    if (
        kernels.keys() >= {_CONVOLUTION, _RULE}
        and states[0] is cache.get_conv_state(layer.layer_idx)
        and states[1] is cache.get_recurrent_state(layer.layer_idx)
        and hidden_states.is_cpu
        and isinstance(layer.conv1d.weight, torch.nn.Parameter)
        and layout(layer) is not None
        and not doubles_beta(layer)
    ):
        _known[id(layer)] = KnownStep(layer, hidden_states, cache, kernels)


def forget_steps() -> None:
    """Forget all layers, as when they are no longer patched."""
    _known.clear()
