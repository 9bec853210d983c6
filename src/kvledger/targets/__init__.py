"""Schedulers under test, by name. A target is built from a node's settings, rules and a watcher."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from kvledger.node import PrefillNode
from kvledger.replay import Target, TargetFactory

TARGETS: Mapping[str, TargetFactory | str] = MappingProxyType(
    {
        "node": PrefillNode,
        "sglang": "kvledger.targets.sglang:SglangTarget",
        "vllm": "kvledger.targets.vllm:VllmTarget",
        "vllm-align": "kvledger.targets.vllm:VllmAlignTarget",
    }
)
"""By name; those of other projects are imported when they are asked for, and only then need their packages."""


def find_target(name: str) -> TargetFactory:
    """A target by its registered name, or `package.module:attribute`. ValueError, one line, if there is none."""
    registered = TARGETS.get(name, name)
    if not isinstance(registered, str):
        return registered
    module_name, colon, attribute = registered.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"{name!r} is neither one of {', '.join(TARGETS)} nor package.module:attribute")
    try:
        with _here_importable():
            factory: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r}: {error}") from error
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        raise ValueError(f"{name!r}: importing it raised {type(error).__name__}: {words}") from error
    if not callable(factory) or (isinstance(factory, type) and not _has_protocol(factory)):
        raise ValueError(f"{name!r} does not make a kvledger target: see kvledger.replay.Target")
    return factory  # type: ignore[no-any-return]


@contextmanager
def _here_importable() -> Iterator[None]:
    """The current folder counts, as it does for `python -m`; a console script would not look there."""
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)


def _has_protocol(factory: type) -> bool:
    wanted = {name for name in vars(Target) if not name.startswith("_")}
    return all(hasattr(factory, name) or name in getattr(factory, "__annotations__", {}) for name in wanted)
