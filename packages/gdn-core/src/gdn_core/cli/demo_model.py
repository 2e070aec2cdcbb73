# SPDX-License-Identifier: Apache-2.0
"""The seeded model of `gdn demo`, and its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .models import import_transformers, token_ids


@dataclass(frozen=True)
class Shape:
    """Sizes of the seeded model. Every fourth layer is attention, the others are Gated DeltaNet."""

    layers: int = 8
    hidden: int = 1024
    intermediate: int = 3584
    attention_heads: int = 8
    attention_kv_heads: int = 2
    attention_head_dim: int = 256
    key_heads: int = 16
    value_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    vocabulary: int | None = None  # None: what the tokenizer has


# Qwen3.5-0.8B: 24 layers, and a vocabulary that decides much of what a decoded token costs.
FULL = Shape(layers=24, vocabulary=248320)


def save_seeded_model(directory: Path, shape: Shape, seed: int, dtype: torch.dtype) -> None:
    """Write a checkpoint with random weights, and a byte-level tokenizer, as `from_pretrained` reads them."""
    transformers = import_transformers()
    tokenizer = _byte_tokenizer(transformers)
    tokenizer.save_pretrained(directory)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=shape.vocabulary or len(tokenizer),
        tie_word_embeddings=shape.vocabulary is not None,
        eos_token_id=tokenizer.eos_token_id,
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.attention_heads,
        num_key_value_heads=shape.attention_kv_heads,
        head_dim=shape.attention_head_dim,
        linear_num_key_heads=shape.key_heads,
        linear_num_value_heads=shape.value_heads,
        linear_key_head_dim=shape.key_dim,
        linear_value_head_dim=shape.value_dim,
        # A random model computes about the same at every token with weights as small as training starts from.
        initializer_range=2 / shape.hidden**0.5,
        dtype=dtype,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3_5ForCausalLM(config).to(dtype)
    model.save_pretrained(directory)


def prompt_ids(tokenizer: Any, count: int) -> torch.Tensor:
    """Return a prompt of exactly `count` tokens, [1, count]."""
    text = _TEXT
    while (ids := token_ids(tokenizer, text)).shape[1] < count:
        text += _TEXT
    return ids[:, :count]


def continuations(ids: torch.Tensor, count: int) -> dict[str, list[int]]:
    """Return texts of `count` tokens to follow the prompt [1, T]: one that repeats it, one that is new.

    What a model with random weights writes is neither, so these are given to it token by token.
    """
    prompt: list[int] = ids[0].tolist()
    repeating = [prompt[i % len(prompt)] for i in range(count)]
    for i in range(19, count, 20):  # a word that was changed here and there
        repeating[i] = prompt[(7 * i) % len(prompt)]
    symbols = torch.tensor(sorted(set(prompt)))
    new = symbols[torch.randint(len(symbols), (count,), generator=torch.Generator().manual_seed(0))]
    return {"repeats the prompt": repeating, "does not": new.tolist()}


def _byte_tokenizer(transformers: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


_TEXT = (
    "A linear attention layer keeps a matrix in place of a cache that grows with the text. For each token it lets "
    "the matrix decay, asks it what it would have answered for the token's key, and writes the difference between "
    "that answer and the token's value back under the same key. Reading is one product with the query. So the cost "
    "of a token does not depend on how many came before it, and a long prompt can be taken in chunks: inside a chunk "
    "everything is a matrix product, and only the state passes from one chunk to the next. "
)
