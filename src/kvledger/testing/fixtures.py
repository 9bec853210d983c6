"""Regression fixtures: a failing trace, named by what it breaks and what it is, with what every preset makes of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from kvledger.monitor import checked_replay
from kvledger.replay import TargetFactory
from kvledger.rules import PRESETS
from kvledger.targets import TARGETS
from kvledger.trace import Trace, TraceError, dumps, write


def expectations(trace: Trace, *, target: TargetFactory = TARGETS["node"]) -> dict[str, str]:
    """The verdict of each preset. One under which an event cannot happen (a hold that does not fit) is left out."""
    verdicts = {}
    for name, rules in PRESETS.items():
        try:
            verdicts[name] = checked_replay(trace, rules, target=target).verdict
        except TraceError:
            continue
    return verdicts


def fixture_name(trace: Trace, invariant: str) -> str:
    """`<invariant>-<hash>.json`; the hash is of the experiment alone, so a title or an expectation changes nothing."""
    content = dumps(replace(trace, title="", expect={}))
    return f"{invariant}-{hashlib.sha256(content.encode()).hexdigest()[:8]}.json"


def save_fixture(
    trace: Trace, invariant: str, folder: str | os.PathLike[str], *, target: TargetFactory = TARGETS["node"]
) -> Path:
    """Write the trace with its expectations into `folder`, whole or not at all; one that is there already is kept."""
    path = Path(folder) / fixture_name(trace, invariant)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(replace(trace, expect=expectations(trace, target=target)), path)
    return path
