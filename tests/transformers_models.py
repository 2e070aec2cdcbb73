# SPDX-License-Identifier: Apache-2.0
"""Small models, with random weights, of transformers' families that have Gated DeltaNet layers."""

from __future__ import annotations

import inspect
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


# As transformers' own tests have them.
_NARROW = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 2}


@lru_cache
def small_model(family: str, *, is_narrow: bool = False) -> Any:
    """Make the model of a family; all callers share it, so it is to be left as it is."""
    config, model, more = _MODELS[family]
    more = more | (_NARROW if is_narrow else {})
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


def left_padded(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch - 1):
        mask[row, : 3 * row + 4] = 0
    return {"input_ids": tokens(batch, length), "attention_mask": mask}


def generate(model: Any, prompt: dict[str, torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate 7 tokens; return the sequences and the logits [tokens, batch, vocabulary] of each step."""
    settings = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    result = model.generate(**prompt, **settings, output_logits=True, return_dict_in_generate=True)
    return result.sequences, torch.stack(result.logits).float()


def assert_same(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(actual[0], expected[0])
    assert relative_difference(actual[1], expected[1]) < 1e-5


def new_cache(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


def forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits: torch.Tensor = model(ids, use_cache=True, **{name: cache}).logits
    return logits
