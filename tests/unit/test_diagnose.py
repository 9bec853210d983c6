from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvledger.adder import PrefillAdder, PrefillRequest
from kvledger.arithmetic import ceil_tokens
from kvledger.diagnose import Diagnosis, NoReturn, diagnose
from kvledger.diagnose_future import FutureSearch
from kvledger.diagnose_history import watch
from kvledger.diagnose_promise import BrokenPromise, Spending
from kvledger.events import (
    Cached,
    Drain,
    Event,
    Fault,
    Hold,
    Release,
    Round,
    Submit,
    Transferred,
)
from kvledger.ledger import Due
from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode, Watcher
from kvledger.record import RoundRecord
from kvledger.replay import replay
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.trace import Trace, TraceError, load
from tests.unit.builders import INCIDENT, INCIDENT_ARRIVALS, INCIDENT_NODE, node_settings, prompt

REGRESSIONS = Path(__file__).parents[1] / "regressions"
NOTHING_BROKE: dict[str, Any] = {"broken_promise": None, "spent_by": [], "point_of_no_return": None, "avoided_by": None}
DEFERRING = AccountingRules(on_shortage="defer")
WORKED_NODE = node_settings(chunked_prefill_size=4096, max_prefill_tokens=16384, pool_tokens=12032)


def trace_of(settings: NodeSettings, *events: Event, rules: str | AccountingRules = "aligned") -> Trace:
    return Trace(settings, rules, events)


def submit(rid: str, tokens: int) -> Submit:
    return Submit(rid, prompt((rid, tokens)))


def worked_example(tier: Any) -> Trace:
    """The post-mortem's example in whole pages, and its twin whose newcomer hits the device."""
    return trace_of(
        replace(WORKED_NODE, host_tokens=None if tier == "host" else 0),
        Cached(tier, prompt(("doc", 6144))),
        submit("A", 1088),
        submit("B", 8000),
        Submit("C", prompt(("doc", 6144), ("c", 128))),
        Drain(),
    )


# --- the cases of the post-mortem


def test_the_incident() -> None:
    diagnosis = diagnose(Trace(INCIDENT_NODE, "aligned", INCIDENT))
    assert diagnosis.document() == {
        "broken_promise": {"request": "1keim", "kind": "tail", "tokens": 4936, "round": 1},
        "spent_by": [
            {"request": "xpkq", "how": "load-back", "tokens": 15360},
            {"request": "xpkq", "how": "chunk", "tokens": 192},
        ],
        "point_of_no_return": {"round": 1, "request": "xpkq"},
        "avoided_by": {"reserve_tail": True},
    }
    assert (diagnosis.verdict, diagnosis.searched.complete) == ("oom", True)
    assert diagnosis.reason == "a failed allocation ends the process, and every request with it"


@pytest.mark.parametrize(("tier", "how"), [("host", "load-back"), ("device", "lock")])
def test_the_worked_example_and_its_twin(tier: str, how: str) -> None:
    diagnosis = diagnose(worked_example(tier))
    assert diagnosis.document() == {
        "broken_promise": {"request": "B", "kind": "tail", "tokens": 5184, "round": 1},
        "spent_by": [
            {"request": "C", "how": how, "tokens": 6144},
            {"request": "C", "how": "chunk", "tokens": 128},
        ],
        "point_of_no_return": {"round": 1, "request": "C"},
        "avoided_by": {"reserve_tail": True},
    }


def test_a_cold_newcomer_takes_a_chunk() -> None:
    """127 pages; B needs 125 of them and is cut at 4096, which leaves 192 of the chunk budget: C takes three pages."""
    settings = node_settings(chunked_prefill_size=4288, pool_tokens=8128)
    diagnosis = diagnose(trace_of(settings, submit("B", 8000), submit("C", 185), Drain()))
    assert diagnosis.verdict == "oom"
    assert diagnosis.broken_promise == BrokenPromise("B", "tail", 3904, 1)
    assert diagnosis.spent_by == (Spending("C", "chunk", 192),)
    assert diagnosis.point_of_no_return == NoReturn(1, "C", "whole")


@pytest.mark.parametrize("rules", ["upstream", "tail-reserved"])
def test_nothing_to_explain(rules: str) -> None:
    diagnosis = diagnose(Trace(INCIDENT_NODE, "aligned", INCIDENT), PRESETS[rules])
    assert diagnosis.document() == NOTHING_BROKE
    assert (diagnosis.verdict, diagnosis.reason, diagnosis.rules) == ("ok", None, PRESETS[rules])


