# SPDX-License-Identifier: Apache-2.0
"""Small models, with random weights, of transformers' families that have Gated DeltaNet layers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers

_SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    # With weights as small as training starts from, such a model computes about the same at every token.
    "initializer_range": 0.1,
}
_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}

# family: configuration, model, and what the configuration has beyond _SIZES and _HEADS
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _EXPERTS),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", _SPECIAL_TOKENS | {"linear_num_value_heads": 2}),
    "lara_mini": ("LaraMiniConfig", "LaraMiniForCausalLM", _EXPERTS),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        _EXPERTS | _INDEXER | {"hc_lowrank": 16, "ple_layer_ids": [], "output_gate_type": "sigmoid"},
    ),
}
FAMILIES = [family for family, (config, _, _) in _MODELS.items() if hasattr(transformers, config)]


@lru_cache
def small_model(family: str) -> Any:
    """Make the model of a family; all callers share it, so it is to be left as it is."""
    config, model, more = _MODELS[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, model)(getattr(transformers, config)(**_SIZES | _HEADS | more))
    return made.eval().requires_grad_(False)


def tokens(batch: int, length: int, seed: int = 5) -> torch.Tensor:
    """Draw token ids [batch, length]."""
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 difference."""
    return float((actual - expected).norm() / expected.norm())
