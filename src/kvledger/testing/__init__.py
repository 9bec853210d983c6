"""The search as a library: put any scheduler under test. Needs the extra `verify`; parts load when asked for."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "AdmissionMachine",
    "InvariantBroken",
    "SearchMonitor",
    "example",
    "save_fixture",
    "search",
    "state_machine",
]

_HOMES = {
    "AdmissionMachine": "machine",
    "InvariantBroken": "machine",
    "state_machine": "machine",
    "example": "driver",
    "search": "search",
    "save_fixture": "fixtures",
    "SearchMonitor": "reached",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
