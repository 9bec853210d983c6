"""Without any checkpoint grid a cut still leaves chunk budget, for three reasons; each has its trace here.

`expect` names presets, and none of them has such a switch: what comes out under the trace's own rules is said here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvledger.diagnose import diagnose
from kvledger.monitor import checked_replay
from kvledger.rules import AccountingRules
from kvledger.trace import Trace, load

CAUSES = ("truncation_align", "continuation_limit", "chunk_grid")
SMALL_EVENTS = 6


def _trace_of(cause: str) -> Trace:
    found = [load(path) for path in sorted(Path(__file__).parent.glob("promises-covered-*.json"))]
    traces = [t for t in found if isinstance(t.rules, AccountingRules) and getattr(t.rules, cause) is not None]
    assert len(traces) == 1, f"{len(traces)} traces for {cause}"
    return traces[0]


@pytest.mark.parametrize("cause", CAUSES)
def test_it_fails_without_the_tail_and_passes_with_it(cause: str) -> None:
    trace = _trace_of(cause)
    rules = trace.accounting_rules
    assert len(trace.events) <= SMALL_EVENTS
    assert (trace.node.checkpoint_align, rules.checkpoint_align) == (trace.node.page_size, "page_size")
    outcome = checked_replay(trace)
    assert (outcome.verdict, outcome.broken[0].invariant) == ("oom", "promises-covered")
    without: dict[str, Any] = {cause: None}
    for cure in (replace(rules, reserve_tail=True), replace(rules, spend_gap=True), replace(rules, **without)):
        assert checked_replay(trace, cure).verdict == "ok", cure


@pytest.mark.parametrize("cause", CAUSES)
def test_its_explanation_names_the_fix(cause: str) -> None:
    diagnosis = diagnose(_trace_of(cause))
    assert diagnosis is not None
    assert diagnosis.avoided_by is not None
    assert diagnosis.avoided_by == (("reserve_tail", True),)
    assert diagnosis.broken_promise is not None
