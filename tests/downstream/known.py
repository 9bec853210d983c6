"""What is known of a released scheduler, as traces: `<verdict>-*.json` break it so, `ok-*.json` do not.

A hole is an expected failure: a release that mends it turns the test red, and so does any other ending than the one
that the file's name says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from kvledger.monitor import InvariantMonitor
from kvledger.replay import TargetFactory, replay
from kvledger.trace import Trace, load

KNOWN = Path(__file__).parent / "known"
BOOKS = frozenset({"ledger-exact", "fix-is-minimal"})
"""What counts the books by a trace's own rules: a release that charges the tail has mended the hole, and breaks it."""


class KnownHole(AssertionError):
    """The trace ends as its name says."""


def nothing_known(folder: str) -> str:
    return f"nothing is known of {folder}: there are no traces in tests/downstream/known/{folder}"


def load_known(folder: str, name: str) -> Trace:
    """One trace; the test is skipped where nothing is known of its release."""
    if not (KNOWN / folder).is_dir():
        pytest.skip(nothing_known(folder))
    return load(KNOWN / folder / f"{name}.json")


def known_traces(folder: str) -> list[ParameterSet]:
    """The traces of a folder of `known`, the holes among them marked as expected failures; without any, a skip."""
    params = []
    if not any((KNOWN / folder).glob("*.json")):
        return [pytest.param(KNOWN / folder, id=folder, marks=pytest.mark.skip(reason=nothing_known(folder)))]
    for path in sorted((KNOWN / folder).glob("*.json")):
        hole = not path.name.startswith("ok-")
        mended = pytest.mark.xfail(strict=True, raises=KnownHole, reason=f"known hole; mended? remove {path.name}")
        params.append(pytest.param(path, id=path.stem, marks=[mended] if hole else []))
    return params


def check_known(path: Path, target: TargetFactory) -> None:
    """Replay it: `ok`, or KnownHole for what the name says, or a plain failure.

    Every invariant is asked, but for a hole's books: where the hole is mended the trace must be called ok.
    """
    trace = load(path)
    asked = {trace.node.schedule_policy} - {"fcfs"}
    if not asked <= getattr(target, "features", frozenset()):
        pytest.skip(f"this release has no schedule policy {', '.join(asked)}")
    hole = not path.name.startswith("ok-")
    unasked = {name for name in BOOKS if hole and not path.name.startswith(name)}
    outcome = replay(trace, target=target, monitor=InvariantMonitor(without=unasked))
    if outcome.verdict != "ok" and path.name.startswith(f"{outcome.verdict}-"):
        raise KnownHole(f"{path.name}: {outcome.verdict}: {outcome.broken[0].message}")
    mended = ": its books count otherwise than these rules; is a hole mended?" if outcome.verdict in BOOKS else ""
    assert outcome.verdict == "ok", f"{path.name} ends as {outcome.verdict}{mended}: {outcome.document()['broken']}"