# --- which promise, and since when


def test_newcomers_are_listed_by_what_they_took() -> None:
    """B leaves 192 of the chunk budget; three newcomers take a page each, and two pages are spare."""
    settings = node_settings(chunked_prefill_size=4288, pool_tokens=8128)
    newcomers = [submit(rid, 1) for rid in ("x", "y", "z")]
    diagnosis = diagnose(trace_of(settings, submit("B", 8000), *newcomers, Drain()))
    assert diagnosis.spent_by == tuple(Spending(rid, "chunk", 64) for rid in ("x", "y", "z"))
    assert diagnosis.point_of_no_return == NoReturn(1, "z", "whole")


RESUMED_NODE = node_settings(chunked_prefill_size=4288, pool_tokens=320 * 64)
RESUMED: tuple[Event, ...] = (
    Cached("host", prompt(("one", 4096))),
    Cached("host", prompt(("two", 4096))),
    submit("B", 20000),
    Round(),
)


def test_a_resumed_chunk_is_cut_again_and_its_tail_spent() -> None:
    """Round 2 runs B from 4096 to 8192; the newcomer loads back behind that cut."""
    late = Submit("C", prompt(("one", 4096), ("c", 100)))
    diagnosis = diagnose(trace_of(RESUMED_NODE, *RESUMED, late, Drain()))
    assert diagnosis.broken_promise == BrokenPromise("B", "tail", 20000 - 8192, 2)
    assert diagnosis.spent_by == (Spending("C", "load-back", 4096), Spending("C", "chunk", 128))
    assert diagnosis.point_of_no_return == NoReturn(2, "C", "whole")


def test_what_the_environment_mended_in_time_is_no_point_of_no_return() -> None:
    """C1's slots come back after it spent them in round 2; C2 spends them again in round 3, and nobody mends that."""
    first = Submit("C1", prompt(("one", 4096), ("c", 100)))
    second = Submit("C2", prompt(("two", 4096), ("c", 100)))
    events = (*RESUMED, first, Round(), Transferred("C1"), second, Drain())
    diagnosis = diagnose(trace_of(RESUMED_NODE, *events))
    assert diagnosis.verdict == "oom"
    assert [broken.round for broken in diagnosis.outcome.broken if broken.invariant == "promises-covered"] == [2]
    assert diagnosis.broken_promise == BrokenPromise("B", "tail", 20000 - 3 * 4096, 3)
    assert diagnosis.spent_by == (Spending("C2", "load-back", 4096), Spending("C2", "chunk", 128))
    assert diagnosis.point_of_no_return == NoReturn(3, "C2", "whole")


def test_a_run_that_was_saved_has_a_point_of_no_return_all_the_same() -> None:
    """v9uj's transfer came early. Under the worst fair environment xpkq's admission was one too many."""
    events = (*INCIDENT_ARRIVALS, Round(), Transferred("v9uj"), Drain())
    diagnosis = diagnose(Trace(INCIDENT_NODE, "aligned", events))
    assert diagnosis.verdict == "promises-covered"
    assert diagnosis.broken_promise == BrokenPromise("1keim", "tail", 4936, 1)
    assert diagnosis.point_of_no_return == NoReturn(1, "xpkq", "whole")


def test_rules_that_wait_never_reach_the_point_of_no_return() -> None:
    diagnosis = diagnose(Trace(INCIDENT_NODE, DEFERRING, INCIDENT))
    assert diagnosis.verdict == "promises-covered"
    assert diagnosis.broken_promise == BrokenPromise("1keim", "tail", 4936, 1)
    assert diagnosis.point_of_no_return is None
    assert diagnosis.searched.continuations > 0
    assert diagnosis.avoided_by == (("reserve_tail", True),)


def test_shared_pages_make_up_for_what_was_spent() -> None:
    """r4's tail is short of 4 pages beside r5, whose cached 31 pages are r2's own: its copies come back in time."""
    settings = node_settings(
        checkpoint_align=512, chunked_prefill_size=1984, max_prefill_tokens=3968, pool_tokens=4224, host_tokens=4224
    )
    events = (
        submit("r2", 1984),
        submit("r4", 2045),
        Submit("r5", prompt(("r2", 1983), ("r5", 1))),
        Drain(),
    )
    diagnosis = diagnose(trace_of(settings, *events))
    assert diagnosis.verdict == "promises-covered"
    assert diagnosis.broken_promise == BrokenPromise("r4", "tail", 509, 2)
    assert diagnosis.spent_by == (Spending("r5", "chunk", 448),)
    assert diagnosis.point_of_no_return is None


