# SPDX-License-Identifier: Apache-2.0
"""Smoke tests of an installed gdn-cuda. They need neither torch nor a GPU."""

import importlib.metadata

import pytest

import gdn_cuda
from gdn_cuda import _C


def test_version_is_the_distribution_s():
    assert gdn_cuda.provider.version == importlib.metadata.version("gdn-cuda")


def test_provider_runs_or_says_why_it_cannot():
    provider = gdn_cuda.provider
    assert (provider.name, provider.device_types) == ("cuda", ("cuda",))
    assert set(provider.ops) <= set(dir(_C))
    reason = provider.availability()
    assert reason is None or reason
    if not _C.query_driver().devices:
        with pytest.raises(RuntimeError):
            gdn_cuda.prepare()


def test_level_is_a_compute_capability_or_nothing():
    level = gdn_cuda.provider.level()
    assert level is None or level.replace(".", "").isdigit()


def test_device_code_names_its_compiler():
    compiler, major, _ = _C.device_compiler()
    assert bool(compiler) == bool(_C.device_code()) == (major > 0)
    for code in _C.device_code():
        assert code.data[:4] == b"\x7fELF" or code.is_ptx
