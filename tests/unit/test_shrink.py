from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.bench_shrink import KINDS, Kind, TwiceFreeingNode, failing
from kvledger.adder import PrefillAdder, PrefillRequest
from kvledger.events import (
    Abort,
    Cached,
    Drain,
    Event,
    Hold,
    Release,
    Round,
    Submit,
    Transferred,
)
from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode, Watcher
from kvledger.record import RoundRecord, Snapshot
from kvledger.replay import Target, TargetFactory
from kvledger.request import USUAL_OUTPUT, Output, Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.shrink import SLOW_STEPS, NothingToShrink, Shrunk, shrink
from kvledger.shrink_passes import letters, lowered, measure, normal_form, repaired, sizes_of, with_sizes
from kvledger.shrink_worlds import shapes, small_worlds
from kvledger.trace import Trace, TraceError, parse, to_document
from tests.unit.builders import INCIDENT, INCIDENT_NODE, node_settings, prompt

SEEDS = range(6)
TAIL, GATE, TWICE = KINDS

# five tokens of A's ten are cut off, and nobody keeps five of thirteen slots for them
TAIL_NODE = NodeSettings(
    page_size=1,
    checkpoint_align=5,
    chunked_prefill_size=9,
    max_prefill_tokens=None,
    pool_tokens=13,
    host_tokens=0,
)
TAIL_EVENTS = (Submit("A", prompt(("a", 10))), Submit("B", prompt(("b", 4))), Drain())
TAIL_TITLE = "promises-covered: after B was whole, admitted prompts still need 14 tokens, and free + evictable is 13"
TAIL_TRACE = Trace(TAIL_NODE, "aligned", TAIL_EVENTS, TAIL_TITLE)

INCIDENT_TRACE = Trace(INCIDENT_NODE, "aligned", INCIDENT)


def unhurried(
    trace: Trace,
    target: TargetFactory = PrefillNode,
    invariant: str | None = None,
    rules: AccountingRules | None = None,
) -> Shrunk:
    """No clock: on a busy machine the answer must be the same."""
    return shrink(trace, target=target, invariant=invariant, rules=rules, budget_seconds=600)


@cache
def seed_trace(kind: Kind, seed: int) -> Trace:
    return failing(kind, seed)


@cache
def found(kind: Kind, seed: int) -> Shrunk:
    return unhurried(seed_trace(kind, seed), kind.target)


def broken(trace: Trace, target: TargetFactory = PrefillNode) -> list[str]:
    return [each.invariant for each in checked_replay(trace, target=target).broken]


def small_trace(*events: Event, rules: str | AccountingRules = "aligned", node: NodeSettings = TAIL_NODE) -> Trace:
    return Trace(node, rules, events)


# --- the canonical trace


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_seed_comes_to_one_trace(kind):
    results = [found(kind, seed) for seed in SEEDS]
    assert len({result.trace for result in results}) == 1
    trace = results[0].trace
    assert len(trace.events) <= 6
    assert broken(trace, kind.target)[0] == kind.invariant
    assert parse(to_document(trace), "shrunk") == trace
    assert not any(result.limited for result in results)


def test_the_unrecorded_tail_in_its_smallest_form():
    assert found(TAIL, 0).trace == TAIL_TRACE


def test_the_incident_comes_to_the_trace_of_its_kind():
    assert unhurried(INCIDENT_TRACE).trace == TAIL_TRACE


def test_the_crash_of_the_incident_can_be_asked_for():
    result = unhurried(INCIDENT_TRACE, invariant="admitted-finishes")
    assert result.invariant == "admitted-finishes"
    assert (result.trace.node, result.trace.events) == (TAIL_NODE, TAIL_EVENTS)
    assert checked_replay(result.trace).verdict == "oom"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_shrunk_trace_stays_as_it_is(kind):
    trace = found(kind, 0).trace
    assert unhurried(trace, kind.target).trace == trace


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_result_is_never_larger(kind):
    for seed in SEEDS:
        assert measure(found(kind, seed).trace, 1) <= measure(seed_trace(kind, seed), 1)


