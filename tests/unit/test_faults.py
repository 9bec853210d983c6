"""Faults as events: what each kind does to a node that keeps its books soundly, and what it may not do."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvledger.cli import main
from kvledger.diagnose import diagnose
from kvledger.events import (
    Abort,
    Cached,
    Decode,
    Drain,
    Event,
    Fault,
    Hold,
    Pause,
    Pin,
    Resume,
    Round,
    Submit,
    Transferred,
    Unpin,
)
from kvledger.faults import FAULT_KINDS, FaultKind
from kvledger.monitor import InvariantMonitor, checked_replay
from kvledger.node import PrefillNode
from kvledger.record import RoundRecord
from kvledger.replay import Replay, TargetFactory, replay
from kvledger.request import Output, Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings, RankSettings
from kvledger.shrink import shrink
from kvledger.shrink_passes import normal_form, repaired, simpler_events, sizes_of, with_sizes
from kvledger.testing.fixtures import expectations
from kvledger.trace import Trace, TraceError, load, parse, to_document, write
from kvledger.unified import UnifiedNode

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


def test_the_bytes_of_pinned_pages_come_back_too() -> None:
    settings = node(state_slots=4, shared_bytes=210, page_bytes=10, state_slot_bytes=10, pool_tokens=100)
    pinned = (Cached("device", prompt(("c", 48))), Submit("A", prompt(("a", 40))), Round(), Pin("W", prompt(("c", 48))))
    run = play(*pinned, Round(), Round(), rules=WAITS, settings=settings)
    assert run.target.snapshot().written_back
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


# --- beside decode, and what the mutants cannot meet often


class _ForgetsLoads(UnifiedNode):
    """Decode leaves alone what the half-done request was promised, and takes what those that are loading were."""

    def _kept_pages(self) -> int:
        return 0


@pytest.mark.parametrize(("target", "verdict"), [(PrefillNode, "ok"), (_ForgetsLoads, "tail-spared")])
def test_decode_spares_what_is_loading(target: TargetFactory, verdict: str) -> None:
    settings = node(mode="unified", pool_tokens=48, new_token_ratio_percent=1)
    run = Replay(settings, SOUND, target=target, monitor=InvariantMonitor())
    others = [Submit(name, prompt((name, 4)), Output(9)) for name in ("X", "Y")]
    load = (HOST, Submit("A", prompt(("a", 24), ("b", 8))), Fault("load-late", "A", 9))
    events: list[Event] = [*others, Round(), *load, Round(), *[Decode()] * 6]
    for event in events:
        run.apply(event)
    assert (run.outcome.broken[0].invariant if run.outcome.broken else "ok") == verdict


def test_a_pinned_promise_breaks_where_the_chunk_is_forced_and_waits_where_it_may() -> None:
    trace = load(Path(__file__).parents[1] / "regressions" / "pinned-promise-forced.json")
    assert len(trace.events) <= 6
    assert checked_replay(trace, SOUND).verdict == "oom"
    waits = Replay(trace.node, WAITS, monitor=InvariantMonitor())
    for event in (*trace.events, Drain()):
        waits.apply(event)
    assert waits.outcome.verdict == "ok"


def test_the_smallest_trace_of_a_late_load() -> None:
    """Nobody is admitted behind a cut here, chunking is off: only the load that is late leaves a tail."""
    trace = load(Path(__file__).parents[1] / "regressions" / "promises-covered-34e0a420.json")
    assert len(trace.events) <= 6
    assert [checked_replay(trace, PRESETS[name]).verdict for name in ("upstream", "aligned", "tail-reserved")] == [
        "oom",
        "oom",
        "ok",
    ]


def test_a_fixture_expects_of_a_faulty_trace_what_its_faults_leave_sound() -> None:
    late = load(Path(__file__).parents[1] / "regressions" / "promises-covered-34e0a420.json")
    assert expectations(late) == dict(late.expect) == {"upstream": "oom", "aligned": "oom", "tail-reserved": "ok"}
    pinned = load(Path(__file__).parents[1] / "regressions" / "pinned-promise-forced.json")
    assert expectations(pinned) == dict(pinned.expect)


# --- in a trace, a target and an outcome

EVENTS = (
    HOST,
    A,
    Fault("load-short", "A", 0),
    Fault("load-late", "A", 2),
    Fault("skip-insert", "A"),
    Pin("W", prompt(("a", 8))),
    Pause(),
    Resume(),
    Unpin("W"),
    Drain(),
)


def test_a_trace_is_what_it_was_when_written_and_read() -> None:
    trace = Trace(node(), "tail-reserved", EVENTS)
    assert parse(to_document(trace), "t") == trace


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"event": "fault", "kind": "load-short", "request": "A"}, 'kind: "load-short" needs the key "tokens"'),
        ({"event": "fault", "kind": "load-late", "request": "A"}, 'kind: "load-late" needs the key "rounds"'),
        (
            {"event": "fault", "kind": "skip-insert", "request": "A", "tokens": 3},
            'tokens: 3 says nothing of a fault of kind "skip-insert"',
        ),
        (
            {"event": "fault", "kind": "skip-insert", "request": "B"},
            'request: "B" is not submitted by any earlier event',
        ),
        ({"event": "unpin", "name": "W"}, 'name: "W" pins nothing here'),
        ({"event": "resume"}, "event: the node is not paused here"),
    ],
)
def test_what_refers_to_nothing_is_bad_input(event: dict[str, object], message: str) -> None:
    document = to_document(Trace(node(), "tail-reserved", (A,)))
    document["events"].append(event)
    with pytest.raises(TraceError, match=re.escape(f"t: events[1].{message}")):
        parse(document, "t")


def test_a_node_cannot_be_paused_twice_and_a_drain_ends_a_pause_and_all_pins() -> None:
    document = to_document(Trace(node(), "tail-reserved", (Pause(), Pin("W", prompt(("a", 4))), Drain(), Pause())))
    assert len(parse(document, "t").events) == 4
    document["events"].append({"event": "pause"})
    with pytest.raises(TraceError, match=re.escape("t: events[4].event: the node is paused already here")):
        parse(document, "t")
    document["events"][4] = {"event": "unpin", "name": "W"}
    with pytest.raises(TraceError, match=re.escape('t: events[4].name: "W" pins nothing here')):
        parse(document, "t")


class _NoFaults(PrefillNode):
    features = PrefillNode.features - {"faults"}


@pytest.mark.parametrize(
    ("event", "word"), [(EVENTS[2], "fault"), (Pin("W", prompt(("a", 8))), "pin"), (Pause(), "pause")]
)
def test_a_target_that_models_no_faults_refuses_them_by_name(event: Event, word: str) -> None:
    with pytest.raises(TraceError, match=re.escape(f't: events[1].event: "{word}" is not modelled by this target')):
        replay(Trace(node(), "tail-reserved", (A, event)), target=_NoFaults, source="t")


def test_what_struck_is_in_the_outcome_and_only_where_something_did() -> None:
    run = play(HOST, A, Fault("load-late", "A", 1), Round(), Round(), Round())
    first, second, third = run.outcome.document()["rounds"]
    assert first["struck"] == [{"fault": "load-late", "request": "A"}]
    assert first["loading"] == ["A"]
    assert "struck" not in second
    assert "loading" not in second
    assert "struck" not in third


def test_happenings_say_what_was_armed_and_pinned() -> None:
    run = play(
        HOST,
        A,
        Fault("load-short", "A", 8),
        Fault("load-late", "A", 1),
        Fault("skip-insert", "A"),
        Pin("W", prompt(("a", 8))),
        Pause(),
        Resume(),
    )
    assert [(each.what, each.name, each.tokens) for each in run.outcome.happenings[2:]] == [
        ("armed load-short (8 tokens):", "A", None),
        ("armed load-late (1 round):", "A", None),
        ("armed skip-insert:", "A", None),
        ("pinned", "a by W", 8),
        ("paused", "node", None),
        ("resumed", "node", None),
    ]


def test_the_shrinker_drops_what_does_nothing_and_keeps_the_fault() -> None:
    noise = (Pause(), Round(), Resume(), Pin("W", prompt(("z", 4))), Unpin("W"))
    long = Submit("A", prompt(("a", 24), ("b", 12)))
    late = (HOST, long, Fault("skip-insert", "A"), Submit("B", prompt(("z", 16))), Fault("load-late", "A", 3))
    trace = Trace(node(pool_tokens=48, chunked_prefill_size=None), "upstream", (*late, *noise, Drain()))
    found = shrink(trace, budget_seconds=600)
    assert not found.limited
    shrunk = found.trace
    assert [type(event) for event in shrunk.events] == [Cached, Submit, Submit, Fault, Drain]


def test_the_rounds_of_a_late_load_are_a_size() -> None:
    trace = Trace(node(), "upstream", (HOST, A, Fault("load-late", "A", 3)))
    *others, rounds = sizes_of(trace)
    assert rounds == 3
    smaller = with_sizes(trace, (*others, 1))
    assert smaller is not None
    assert smaller.events == (HOST, A, Fault("load-late", "A", 1))


def test_the_shrinker_makes_what_a_short_load_brings_nothing() -> None:
    (simpler,) = [
        changed
        for changed in simpler_events(Trace(node(), "upstream", (HOST, A, Fault("load-short", "A", 8), Drain())))
        if changed.events[2:3] == (Fault("load-short", "A", 0),) and len(changed.events) == 4
    ]
    assert sizes_of(simpler)[-1] == 4  # what is none at all is not a size


def test_repaired_events_refer_to_what_is_there() -> None:
    events = (
        Fault("skip-insert", "A"),
        Unpin("W"),
        Resume(),
        A,
        Pause(),
        Pause(),
        Pin("W", prompt(("a", 4))),
        Drain(),
        Unpin("W"),
    )
    assert repaired(events) == (A, Pause(), Pin("W", prompt(("a", 4))), Drain())


def test_names_are_normal_for_what_is_pinned_too() -> None:
    events = (Submit("x", prompt(("y", 3))), Fault("skip-insert", "x"), Pin("p", prompt(("y", 2))), Unpin("p"), Drain())
    assert normal_form(Trace(node(), "upstream", events)).events == (
        Submit("A", prompt(("a", 3))),
        Fault("skip-insert", "A"),
        Pin("W1", prompt(("a", 2))),
        Unpin("W1"),
        Drain(),
    )


@pytest.mark.parametrize("command", ["replay", "explain", "report", "perfetto", "fixture", "upstream"])
def test_no_command_falls_over_a_fault(command: str, tmp_path: Path) -> None:
    long = Submit("A", prompt(("a", 24), ("b", 12)))
    late = (HOST, long, Fault("load-late", "A", 3), Submit("B", prompt(("z", 16))), Fault("abort-decided", "B"))
    more = (Submit("C", prompt(("z", 16))), Round(), Pin("W", prompt(("a", 8))), Pause(), Round(), Drain())
    path = tmp_path / "t.json"
    write(Trace(node(pool_tokens=48, chunked_prefill_size=None), "upstream", (*late, *more)), path)
    where = {"report": ["-o", "t.html"], "perfetto": ["-o", "t.pf"], "fixture": ["--save", "."]}
    where["upstream"] = ["--target", "node", "-o", "t"]
    with contextlib.chdir(tmp_path):
        status = main([command, str(path), *where.get(command, [])])
    assert status in ((0, 1) if command != "upstream" else (0, 1, 2))


def test_the_example_in_the_docs_says_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "faults.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"```(?:sh|text)\n(kvledger .*?|promise .*?)```", text, re.DOTALL)
    _, verb, path = command.split()
    assert main([verb, str(root / path)]) == 0  # as the trace expects
    printed = capsys.readouterr().out
    assert all(line in printed for line in shown.splitlines())


def test_the_docs_name_every_kind() -> None:
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)`", text, re.MULTILINE)) == set(FAULT_KINDS)


# --- what is said of it


def told(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, *more: str) -> str:
    path = tmp_path / "told.json"
    write(trace, str(path))
    assert main([command, str(path), *more]) in (0, 1)
    return capsys.readouterr().out


@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize(
    ("where", "who"),
    [("after", ["W"]), ("before", []), ("unpinned", ["V"])],
)
def test_a_pin_that_took_a_promise_is_named_and_one_that_was_there_before_is_not(
    pages: int, where: str, who: list[str]
) -> None:
    pool_tokens = (7 if where == "before" else 6) * pages
    settings = node(page_size=pages, checkpoint_align=pages, chunked_prefill_size=2 * pages, pool_tokens=pool_tokens)
    doc = prompt(("c", 4 * pages))
    events: list[Event] = [Cached("device", doc), Submit("A", prompt(("a", 3 * pages)))]
    pins: dict[str, list[Event]] = {
        "after": [Round(), Pin("W", doc), Round()],
        "before": [Pin("W", prompt(("c", pages))), Round(), Hold("H", 4 * pages), Round()],
        "unpinned": [Round(), Pin("W", doc), Unpin("W"), Pin("V", doc), Round()],
    }
    diagnosis = diagnose(Trace(settings, "tail-reserved", (*events, *pins[where])))
    assert diagnosis.verdict == "oom"
    assert [each.request for each in diagnosis.spent_by if each.how == "pin"] == who
    if who:
        assert [each.tokens for each in diagnosis.spent_by] == [4 * pages]
        promise = diagnosis.broken_promise
        assert promise is not None
        assert (promise.request, promise.kind, promise.tokens, promise.round) == ("A", "tail", pages, 1)


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_an_armed_fault_is_told_as_struck_or_as_never_struck(
    kind: FaultKind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each kind: with an occasion it is in a round, without one it is at the end, in text and JSON alike."""
    fault = Fault(kind, "A", {"load-short": 8, "load-late": 1}.get(kind))
    device = Cached("device", prompt(("a", 24)))
    for events, strikes in (
        ((HOST if kind.startswith("load") else device, A, fault), True),
        ((A, Drain(), fault), False),
    ):
        trace = Trace(node(), SOUND, (*events, Drain()))
        outcome = replay(trace)
        assert ((kind, "A") in [each for record in outcome.rounds for each in record.struck]) is strikes
        assert outcome.unstruck == ([] if strikes else [(kind, "A")])
        words = told(trace, tmp_path, capsys, "replay")
        assert (f"armed and never struck: {kind} A" in words) is not strikes
        assert (f"  struck    {kind} A" in words) is strikes
        document = json.loads(told(trace, tmp_path, capsys, "replay", "--json"))
        assert document.get("unstruck") == (None if strikes else [{"fault": kind, "request": "A"}])


