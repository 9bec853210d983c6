"""Faults as events: what each kind does to a node that keeps its books soundly, and what it may not do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvledger.events import (
    Abort,
    Cached,
    Decode,
    Drain,
    Event,
    Fault,
    Pause,
    Pin,
    Resume,
    Round,
    Submit,
    Transferred,
    Unpin,
)
from kvledger.monitor import InvariantMonitor
from kvledger.record import RoundRecord
from kvledger.replay import Replay
from kvledger.request import Output, Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings

SOUND = PRESETS["tail-reserved"]
WAITS = replace(SOUND, on_shortage="defer")


def node(**changes: object) -> NodeSettings:
    """Pages of 4 on a grid of 8, chunks of 16, a pool of 64 tokens, a host without limit."""
    usual: dict[str, object] = {
        "page_size": 4,
        "checkpoint_align": 8,
        "chunked_prefill_size": 16,
        "max_prefill_tokens": None,
        "pool_tokens": 64,
        "host_tokens": None,
    }
    return NodeSettings(**usual | changes)  # type: ignore[arg-type]


def prompt(*runs: tuple[str, int]) -> Prompt:
    return Prompt(runs)


def play(*events: Event, rules: AccountingRules = SOUND, settings: NodeSettings | None = None) -> Replay:
    """Nothing may break, whatever happens."""
    run = Replay(settings or node(), rules, monitor=InvariantMonitor())
    for event in events:
        run.apply(event)
    assert run.outcome.verdict == "ok", run.outcome.broken or run.outcome.stuck or run.outcome.failure
    return run


def chunks(record: RoundRecord) -> list[tuple[str, str, int, int]]:
    return [(d.request, d.kind, d.start, d.end) for d in record.decisions]


HOST = Cached("host", prompt(("a", 24)))
A = Submit("A", prompt(("a", 24), ("b", 4)))


# --- a load-back that brings less


@pytest.mark.parametrize(("tokens", "start"), [(0, 0), (7, 0), (8, 8), (15, 8), (16, 16), (24, 24), (100, 24)])
def test_what_came_is_used_down_to_the_grid_and_the_rest_is_computed(tokens: int, start: int) -> None:
    run = play(HOST, A, Fault("load-short", "A", tokens), Round())
    record = run.outcome.rounds[0]
    assert [(d.start, d.load_back) for d in record.decisions] == [(start, start)]
    assert record.struck == ((("load-short", "A"),) if tokens < 24 else ())
    run.apply(Drain())
    assert run.outcome.verdict == "ok"


@pytest.mark.parametrize(("tokens", "stays"), [(0, 0), (16, 4), (20, 5)])
def test_a_refusal_after_a_short_load_leaves_pages_and_no_lock_and_no_promise(tokens: int, stays: int) -> None:
    """X is cut on the grid and leaves 8 tokens of the chunk: enough for what A asks, and not for what did not come."""
    settings = node(checkpoint_align=16, chunked_prefill_size=24, pool_tokens=160)
    events = (
        Submit("X", prompt(("x", 40))),
        Cached("host", prompt(("a", 32))),
        Submit("A", prompt(("a", 32), ("b", 4))),
    )
    whole = play(*events, Round(), settings=settings)
    assert chunks(whole.outcome.rounds[0]) == [("X", "truncated", 0, 16), ("A", "whole", 32, 36)]
    run = play(*events, Fault("load-short", "A", tokens), Round(), settings=settings)
    x, a = run.outcome.rounds[0].decisions
    assert (x.kind, a.kind, str(a.reason), a.faults) == ("truncated", "refused", "OTHER", ("load-short",))
    snapshot = run.target.snapshot()
    assert snapshot.evictable_pages == stays
    assert not snapshot.open_promises
    assert [each.rid for each in snapshot.live] == ["X"]
    run.apply(Drain())
    assert run.outcome.verdict == "ok"


def test_a_device_hit_is_of_less_use_when_the_host_part_of_its_grid_step_does_not_come() -> None:
    """4 tokens on the device and 4 on the host make one step of the grid; without the second the first is no hit."""
    device = Cached("device", prompt(("a", 4)))
    host = Cached("host", prompt(("a", 8)))
    run = play(device, host, A, Fault("load-short", "A", 0), Round())
    (decision,) = run.outcome.rounds[0].decisions
    assert (decision.start, decision.load_back, decision.newly_locked_tokens) == (0, 0, 0)


def test_a_fault_strikes_once() -> None:
    run = play(HOST, A, Fault("load-short", "A", 0), Drain(), Cached("host", prompt(("c", 16))))
    run.apply(Submit("C", prompt(("c", 16), ("d", 4))))
    run.apply(Drain())
    assert [record.struck for record in run.outcome.rounds if record.struck] == [(("load-short", "A"),)]


# --- a load-back that arrives late


def test_a_late_load_takes_its_slots_at_once_and_runs_when_it_is_there() -> None:
    run = play(HOST, A, Fault("load-late", "A", 2), Round(), Round(), Round())
    first, second, third = run.outcome.rounds
    assert chunks(first) == [("A", "loading", 24, 24)]
    assert first.decisions[0].load_back == 24
    assert (first.free, first.protected, first.loading) == (40, 24, ("A",))
    assert (chunks(second), second.loading) == ([("A", "loading", 24, 24)], ("A",))
    assert chunks(third) == [("A", "loading", 24, 24), ("A", "resumed", 24, 28)]
    assert third.loading == ()


def test_what_waits_for_a_late_load_is_promised_its_tail_in_every_round() -> None:
    """A needs 8 tokens more than its load; B, which would fit without that promise, waits."""
    settings = node(pool_tokens=48)
    events = (
        HOST,
        Submit("A", prompt(("a", 24), ("b", 12))),
        Fault("load-late", "A", 2),
        Submit("B", prompt(("z", 16))),
    )
    run = play(*events, Round(), Round(), settings=settings)
    for record in run.outcome.rounds:
        assert [(p.request, p.kind, p.tokens) for p in record.promises] == [("A", "tail", 12), ("A", "first_token", 1)]
        assert chunks(record)[-1][:2] == ("B", "refused")
    run.apply(Drain())
    assert run.outcome.verdict == "ok"


def test_without_that_promise_it_runs_out_of_memory() -> None:
    settings = node(pool_tokens=48)
    run = Replay(settings, PRESETS["aligned"], monitor=InvariantMonitor())
    events = (
        HOST,
        Submit("A", prompt(("a", 24), ("b", 12))),
        Fault("load-late", "A", 2),
        Submit("B", prompt(("z", 16))),
    )
    for event in (*events, Drain()):
        run.apply(event)
    assert run.outcome.verdict == "oom"
    assert run.outcome.broken[0].invariant == "promises-covered"


def test_a_loaded_one_that_must_be_cut_waits_for_the_one_that_is_half_done() -> None:
    settings = node(pool_tokens=160)
    late = Submit("A", prompt(("a", 24), ("b", 24)))
    run = play(HOST, late, Fault("load-late", "A", 1), Round(), settings=settings)
    run.apply(Submit("X", prompt(("x", 40))))
    run.apply(Drain())
    assert run.outcome.verdict == "ok"
    cut = [(r.round, d.request, d.kind) for r in run.outcome.rounds for d in r.joined if d.tail_tokens]
    assert ("A", "resumed") in {(rid, kind) for _, rid, kind in cut}


def test_a_late_load_that_is_aborted_leaves_nothing() -> None:
    run = play(HOST, A, Fault("load-late", "A", 5), Round(), Abort("A"), Drain())
    snapshot = run.target.snapshot()
    assert not snapshot.live
    assert snapshot.baseline_pages == snapshot.pool_pages


def test_a_drain_waits_for_a_load_however_late() -> None:
    run = play(HOST, A, Fault("load-late", "A", 40), Drain())
    assert len(run.outcome.rounds) == 41


def test_time_passes_for_a_load_while_the_node_is_paused() -> None:
    run = play(HOST, A, Fault("load-late", "A", 3), Round(), Pause(), Round(), Round(), Resume(), Round())
    assert chunks(run.outcome.rounds[-1])[-1] == ("A", "resumed", 24, 28)


# --- inserts, matches, aborts


def test_a_skipped_insert_costs_nothing_but_the_cache() -> None:
    run = play(Submit("A", prompt(("a", 40))), Fault("skip-insert", "A"), Round())
    (request,) = run.target.snapshot().live
    assert (len(request.pages), request.shared_pages) == (4, 0)
    run.apply(Round())
    assert chunks(run.outcome.rounds[1]) == [("A", "resumed", 16, 32)]
    (request,) = run.target.snapshot().live
    assert (len(request.pages), request.shared_pages) == (8, 8)  # the next insert brings what was left out
    run.apply(Drain())
    assert run.outcome.verdict == "ok"


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_match_that_has_gone_is_looked_for_again(tier: str) -> None:
    run = play(Cached("host" if tier == "host" else "device", prompt(("a", 24))), A, Fault("stale-match", "A"), Round())
    (decision,) = run.outcome.rounds[0].decisions
    assert (decision.start, decision.prefix_tokens, decision.load_back) == (0, 0, 0)
    assert decision.faults == ("stale-match",)


def test_a_match_that_has_gone_to_the_host_is_loaded_back() -> None:
    run = play(Cached("device", prompt(("a", 24))), A, Fault("evicted-match", "A"), Round())
    (decision,) = run.outcome.rounds[0].decisions
    assert (decision.start, decision.prefix_tokens, decision.load_back) == (24, 0, 24)


def test_what_others_lock_does_not_go() -> None:
    other = Submit("X", prompt(("a", 16)))
    run = play(other, Round(), Cached("device", prompt(("a", 24))), A, Fault("stale-match", "A"), Round())
    decision = run.outcome.rounds[1].decisions[0]
    assert (decision.prefix_tokens, decision.faults) == (16, ("stale-match",))


def test_an_abort_between_decision_and_allocation_takes_its_chunk_alone() -> None:
    run = play(Submit("A", prompt(("a", 8))), Submit("B", prompt(("b", 8))), Fault("abort-decided", "A"), Round())
    (record,) = run.outcome.rounds
    assert chunks(record) == [("A", "whole", 0, 8), ("B", "whole", 0, 8)]
    assert [d.request for d in record.joined] == ["B"]
    assert record.withdrawn == ("A",)
    snapshot = run.target.snapshot()
    assert [(request.rid, len(request.pages)) for request in snapshot.live] == [("B", 2)]
    assert not snapshot.open_promises


def test_an_abort_of_the_half_done_one_leaves_nobody_half_done() -> None:
    run = play(Submit("A", prompt(("a", 40))), Round(), Fault("abort-decided", "A"), Round())
    assert run.outcome.rounds[1].withdrawn == ("A",)
    assert not run.target.has_work
    assert run.target.snapshot().evictable_pages == 4


# --- pins


def test_pinned_pages_are_waited_for_where_the_rules_say_so() -> None:
    """40 tokens of A are to come, 32 of them from what is evictable; pinned, it waits, and nobody is let in."""
    cached = Cached("device", prompt(("c", 32)))
    pinned = (cached, Submit("A", prompt(("a", 56))), Round(), Pin("W", prompt(("c", 32))))
    run = play(*pinned, Submit("B", prompt(("b", 4))), Round(), Round(), Round(), rules=WAITS)
    kinds = [[d.kind for d in record.decisions] for record in run.outcome.rounds]
    assert kinds == [["truncated"], ["resumed"], ["deferred", "refused"], ["deferred", "refused"]]
    assert len(run.target.snapshot().written_back) == 8
    run.apply(Unpin("W"))
    run.apply(Round())
    assert chunks(run.outcome.rounds[-1])[0] == ("A", "resumed", 32, 48)
    run.apply(Drain())
    assert run.outcome.verdict == "ok"


def test_a_forced_chunk_on_pinned_pages_breaks() -> None:
    run = Replay(node(), SOUND, monitor=InvariantMonitor())
    cached = Cached("device", prompt(("c", 32)))
    for event in (cached, Submit("A", prompt(("a", 56))), Round(), Pin("W", prompt(("c", 32))), Round(), Round()):
        run.apply(event)
    assert run.outcome.verdict == "oom"
    assert run.outcome.broken[0].invariant == "never-forced"


def test_a_drain_unpins_and_resumes() -> None:
    cached = Cached("device", prompt(("c", 32)))
    events = (cached, Submit("A", prompt(("a", 56))), Round(), Pin("W", prompt(("c", 32))), Pause(), Round(), Drain())
    run = play(*events, rules=WAITS)
    assert [h.what for h in run.outcome.happenings if h.what in ("unpinned", "resumed")] == ["unpinned", "resumed"]
    assert not run.target.snapshot().written_back


def test_pins_of_one_name_add_up_and_go_together() -> None:
    cached = Cached("device", prompt(("c", 32)))
    run = play(cached, Pin("W", prompt(("c", 16))), Pin("W", prompt(("c", 32))), Pin("V", prompt(("c", 8))), Unpin("W"))
    assert len(run.target.snapshot().written_back) == 2
    run.apply(Unpin("V"))
    assert not any(lock_refs or pinned for _, lock_refs, pinned, _ in run.target.snapshot().cached)


def test_a_lone_running_request_waits_for_pinned_pages_and_is_not_given_up() -> None:
    settings = node(mode="unified", pool_tokens=32)
    run = Replay(settings, WAITS, monitor=InvariantMonitor())
    cached = Cached("device", prompt(("c", 20)))
    long = Submit("A", prompt(("a", 8)), Output(12))
    for event in (cached, long, Round(), Pin("W", prompt(("c", 20))), Decode(), Decode(), Decode(), Decode(), Decode()):
        run.apply(event)
    assert any(record.retracted == ("A",) for record in run.outcome.rounds)
    assert not any(record.aborted for record in run.outcome.rounds)
    run.apply(Drain())
    assert run.outcome.verdict == "ok"
    assert run.outcome.rounds[-1].finished == ("A",)


# --- pauses, and transfers that last


@pytest.mark.parametrize("mode", ["prefill", "unified"])
def test_a_paused_round_does_nothing(mode: str) -> None:
    step = Decode() if mode == "unified" else Round()
    run = play(Submit("A", prompt(("a", 8))), Pause(), Round(), step, settings=node(mode=mode))
    assert [record.decisions for record in run.outcome.rounds] == [(), ()]
    assert run.target.snapshot().waiting == ("A",)
    run.apply(Abort("A"))
    assert run.target.snapshot().waiting == ()


def test_a_transfer_may_last_as_long_as_it_likes() -> None:
    """It is one that has no event: what is in flight keeps its slots, and others wait, for a hundred rounds."""
    run = play(Submit("A", prompt(("a", 40))), *[Round()] * 3, Submit("B", prompt(("b", 24))), *[Round()] * 100)
    assert {d.kind for record in run.outcome.rounds[3:] for d in record.decisions} == {"refused"}
    run.apply(Transferred("A"))
    run.apply(Round())
    assert chunks(run.outcome.rounds[-1]) == [("B", "truncated", 0, 16)]
    run.apply(Drain())
    assert run.outcome.verdict == "ok"
