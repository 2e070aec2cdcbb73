# SPDX-License-Identifier: Apache-2.0
"""Smoke tests of an installed gdn-cuda. They need neither torch nor a GPU."""

import importlib.metadata

import gdn_cuda


def test_version_is_the_distribution_s():
    assert gdn_cuda.provider.version == importlib.metadata.version("gdn-cuda")


def test_provider_says_why_it_cannot_run():
    assert gdn_cuda.provider.name == "cuda"
    assert not gdn_cuda.provider.ops
    assert gdn_cuda.provider.availability()


def test_level_is_a_compute_capability_or_nothing():
    level = gdn_cuda.provider.level()
    assert level is None or level.replace(".", "").isdigit()