# --- outsiders


HELD_NODE = node_settings(chunked_prefill_size=256)


@pytest.mark.parametrize(("rules", "kind"), [(AccountingRules(), "resumed"), (DEFERRING, "deferred")])
def test_a_hold_spends_a_tail(rules: AccountingRules, kind: str) -> None:
    """Ten pages; A has computed four and needs four more, and x takes all six that are free."""
    events = (submit("A", 500), Round(), Hold("x", 384), Drain())
    diagnosis = diagnose(trace_of(HELD_NODE, *events, rules=rules))
    assert diagnosis.broken_promise == BrokenPromise("A", "tail", 244, 1)
    assert diagnosis.spent_by == (Spending("x", "hold", 384),)
    assert diagnosis.point_of_no_return == NoReturn(2, "A", kind)
    assert diagnosis.verdict == ("oom" if kind == "resumed" else "stuck")
    assert diagnosis.avoided_by is None or diagnosis.avoided_by == (("on_shortage", "defer"),)


def test_a_lock_from_outside_has_no_name_and_a_released_hold_spends_nothing() -> None:
    events = (
        submit("A", 500),
        Round(),
        Hold("x", 64),
        Cached("device", prompt(("d", 320)), locked=True),
        Release("x"),
        Drain(),
    )
    diagnosis = diagnose(trace_of(HELD_NODE, *events))
    assert diagnosis.broken_promise == BrokenPromise("A", "tail", 244, 1)
    assert diagnosis.spent_by == (Spending(None, "lock", 320),)


def test_a_request_that_only_waits_was_promised_nothing() -> None:
    diagnosis = diagnose(trace_of(HELD_NODE, Hold("x", 320), submit("A", 500), Drain(), rules="tail-reserved"))
    assert diagnosis.verdict == "stuck"
    assert diagnosis.document() == NOTHING_BROKE
    assert diagnosis.reason == "a safe scheduler that starves is no scheduler"


def test_an_event_that_cannot_happen_is_the_readers_error() -> None:
    with pytest.raises(TraceError, match=r"mine: events\[0\]\.tokens: out of KV slots"):
        diagnose(trace_of(HELD_NODE, Hold("x", 641)), source="mine")


# --- the change that avoids it


def test_the_fewest_switches_in_order() -> None:
    """A split size above the residue leaves a gap even on the page grid; the fix covers that too."""
    split = AccountingRules(checkpoint_align="page_size", truncation_align=512)
    settings = node_settings(chunked_prefill_size=4288, pool_tokens=8128)
    events = (submit("B", 8000), submit("C", 185), Drain())
    assert diagnose(trace_of(settings, *events, rules=split)).avoided_by == (("reserve_tail", True),)


def test_two_switches_where_one_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    split = AccountingRules(truncation_align=512)
    settings = node_settings(chunked_prefill_size=4288, pool_tokens=8128)
    events = (submit("B", 8000), submit("C", 185), Drain())
    monkeypatch.setattr(
        "kvledger.diagnose._changes",
        lambda *_: iter((("checkpoint_align", "page_size"), ("truncation_align", None), ("on_shortage", "defer"))),
    )
    diagnosis = diagnose(trace_of(settings, *events, rules=split))
    assert diagnosis.avoided_by == (("checkpoint_align", "page_size"), ("truncation_align", None))