def test_what_was_tried_is_counted_and_repeats():
    trace = seed_trace(TWICE, 0)
    first, second = unhurried(trace, TWICE.target), unhurried(trace, TWICE.target)
    assert first.tried == second.tried
    assert sum(first.tried.values()) == first.evaluations > 0
    assert {"drop events", "small worlds"} <= first.tried.keys()


# --- what is kept


def test_rules_become_the_preset_they_amount_to():
    trace = small_trace(*TAIL_EVENTS, rules=AccountingRules(on_shortage="defer"))
    assert unhurried(trace).trace == TAIL_TRACE


def test_given_rules_stay():
    rules = AccountingRules(on_shortage="defer")
    result = unhurried(replace(INCIDENT_TRACE, rules="upstream"), rules=rules)
    assert result.trace == replace(TAIL_TRACE, rules=rules)


class GapForgettingNode(PrefillNode):
    """Told to spend the gap behind a cut, it does not."""

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, replace(rules, spend_gap=False), watcher)


def test_a_fault_under_sound_rules_does_not_end_under_unsound_ones():
    rules = AccountingRules(spend_gap=True, on_shortage="defer")
    result = unhurried(small_trace(*TAIL_EVENTS, rules=rules), GapForgettingNode)
    assert result.trace.rules == AccountingRules(spend_gap=True)


class LoadBackForgettingAdder(PrefillAdder):
    """Its gate asks for what is computed, not for what is loaded back."""

    def _needed_tokens(self, req: PrefillRequest) -> int:
        return super()._needed_tokens(req) - req.host_hit_tokens


class LoadBackForgettingNode(PrefillNode):
    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        adder.__class__ = LoadBackForgettingAdder
        return adder


def test_slots_promised_by_the_scheduler_are_not_taken_from_outside():
    """A hold that takes them breaks promises-covered too, with fewer words: but that is not the scheduler's fault."""
    trace = small_trace(
        Cached("host", prompt(("doc", 6))),
        Submit("one", prompt(("one", 4))),
        Submit("two", prompt(("doc", 6), ("two", 1))),
        Hold("somebody", 1),
        Drain(),
        rules="tail-reserved",
        node=replace(TAIL_NODE, checkpoint_align=1, pool_tokens=11, host_tokens=None),
    )
    result = unhurried(trace, LoadBackForgettingNode)
    assert result.invariant == "promises-covered"
    assert [type(event) for event in result.trace.events] == [Cached, Submit, Submit, Drain]


def test_where_the_outside_is_at_fault_it_stays_so():
    trace = small_trace(Submit("x", prompt(("x", 10))), Round(), Hold("h", 7), Drain(), rules="tail-reserved")
    result = unhurried(trace)
    assert broken(result.trace)[0] == result.invariant == "promises-covered"
    assert len(result.trace.events) <= 4


def test_a_trace_without_fault_is_refused():
    with pytest.raises(NothingToShrink, match="any invariant"):
        shrink(INCIDENT_TRACE.with_rules("tail-reserved"))
    with pytest.raises(NothingToShrink, match="quiescent"):
        shrink(INCIDENT_TRACE, invariant="quiescent")


def test_an_event_that_cannot_happen_is_an_error():
    with pytest.raises(TraceError, match=r"events\[0\]\.tokens"):
        shrink(small_trace(Hold("h", 100), *TAIL_EVENTS))


# --- limits


@pytest.mark.parametrize("limits", [{"max_evaluations": 0}, {"max_evaluations": 7}, {"budget_seconds": 0}])
def test_a_limit_ends_it_with_what_there_is(limits):
    trace = seed_trace(TAIL, 0)
    result = shrink(trace, **limits)
    assert result.limited
    assert result.evaluations <= limits.get("max_evaluations", 0)
    assert broken(result.trace)[0] == "promises-covered"
    assert len(result.trace.events) <= len(trace.events)
    assert parse(to_document(result.trace), "shrunk") == result.trace


