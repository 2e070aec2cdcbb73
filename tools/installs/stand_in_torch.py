# SPDX-License-Identifier: Apache-2.0
"""Run gdn-cpu's kernels on a Python for which there is no torch here: a script for that Python.

    python stand_in_torch.py

A module stands in for torch with the little that the binding asks of it: tensors are buffers of floats. It shows that
one file, built for the stable ABI, loads and computes on this Python; what it computes is tested elsewhere.
"""

import array
import math
import sys
import types


class Tensor:
    """A tensor, as far as the binding looks: plain, and readable through the buffer protocol."""

    def __init__(self, *values: float, shape: list[int]) -> None:
        self.view = memoryview(array.array("f", values)).cast("B").cast("f", shape)

    def detach(self) -> "memoryview[float]":
        return self.view

    def is_neg(self) -> bool:
        return False


def use_stand_in() -> None:
    """Let ``import torch`` find this."""
    torch = types.ModuleType("torch")
    names = {
        "Tensor": Tensor,
        "nn": types.SimpleNamespace(Parameter=type("Parameter", (Tensor,), {})),
        "_C": types.SimpleNamespace(TensorBase=Tensor),
        "get_num_threads": lambda: 1,
    }
    vars(torch).update(names)
    sys.modules["torch"] = torch


def gates_are_right(module: types.ModuleType) -> bool:
    """Compute g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b) on two heads, and compare."""
    a_log, a, b, bias = (0.5, -1.0), (0.25, 2.0, -3.0, 1.0), (0.0, 1.0, -1.0, 3.0), (0.125, -0.5)
    heads, tokens = [2], [2, 2]
    g, beta = (Tensor(*[math.nan] * 4, shape=tokens) for _ in range(2))
    inputs = (
        Tensor(*a_log, shape=heads),
        Tensor(*a, shape=tokens),
        Tensor(*b, shape=tokens),
        Tensor(*bias, shape=heads),
    )
    module.fused_gdn_gating(*inputs, 1.0, 20.0, g, beta)
    wanted = [-math.exp(a_log[i % 2]) * math.log1p(math.exp(a[i] + bias[i % 2])) for i in range(4)]
    wanted += [1 / (1 + math.exp(-x)) for x in b]
    got = [*g.view.cast("B").cast("f"), *beta.view.cast("B").cast("f")]
    return all(abs(x - y) < 1e-5 for x, y in zip(got, wanted, strict=True))


def main() -> None:
    use_stand_in()
    import gdn_cpu
    import gdn_cuda

    levels = [level.name for level in gdn_cpu.levels() if level.supported]
    for level in levels:
        with gdn_cpu.isa_level(level):
            if not gates_are_right(gdn_cpu._C):
                sys.exit(f"wrong results at level {level}")
    print(f"kernels right at {', '.join(levels)}; gdn_cuda: {gdn_cuda.provider.availability()}")


if __name__ == "__main__":
    main()
