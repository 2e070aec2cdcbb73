# SPDX-License-Identifier: Apache-2.0
"""The `gdn` command: info, verify, bench, demo, generate.

Exit status: 0 done and right, 1 a check failed, 2 the command could not run (a line says what to do).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .. import _dispatch, _registry

_COMMANDS = {
    "info": "what is installed, and what would run each operation here",
    "verify": "check every operation of every backend against float64 on this machine",
    "bench": "time operations against the machine's own limits and against other libraries",
    "demo": "generate text with a Qwen3.5-architecture model, without gdn and with it",
    "generate": "continue a text with a model of your own, on gdn",
}


class CommandError(Exception):
    """A command cannot go on. The message is one line that also says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        # `gdn info` shows what it can all the same.
        if args.command != "info" and (error_of_environment := environment_error()):
            raise CommandError(error_of_environment)
        status: int = args.run(args)
        return status
    except CommandError as error:
        print(f"gdn {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gdn {args.command}: interrupted", file=sys.stderr)
        return 130


def environment_error() -> str | None:
    """Return what is wrong with the environment, so that no call, or a backend not at all, would run, or None."""
    try:
        _dispatch._environment_choice()
    except (ValueError, RuntimeError) as error:
        return str(error)
    # A backend's own variable: without this the others would run in its place, and all would look well.
    reasons = [backend.reason or "" for backend in _registry.backends()]
    return next((reason for reason in reasons if reason.startswith(tuple(_registry.ENVIRONMENT))), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gdn",
        description="Gated DeltaNet kernels: look at them, check them, time them, see them in a model.",
        epilog=_environment_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gdn {_registry.core_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        try:
            module = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "rich":
                raise
            parser.exit(2, "gdn: the command line needs rich: pip install rich\n")
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _environment_help() -> str:
    settings = {f"{name}={value}": meaning for name, (value, meaning) in _registry.ENVIRONMENT.items()}
    width = max(map(len, settings))
    return "\n".join(["environment:", *(f"  {setting:{width}}   {text}" for setting, text in settings.items())])
