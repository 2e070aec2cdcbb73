# SPDX-License-Identifier: Apache-2.0
"""Continue a text with a checkpoint that transformers loads, its Gated DeltaNet layers on gdn.

The text streams to stdout, and what it took goes to stderr. --compare generates greedily without gdn and with it, and
shows where the time went and whether the tokens are the same, as `gdn demo` does for a seeded model.

--speculate verifies several drafted tokens in one pass, and stops drafting where that does not pay. --compare
--speculate decodes on gdn with and without drafts: the texts may part where the two best logits are closer than the
dtype rounds them, since torch's matrix products round otherwise for several tokens; with --exact they must be equal.
"""

from __future__ import annotations

import argparse
import sys
from time import perf_counter
from typing import Any

import torch

from gdn_core.integrations import transformers as integration

from . import CommandError, demo, models, output, speculation
from .demo_generate import follow_at_once
from .timing import Others, torch_threads

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
    parser.add_argument(
        "--speculate", action="store_true", help="verify tokens that are looked up in the text so far, several a pass"
    )
    parser.add_argument(
        "--draft", metavar="MODEL", help="with --speculate: a smaller model of the same family proposes tokens"
    )
    parser.add_argument(
        "--exact", action="store_true", help="with --speculate: the bits of single tokens, by running them one by one"
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
    if not args.speculate and (args.draft or args.exact):
        raise CommandError(f"{'--draft' if args.draft else '--exact'}: only with --speculate")
    if args.compare and args.temperature:
        raise CommandError("--compare: tokens are compared where none is drawn; leave out --temperature")
    if args.compare and not args.speculate:
        return _compare(args)
    remedy = "use a shorter prompt, fewer --max-new-tokens or a smaller model"
    with models.memory_errors(remedy), torch_threads(args.threads):
        return _compare_speculation(args) if args.compare else _generate(args)


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return value


def _compare(args: argparse.Namespace) -> int:
    threads = "all" if args.threads is None else str(args.threads)
    of_demo = {"new_tokens": args.max_new_tokens, "rounds": 1, "shape": "small", "json": None, "threads": threads}
    return demo.run(argparse.Namespace(**vars(args) | of_demo))


def _load(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return the model, its tokenizer and the drafting model, if there is one."""
    dtype = models.DTYPES[args.dtype]
    with output.steps(1 + bool(args.draft)) as steps:
        steps.step("loading the model", args.model)
        model, tokenizer = models.load(args.model, dtype)
        if not args.draft:
            return model, tokenizer, None
        steps.step("loading the drafting model", args.draft)
        return model, tokenizer, models.load(args.draft, dtype)[0]


def _compare_speculation(args: argparse.Namespace) -> int:
    model, tokenizer, draft = _load(args)
    ids = models.token_ids(tokenizer, args.prompt)
    # To the asked length, whatever ends a text in this checkpoint.
    model.generation_config = type(model.generation_config)(do_sample=False)
    with integration.patched(), Others() as others, output.steps(2) as steps:
        steps.step("generating without drafts")
        if args.exact:
            engine = speculation.engine_for(model, ids.shape[1], speculates=False, exact=True)
            plain = speculation.run_engine(engine, ids, args.max_new_tokens)
        else:
            plain = speculation.run_plain(model, ids, args.max_new_tokens)
        steps.step("generating with drafts")
        engine = speculation.engine_for(model, ids.shape[1], draft, exact=args.exact)
        speculative = speculation.run_engine(engine, ids, args.max_new_tokens)
    console = output.console()
    row = speculation.Row("this one", torch.get_num_threads(), [plain], [speculative], others.disturb)
    console.print(speculation.table(f"Decode of {args.model} with drafts", [row]), markup=False)
    dtype = models.DTYPES[args.dtype]
    exact = None
    if plain.tokens != speculative.tokens and plain.logits is not None and dtype != torch.float32:
        exact = follow_at_once(model.float(), ids, plain.tokens)
    passed, verdict = speculation.verdict(plain, speculative, exact, dtype)
    console.print(verdict, markup=False)
    console.print(f"\nText: {tokenizer.decode(speculative.tokens)}", markup=False)
    return 0 if passed else 1


def _generate(args: argparse.Namespace) -> int:
    model, tokenizer, draft = _load(args)
    ids = models.token_ids(tokenizer, args.prompt)
    stream = _Stream(tokenizer)
    run = _plain if not args.speculate else _speculative
    status, note = 0, ""
    try:
        with integration.patched():
            note = run(args, model, ids, stream, draft)
    except KeyboardInterrupt:
        stream.end()
        status, note = 130, ", interrupted"
    print(f"gdn generate: {stream.summary(ids.shape[1])}{note}", file=sys.stderr)
    return status


def _plain(args: argparse.Namespace, model: Any, ids: torch.Tensor, stream: _Stream, draft: None) -> str:
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    torch.manual_seed(args.seed)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=args.max_new_tokens,
        streamer=stream,
        **sampling,
    )
    return ""


def _speculative(args: argparse.Namespace, model: Any, ids: torch.Tensor, stream: _Stream, draft: Any) -> str:
    engine = speculation.engine_for(model, ids.shape[1], draft, exact=args.exact)
    ends = model.generation_config.eos_token_id
    stops = [] if ends is None else [ends] if isinstance(ends, int) else ends
    request = engine.add(ids[0].tolist(), args.max_new_tokens, stops, temperature=args.temperature, seed=args.seed)
    stream.put(ids)
    shown = 0
    while not request.is_finished:
        engine.step()
        for token in request.generated[shown:]:
            stream.put(torch.tensor([token]))
        shown = len(request.generated)
    stream.end()
    return f", {engine.num_passes} passes, {request.num_accepted} of {request.num_drafted} drafts right"


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
