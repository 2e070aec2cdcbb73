# SPDX-License-Identifier: Apache-2.0
"""Compiles gdn_core's Triton kernels for a GPU that need not be there, and prints what the machine code uses, as JSON.

python tests/triton_compile.py 80 fp32
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gdn_core.triton_backend import decode, kernels

FORMS = {"slots": 0, "replay": 1, "single": 2}
_FP32 = {"new_u", "new_decay", "records_u", "records_decay", "A_log", "dt_bias", "weight"}
_INT32 = {"slots", "accepted_tokens", "cu_seqlens", "row_indices", "records_live"}
_REAL = {"scale", "softplus_beta", "softplus_threshold", "eps"}
_OF_REPLAY = {"records_k", "records_u", "records_decay", "records_live", "new_u", "new_decay"}
_POINTERS = {"q", "k", "v", "a", "b", "o", "gate", "out", "state", "records_k"} | _FP32 | _INT32


def _type_of(name: str, activations: str, state: str, o: str) -> str:
    if name in _FP32:
        return "*fp32"
    if name in _INT32:
        return "*i32"
    if name in _REAL:
        return "fp32"
    if name in _POINTERS:
        return "*" + {"state": state, "o": o}.get(name, activations)
    return "i64" if name == "state_slot" else "i32"


def source(kernel: Any, form: str, state: str, *, chosen: bool = False, **constants: Any) -> ASTSource:
    """Return a kernel with bf16 activations and a state of 128 x 128, for all rows or chosen ones."""
    constants |= {"H": 2, "HV": 4, "K": 128, "V": 128, "BLOCK_K": 128, "FORM": FORMS[form], "HAS_NULL_SLOT": False}
    if not chosen:
        constants |= {"row_indices": None, "row_stride": 0}
    if form == "single":
        constants["accepted_tokens"] = None
    if form != "replay":
        constants |= dict.fromkeys(_OF_REPLAY)
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: _type_of(name, "bf16", state, "fp32") for name in names}
    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return ASTSource(kernel, signature | dict.fromkeys(used, "constexpr"), used)


def sources(state: str) -> dict[str, ASTSource]:
    """Return every kernel by name, in every form."""
    found = {}
    for form, v_first in product(FORMS, (True, False)):
        options = {"BLOCK_V": 32, "NORMALIZE": True, "STATE_V_FIRST": v_first}
        name = f"decode {form} {'V' if v_first else 'K'} first"
        found[name] = source(kernels.decode_kernel, form, state, **options)
        if v_first and form != "single":
            found[f"decode {form}, chosen rows"] = source(kernels.decode_kernel, form, state, chosen=True, **options)
    found["renew records"] = source(kernels.renew_records_kernel, "replay", state, BLOCK_V=128)
    found["norm"] = source(kernels.norm_kernel, "slots", state, BLOCK_V=128, ACTIVATION=1)
    return found


def resources(cubin: bytes) -> dict[str, int]:
    """Count registers and bytes of local memory a thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


def main() -> None:
    """Compile for the capability and state dtype asked for."""
    capability, state = int(sys.argv[1]), sys.argv[2]
    target = GPUTarget("cuda", capability, 32)
    result = {}
    for name, ast_source in sources(state).items():
        compiled = triton.compile(ast_source, target=target, options=decode._OPTIONS)
        cubin = compiled.asm["cubin"]
        assert cubin.startswith(b"\x7fELF")
        result[name] = {"bytes": len(cubin), "target": re.search(r"\.target (\w+)", compiled.asm["ptx"]).group(1)}
        result[name] |= resources(cubin)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
