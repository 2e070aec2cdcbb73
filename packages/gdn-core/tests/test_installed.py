# SPDX-License-Identifier: Apache-2.0
"""Smoke tests of an installed gdn-core, with or without a backend beside it."""

import importlib.metadata
import subprocess
import sys

import torch

import gdn_core


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_version_is_the_distribution_s():
    assert gdn_core.__version__ == importlib.metadata.version("gdn-core")


def test_backends_say_what_is_missing_and_how_to_get_it():
    backends = {backend.name: backend for backend in gdn_core.backends()}
    assert backends["reference"].available
    if not is_installed("gdn-cpu"):
        assert not backends["cpu"].available
        assert "not installed" in backends["cpu"].reason
        assert f"gdn-core[cpu]=={gdn_core.__version__}" in backends["cpu"].install


def test_an_op_runs():
    heads, dim = 2, 16
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3, heads, dim, generator=generator) for _ in range(3))
    g, beta = (torch.rand(1, 3, heads, generator=generator) for _ in range(2))
    o, final_state = gdn_core.fused_recurrent_gated_delta_rule(q, k, v, -g, beta=beta, output_final_state=True)
    assert o.shape == v.shape
    assert final_state.shape == (1, heads, dim, dim)
    assert o.isfinite().all()


def test_the_command_runs_as_a_module():
    result = subprocess.run([sys.executable, "-m", "gdn_core", "info"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert gdn_core.__version__ in result.stdout
