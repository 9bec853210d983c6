"""A failing experiment as a person gets it: shrunk, explained, and saved as a fixture."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from kvledger.diagnose import diagnose
from kvledger.monitor import checked_replay
from kvledger.replay import TargetFactory
from kvledger.report.explained import explanation_lines
from kvledger.shrink import NothingToShrink, shrink
from kvledger.shrink_lost import lost_causes
from kvledger.testing.fixtures import fixture_name, save_fixture
from kvledger.trace import Trace


@dataclass(frozen=True, slots=True)
class Failure:
    """The invariant, the fixture that shows it, and the explanation, line by line. `lost`: what may have been the cause
    in the trace as it was, and is not in the fixture (see `shrink_lost`)."""

    invariant: str
    path: Path
    lines: tuple[str, ...]
    lost: tuple[str, ...] = ()


def explain_failure(
    trace: Trace,
    folder: str | os.PathLike[str],
    target: TargetFactory,
    *,
    invariant: str | None = None,
    small: bool = True,
) -> Failure:
    """Shrink `trace` (unless it is to stay as it is), save it in `folder`, and say in words what it shows.

    NothingToShrink if it does not break `invariant` (None: anything) when it is replayed.
    """
    if not small:
        outcome = checked_replay(trace, target=target)
        if not outcome.broken:
            raise NothingToShrink(f"the trace does not break any invariant (verdict {outcome.verdict})")
        return _kept(trace, outcome.broken[0].invariant, "Kept as it is.", folder, target)
    shrunk = shrink(trace, target=target, invariant=invariant)
    effort = f"Shrunk from {len(trace.events)} events to {len(shrunk.trace.events)} in {shrunk.evaluations:,} replays."
    failure = _kept(shrunk.trace, shrunk.invariant, effort, folder, target)
    return replace(failure, lost=lost_causes(trace, shrunk.trace))


def explain_unrepeatable(
    trace: Trace, invariant: str, folder: str | os.PathLike[str], target: TargetFactory
) -> Failure:
    """The same for a failure of the machine, which may not show again when its trace alone is replayed."""
    try:
        return explain_failure(trace, folder, target, invariant=invariant)
    except NothingToShrink:
        doubt = "The trace alone does not show it again: is something left over between examples?"
        return _kept(trace, invariant, doubt, folder, target)


def _kept(trace: Trace, invariant: str, effort: str, folder: str | os.PathLike[str], target: TargetFactory) -> Failure:
    there = (Path(folder) / fixture_name(trace, invariant)).exists()
    path = save_fixture(trace, invariant, folder, target=target)
    explanation = explanation_lines(diagnose(trace, target=target))
    kept = f"fixture: {path}{' (it was there already)' if there else ''}"
    return Failure(invariant, path, (f"{invariant} is broken. {effort}", *explanation, kept))
