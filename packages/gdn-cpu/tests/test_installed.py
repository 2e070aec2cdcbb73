# SPDX-License-Identifier: Apache-2.0
"""Smoke tests of an installed gdn-cpu. They need torch, and not gdn-core."""

import importlib.metadata

import gdn_cpu


def test_version_is_the_distribution_s():
    assert gdn_cpu.provider.version == importlib.metadata.version("gdn-cpu")


def test_backend_is_available():
    assert gdn_cpu.provider.name == "cpu"
    assert gdn_cpu.provider.availability() is None
    assert gdn_cpu.provider.ops


def test_baseline_runs_everywhere_and_one_level_is_active():
    levels = {level.name: level for level in gdn_cpu.levels()}
    assert levels["baseline"].kernels == "baseline"
    assert levels["baseline"].supported
    assert [level.name for level in levels.values() if level.active] == [gdn_cpu.provider.level()]
