# SPDX-License-Identifier: Apache-2.0
"""A transformers model as the target, or the drafter, of gdn_core.speculate.

transformers refuses assisted generation for models whose states cannot be cropped. Here the Gated DeltaNet layers keep
their states in a GDNStateCache, which takes rejected tokens back by the number of accepted ones, and the attention
layers keep keys and values by slot, where the next pass overwrites those of rejected tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

from ...attention import GDNLayerParams, GDNMetadata, GDNStateCache
from ...speculate import Batch
from .install import is_held, patched
from .layer import gated_delta_net_layers, why_not
from .parts import Weights, doubles_beta

_KINDS = {"full_attention", "linear_attention"}


class TransformersTarget:
    """Run a causal language model of transformers on packed batches of any mix of rows.

    Args:
        model: with Gated DeltaNet and full attention layers, as Qwen3-Next and Qwen3.5; in evaluation mode. Its
            Gated DeltaNet layers run on gdn whether the model is patched or not.
        num_slots: requests at once; with several slots S times as many.
        S: most tokens of a row with drafts in one pass, the drafts and one more; up to 16.
        replay: keep records of the last pass's tokens, and one state a request, instead of S states.

    Attributes:
        caches: a :class:`GDNStateCache` for each Gated DeltaNet layer.

    Raises:
        ValueError: the model has layers of another kind, or none that gdn knows.

    Example:
        >>> from gdn_core.integrations.transformers import TransformersTarget
        >>> from gdn_core.speculate import Engine, PromptLookup
        >>> def continued(model, prompt):
        ...     engine = Engine(TransformersTarget(model, S=8), PromptLookup())
        ...     request = engine.add(prompt, max_new_tokens=100)
        ...     engine.run()
        ...     return request.generated
    """

    def __init__(self, model: Any, *, num_slots: int = 1, S: int = 1, replay: bool = True) -> None:
        _check(model)
        self.model = model
        layers: list[Any] = gated_delta_net_layers(model)
        self.caches: Sequence[GDNStateCache] = [_state_cache(layer, num_slots, S, replay and S > 1) for layer in layers]
        entries = importlib.import_module("gdn_core.integrations.transformers.cache_entries")
        self._states = [
            entries.GDNStates(_params(layer), cache) for layer, cache in zip(layers, self.caches, strict=True)
        ]
        by_index = {layer.layer_idx: states for layer, states in zip(layers, self._states, strict=True)}
        kinds = model.config.get_text_config().layer_types
        self._contexts = [entries.Context() for _ in kinds]
        self._cache = importlib.import_module("transformers").Cache(
            [by_index.get(index, context) for index, context in enumerate(self._contexts)]
        )

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states [T, hidden], and logits [n, vocabulary] of the tokens that the batch needs them of."""
        with torch.inference_mode(), nullcontext() if is_held(self.model) else patched(self.model):
            return self._run(batch)

    def _run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        spans = _spans(batch)
        for states in self._states:
            states.metadata = batch.metadata
        for context in self._contexts:
            context.spans = spans
        hidden_states = self.model.get_decoder()(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            attention_mask={"full_attention": _mask(spans, batch.tokens.device), "linear_attention": None},
            cache=self._cache,
            use_cache=True,
        ).last_hidden_state[0]
        needed = hidden_states if len(batch.needed) == len(hidden_states) else hidden_states[batch.needed]
        return hidden_states, self.model.get_output_embeddings()(needed)


Span = tuple[int, int, int, int]  # slot, first and end token in the batch, position of the first in its request


def _spans(batch: Batch) -> list[Span]:
    positions = batch.positions.tolist()
    ends = batch.metadata.row_ends
    return [
        (slot, start, end, positions[start]) for slot, (start, end) in zip(batch.slots, pairwise(ends), strict=True)
    ]


def _mask(spans: Sequence[Span], device: torch.device) -> torch.Tensor | None:
    """Return which keys each token sees, bool [1, 1, T, keys of all rows]; None where attention knows by itself."""
    _, start, end, position = spans[0]
    if len(spans) == 1 and (end - start == 1 or position == 0):
        return None
    tokens, keys = spans[-1][2], sum(end - start + position for _, start, end, position in spans)
    mask = torch.zeros(tokens, keys, dtype=torch.bool, device=device)
    first = 0
    for _, start, end, position in spans:
        length = end - start + position
        mask[start:end, first : first + length] = torch.ones(end - start, length, dtype=torch.bool, device=device).tril(
            position
        )
        first += length
    return mask[None, None]


# The model