def test_a_long_trace_is_not_replayed_often():
    quiet = [
        event for number in range(SLOW_STEPS) for event in (Submit(f"q{number}", prompt((f"q{number}", 64))), Round())
    ]
    ends = [Transferred(f"q{number}") for number in range(SLOW_STEPS)]
    trace = replace(INCIDENT_TRACE, events=(*quiet, *ends, *INCIDENT))
    assert unhurried(trace).trace == TAIL_TRACE


# --- other targets


class ForeignTarget:
    """Somebody else's scheduler: nothing but the protocol, and one capability less."""

    capabilities = PrefillNode.capabilities - {"offsets"}

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> None:
        self._node = TwiceFreeingNode(settings, rules, watcher)

    @property
    def has_work(self) -> bool:
        return self._node.has_work

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        return self._node.submit(rid, prompt)

    def run_round(self) -> RoundRecord:
        return self._node.run_round()

    def transferred(self, rid: str) -> None:
        self._node.transferred(rid)

    def abort(self, rid: str) -> None:
        self._node.abort(rid)

    def cache_on_device(self, prompt: Prompt, *, locked: bool) -> None:
        self._node.cache_on_device(prompt, locked=locked)

    def cache_on_host(self, prompt: Prompt) -> None:
        self._node.cache_on_host(prompt)

    def hold(self, name: str, tokens: int) -> None:
        self._node.hold(name, tokens)

    def release(self, name: str, tokens: int | None = None) -> None:
        self._node.release(name, tokens)

    def in_flight(self) -> tuple[str, ...]:
        return self._node.in_flight()

    def snapshot(self) -> Snapshot:
        return self._node.snapshot()


def test_a_foreign_target():
    result = unhurried(seed_trace(TWICE, 1), ForeignTarget)
    assert result.trace == found(TWICE, 1).trace


