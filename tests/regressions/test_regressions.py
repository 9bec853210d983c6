"""Every trace in this folder, under every preset that it has an expectation for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.invariants import INVARIANTS
from kvledger.monitor import checked_replay
from kvledger.rules import PRESETS
from kvledger.testing.fixtures import fixture_name
from kvledger.trace import load

HERE = Path(__file__).parent
TRACES = sorted(path.name for path in HERE.glob("*.json"))
FOUND = [name for name in TRACES if name.startswith(tuple(f"{invariant.name}-" for invariant in INVARIANTS))]
CASES = [(name, preset) for name in TRACES for preset in load(HERE / name).expect]


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_verdict(name: str, preset: str) -> None:
    trace = load(HERE / name)
    outcome = checked_replay(trace, PRESETS[preset])
    assert outcome.verdict == trace.expect[preset], outcome.document()["broken"]


@pytest.mark.parametrize("name", TRACES)
def test_says_what_is_expected(name: str) -> None:
    assert load(HERE / name).expect, "a regression without an expectation cannot fail"


@pytest.mark.parametrize("name", FOUND)
def test_a_found_trace_has_the_name_of_its_content(name: str) -> None:
    trace = load(HERE / name)
    assert fixture_name(trace, name.rsplit("-", 1)[0]) == name
    first = checked_replay(trace).broken[0]
    assert name.startswith(f"{first.invariant}-")


def test_the_post_mortem_is_here() -> None:
    assert {
        "incident-2026-11-02.json",
        "worked-example.json",
        "device-hit-lock.json",
        "unit-truncated-tail-blocks-load-back.json",
        "unit-resumed-tail-blocks-waiting.json",
    } <= set(TRACES)
    assert FOUND, "the search has found nothing yet"
