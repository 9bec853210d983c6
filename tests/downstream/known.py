"""What is known of a released scheduler, as traces: `<verdict>-*.json` break it so, `ok-*.json` do not.

A hole is an expected failure: a release that mends it turns the test red, and so does any other ending than the one
that the file's name says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from kvledger.monitor import checked_replay
from kvledger.replay import TargetFactory
from kvledger.trace import load

KNOWN = Path(__file__).parent / "known"


class KnownHole(AssertionError):
    """The trace ends as its name says."""


def known_traces(folder: str) -> list[ParameterSet]:
    """The traces of a folder of `known`, the holes among them marked as expected failures."""
    params = []
    for path in sorted((KNOWN / folder).glob("*.json")):
        hole = not path.name.startswith("ok-")
        mended = pytest.mark.xfail(strict=True, raises=KnownHole, reason=f"known hole; mended? remove {path.name}")
        params.append(pytest.param(path, id=path.stem, marks=[mended] if hole else []))
    return params


def check_known(path: Path, target: TargetFactory) -> None:
    """Replay with every invariant asked: `ok`, or KnownHole for what the name says, or a plain failure."""
    trace = load(path)
    asked = {trace.node.schedule_policy} - {"fcfs"}
    if not asked <= getattr(target, "features", frozenset()):
        pytest.skip(f"this release has no schedule policy {', '.join(asked)}")
    outcome = checked_replay(trace, target=target)
    if outcome.verdict != "ok" and path.name.startswith(f"{outcome.verdict}-"):
        raise KnownHole(f"{path.name}: {outcome.verdict}: {outcome.broken[0].message}")
    assert outcome.verdict == "ok", f"{path.name} ends as {outcome.verdict}: {outcome.document()['broken']}"
