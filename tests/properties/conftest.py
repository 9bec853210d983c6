"""Profiles: `pytest --hypothesis-profile=ci tests/properties`; without the option, `dev`."""

from __future__ import annotations

import pytest
from hypothesis import settings

from kvledger.testing.profiles import register_profiles


def pytest_configure(config: pytest.Config) -> None:
    register_profiles()
    settings.load_profile(config.getoption("--hypothesis-profile") or "dev")
