# SPDX-License-Identifier: Apache-2.0
"""Show the backends, what they run on, and which one would run each operation on this machine."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import gdn_core

from .. import _registry
from . import CommandError, environment_error, models, output
from .verify_cases import all_cases

_PACKAGES = ("gdn-core", "gdn-cpu", "gdn-cuda", "torch", "triton", "transformers", "rich")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH_OR_ID", help="also show what the layers of this model run on under transformers"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    facts = gather()
    if args.model is not None and not facts["environment_error"]:
        facts["model"] = {"name": args.model, "layers": _layers(args.model)}
    if args.json:
        output.write_json("-", facts)
    else:
        _show(facts, output.console())
    if facts["environment_error"]:
        raise CommandError(facts["environment_error"])
    return 0


def gather() -> dict[str, Any]:
    """Collect everything that the command shows."""
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith("GDN_")}
    error = environment_error()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "threads": torch.get_num_threads(),
        "devices": _devices(),
        "backends": [asdict(backend) for backend in gdn_core.backends()],
        "cpu_levels": _cpu_levels(),
        "environment": environment,
        "unknown_environment": [name for name in environment if name not in _registry.ENVIRONMENT],
        "environment_error": error,
        "operations": [] if error else [_operation(op, device) for op in gdn_core.OPS for device in _devices()],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _cpu_levels() -> list[dict[str, Any]]:
    if not any(backend.name == "cpu" and backend.available for backend in gdn_core.backends()):
        return []
    return [asdict(level) for level in importlib.import_module("gdn_cpu").levels()]


def _operation(op: str, device: str) -> dict[str, Any]:
    """Ask the dispatcher about a bfloat16 call of a released model's sizes."""
    arguments, _ = next(case for case in all_cases() if case.op == op).make(torch.bfloat16)
    if device != "cpu":
        arguments = {name: value.to(device) if hasattr(value, "to") else value for name, value in arguments.items()}
    explanation = gdn_core.explain(op, **arguments)
    return {"op": op, "device": device, "backend": explanation.backend, "reasons": explanation.reasons}


def _layers(path: str) -> list[dict[str, Any]]:
    """Plan the layers of a model from its configuration alone."""
    transformers = models.import_transformers()
    with models.load_errors(path):
        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    models.require_layers(path, model)
    integration = importlib.import_module("gdn_core.integrations.transformers")
    dtype = config.get_text_config().dtype or torch.bfloat16
    plans = [(device, plan) for device in _devices() for plan in integration.plan_layers(model, dtype, device)]
    return [{"device": device, "dtype": str(dtype).removeprefix("torch.")} | asdict(plan) for device, plan in plans]


# What is printed


def _show(facts: dict[str, Any], console: Console) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    console.print(f"[bold]{facts['system']}[/], {facts['cpu']}, {output.count(facts['threads'], 'thread')}")
    console.print(f"python {facts['python']}, {versions}\n", markup=False)
    _show_backends(facts, console)
    _show_levels(facts, console)
    _show_operations(facts, console)
    if "model" in facts:
        _show_layers(facts["model"], console)
    _show_environment(facts, console)


def _show_layers(model: dict[str, Any], console: Console) -> None:
    """Print a row for each run of layers that do the same."""
    table = output.table(
        f"Gated DeltaNet layers of {_escaped(model['name'])}, patched (GDN_PATCH_TRANSFORMERS=1, or patch())",
        *("layers", "device", "dtype", "heads of keys, of values", "prefill", "decoded token", "why not gdn"),
    )
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer in model["layers"]:
        phases = (_backends_of(layer[phase]) for phase in ("prefill", "decode"))
        row = (layer["device"], layer["dtype"], layer["heads"], *phases, layer["reason"] or "")
        groups.setdefault(row, []).append(layer["index"])
    for row, indices in groups.items():
        table.add_row(" ".join(map(str, indices)), *row)
    console.print(table)


def _backends_of(calls: dict[str, str]) -> str:
    names = sorted(set(calls.values()))
    return f"gdn: {', '.join(names)} ({output.count(len(calls), 'operation')})" if names else "transformers"


def _show_backends(facts: dict[str, Any], console: Console) -> None:
    table = output.table("Backends", "backend", "version", "level", "")
    for backend in facts["backends"]:
        if backend["available"]:
            note = "\n".join(f"{name}: {value}" for name, value in backend["details"].items())
        else:
            note = f"[red]unavailable:[/] {backend['reason']}"
            note += f"\nremedy: [bold]{_escaped(backend['install'])}[/]" if backend["install"] else ""
        table.add_row(backend["name"], backend["version"] or "-", backend["level"] or "-", note)
    console.print(table)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def _show_levels(facts: dict[str, Any], console: Console) -> None:
    if not facts["cpu_levels"]:
        return
    table = output.table("Instruction-set levels of gdn-cpu", "level", "", "kernels")
    for level in facts["cpu_levels"]:
        state = "supported" if level["supported"] else level["reason"] or "not supported"
        kernels = "its own" if level["kernels"] == level["name"] else f"those of {level['kernels']}"
        table.add_row(level["name"], "[bold green]in use[/]" if level["active"] else state, kernels)
    console.print(table)


def _show_operations(facts: dict[str, Any], console: Console) -> None:
    if not facts["operations"]:
        return
    title = "What runs a bfloat16 call of the sizes of Qwen3-Next"
    table = output.table(title, "operation", "device", "runs on", "why not another")
    available = {backend["name"] for backend in facts["backends"] if backend["available"]}
    for row in facts["operations"]:
        # The unavailable ones are explained once, in the table of backends.
        reasons = [
            f"{name} {why}".removesuffix(f" for {row['op']}")
            for name, why in row["reasons"].items()
            if why and name in available
        ]
        table.add_row(row["op"], row["device"], row["backend"] or "[red]raises[/]", "; ".join(reasons))
    console.print(table)


def _show_environment(facts: dict[str, Any], console: Console) -> None:
    unknown = " (unknown: gdn reads no such variable)"
    settings = [
        f"{name}={value}" + unknown * (name in facts["unknown_environment"])
        for name, value in facts["environment"].items()
    ]
    console.print(f"Environment: {', '.join(settings) or 'no GDN_ variable is set'}", markup=False)
    if facts["environment_error"]:
        console.print(f"  wrong: {facts['environment_error']}", style="red", markup=False)
