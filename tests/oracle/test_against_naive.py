"""Our node against the naive model, written from the design alone: round by round, figure by figure."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvledger.monitor import checked_replay
from kvledger.trace import parse
from tests.oracle import naive_node
from tests.oracle.random_traces import random_trace


def _ours(document: dict[str, Any]) -> dict[str, Any]:
    """Our outcome, without what the naive model does not state."""
    outcome = checked_replay(parse(document, "random trace")).document()
    for record in outcome["rounds"]:
        del record["promises"]
    outcome["rejected_at_submit"] = [rejected["request"] for rejected in outcome["rejected_at_submit"]]
    return outcome


def _oom(outcome: dict[str, Any]) -> dict[str, Any] | None:
    violation = outcome["violation"]
    if violation is None or violation["kind"] != "oom":
        return None
    return {key: violation[key] for key in ("round", "request", "wanted", "free", "evictable")}


@pytest.mark.parametrize("seed", range(150))
def test_rounds_agree_with_the_naive_model(seed: int) -> None:
    document = random_trace(random.Random(seed))
    theirs, ours = naive_node.replay(document), _ours(document)
    for their_round, our_round in zip(theirs["rounds"], ours["rounds"], strict=False):
        assert our_round == their_round
    assert len(ours["rounds"]) == len(theirs["rounds"])
    assert ours["rejected_at_submit"] == theirs["rejected_at_submit"]
    assert _oom(ours) == _oom(theirs)
    if theirs["verdict"] != "ok":
        assert ours["verdict"] == theirs["verdict"]
    else:
        assert ours["verdict"] not in ("oom", "stuck")
