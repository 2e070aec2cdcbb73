# SPDX-License-Identifier: Apache-2.0
"""The `gdn` command: info, verify, bench, demo.

Exit status: 0 done and right, 1 a check failed, 2 the command could not run (a line says what to do).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "info": "what is installed, and what would run each operation here",
    "verify": "check every operation of every backend against float64 on this machine",
    "bench": "time operations against the machine's own limits and against other libraries",
    "demo": "generate text with a Qwen3.5-architecture model, without gdn and with it",
}

_EPILOG = """\
environment:
  GDN_BACKEND=NAME           force a backend: cpu, cuda, reference
  GDN_CPU_ISA=LEVEL          cap gdn-cpu's instruction-set level (`gdn info` lists them)
  GDN_DECODE_KERNEL=NAME     cuda or triton
  GDN_DEBUG=1                check more, at the price of speed
  GDN_SKIP_VERSION_CHECK=1   accept a backend of another version
"""


class CommandError(Exception):
    """A command cannot go on. The message is one line that also says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except CommandError as error:
        print(f"gdn {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gdn {args.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gdn",
        description="Gated DeltaNet kernels: look at them, check them, time them, see them in a model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
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
