"""Which engine speaks which release of sglang, and the one that is installed."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from functools import cache
from importlib import metadata

from kvledger.targets.sglang.engine import Engine
from kvledger.targets.sglang.engine_0520 import Engine0520
from kvledger.targets.sglang.stubs import STUBS

ENGINES: tuple[tuple[str, type[Engine]], ...] = (("0.5.20", Engine0520), ("0.5.22", Engine))
"""From this release on, up to the next entry's; the newest last."""


def engine_class(version: str) -> type[Engine]:
    """The engine for a release. ImportError, one line, for one that is older than all of them."""
    found = [engine for since, engine in ENGINES if _numbers(since) <= _numbers(version)]
    if not found:
        raise ImportError(f"sglang {version} is older than {ENGINES[0][0]}, the first release whose interface is known")
    return found[-1]


def _numbers(version: str) -> tuple[int, ...]:
    """`0.5.20.post1` as (0, 5, 20)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


@cache
def installed_engine() -> Engine:
    """The release that is installed, imported. ImportError, one line, if there is none that is known."""
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise ImportError(
            "the package sglang is not installed: pip install --no-deps -r requirements/sglang-0.5.23.txt"
        ) from None
    chosen = engine_class(version)
    if "sglang" not in sys.modules:
        # somebody tried before the stubs were there, and left half of it
        for name in [name for name in sys.modules if name.startswith("sglang.")]:
            del sys.modules[name]
    os.environ.update(chosen.environment)
    with warnings.catch_warnings():
        # what it says about devices that are not here
        warnings.simplefilter("ignore")
        for stub in STUBS:
            if stub.before:
                stub.install()
        # a world is small tensors: threads would only wait for each other
        importlib.import_module("torch").set_num_threads(1)
        engine = chosen(version)
        for stub in STUBS:
            if not stub.before:
                stub.install()
    # a failed allocation logs the whole tree; the outcome says it in one line
    logging.getLogger("sglang").setLevel(logging.CRITICAL + 1)
    return engine
