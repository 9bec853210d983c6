"""Regression fixtures: a failing trace, named by what it breaks and what it is, with what every preset makes of it."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path

from kvledger.events import Fault, Pin
from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode
from kvledger.replay import TargetFactory
from kvledger.rules import PRESETS, SOUND_BESIDE_DECODE
from kvledger.targets import TARGETS
from kvledger.trace import Trace, TraceError, dumps, write


def expectations(trace: Trace, *, target: TargetFactory = PrefillNode) -> dict[str, str]:
    """What the trace must give. Our node: `ok` under each sound preset, whatever it gives today, and today's verdict
    under the others; a preset under which an event cannot happen is left out. Another scheduler knows no presets:
    `ok` under the rules it was run with.
    """
    if target is not PrefillNode:
        return {trace.rules if isinstance(trace.rules, str) else "tail-reserved": "ok"}
    verdicts = {}
    sound = _sound_presets(trace)
    for name, rules in PRESETS.items():
        try:
            verdict = checked_replay(trace, rules, target=target).verdict
        except TraceError:
            continue
        verdicts[name] = verdict if verdict == "stuck" or name not in sound else "ok"
    return verdicts


def _sound_presets(trace: Trace) -> frozenset[str]:
    """Presets under which nothing may break on this node, whatever goes wrong in the trace.

    A late load leaves a tail without a cut, and what is pinned must be waited for, which no preset does.
    """
    if any(isinstance(event, Pin) for event in trace.events):
        return frozenset()
    faulty = any(isinstance(event, Fault) for event in trace.events)
    return trace.node.sound_presets & SOUND_BESIDE_DECODE if faulty else trace.node.sound_presets


def fixture_name(trace: Trace, invariant: str) -> str:
    """`<invariant>-<hash>.json`; the hash is of the experiment alone, so a title or an expectation changes nothing."""
    content = dumps(replace(trace, title="", expect={}))
    return f"{invariant}-{hashlib.sha256(content.encode()).hexdigest()[:8]}.json"


def save_fixture(
    trace: Trace, invariant: str, folder: str | os.PathLike[str], *, target: TargetFactory = PrefillNode
) -> Path:
    """Write the trace with its expectations into `folder`, whole or not at all; one that is there already is kept."""
    path = Path(folder) / fixture_name(trace, invariant)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(replace(trace, expect=expectations(trace, target=target)), path)
    return path


def folder_name(target: TargetFactory) -> str:
    """A folder's name for a scheduler under test: its registered name, or its module and class, which are its own."""
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", type(target).__name__)
    for registered, known in TARGETS.items():
        if known is target:
            return registered
        if isinstance(known, str) and known.partition(":")[2] == name and module.startswith(known.partition(":")[0]):
            return registered
    return re.sub(r"[^\w.-]+", "_", f"{module}.{name}")


def target_name(target: TargetFactory) -> str:
    """What to call a scheduler under test: its registered name, or its own."""
    return next((name for name, known in TARGETS.items() if known is target), getattr(target, "__name__", "target"))
