# SPDX-License-Identifier: Apache-2.0
"""The functions and the gated norm that transformers' layers call, on gdn where it takes the call.

Parameters keep transformers' names; what a replacement does not name is for the original alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import gdn_core

from .eligibility import CONV_ACTIVATIONS, GATE_ACTIVATIONS, takes

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]


def _kept(original: Function) -> Function:
    """Return what runs a call that gdn does not take.

    fla and causal-conv1d, which stand behind the original where they are installed, run on GPUs alone, so tensors of
    the CPU go to the torch function that they replace. Packed sequences are for the original to take or refuse.
    """
    plain = inspect.unwrap(original)

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
        function = plain if tensor.device.type == "cpu" and not is_packed else original
        return function(tensor, *args, **kwargs)

    return run


def conv_fn(original: Function) -> Function:
    """Wrap the convolution of a prompt."""
    kept = _kept(original)

    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        if (
            kwargs.get("seq_idx") is None
            and activation in CONV_ACTIVATIONS
            and hidden_states.dtype == weight.dtype
            and takes(("causal_conv1d_fn",), hidden_states, weight, bias)
        ):
            return gdn_core.causal_conv1d_fn(hidden_states, weight, bias, activation=activation)
        return kept(hidden_states, weight, bias, activation=activation, **kwargs)

    return causal_conv1d_fn


def conv_update(original: Function) -> Function:
    """Wrap the convolution of decoded tokens, which updates its state in place."""
    kept = _kept(original)

    def causal_conv1d_update(
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        if (
            activation in CONV_ACTIVATIONS
            and hidden_states.dtype == weight.dtype == conv_state.dtype
            and takes(("causal_conv1d_update",), hidden_states, conv_state, weight, bias)
        ):
            return gdn_core.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)
        return kept(hidden_states, conv_state, weight, bias, activation)

    return causal_conv1d_update


def _delta_rule(op: str) -> Wrap:
    operation: Function = getattr(gdn_core, op)

    def wrap(original: Function) -> Function:
        kept = _kept(original)

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
            options: dict[str, Any] = {
                "g": g,
                "beta": beta,
                "initial_state": initial_state,
                "output_final_state": output_final_state,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
            }
            is_packed = kwargs.get("cu_seqlens") is not None
            if not is_packed and takes((op,), query, key, value, g, beta, initial_state):
                return operation(query, key, value, **options)
            return kept(query, key, value, **options, **kwargs)

        return gated_delta_rule

    return wrap


def norm_forward(original: Function) -> Function:
    """Wrap the forward of the gated norm."""

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
        # Written by later versions of transformers; earlier ones have SiLU alone.
        activation = getattr(self, "activation", "silu")
        if (
            gate is not None
            and activation in GATE_ACTIVATIONS
            and takes(("rms_norm_gated",), hidden_states, gate, self.weight)
        ):
            return gdn_core.rms_norm_gated(
                hidden_states, gate, self.weight, self.variance_epsilon, activation=activation
            )
        return original(self, hidden_states, gate)

    return forward


chunk_rule = _delta_rule("chunk_gated_delta_rule")
recurrent_rule = _delta_rule("fused_recurrent_gated_delta_rule")

# What a modeling module calls these functions, from transformers 5.16 on.
FUNCTIONS: dict[str, Wrap] = {
    "causal_conv1d_fn": conv_fn,
    "causal_conv1d_update": conv_update,
    "torch_chunk_gated_delta_rule": chunk_rule,
    "torch_recurrent_gated_delta_rule": recurrent_rule,
}


# transformers before 5.16: a layer chooses its functions when it is made, and keeps them in attributes


def early_conv_fn(original: Function | None) -> Function:
    """Wrap a convolution that is called by keyword, and that is None where causal-conv1d is not installed."""
    function = conv_fn(original or _torch_conv_fn)

    def causal_conv1d_fn(x: torch.Tensor, **kwargs: Any) -> Any:
        return function(x, **kwargs)

    return causal_conv1d_fn


def _torch_conv_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, seq_idx: None = None
) -> torch.Tensor:
    """Compute what those layers do where there is no such function: torch's convolution, and always SiLU."""
    channels, width = weight.shape
    y = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=width - 1, groups=channels)
    return torch.nn.functional.silu(y[..., : x.shape[-1]])


class LayerFunction:
    """A function that a layer keeps in an attribute of its own, seen through a wrapper.

    On the class, and with a setter, it comes before the attribute: so it holds for layers made earlier or later, and
    deleting it from the class leaves each layer with the function that it chose.
    """

    def __init__(self, name: str, wrap: Wrap) -> None:
        self.name, self.wrap = name, wrap

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        try:
            original = vars(layer)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None
        return self.wrap(original)

    def __set__(self, layer: Any, value: Any) -> None:
        vars(layer)[self.name] = value


EARLY_FUNCTIONS: dict[str, Wrap] = {
    "causal_conv1d_fn": early_conv_fn,
    "causal_conv1d_update": conv_update,
    "chunk_gated_delta_rule": chunk_rule,
    "recurrent_gated_delta_rule": recurrent_rule,
}