@pytest.mark.parametrize("cause", ["truncation_align", "continuation_limit", "chunk_grid"])
def test_where_nothing_else_is_switched_the_cause_of_the_residue_is_to_go(cause: str) -> None:
    def forcing(settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> PrefillNode:
        fixed = replace(rules, reserve_tail=False, spend_gap=False, on_shortage="force")
        return PrefillNode(settings, fixed, watcher)

    switch: dict[str, Any] = {cause: 5}
    rules = AccountingRules(checkpoint_align="page_size", **switch)
    settings = node_settings(page_size=1, checkpoint_align=1, chunked_prefill_size=9, pool_tokens=13)
    if cause == "continuation_limit":
        settings = replace(settings, chunked_prefill_size=10, pool_tokens=29)
    events = (submit("A", settings.pool_tokens - 3), submit("B", 4), Drain())
    assert diagnose(trace_of(settings, *events, rules=rules), target=forcing).avoided_by == ((cause, None),)


def test_a_change_may_leave_stuck_what_outsiders_hold_up() -> None:
    """C never fits beside the lock. With the tail reserved nothing that was admitted goes short, and that is enough."""
    settings = node_settings(chunked_prefill_size=4288, pool_tokens=8128 + 64)
    events = (
        Cached("device", prompt(("d", 64)), locked=True),
        submit("B", 8000),
        submit("C", 185),
        submit("huge", 8100),
        Drain(),
    )
    diagnosis = diagnose(trace_of(settings, *events))
    assert diagnosis.verdict == "oom"
    assert diagnosis.avoided_by == (("reserve_tail", True),)
    assert checked_replay(trace_of(settings, *events), PRESETS["tail-reserved"]).verdict == "stuck"


# --- faulty and foreign targets


class LoadsBackBeyondTheGate(PrefillNode):
    """Its gate forgets what must be loaded back."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        needed = adder._needed_tokens

        def forgetful(req: PrefillRequest) -> int:
            return needed(req) - req.host_hit_tokens

        adder._needed_tokens = forgetful  # type: ignore[method-assign]
        return adder


def test_an_admission_that_fails_half_way() -> None:
    events = (Cached("host", prompt(("h", 512))), Hold("x", 320), Submit("X", prompt(("h", 512), ("x", 10))), Drain())
    diagnosis = diagnose(trace_of(node_settings(), submit("A", 10), *events), target=LoadsBackBeyondTheGate)
    assert diagnosis.broken_promise == BrokenPromise("X", "load-back", 512, 1)
    assert diagnosis.spent_by == (Spending("A", "chunk", 64),)
    assert diagnosis.point_of_no_return == NoReturn(1, "X", "admitted")


class ChargesRaw(PrefillNode):
    """A chunk is charged as its tokens, not as its pages, and without the page of slack."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()

        def raw(req: PrefillRequest, tokens: int, *, final: bool) -> None:
            adder.memory.promise(req.rid, "chunk", tokens, Due.NOW)
            adder.compute.spend(tokens)

        adder._charge = raw  # type: ignore[method-assign]
        return adder


def test_rounding_that_no_charge_held() -> None:
    """17 pages, of which B needs 15; its cut leaves 188 tokens, and three newcomers of one token take a page each."""
    settings = node_settings(chunked_prefill_size=700, pool_tokens=17 * 64)
    events: list[Event] = [submit("B", 900), *(submit(rid, 1) for rid in ("x", "y", "z")), Drain()]
    diagnosis = diagnose(trace_of(settings, *events, rules="tail-reserved"), target=ChargesRaw)
    assert diagnosis.broken_promise == BrokenPromise("B", "tail", 388, 1)
    rounded = tuple(Spending(rid, "rounding", 63) for rid in ("x", "y", "z"))
    assert diagnosis.spent_by == (*rounded, *(Spending(rid, "chunk", 1) for rid in ("x", "y", "z")))


class Leaks(PrefillNode):
    """Three pages are lost in every round."""

    def run_round(self) -> RoundRecord:
        record = super().run_round()
        self.pool.alloc(min(3, self.pool.free_pages))
        return record


def test_a_leak_spends_a_tail() -> None:
    diagnosis = diagnose(trace_of(HELD_NODE, submit("A", 500), Drain()), target=Leaks)
    assert diagnosis.broken_promise is not None
    assert diagnosis.broken_promise.request == "A"
    assert [(each.request, each.how) for each in diagnosis.spent_by] == [(None, "leak")]


class GivesUpNobody(PrefillNode):
    """Who waits cannot be taken out of the queue."""

    def abort(self, rid: str) -> None:
        if rid not in self.waiting:
            super().abort(rid)


def test_a_target_that_lets_go_of_nobody_is_searched_by_not_submitting() -> None:
    diagnosis = diagnose(Trace(INCIDENT_NODE, "aligned", INCIDENT), target=GivesUpNobody)
    assert diagnosis.document() == diagnose(Trace(INCIDENT_NODE, "aligned", INCIDENT)).document()
    assert not diagnosis.searched.complete


class TellsAfterTheRound(PrefillNode):
    """It says what it decided only once the batch has run."""

    capabilities = frozenset({"batches", "grid", "pages"})

    def run_round(self) -> RoundRecord:
        watcher, self.watcher = self.watcher, Watcher()
        record = super().run_round()
        self.watcher = watcher
        for decision in () if record.failure else record.decisions:
            self.watcher.before_decision()
            self.watcher.after_decision(decision)
        return record


def test_a_target_that_tells_late_is_explained_the_same() -> None:
    diagnosis = diagnose(worked_example("host"), target=TellsAfterTheRound)
    assert diagnosis.document() == diagnose(worked_example("host")).document()


class ShowsNoDecisions(PrefillNode):
    capabilities = frozenset({"pages"})


def test_a_target_that_shows_no_decisions_is_explained_by_its_failure() -> None:
    diagnosis = diagnose(worked_example("host"), target=ShowsNoDecisions)
    assert diagnosis.broken_promise == BrokenPromise("B", "chunk", 3328, 4)
    assert (diagnosis.spent_by, diagnosis.point_of_no_return) == ((), None)


class OrderIsLost(PrefillNode):
    """It breaks an invariant that is about no promise of slots."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        adder.memory.promise("nobody", "debt", -64, Due.LATER)
        return adder


def test_another_invariant_is_named_with_its_reason() -> None:
    diagnosis = diagnose(trace_of(HELD_NODE, submit("A", 64), Drain()), target=OrderIsLost)
    assert diagnosis.verdict == "order"
    assert diagnosis.reason == "what is due now is part of what is due at all"
    assert diagnosis.document() == NOTHING_BROKE


# --- any failing trace


def random_trace(rng: random.Random) -> Trace:
    """A cut prompt of about the pool's size, and newcomers small in compute behind it, some with a long prefix."""
    page_size = rng.choice([1, 4, 16, 64])
    grid = page_size * rng.choice([4, 8])
    chunk = grid * rng.randint(1, 3) + page_size * rng.randint(1, 7)
    pool_tokens = page_size * (chunk // page_size * rng.randint(2, 4) + rng.randint(3, 12))
    long = pool_tokens - page_size * rng.randint(1, 6) - rng.randint(2, 2 * page_size)
    settings = NodeSettings(
        page_size=page_size,
        checkpoint_align=grid,
        chunked_prefill_size=chunk,
        max_prefill_tokens=None,
        pool_tokens=pool_tokens,
        host_tokens=None,
    )
    events: list[Event] = []
    prefix = grid * rng.randint(1, max(1, pool_tokens // grid // 2))
    if rng.random() < 0.6:
        events.append(Cached(rng.choice(["host", "device"]), prompt(("doc", prefix))))
    events += [submit(f"s{number}", rng.randint(1, chunk)) for number in range(rng.randint(0, 1))]
    events.append(submit("long", max(chunk + 1, long)))
    for number in range(rng.randint(1, 4)):
        own = (f"n{number}", rng.randint(1, grid))
        events.append(Submit(f"n{number}", prompt(("doc", prefix), own) if rng.random() < 0.5 else prompt(own)))
        if rng.random() < 0.2:
            events.append(Round())
    rules = AccountingRules(on_shortage=rng.choice(["force", "force", "defer"]))
    return trace_of(settings, *events, Drain(), rules=rules)


def failing_traces(count: int) -> list[Trace]:
    rng = random.Random(1102)
    found: list[Trace] = []
    while len(found) < count:
        trace = random_trace(rng)
        if replay(trace).failure is not None or checked_replay(trace).broken:
            found.append(trace)
    return found


@pytest.fixture(scope="module")
def explained() -> list[tuple[Trace, Diagnosis]]:
    return [(trace, diagnose(trace)) for trace in failing_traces(200)]


def test_every_failing_trace_has_a_promise_and_somebody_else_who_spent_it(
    explained: Sequence[tuple[Trace, Diagnosis]],
) -> None:
    hows: Counter[str] = Counter()
    for _, diagnosis in explained:
        promise = diagnosis.broken_promise
        assert promise is not None
        assert promise.tokens > 0
        assert diagnosis.spent_by
        assert promise.request not in [each.request for each in diagnosis.spent_by]
        sizes = [each.tokens for each in diagnosis.spent_by]
        assert sizes == sorted(sizes, reverse=True)
        assert min(sizes) > 0
        hows.update(each.how for each in diagnosis.spent_by)
    assert min(hows["load-back"], hows["lock"], hows["chunk"]) > 20, hows


def test_what_is_said_to_avoid_it_does(explained: Sequence[tuple[Trace, Diagnosis]]) -> None:
    for trace, diagnosis in explained:
        assert diagnosis.avoided_by is not None
        assert checked_replay(trace, replace(trace.accounting_rules, **dict(diagnosis.avoided_by))).verdict == "ok"


def test_it_is_too_late_between_the_promise_and_the_failure(explained: Sequence[tuple[Trace, Diagnosis]]) -> None:
    met: Counter[str] = Counter()
    for _, diagnosis in explained:
        point, promise = diagnosis.point_of_no_return, diagnosis.broken_promise
        assert promise is not None
        met[f"{diagnosis.verdict} {'lost' if point else 'kept'}"] += 1
        if diagnosis.verdict == "oom":
            assert point is not None
            assert promise.round <= point.round <= diagnosis.outcome.rounds[-1].round
            assert point.request != promise.request
    assert min(met["oom lost"], met["promises-covered kept"]) > 30, met


def test_the_point_of_no_return_is_where_a_plain_replay_puts_it(
    explained: Sequence[tuple[Trace, Diagnosis]],
) -> None:
    """The queue is first in, first out: with all up to that request submitted the run dies, without it nobody does."""
    checked = 0
    for trace, diagnosis in explained:
        point = diagnosis.point_of_no_return
        if diagnosis.verdict != "oom" or point is None or not trace_is_plain(trace):
            continue
        checked += 1
        place = next(i for i, event in enumerate(trace.events) if event == find_submit(trace, point.request))
        assert replay(replace(trace, events=(*trace.events[: place + 1], Drain()))).failure is not None
        assert replay(replace(trace, events=(*trace.events[:place], Drain()))).failure is None
    assert checked > 40


def test_where_a_load_is_late_the_point_of_no_return_is_where_a_plain_replay_puts_it() -> None:
    """A load that is on its way is something that moves: who waits for it is saved by refusing the one who spent it."""
    rng = random.Random(1117)
    checked = spoilt = 0
    for _ in range(4000):
        plain = random_trace(rng)
        waiting = [event for event in plain.events if isinstance(event, Submit)]
        faults = [Fault("load-late", each.request, rng.choice((1, 2, 30))) for each in waiting if rng.random() < 0.7]
        trace = replace(plain, events=(*plain.events[:-1], *faults, Drain()))
        outcome = replay(trace)
        if not trace_is_plain(trace) or outcome.failure is None or not any(each.struck for each in outcome.rounds):
            continue
        point = diagnose(trace).point_of_no_return
        assert point is not None
        at = waiting.index(find_submit(trace, point.request))
        for gone, dies in ((waiting[at + 1 :], True), (waiting[at:], False)):
            names = {each.request for each in gone}
            kept = tuple(each for each in trace.events if getattr(each, "request", None) not in names)
            assert (replay(replace(trace, events=kept)).failure is not None) is dies
        checked += 1
        spoilt += any(each.loading for each in outcome.rounds if each.round >= point.round)
        if checked == 20:
            break
    assert (checked, spoilt > 5) == (20, True), (checked, spoilt)


def test_whom_a_late_load_waits_for_is_not_called_lost() -> None:
    """The user's two traces: without B the load arrives, and A is done."""
    for name, request in (("promises-covered-34e0a420", "B"), ("pinned-promise-forced", "A")):
        diagnosis = diagnose(load(str(REGRESSIONS / f"{name}.json")))
        assert diagnosis.point_of_no_return is not None
        assert diagnosis.point_of_no_return.request == request


def trace_is_plain(trace: Trace) -> bool:
    return not any(isinstance(event, Round) for event in trace.events)


def find_submit(trace: Trace, request: str) -> Submit:
    return next(event for event in trace.events if isinstance(event, Submit) and event.request == request)


def test_bisection_finds_what_asking_every_decision_finds(explained: Sequence[tuple[Trace, Diagnosis]]) -> None:
    for trace, diagnosis in explained[:40]:
        history = watch(trace, trace.accounting_rules, PrefillNode, "trace")
        search = FutureSearch(history)
        decisions = [moment for moment in history.moments if moment.decision is not None]
        lost = [moment for moment in decisions if search.lost_after(moment)]
        assert decisions[len(decisions) - len(lost) :] == lost, "once lost is lost for good"
        point = diagnosis.point_of_no_return
        first = lost[0].decision if lost else None
        assert (point and (point.round, point.request)) == (first and (lost[0].round, first.request))


def test_needs_are_counted_in_whole_pages() -> None:
    """A promise that fits to the last slot is no broken one."""
    settings = node_settings(chunked_prefill_size=4288, pool_tokens=ceil_tokens(8000, 64) + 3 * 64)
    assert diagnose(trace_of(settings, submit("B", 8000), submit("C", 185), Drain())).verdict == "ok"
