"""What one test session puts under test: set once, by the pytest plugin from its options, read by `state_machine`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from kvledger.replay import Target, TargetFactory
from kvledger.rules import PRESETS
from kvledger.targets import TARGETS

PROFILES = ("dev", "ci", "nightly")


@dataclass(slots=True)
class Session:
    """Defaults of `state_machine`. `rules` None: whatever a test asks for itself."""

    target: TargetFactory = TARGETS["node"]
    target_name: str = "node"
    rules: str | None = None
    profile: str = "dev"
    observe: bool = False


SESSION = Session()


def find_target(name: str) -> TargetFactory:
    """A target by its registered name, or `package.module:attribute`. ValueError, one line, if there is none."""
    if name in TARGETS:
        return TARGETS[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} is neither one of {', '.join(TARGETS)} nor package.module:attribute")
    try:
        factory: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r}: {error}") from error
    if not callable(factory) or (isinstance(factory, type) and not _has_protocol(factory)):
        raise ValueError(f"{name!r} does not make a kvledger target: see kvledger.replay.Target")
    return factory  # type: ignore[no-any-return]


def _has_protocol(factory: type) -> bool:
    wanted = {name for name in vars(Target) if not name.startswith("_")}
    return all(hasattr(factory, name) or name in getattr(factory, "__annotations__", {}) for name in wanted)


def find_rules(name: str) -> str:
    """A preset's name. ValueError, one line, if it is none."""
    if name not in PRESETS:
        raise ValueError(f"{name!r} is none of {', '.join(PRESETS)}")
    return name