def test_of_two_faults_of_a_kind_the_one_that_is_left_is_told() -> None:
    run = play(HOST, A, Fault("load-late", "A", 1), Fault("load-late", "A", 2), Drain())
    assert run.outcome.unstruck == [("load-late", "A")]


def test_a_short_load_strikes_before_a_late_one() -> None:
    run = play(HOST, A, Fault("load-late", "A", 1), Fault("load-short", "A", 8), Drain())
    assert [each for record in run.outcome.rounds for each in record.struck] == [("load-short", "A")]
    assert run.outcome.unstruck == [("load-late", "A")]


@pytest.mark.parametrize(
    ("host_tokens", "event", "note"),
    [
        (0, Cached("host", prompt(("a", 24))), "no host: nothing kept"),
        (8, Cached("host", prompt(("a", 24))), "no more than 8 kept"),
        (24, Cached("host", prompt(("a", 24))), ""),
        (None, Cached("host", prompt(("a", 24))), ""),
        (0, Cached("device", prompt(("a", 24))), ""),
        (None, Pin("W", prompt(("z", 8))), "nothing of it is on the device"),
        (None, Pin("W", prompt(("d", 8), ("e", 8))), "8 of it on the device"),
        (None, Pin("W", prompt(("d", 8))), ""),
    ],
)
def test_a_happening_says_where_less_came_of_it(
    host_tokens: int | None, event: Event, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first round in the heading, later between the rounds; in the text and in the page."""
    cached, waits = Cached("device", prompt(("d", 8))), Submit("A", prompt(("q", 4)))
    for events in ((cached, event, waits, Round()), (cached, waits, Round(), event, Round())):
        trace = Trace(node(host_tokens=host_tokens), SOUND, (*events, Drain()))
        assert replay(trace).happenings[events.index(event) - (Round() in events[: events.index(event)])].note == note
        words = " ".join(told(trace, tmp_path, capsys, "replay").split())
        assert not note or f"({note})" in words
        assert note or not re.search(r"kept|on the device\)", words)


def test_a_host_that_one_rank_lacks_is_told_of_that_rank() -> None:
    settings = node(page_size=1, checkpoint_align=1, ranks=(RankSettings(host_tokens=0),))
    happening = replay(Trace(settings, "tail-reserved", (Cached("host", prompt(("a", 8))),))).happenings[0]
    assert happening.note == "rank 1: no host: nothing kept"


def test_a_withdrawn_chunk_is_told_once_as_taken_and_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = Submit("B", prompt(("b", 8)))
    trace = Trace(node(), SOUND, (Submit("A", prompt(("a", 8))), b, Fault("abort-decided", "A"), Round(), Drain()))
    first = json.loads(told(trace, tmp_path, capsys, "replay", "--json"))["rounds"][0]
    assert [each["request"] for each in first["admitted"]] == ["B"]
    assert [(each["request"], each["kind"], each["end"]) for each in first["withdrawn"]] == [("A", "whole", 8)]
    assert {each["request"] for each in first["promises"]} == {"B"}
    words = told(trace, tmp_path, capsys, "replay").split("round 2")[0]
    assert re.search(r"A +whole .*withdrawn before it ran", words)
    assert not re.search(r"promised .*A ", words)
    assert "withdrawn: A" in told(trace, tmp_path, capsys, "explain")


def test_a_paused_round_says_that_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace(node(), SOUND, (A, Pause(), Round(), Resume(), Round(), Drain()))
    first, second, *_ = json.loads(told(trace, tmp_path, capsys, "replay", "--json"))["rounds"]
    assert first["paused"] is True
    assert "paused" not in second
    words = told(trace, tmp_path, capsys, "replay")
    assert "\n  paused\n" in words
    assert "nothing to decide" not in words
    assert "\n  paused\n" in told(trace, tmp_path, capsys, "explain")


def test_the_round_in_which_a_load_arrives_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace(node(), SOUND, (HOST, A, Fault("load-late", "A", 2), Drain()))
    rounds = re.split(r"^round \d+", told(trace, tmp_path, capsys, "replay"), flags=re.MULTILINE)[1:]
    assert ["its load is here: it runs below" in each for each in rounds[:3]] == [False, False, True]
    rounds = re.split(r"^round \d+", told(trace, tmp_path, capsys, "explain"), flags=re.MULTILINE)[1:]
    assert ["its load goes on" in each for each in rounds[:3]] == [True, True, False]
    assert "its load is here" in rounds[2]