def _check(model: Any) -> None:
    layers: list[Any] = gated_delta_net_layers(model)
    if not layers:
        raise ValueError(f"model: expected a model with Gated DeltaNet layers, got a {type(model).__name__}")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if not kinds or kinds - _KINDS:
        others = ", ".join(sorted(kinds - _KINDS)) or "unknown kinds"
        raise ValueError(f"model: expected layers of {' and '.join(sorted(_KINDS))}, got {others}")
    for layer in layers:
        reason = why_not(layer)
        if doubles_beta(layer):
            reason = "its update strength goes up to 2, which the fused step does not have"
        if reason is not None:
            raise ValueError(f"model: layer {layer.layer_idx} cannot run on gdn: {reason}")


def _params(layer: Any) -> GDNLayerParams:
    weights = Weights.of(layer)
    return GDNLayerParams(
        weights.conv_weight.detach(),
        weights.A_log.detach(),
        weights.dt_bias.detach(),
        weights.norm_weight.detach(),
        weights.norm_eps,
        layer.num_k_heads,
        layer.num_v_heads,
        layer.head_k_dim,
        layer.head_v_dim,
        weights.conv_bias,
        layer.activation,
        weights.gate_activation,
    )


def _state_cache(layer: Any, num_slots: int, S: int, replay: bool) -> GDNStateCache:
    weight = layer.conv1d.weight
    return GDNStateCache(
        num_slots if replay else num_slots * S, layer.num_k_heads, layer.num_v_heads, layer.head_k_dim,
        layer.head_v_dim, weight.dtype, conv_width=layer.conv_kernel_size, S=S, replay=replay, device=weight.device,
    )  # fmt: skip


# Drafts


class ModelDrafter:
    """Draft with a smaller model of the same vocabulary: the tokens that it would generate greedily.

    It decodes ahead token by token. What was rejected it forgets by going back to the states before its drafts, a copy,
    and taking the tokens that stayed, with the newest one, in one pass.

    Args:
        model: as :class:`TransformersTarget` takes them.
        num_drafts: most tokens to propose at once.
        num_slots: of the target.

    Example:
        >>> from gdn_core.integrations.transformers import ModelDrafter, TransformersTarget
        >>> from gdn_core.speculate import Engine
        >>> def engine(model, smaller):
        ...     return Engine(TransformersTarget(model, S=8), ModelDrafter(smaller, num_drafts=4))
    """

    def __init__(self, model: Any, num_drafts: int = 4, num_slots: int = 1) -> None:
        if num_drafts < 1:
            raise ValueError(f"num_drafts: expected at least 1, got {num_drafts}")
        self._target = TransformersTarget(model, num_slots=num_slots)
        self._num_drafts = num_drafts
        self._texts: dict[int, list[int]] = {}
        self._seen: dict[int, int] = {}  # tokens of a text that the states stand for

    def start(self, slot: int) -> None:
        """Forget the slot's last request."""
        self._texts[slot], self._seen[slot] = [], 0

    def extend(self, slot: int, tokens: Sequence[int], hidden_states: torch.Tensor) -> None:
        """Take over tokens; the model sees them when drafts are asked for."""
        self._texts[slot].extend(tokens)

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Keep the first ``num_tokens``."""
        del self._texts[slot][num_tokens:]

    def propose(self, slots: Sequence[int], last_tokens: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        """Decode up to ``num_drafts`` tokens ahead of each text."""
        return [
            self._follow(slot, last, min(limit, self._num_drafts))
            for slot, last, limit in zip(slots, last_tokens, limits, strict=True)
        ]

    def _follow(self, slot: int, last: int, limit: int) -> list[int]:
        if limit < 1:
            return []
        text = [*self._texts[slot], last]
        drafts = [self._next(slot, text[self._seen[slot] :], self._seen[slot])]
        self._seen[slot] = len(text)
        held = [cache.snapshot([slot]) for cache in self._target.caches] if limit > 1 else []
        while len(drafts) < limit:
            drafts.append(self._next(slot, drafts[-1:], len(text) + len(drafts) - 1))
        for cache, snapshot in zip(self._target.caches, held, strict=False):
            cache.restore(snapshot, [slot])
        return drafts

    def _next(self, slot: int, tokens: Sequence[int], position: int) -> int:
        """Run tokens of one slot and return the likeliest one after them."""
        device = self._target.caches[0].state.device
        metadata = GDNMetadata.build([0, len(tokens)], [slot], has_initial_state=[position > 0], device=device)
        positions = torch.arange(position, position + len(tokens), device=device)
        needed = torch.tensor([len(tokens) - 1], device=device)
        _, logits = self._target(Batch(torch.tensor(tokens, device=device), positions, metadata, (slot,), needed))
        return int(logits[0].argmax())
