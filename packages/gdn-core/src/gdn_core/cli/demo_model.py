# SPDX-License-Identifier: Apache-2.0
"""The model of `gdn demo`: a seeded one of Qwen3.5's architecture, or a checkpoint."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import CommandError

EXTRA = 'pip install "gdn-core[transformers]"'


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


def import_transformers() -> Any:
    """Import transformers, quiet about the very fallback that this command is about."""
    try:
        import transformers
    except ImportError as error:
        raise CommandError(f"this command needs transformers ({error}): {EXTRA}") from error
    if not hasattr(transformers, "Qwen3_5ForCausalLM"):
        raise CommandError(f"transformers {transformers.__version__} has no Qwen3.5 model: {EXTRA} --upgrade")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def save_seeded_model(directory: Path, shape: Shape, seed: int, dtype: torch.dtype) -> None:
    """Write a checkpoint with random weights, and a byte-level tokenizer, as `from_pretrained` reads them."""
    transformers = import_transformers()
    tokenizer = _byte_tokenizer(transformers)
    tokenizer.save_pretrained(directory)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
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


def load(path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a model and its tokenizer from a directory or by its hub id."""
    transformers = import_transformers()
    _check_memory(path, dtype)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CommandError(f"{path}: out of memory while loading; try --dtype bfloat16 or a smaller model") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CommandError(f"{path}: {_first_line(error)}{_remedy(path)}") from error
    # Plain greedy decoding to the asked length, whatever the checkpoint recommends for a conversation.
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    return model.eval(), tokenizer


def prompt_ids(tokenizer: Any, count: int) -> torch.Tensor:
    """Return a prompt of exactly `count` tokens, [1, count]."""
    text = _TEXT
    ids = tokenizer(text)["input_ids"]
    while len(ids) < count:
        text += _TEXT
        ids = tokenizer(text)["input_ids"]
    return torch.tensor([ids[:count]])


def _byte_tokenizer(transformers: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def _check_memory(path: str, dtype: torch.dtype) -> None:
    """Refuse a local checkpoint that cannot fit: Linux would end the process without a word."""
    stored = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    needed = stored * max(1, dtype.itemsize // 2)  # checkpoints of these models hold 2 bytes a weight
    available = available_memory()
    if needed > available:
        raise CommandError(
            f"{path}: the weights need {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free; "
            "use --dtype bfloat16, a smaller model or a larger machine"
        )


def available_memory() -> float:
    """Return the bytes that can be had without swapping; infinity where the system does not say."""
    try:
        meminfo = Path("/proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _remedy(path: str) -> str:
    if Path(path).is_dir():
        return "; the directory must hold config.json, the weights (*.safetensors) and the tokenizer's files"
    if importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE:
        return "; HF_HUB_OFFLINE is set, so only models already in the cache load: give a directory, or unset it"
    return "; give a directory with a checkpoint, or the id of a model on the hub (needs a network)"


_TEXT = (
    "A linear attention layer keeps a matrix in place of a cache that grows with the text. For each token it lets "
    "the matrix decay, asks it what it would have answered for the token's key, and writes the difference between "
    "that answer and the token's value back under the same key. Reading is one product with the query. So the cost "
    "of a token does not depend on how many came before it, and a long prompt can be taken in chunks: inside a chunk "
    "everything is a matrix product, and only the state passes from one chunk to the next. "
)
