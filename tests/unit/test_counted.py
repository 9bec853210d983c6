"""A scheduler that can only be counted: what the base class makes of its five methods."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from kvledger.diagnose import diagnose
from kvledger.events import (
    Abort,
    Cached,
    Drain,
    Hold,
    Release,
    Round,
    Submit,
    Transferred,
)
from kvledger.monitor import InvariantMonitor, checked_replay
from kvledger.node import Watcher
from kvledger.replay import Replay, Target, TargetError, TargetFactory
from kvledger.report.explained import explanation_lines
from kvledger.request import Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.targets.counted import CountedTarget, Ran
from kvledger.testing import state_machine
from kvledger.testing.moves import NODE_SPACE, World
from kvledger.testing.reached import SearchMonitor
from kvledger.trace import Trace

NODE = NodeSettings(
    page_size=4,
    checkpoint_align=8,
    chunked_prefill_size=16,
    max_prefill_tokens=None,
    pool_tokens=64,
    host_tokens=0,
)


class FirstComeFirstServed(CountedTarget):
    """One request at a time, a chunk a round; `careless` begins the next before the first is done."""

    careless = False

    def __init__(self, settings: NodeSettings, _rules: AccountingRules, watcher: Watcher) -> None:
        super().__init__(settings, watcher)
        self.queue: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.pages: dict[str, int] = {}

    def enqueue(self, rid: str, prompt_tokens: int) -> None:
        self.queue[rid] = prompt_tokens

    def cancel(self, rid: str) -> bool:
        return self.queue.pop(rid, None) is not None

    def step(self) -> Iterable[Ran]:
        unfinished = [rid for rid in self.queue if self.done.get(rid, 0) < self.queue[rid]]
        ran = []
        for rid in unfinished if self.careless else unfinished[:1]:
            start = self.done.get(rid, 0)
            if not start and not self.careless and self.queue[rid] > self.free_tokens():
                break
            end = min(self.queue[rid], start + 16)
            pages = -(-end // 4) - self.pages.get(rid, 0)
            if pages * 4 > self.free_tokens():
                raise MemoryError(f"{rid} wants {pages} pages")
            self.done[rid], self.pages[rid] = end, self.pages.get(rid, 0) + pages
            ran.append((rid, start, end))
        return ran

    def finish(self, rid: str) -> None:
        del self.queue[rid], self.done[rid], self.pages[rid]

    def free_tokens(self) -> int:
        return 64 - 4 * sum(self.pages.values())

    def allocated_tokens(self) -> Mapping[str, int]:
        return {rid: 4 * pages for rid, pages in self.pages.items()}


class Careless(FirstComeFirstServed):
    careless = True


def _trace(*tokens: int) -> Trace:
    submits = [Submit(name, Prompt([(name, size)])) for name, size in zip("ABCD", tokens, strict=False)]
    return Trace(NODE, "tail-reserved", (*submits, Drain()))


def test_is_a_target() -> None:
    assert isinstance(FirstComeFirstServed(NODE, PRESETS["upstream"], Watcher()), Target)


def test_the_base_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError):
        CountedTarget(NODE, Watcher()).step()


def test_one_at_a_time_is_ok() -> None:
    outcome = checked_replay(_trace(40, 30, 20), target=FirstComeFirstServed)
    assert outcome.verdict == "ok"
    assert [(d.request, d.kind, d.start, d.end) for r in outcome.rounds for d in r.joined][:3] == [
        ("A", "truncated", 0, 16),
        ("A", "resumed", 16, 32),
        ("A", "resumed", 32, 40),
    ]


def test_the_chunk_that_spends_a_tail_is_named_and_the_failure_follows() -> None:
    outcome = checked_replay(_trace(40, 40), target=Careless)
    assert outcome.verdict == "oom"
    assert (outcome.broken[0].invariant, outcome.broken[0].request) == ("promises-covered", "B")
    assert outcome.failure is not None
    assert (outcome.failure.known, outcome.failure.request) == (False, "one of A, B")


class Leaking(FirstComeFirstServed):
    leaked_pages = 0

    def finish(self, rid: str) -> None:
        self.leaked_pages += 1
        super().finish(rid)

    def free_tokens(self) -> int:
        return super().free_tokens() - 4 * self.leaked_pages


def test_a_leak_is_called_one() -> None:
    outcome = checked_replay(_trace(40, 30), target=Leaking)
    assert outcome.broken[0].invariant == "conserved"
    assert outcome.broken[0].message == "1 of the 1 pages in use belongs to nobody, after A was transferred"


# --- whose chunk failed


class Batch(FirstComeFirstServed):
    """Begins everybody in one batch of 4 tokens each, and yields each chunk as it runs. A pool of 7 holds one."""

    told = True

    def step(self) -> Iterable[Ran]:
        for rid in [rid for rid in self.queue if rid not in self.done]:
            if self.free_tokens() < 64:
                error = MemoryError("7 slots")
                if self.told:
                    error.request = rid  # type: ignore[attr-defined]
                raise error
            self.done[rid], self.pages[rid] = self.queue[rid], 1
            yield rid, 0, self.queue[rid]


class Untold(Batch):
    told = False


class AsList(Untold):
    def step(self) -> Iterable[Ran]:
        return list(super().step())


class AsNamedList(Batch):
    def step(self) -> Iterable[Ran]:
        return list(super().step())


@pytest.mark.parametrize(
    ("target", "names", "request_name", "ran"),
    [
        (Batch, "AB", "B", ["A"]),
        (Batch, "ABCD", "B", ["A"]),
        (Untold, "AB", "B", ["A"]),
        (Untold, "ABCD", None, ["A"]),
        (AsList, "AB", None, []),
        (AsNamedList, "ABCD", "B", []),
    ],
)
def test_a_wrong_one_is_never_named(
    target: TargetFactory, names: str, request_name: str | None, ran: list[str]
) -> None:
    trace = _trace(*[4] * len(names))
    outcome = checked_replay(trace, target=target)
    assert outcome.failure is not None
    assert outcome.failure.named == request_name
    assert outcome.document()["violation"]["request"] == request_name
    assert [broken.request for broken in outcome.broken] == [request_name]
    assert [decision.request for decision in outcome.rounds[0].joined] == ran
    lines = "\n".join(explanation_lines(diagnose(trace, target=target)))
    assert "load-back" not in lines and "(0 continuations" not in lines and "avoided by" not in lines
    if request_name is not None:
        assert f"oom in round 1: {request_name} wanted 4 tokens" in lines
        assert f"promise     {request_name}'s chunk of 4 tokens, made in round 1" in lines
    else:
        able = [name for name in names if name not in ran]
        assert f"one of {', '.join(able)}" in lines
        assert "A wanted" not in lines and "spent by    nobody" not in lines
    assert ("spent by    A: chunk 4" in lines) == bool(ran)


def test_many_that_it_can_have_been_are_counted() -> None:
    replay = Replay(NODE, PRESETS["upstream"], target=AsList)
    for number in range(8):
        replay.apply(Submit(f"r{number}", Prompt([(f"r{number}", 4)])))
    replay.apply(Round())
    assert replay.outcome.failure is not None
    assert replay.outcome.failure.request == "one of r0, r1, r2, r3, r4 and 3 more"


# --- answers that are none


def _answering(**methods: Any) -> TargetFactory:
    return type("Odd", (FirstComeFirstServed,), {name: lambda *_, v=value: v for name, value in methods.items()})


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({"step": None}, "step returned None, not the chunks that it ran"),
        ({"step": 7}, "step returned 7, not the chunks"),
        ({"step": ["A"]}, "step told of 'A', not of (request, start, end)"),
        ({"step": [("A", 0)]}, "step told of ('A', 0), not of (request, start, end)"),
        ({"step": [("A", 0, "8")]}, "step told of ('A', 0, '8'), not of"),
        ({"step": [([], 0, 8)]}, "step told of ([], 0, 8), not of"),
        ({"step": [("Z", 0, 8)]}, "step told of request 'Z', which is unknown or has ended"),
        ({"step": [(1, 0, 8)]}, "step told of request 1, which is unknown"),
        ({"step": [("A", 0, 9)]}, "step told of 0..9 of 'A', whose prompt has 8 tokens"),
        ({"step": [("A", 8, 4)]}, "step told of 8..4 of 'A'"),
        ({"free_tokens": None}, "free_tokens answered None, not a whole number of tokens"),
        ({"free_tokens": 6.5}, "free_tokens answered 6.5, not a whole number"),
        ({"allocated_tokens": None}, "allocated_tokens returned None, not tokens by request"),
        ({"allocated_tokens": {"A": "4"}}, "allocated_tokens answered '4', not a whole number"),
    ],
)
def test_an_answer_that_is_none_is_the_targets_fault_and_no_finding(methods: dict[str, Any], says: str) -> None:
    with pytest.raises(TargetError) as raised:
        checked_replay(_trace(8), target=_answering(**methods))
    line = str(raised.value)
    assert line.startswith("target tests.unit.test_counted:Odd: ") and says in line and "\n" not in line


def test_a_method_that_is_missing_or_takes_other_arguments_is_named() -> None:
    class Half(CountedTarget):
        def __init__(self, settings: NodeSettings, _rules: AccountingRules, watcher: Watcher) -> None:
            super().__init__(settings, watcher)

        def free_tokens(self) -> int:
            return 64

        def allocated_tokens(self) -> Mapping[str, int]:
            return {}

    with pytest.raises(TargetError, match=r"Half: enqueue: it is not provided$"):
        checked_replay(_trace(8), target=Half)

    class Other(FirstComeFirstServed):
        def enqueue(self, rid: str) -> None:  # type: ignore[override]
            pass

    with pytest.raises(TargetError, match=r"Other: enqueue: .*takes 2 positional arguments but 3 were given$"):
        checked_replay(_trace(8), target=Other)


def test_what_the_scheduler_raises_itself_is_a_finding() -> None:
    class Raising(FirstComeFirstServed):
        def step(self) -> Iterable[Ran]:
            raise TypeError("its own")

    outcome = checked_replay(_trace(8), target=Raising)
    assert [(broken.invariant, broken.round) for broken in outcome.broken] == [("never-raises", 1)]
    assert outcome.broken[0].message == "TypeError in step (test_counted.py): its own"


@pytest.mark.parametrize("answer", [None, True])
def test_a_cancel_that_says_nothing_has_taken_it_out(answer: bool | None) -> None:
    class Quiet(FirstComeFirstServed):
        def cancel(self, rid: str) -> bool | None:  # type: ignore[override]
            super().cancel(rid)
            return answer

    submits = (Submit("A", Prompt([("A", 40)])), Submit("B", Prompt([("B", 8)])))
    outcome = checked_replay(Trace(NODE, "tail-reserved", (*submits, Round(), Abort("B"), Drain())), target=Quiet)
    assert outcome.verdict == "ok"


def test_two_half_done_prompts_are_no_fault() -> None:
    """A design rule of others: a counted scheduler may have any number of them."""

    class Both(FirstComeFirstServed):
        careless = True

    outcome = checked_replay(_trace(20, 20), target=Both)
    assert {d.request for d in outcome.rounds[0].joined if d.tail_tokens} == {"A", "B"}
    assert outcome.verdict == "ok"


# --- what it does nothing with


def test_what_it_ignores_is_neither_drawn_nor_counted() -> None:
    monitor = SearchMonitor()
    world = World(Replay(NODE, PRESETS["upstream"], target=FirstComeFirstServed, monitor=monitor))
    for move in NODE_SPACE.moves:
        for high in (False, True):
            world.apply(move.make(world, **{name: domain[high] for name, domain in move.domains.items()}))
    assert not any(isinstance(event, Cached | Hold | Release) for event in world.events)
    world.apply(Hold("somebody", 8))
    world.apply(Cached("host", Prompt([("doc", 16)])))
    assert not any(branch.startswith(("cached", "held")) for branch in monitor.reached)


def test_a_known_hole_does_not_hide_the_next_one() -> None:
    class CarelessAndLeaking(Leaking):
        careless = True

    def found(without: Collection[str]) -> list[str]:
        machine = state_machine(CarelessAndLeaking, without=without)()
        machine.world = World(Replay(NODE, PRESETS["upstream"], target=CarelessAndLeaking, monitor=machine.monitor))
        for event in (*_trace(40, 40).events[:2], Round(), Abort("A")):
            machine.world.apply(event)
        return [broken.invariant for broken in machine.monitor.broken]

    assert found(()) == ["promises-covered", "conserved"]
    assert found({"promises-covered", "admitted-finishes"}) == ["conserved"]
    with pytest.raises(ValueError, match="'typo' is none of promises-covered, "):
        state_machine(CarelessAndLeaking, without=["typo"])


def test_too_large_a_prompt_is_rejected_at_submit() -> None:
    outcome = checked_replay(_trace(59, 58), target=FirstComeFirstServed)
    assert [rid for rid, _ in outcome.rejected_at_submit] == ["A"]
    assert outcome.verdict == "ok"


def test_what_it_cannot_show_is_skipped_by_name() -> None:
    monitor = InvariantMonitor()
    Replay(NODE, PRESETS["upstream"], target=FirstComeFirstServed, monitor=monitor)
    assert {"no-use-after-free", "order", "refusal-is-free", "on-grid"} <= set(monitor.skipped)
    assert not {"promises-covered", "admitted-finishes", "progress", "conserved", "quiescent"} & set(monitor.skipped)


def test_aborts_end_requests_waiting_begun_and_in_flight() -> None:
    replay = Replay(NODE, PRESETS["upstream"], target=FirstComeFirstServed, monitor=InvariantMonitor())
    for name, tokens in (("A", 16), ("B", 30), ("C", 8)):
        replay.apply(Submit(name, Prompt([(name, tokens)])))
    replay.apply(Round())
    replay.apply(Round())
    assert replay.target.in_flight() == ("A",)
    for name in ("A", "B", "C", "C"):
        replay.apply(Abort(name))
    assert not replay.target.has_work
    assert replay.target.snapshot().free_pages == 16
    assert not replay.outcome.broken


def test_outsiders_do_nothing_here() -> None:
    replay = Replay(NODE, PRESETS["upstream"], target=FirstComeFirstServed, monitor=InvariantMonitor())
    for tier in ("host", "device"):
        replay.apply(Cached(tier, Prompt([("doc", 16)])))
    replay.apply(Hold("somebody", 8))
    replay.apply(Release("somebody"))
    replay.apply(Submit("A", Prompt([("A", 8)])))
    replay.apply(Transferred("A"))
    assert replay.target.snapshot().free_pages == 16
    assert replay.target.has_work
