# SPDX-License-Identifier: Apache-2.0
"""Continue a text with a checkpoint that transformers loads, its Gated DeltaNet layers on gdn.

The text streams to stdout, and what it took goes to stderr. --compare generates greedily without gdn and with it, and
shows where the time went and whether the tokens are the same, as `gdn demo` does for a seeded model.
"""

from __future__ import annotations

import argparse
import sys
from time import perf_counter
from typing import Any

import torch

from gdn_core.integrations import transformers as integration

from . import CommandError, demo, models, output
from .timing import torch_threads

_PROMPT = "The delta rule updates a memory by"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory with a checkpoint, or the id of a model on the hub")
    parser.add_argument(
        "--prompt", default=_PROMPT, metavar="TEXT", help='the text to continue, as it is; "-": from stdin'
    )
    parser.add_argument("--max-new-tokens", type=output.positive, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="T", help="0, the default, takes the likeliest token"
    )
    parser.add_argument("--compare", action="store_true", help="generate without gdn and with it, and show a table")
    parser.add_argument("--dtype", choices=list(models.DTYPES), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--threads", type=output.positive, metavar="N", help="default: torch's own choice")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what a temperature draws (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    models.import_transformers()
    if args.prompt == "-":
        args.prompt = sys.stdin.read()
    if not args.prompt:
        raise CommandError("--prompt: give a text to continue")
    if args.compare:
        return _compare(args)
    try:
        with torch_threads(args.threads):
            return _generate(args)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CommandError("out of memory; use a shorter prompt, fewer --max-new-tokens or a smaller model") from error


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return value


def _compare(args: argparse.Namespace) -> int:
    if args.temperature:
        raise CommandError("--compare: tokens are compared where none is drawn; leave out --temperature")
    return demo.run(
        argparse.Namespace(**vars(args), new_tokens=args.max_new_tokens, rounds=1, shape="small", json=None)
    )


def _generate(args: argparse.Namespace) -> int:
    with output.steps(1) as steps:
        steps.step("loading the model", args.model)
        model, tokenizer = models.load(args.model, models.DTYPES[args.dtype])
    prompt = tokenizer(args.prompt, return_tensors="pt")
    stream = _Stream(tokenizer)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    torch.manual_seed(args.seed)
    status = 0
    try:
        with integration.patched():
            model.generate(
                prompt["input_ids"],
                attention_mask=prompt["attention_mask"],
                max_new_tokens=args.max_new_tokens,
                streamer=stream,
                **sampling,
            )
    except KeyboardInterrupt:
        stream.end()
        status = 130
    stopped = ", interrupted" if status else ""
    print(f"gdn generate: {stream.summary(prompt['input_ids'].shape[1])}{stopped}", file=sys.stderr)
    return status


class _Stream:
    """Prints text as its tokens come, and keeps the time. transformers hands it the prompt first."""

    def __init__(self, tokenizer: Any) -> None:
        transformers = models.import_transformers()
        self._printer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._times: list[float] = []
        self._has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self._times.append(perf_counter())
        self._printer.put(value)

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._printer.end()

    def summary(self, prompt_tokens: int) -> str:
        """Say what the prompt and the tokens took."""
        tokens = max(0, len(self._times) - 1)
        text = f"{output.count(tokens, 'token')} after a prompt of {prompt_tokens}"
        if tokens:
            text += f", prompt {prompt_tokens / (self._times[1] - self._times[0]):.1f} tokens/s"
        if tokens > 1:
            text += f", then {(tokens - 1) / (self._times[-1] - self._times[1]):.1f} tokens/s"
        return text