def pages_of_two_or_more(settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> Target:
    """A target that does not run on every node falls over, as its authors' assertions would have it."""
    assert settings.page_size >= 2, "no kernel for pages of one token"
    return PrefillNode(settings, rules, watcher)


def test_a_target_that_falls_over_shows_another_failure():
    result = unhurried(INCIDENT_TRACE, pages_of_two_or_more)
    assert result.trace.node.page_size == 2
    assert len(result.trace.events) == 3


class SuspiciousNode(PrefillNode):
    """The node, but with requests of one name only does it fail."""

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        return super().submit(rid, prompt) if rid.startswith("req-") else "who is that?"


def test_names_that_matter_are_kept():
    trace = small_trace(Submit("req-1", prompt(("a", 10))), Submit("req-2", prompt(("b", 4))), Drain())
    result = unhurried(trace, SuspiciousNode)
    assert [event.request for event in result.trace.events if isinstance(event, Submit)] == ["req-1", "req-2"]


# --- the parts


def test_names_in_normal_form():
    trace = small_trace(
        Hold("mine", 2),
        Cached("device", prompt(("doc", 3), ("gone", 0))),
        Submit("x1", prompt(("doc", 3), ("x1", 2))),
        Submit("x0", prompt(("x0", 2))),
        Round(),
        Transferred("x0"),
        Abort("x1"),
        Release("mine", 1),
        Release("mine"),
    )
    assert normal_form(trace).events == (
        Hold("H1", 2),
        Cached("device", prompt(("a", 3))),
        Submit("A", prompt(("a", 3), ("b", 2))),
        Submit("B", prompt(("c", 2))),
        Round(),
        Transferred("B"),
        Abort("A"),
        Release("H1", 1),
        Release("H1"),
    )


def test_letters_go_on_after_z():
    assert [letters(number) for number in (0, 25, 26, 51, 52, 701, 702)] == ["a", "z", "aa", "az", "ba", "zz", "aaa"]


def test_events_without_their_subject_go_with_it():
    events = (Abort("x"), Release("h"), Hold("h", 2), Release("h", 3), Release("h", 2), Release("h"), Transferred("x"))
    assert repaired(events) == (Hold("h", 2), Release("h", 2))


LARGE = small_trace(
    Cached("host", prompt(("doc", 30))),
    Hold("h", 9),
    Submit("x", prompt(("doc", 30), ("x", 7))),
    Release("h", 4),
    rules=AccountingRules(checkpoint_align=8, truncation_align=4),
    node=node_settings(page_size=4, checkpoint_align=8, chunked_prefill_size=16, pool_tokens=64, host_tokens=0),
)


def test_sizes_are_taken_out_and_put_back():
    assert sizes_of(LARGE) == (4, 8, 16, 64, 8, 4, 30, 9, 30, 7, 4)
    assert with_sizes(LARGE, sizes_of(LARGE)) == LARGE


@pytest.mark.parametrize(
    ("index", "size"),
    [
        pytest.param(0, 3, id="page does not divide the grid"),
        pytest.param(1, 6, id="nor this grid"),
        pytest.param(2, 3, id="chunk below a page"),
        pytest.param(3, 3, id="pool below a page"),
        pytest.param(5, 6, id="split inside a page"),
        pytest.param(9, 0, id="nothing"),
        pytest.param(10, 10, id="more released than held"),
    ],
)
def test_sizes_that_do_not_fit_are_none(index, size):
    sizes = list(sizes_of(LARGE))
    sizes[index] = size
    assert with_sizes(LARGE, tuple(sizes)) is None


def test_what_lowers_a_size_is_repeated_until_it_is_refused():
    trace = TAIL_TRACE
    candidates = lowered(trace)
    candidate = next(candidates)
    try:
        while True:
            accepted = sum(sizes_of(candidate)) >= 12
            trace = candidate if accepted else trace
            candidate = candidates.send(accepted)
    except StopIteration:
        assert sum(sizes_of(trace)) == 12


A, B = Submit("A", prompt(("a", 4))), Submit("B", prompt(("b", 4)))


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        pytest.param((A, Drain()), (A, B, Drain()), id="fewer events"),
        pytest.param((A, Drain()), (A, Round()), id="the natural end"),
        pytest.param((A, B, Drain()), (A, Submit("B", prompt(("a", 4))), Drain()), id="nothing shared"),
        pytest.param((A, B, Drain()), (Cached("device", prompt(("b", 4))), A, Drain()), id="a request, not a cache"),
        pytest.param((A, Drain()), (Submit("A", prompt(("a", 2), ("b", 2))), Drain()), id="one segment"),
        pytest.param((Hold("h", 4), Release("h")), (Hold("h", 4), Release("h", 4)), id="released whole"),
        pytest.param((Hold("h", 4), A), (A, Hold("h", 4)), id="what was there before comes first"),
        pytest.param((A, Drain()), (Submit("A", prompt(("a", 5))), Drain()), id="a smaller size"),
    ],
)
def test_the_order_of_traces(smaller, larger):
    assert measure(small_trace(*smaller), 1) < measure(small_trace(*larger), 1)


def test_the_order_of_settings():
    traces = [
        small_trace(A, Drain(), rules=rules, node=replace(TAIL_NODE, **changes))
        for rules, changes in (
            ("aligned", {"chunked_prefill_size": None}),
            ("upstream", {}),
            ("upstream", {"host_tokens": None}),
            ("upstream", {"host_tokens": 1}),
            ("upstream", {"max_prefill_tokens": 1}),
            (PRESETS["upstream"], {}),
            (AccountingRules(spend_gap=True), {}),
        )
    ]
    measures = [measure(trace, 1) for trace in traces]
    assert measures == sorted(measures)


def test_small_worlds_come_in_order_and_only_once():
    order = [outline for outline, _ in small_worlds("aligned")]
    assert order == sorted(order)
    assert len(order) == len(set(order))


def test_small_worlds_are_valid_and_repeat():
    own_grids = AccountingRules(checkpoint_align=128, truncation_align=64)
    first, second = (
        [next(traces) for outline, traces in small_worlds(own_grids, 3) if outline[0] < 4] for _ in range(2)
    )
    assert first == second
    for trace in first:
        assert parse(to_document(trace), "small") == trace


def test_shapes_have_what_the_post_mortem_needed():
    kinds = {tuple(type(event) for event in shape) for length in (3, 4) for shape in shapes(length)}
    assert {(Submit, Submit, Drain), (Cached, Submit, Submit, Drain), (Submit, Round, Abort, Drain)} <= kinds
