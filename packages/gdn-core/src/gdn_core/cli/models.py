# SPDX-License-Identifier: Apache-2.0
"""Load transformers' models for the commands, with errors that say what to do."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import CommandError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EXTRA = 'pip install "gdn-core[transformers]"'


def import_transformers() -> Any:
    """Import transformers, quiet about the very fallback that the commands are about."""
    try:
        import transformers
    except ImportError as error:
        raise CommandError(f"this command needs transformers ({error}): {EXTRA}") from error
    if not hasattr(transformers, "Qwen3_5ForCausalLM"):
        raise CommandError(f"transformers {transformers.__version__} has no Qwen3.5 model: {EXTRA} --upgrade")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def load(path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a model that has Gated DeltaNet layers, and its tokenizer, from a directory or by its hub id."""
    transformers = import_transformers()
    with load_errors(path):
        _check_kind(path, transformers)
        _check_memory(path, dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    require_layers(path, model)
    return model.eval(), tokenizer


@contextmanager
def load_errors(path: str) -> Iterator[None]:
    """Turn what transformers raises while it loads into one line that says what to do."""
    _check_path(path)
    damaged: type[Exception] = importlib.import_module("safetensors").SafetensorError
    try:
        with memory_errors("try --dtype bfloat16 or a smaller model"):
            yield
    except damaged as error:
        raise CommandError(
            f"{path}: the weights are damaged ({_first_line(error)}); copy or download them anew"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CommandError(f"{path}: {_first_line(error)}{_remedy(path, error)}") from error


@contextmanager
def memory_errors(remedy: str) -> Iterator[None]:
    """Turn the ways in which memory runs out into one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On the CPU torch raises a plain RuntimeError, of which this is the only mark.
        is_ours = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not is_ours:
            raise
        raise CommandError(f"out of memory; {remedy}") from error


def token_ids(tokenizer: Any, text: str) -> torch.Tensor:
    """Return the tokens of a text [1, T], at least one."""
    ids: torch.Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        raise CommandError(
            "the tokenizer makes no token of the prompt; are tokenizer.json and its config beside the model?"
        )
    return ids


def require_layers(path: str, model: Any) -> list[Any]:
    """Return the Gated DeltaNet layers of a model that has some."""
    layers: list[Any] = importlib.import_module("gdn_core.integrations.transformers").gated_delta_net_layers(model)
    if not layers:
        raise CommandError(_no_layers(path, model.config))
    return layers


def _check_path(path: str) -> None:
    """Refuse what looks like a place in the file system, and is none: transformers takes it for a name on the hub."""
    if Path(path).is_file():
        raise CommandError(f"{path}: this is a file; give the directory of the checkpoint")
    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise CommandError(f"{path}: there is no such directory; give one with a checkpoint, or the id of a model")


def _check_kind(path: str, transformers: Any) -> None:
    """Refuse a model without such layers before its weights are read."""
    config = transformers.AutoConfig.from_pretrained(path)
    types = getattr(config.get_text_config(), "layer_types", None)
    if types is None:
        with torch.device("meta"):
            require_layers(path, transformers.AutoModelForCausalLM.from_config(config))
    elif "linear_attention" not in types:
        raise CommandError(_no_layers(path, config))


def _no_layers(path: str, config: Any) -> str:
    return f"{path}: a {config.model_type} model has no Gated DeltaNet layers; try a Qwen3.5 or a Qwen3-Next"


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


def _remedy(path: str, error: Exception) -> str:
    if "does not recognize this architecture" in str(error):
        return f"; {EXTRA} --upgrade"
    if Path(path).is_dir():
        return "; the directory must hold config.json, the weights (*.safetensors) and the tokenizer's files"
    if importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE:
        return "; HF_HUB_OFFLINE is set, so only models already in the cache load: give a directory, or unset it"
    return "; give a directory with a checkpoint, or the id of a model on the hub (needs a network)"
