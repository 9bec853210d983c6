"""A failing experiment as a person gets it: shrunk, explained, and saved as a fixture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvledger.diagnose import diagnose
from kvledger.replay import TargetFactory
from kvledger.report.explained import explanation_lines
from kvledger.shrink import NothingToShrink, Shrunk, shrink
from kvledger.testing.fixtures import save_fixture
from kvledger.trace import Trace


@dataclass(frozen=True, slots=True)
class Failure:
    """The invariant, the fixture that shows it, and the explanation, line by line."""

    invariant: str
    path: Path
    lines: tuple[str, ...]


def explain_trace(trace: Trace, invariant: str, folder: str | os.PathLike[str], target: TargetFactory) -> Failure:
    """Shrink `trace`, save what is left of it, and say in words what it shows."""
    small, effort = _shrunk(trace, invariant, target)
    path = save_fixture(small, invariant, folder, target=target)
    lines = (
        f"{invariant} is broken. {effort}",
        *explanation_lines(diagnose(small, target=target)),
        f"fixture: {path}",
    )
    return Failure(invariant, path, lines)


def _shrunk(trace: Trace, invariant: str, target: TargetFactory) -> tuple[Trace, str]:
    try:
        shrunk: Shrunk = shrink(trace, target=target, invariant=invariant)
    except NothingToShrink:
        return trace, "The trace alone does not show it again: is something left over between examples?"
    tried = f"{shrunk.evaluations:,} replays"
    return shrunk.trace, f"Shrunk from {len(trace.events)} events to {len(shrunk.trace.events)} in {tried}."
