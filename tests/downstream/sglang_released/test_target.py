"""The target: what it refuses, what it reads, what it models beyond plain prefill, and that worlds do not leak."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from kvledger.events import Abort, Cached, Decode, Drain, Event, Finish, Hold, Release, Round, Submit, Transferred
from kvledger.monitor import InvariantMonitor, checked_replay
from kvledger.replay import EventError, Outcome, Replay, TargetFactory
from kvledger.request import Output, Prompt
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.trace import Trace, TraceError

NODE = NodeSettings(
    page_size=16,
    checkpoint_align=16,
    chunked_prefill_size=64,
    max_prefill_tokens=None,
    pool_tokens=512,
    host_tokens=0,
)
UPSTREAM = AccountingRules(checkpoint_align="page_size")


def prompt(name: str, tokens: int) -> Prompt:
    return Prompt(((name, tokens),))


def submit(name: str, tokens: int, output: int = 1, **more: Any) -> Submit:
    return Submit(name, prompt(name.lower(), tokens), Output(output, **more))


def run(target: TargetFactory, *events: Event, rules: AccountingRules = UPSTREAM, **settings: Any) -> Outcome:
    return checked_replay(Trace(replace(NODE, **settings), rules, events), target=target)


@pytest.mark.parametrize(
    ("settings", "rules", "field"),
    [
        ({"checkpoint_align": 64}, AccountingRules(), "node.checkpoint_align"),
        ({}, AccountingRules(checkpoint_align=32), "rules.checkpoint_align"),
        ({}, replace(UPSTREAM, spend_gap=True), "rules.spend_gap"),
        ({}, replace(UPSTREAM, on_shortage="defer"), "rules.on_shortage"),
        ({}, replace(UPSTREAM, continuation_limit=64), "rules.continuation_limit"),
        ({}, replace(UPSTREAM, chunk_grid=64), "rules.chunk_grid"),
        ({}, replace(UPSTREAM, truncation_align=128), "node.chunked_prefill_size"),
        ({"chunked_prefill_size": 72}, UPSTREAM, "node.chunked_prefill_size"),
        ({"state_slots": 4}, UPSTREAM, "node.state_slots"),
    ],
)
def test_refuses_what_it_cannot_express(
    sglang: TargetFactory, settings: dict[str, int], rules: AccountingRules, field: str
) -> None:
    with pytest.raises(TraceError, match=rf"^trace: {field}: "):
        run(sglang, Drain(), rules=rules, **settings)


def test_a_node_whose_grid_is_its_page_takes_every_preset(sglang: TargetFactory) -> None:
    assert run(sglang, submit("A", 100), Drain(), rules=AccountingRules(reserve_tail=True)).verdict == "ok"


def test_pages_are_counted_by_identity(sglang: TargetFactory) -> None:
    events = (
        Cached("device", prompt("doc", 100), locked=True),
        Cached("host", prompt("other", 64)),
        Hold("H", 40),
        submit("A", 100),
        submit("B", 70),
        Round(),
        Abort("A"),
        Round(),
        Transferred("B"),
        Release("H", 20),
        Release("H"),
        Drain(),
    )
    outcome = run(sglang, *events, host_tokens=1024)
    assert outcome.verdict == "ok", outcome.broken
    assert outcome.rounds[-1].free + outcome.rounds[-1].evictable + outcome.rounds[-1].protected <= NODE.pool_tokens


@pytest.mark.parametrize("page", [1, 4, 64])
def test_pages_of_any_size(sglang: TargetFactory, page: int) -> None:
    outcome = run(
        sglang,
        Cached("host", prompt("doc", 8 * page)),
        Submit("A", Prompt((("doc", 8 * page), ("a", page)))),
        submit("B", 9 * page + 1),
        Drain(),
        page_size=page,
        checkpoint_align=page,
        chunked_prefill_size=4 * page,
        pool_tokens=32 * page,
        host_tokens=None,
    )
    assert outcome.verdict == "ok", outcome.broken
    # sglang loads nothing of fewer than ten tokens back
    assert outcome.rounds[0].joined[0].load_back == (8 * page if 8 * page >= 10 else 0)


def test_without_chunks_a_long_prompt_runs_whole(sglang: TargetFactory) -> None:
    outcome = run(
        sglang, submit("A", 300), submit("B", 200), Drain(), chunked_prefill_size=None, max_prefill_tokens=128
    )
    assert [len(record.joined) for record in outcome.rounds if record.joined] == [1, 1]
    assert outcome.rounds[0].joined[0].tokens == 300


def test_longest_prefix_first(sglang: TargetFactory) -> None:
    events = (
        Cached("device", prompt("doc", 160)),
        submit("A", 64),
        Submit("B", Prompt((("doc", 160), ("b", 16)))),
        Round(),
        Drain(),
    )
    first = [run(sglang, *events, schedule_policy=policy).rounds[0].joined[0].request for policy in ("fcfs", "lpm")]
    assert first == ["A", "B"]


def test_priority_first(sglang: TargetFactory) -> None:
    outcome = run(sglang, submit("A", 64), submit("B", 64, priority=1), Round(), Drain(), schedule_policy="priority")
    assert [decision.request for decision in outcome.rounds[0].joined] == ["B"]


def test_decodes_until_its_limit(sglang: TargetFactory) -> None:
    outcome = run(sglang, submit("A", 16, 3), Drain(), mode="unified")
    assert outcome.verdict == "ok", outcome.broken
    assert [record.decoded for record in outcome.rounds] == [(), ("A",), ("A",)]
    assert outcome.rounds[-1].finished == ("A",)


def test_finishes_early(sglang: TargetFactory) -> None:
    outcome = run(sglang, submit("A", 16, 30), Round(), Decode(), Finish("A"), Drain(), mode="unified")
    assert (outcome.verdict, len(outcome.rounds)) == ("ok", 2)


def test_decodes_join_a_mixed_chunk(sglang: TargetFactory) -> None:
    events = (submit("A", 16, 8), Round(), submit("B", 32), Round(), Drain())
    mixed = [run(sglang, *events, mode="unified", mixed_chunk=flag).rounds[1].decoded for flag in (False, True)]
    assert mixed == [(), ("A",)]


def test_retracts_and_serves_again(sglang: TargetFactory) -> None:
    events = (submit("A", 16, 40), submit("B", 16, 40), Round(), submit("C", 16, 40), Round(), Drain())
    outcome = run(sglang, *events, mode="unified", pool_tokens=160)
    retracted = [rid for record in outcome.rounds for rid in record.retracted]
    finished = [rid for record in outcome.rounds for rid in record.finished]
    assert retracted and sorted(finished) == ["A", "B", "C"], (retracted, finished)
    assert outcome.verdict == "ok", outcome.broken


ROWS: dict[str, Any] = {
    "page_size": 64,
    "checkpoint_align": 64,
    "chunked_prefill_size": 4096,
    "pool_tokens": 2**18,
    "schedule_policy": "priority",
    "mode": "unified",
}
"""So long a context leaves the table of requests 32 rows."""
CROWD = tuple(submit(f"r{number}", 1, 5, ignore_eos=True) for number in range(32))


def test_who_makes_way_for_a_higher_priority_queues_once(sglang: TargetFactory) -> None:
    outcome = run(sglang, *CROWD, Round(), submit("X", 20, 5, priority=50), Round(), Drain(), **ROWS)
    assert outcome.verdict == "ok", outcome.broken
    second = outcome.rounds[1]
    assert [decision.request for decision in second.joined] == ["X"]
    assert (second.retracted, len(second.preempted)) == ((), 1)
    finished = [rid for record in outcome.rounds for rid in record.finished]
    assert sorted(finished) == sorted([*(f"r{number}" for number in range(32)), "X"])


def test_who_made_way_for_nobody_is_told_too(sglang: TargetFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    admit = PrefillAdder.add_one_req

    def not_x(self: Any, req: Any, *args: Any, **named: Any) -> Any:
        return AddReqResult.NO_TOKEN if req.rid == "X" else admit(self, req, *args, **named)

    monkeypatch.setattr(PrefillAdder, "add_one_req", not_x)
    replay = Replay(replace(NODE, **ROWS), UPSTREAM, target=sglang, monitor=InvariantMonitor())
    events: tuple[Event, ...] = (*CROWD, Round(), submit("X", 20, 5, priority=50), Round())
    for event in events:
        replay.apply(event)
    second = replay.outcome.rounds[1]
    assert not second.joined and len(second.decoded) == 31
    assert (second.retracted, len(second.preempted)) == ((), 1)
    assert sorted(replay.target.snapshot().waiting) == sorted(["X", *second.preempted])
    assert not replay.outcome.broken


def test_a_transfer_of_one_that_decodes_is_nothing(sglang: TargetFactory) -> None:
    outcome = run(sglang, submit("A", 16, 4), Round(), Transferred("A"), Drain(), mode="unified")
    assert outcome.verdict == "ok", outcome.broken
    assert outcome.rounds[-1].finished == ("A",)


def test_what_cannot_be_held_evicts_nothing(sglang: TargetFactory) -> None:
    replay = Replay(NODE, UPSTREAM, target=sglang, monitor=InvariantMonitor())
    replay.apply(Cached("device", prompt("doc", 160)))
    before = replay.target.snapshot()
    with pytest.raises(EventError, match="528 tokens wanted"):
        replay.apply(Hold("H", 528))
    assert replay.target.snapshot() == before and len(before.cached) == 10


def test_what_sglang_raises_is_a_finding(sglang: TargetFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder

    def raises(*_: Any, **__: Any) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(PrefillAdder, "add_one_req", raises)
    outcome = run(sglang, submit("A", 100), Drain())
    assert outcome.verdict == "never-raises"
    assert "ValueError" in outcome.broken[0].message and "not today" in outcome.broken[0].message


def test_nothing_is_left_of_a_world(sglang: Any) -> None:
    events = (Cached("host", prompt("doc", 128)), Submit("A", Prompt((("doc", 128), ("a", 16)))), Drain())
    first, again = (run(sglang, *events, host_tokens=1024).document() for _ in range(2))
    assert first == again
    world = weakref.ref(sglang(replace(NODE, host_tokens=1024), UPSTREAM).world.tree)
    gc.collect()
    assert world() is None, "a world outlives its example"
