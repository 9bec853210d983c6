"""These tests need a released sglang: `tox -e sglang`. Elsewhere each is skipped by name."""

from __future__ import annotations

from importlib import metadata

import pytest

from kvledger.replay import TargetFactory


@pytest.fixture(scope="session")
def sglang() -> TargetFactory:
    """The target. Importing sglang takes a while, and once."""
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        pytest.skip("the package sglang is not installed: tox -e sglang brings it")
    from kvledger.targets.sglang import SglangTarget

    return SglangTarget
