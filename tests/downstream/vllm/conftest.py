"""These tests need a released vllm: `tox -e vllm`. Elsewhere each is skipped by name."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm() -> Any:
    """The package of targets. Importing vllm takes a while, and once."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        pytest.skip("the package vllm is not installed: tox -e vllm brings it")
    import kvledger.targets.vllm

    return kvledger.targets.vllm
