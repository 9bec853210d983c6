"""The domain shrinker: from a failing trace to the smallest one that breaks the same invariant first.

Three things make the result the same from any seed. A total order on traces (`shrink_passes.measure`) says what smaller
means; passes over events, settings and sizes descend in it until none finds anything; and short shapes are tried from
scratch (`shrink_worlds`), simplest first, so that a result does not keep the mechanism that its seed happened to use.
All of it is counted in evaluations and repeats exactly; the clock only ends what takes too long.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from kvledger.invariants import INVARIANTS, Invariant, needed_pages_of
from kvledger.monitor import InvariantMonitor
from kvledger.node import PrefillNode
from kvledger.record import Decision, RoundRecord
from kvledger.replay import Broken, EventError, Replay, Target, TargetFactory
from kvledger.rules import PRESETS, AccountingRules
from kvledger.shrink_passes import (
    Measure,
    Pass,
    fewer_events,
    fewer_limits,
    lowered,
    measure,
    neighbours,
    normal_form,
    one_at_a_time,
    reordered,
    scaled,
    shape_key,
    simpler_events,
    simpler_prompts,
    simpler_rules,
)
from kvledger.shrink_worlds import shapes, small_traces
from kvledger.trace import Cached, Event, Hold, Trace, TraceError, parse, to_document

MAX_EVALUATIONS = 8000
BUDGET_SECONDS = 6.0
WORLD_EVALUATIONS = 2500
"""At most so many are spent on small worlds, counted apart: how far they get must not depend on the seed."""
WORLD_ROUNDS = 6
HITS_PER_SHAPE = 3


class NothingToShrink(ValueError):
    """The trace does not break what it should."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest trace found, and what it took: evaluations in all and by pass.

    `limited` says that a limit ended the search: the trace is smaller than it was, but may not be canonical.
    """

    trace: Trace
    invariant: str
    evaluations: int
    tried: Mapping[str, int]
    seconds: float
    limited: bool


def shrink(
    trace: Trace,
    *,
    rules: AccountingRules | None = None,
    target: TargetFactory = PrefillNode,
    invariant: str | None = None,
    max_evaluations: int = MAX_EVALUATIONS,
    budget_seconds: float = BUDGET_SECONDS,
) -> Shrunk:
    """The canonical trace of this failure. NothingToShrink if the trace breaks nothing, or not `invariant`."""
    started = time.perf_counter()
    if rules is not None:
        trace = trace.with_rules(rules)
    search = _Search(target, max_evaluations, started + budget_seconds)
    first = search.open(trace, invariant)
    limited = False
    try:
        search.run(first, keep_rules=rules is not None)
    except _OutOfBudget:
        limited = True
    best = search.best
    assert best is not None
    return Shrunk(
        trace=search.titled(normal_form(best.trace)),
        invariant=search.invariant,
        evaluations=sum(search.tried.values()),
        tried=MappingProxyType(dict(search.tried)),
        seconds=time.perf_counter() - started,
        limited=limited,
    )


# --- one evaluation


class _Stop(BaseException):
    """Ends a replay whose answer is known. Not an Exception, so that no target takes it for its own."""


class _Probe(InvariantMonitor):
    """Asks until the first invariant breaks, or until more rounds have passed than are of interest.

    It looks at the target only when there is something to ask. `unfair`: something outside the scheduler took slots
    that had been promised; where `fair` is asked for, that ends the replay.
    """

    def __init__(self, invariants: Iterable[Invariant], *, rounds: int | None = None, fair: bool = False) -> None:
        super().__init__(invariants)
        self._rounds_limit = rounds
        self._fair = fair
        self._stale = False
        self.unfair = False

    def before_decision(self) -> None:
        if self._rounds_limit is not None and self._rounds_ended >= self._rounds_limit:
            raise _Stop
        if self._pending.get("decision"):
            self._refresh()
            super().before_decision()

    def after_round(self, record: RoundRecord) -> None:
        super().after_round(record)
        if self._rounds_limit is not None and record.round > self._rounds_limit:
            raise _Stop

    def after_event(self, event: Event) -> None:
        if isinstance(event, (Hold, Cached)):
            snapshot = self._target.snapshot()
            needed_pages = sum(needed_pages_of(request, snapshot.page_size) for request in snapshot.live)
            self.unfair = self.unfair or snapshot.baseline_pages < needed_pages
            if self.unfair and self._fair:
                raise _Stop
        super().after_event(event)

    def _look(self) -> None:
        self._stale = True

    def _refresh(self) -> None:
        if self._stale:
            super()._look()
            self._stale = False

    def _ask(self, when: str, *facts: object) -> None:
        if self._pending.get(when):
            self._refresh()
            super()._ask(when, *facts)
            if self.broken:
                raise _Stop


# --- the search


class _OutOfBudget(Exception):
    """Too many evaluations, or too much time."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A trace that breaks the invariant, in this round."""

    trace: Trace
    rounds: int
    measure: Measure


_OUTER = (
    ("rules", one_at_a_time(simpler_rules)),
    ("events", one_at_a_time(fewer_events)),
    ("limits", one_at_a_time(fewer_limits)),
    ("event kinds", one_at_a_time(simpler_events)),
    ("prompts", one_at_a_time(simpler_prompts)),
    ("order", one_at_a_time(reordered)),
)
_SIZES = (
    ("scale", one_at_a_time(scaled)),
    ("lower", lowered),
    ("neighbours", one_at_a_time(neighbours)),
)


def _by_measure(found: _Found) -> Measure:
    return found.measure


def _shape(trace: Trace) -> tuple[int, int, tuple[Any, ...]]:
    return len(trace.events), *shape_key(trace.events)


class _Search:
    """What is looked for, what it has cost, and the smallest trace that broke it so far."""

    def __init__(self, target: TargetFactory, max_evaluations: int, deadline: float) -> None:
        self.target = target
        self.max_evaluations = max_evaluations
        self.deadline = deadline
        self.tried: Counter[str] = Counter()
        self.best: _Found | None = None
        self.invariant = ""
        self._asked: tuple[Invariant, ...] = INVARIANTS
        self._only: tuple[Invariant, ...] = ()
        self._fair = False
        self._known: dict[tuple[Trace, int | None], _Found | None] = {}

    def open(self, trace: Trace, invariant: str | None) -> _Found:
        """What the trace breaks first, or `invariant` alone, and the trace up to there."""
        probe, end = self._replay(trace, _Probe(INVARIANTS))
        if invariant is not None and (not probe.broken or probe.broken[0].invariant != invariant):
            self._asked = tuple(asked for asked in INVARIANTS if asked.name == invariant)
            probe, end = self._replay(trace, _Probe(self._asked))
        if not probe.broken:
            raise NothingToShrink(f"the trace does not break {invariant or 'any invariant'}")
        self.invariant = probe.broken[0].invariant
        self._only = tuple(asked for asked in INVARIANTS if asked.name == self.invariant)
        self._fair = not probe.unfair
        return self._keep(replace(trace, events=trace.events[:end], title="", expect={}), probe.broken[0].round)

    def run(self, found: _Found, *, keep_rules: bool) -> None:
        outer = _OUTER[1:] if keep_rules else _OUTER
        found = self._descend(found, outer)
        while True:
            before = found
            finalists = [found]
            scratch = self._from_scratch(found)
            if scratch is not None:
                same_shape = _shape(scratch.trace) == _shape(found.trace)
                finalists = [scratch, found] if same_shape else [scratch]
            found = min((self._descend(each, (*outer, *_SIZES)) for each in finalists), key=_by_measure)
            if found.measure == before.measure:
                return

    def _from_scratch(self, found: _Found) -> _Found | None:
        left = WORLD_EVALUATIONS
        for shape in shapes():
            if (len(shape), *shape_key(shape)) > _shape(found.trace):
                break
            for page_size in (1, 2, 4):
                hits: list[_Found] = []
                for trace in small_traces(shape, page_size, found.trace.rules):
                    hit = self._breaks(trace, "small worlds", WORLD_ROUNDS)
                    left -= 1
                    if hit is not None:
                        hits.append(hit)
                        if len(hits) == HITS_PER_SHAPE:
                            break
                if hits:
                    return min((self._descend(hit, _SIZES) for hit in hits), key=_by_measure)
            if left <= 0:
                break
        return None

    def _descend(self, found: _Found, passes: Iterable[tuple[str, Callable[[Trace], Pass]]]) -> _Found:
        while True:
            before = found
            for name, make in passes:
                while (better := self._sweep(found, name, make)) is not found:
                    found = better
            if found is before:
                return found

    def _sweep(self, found: _Found, name: str, make: Callable[[Trace], Pass]) -> _Found:
        candidates = make(found.trace)
        candidate = next(candidates, None)
        while candidate is not None:
            better = self._smaller(found, candidate, name)
            found = better or found
            try:
                candidate = candidates.send(better is not None)
            except StopIteration:
                break
        return found

    def _smaller(self, found: _Found, candidate: Trace, name: str) -> _Found | None:
        if not measure(candidate, found.rounds) < found.measure:
            return None
        better = self._breaks(candidate, name, found.rounds)
        return better if better is not None and better.measure < found.measure else None

    def _breaks(self, trace: Trace, name: str, rounds: int | None) -> _Found | None:
        key = trace, rounds
        if key not in self._known:
            self._known[key] = self._evaluate(trace, name, rounds)
        return self._known[key]

    def _evaluate(self, trace: Trace, name: str, rounds: int | None) -> _Found | None:
        if sum(self.tried.values()) >= self.max_evaluations or time.perf_counter() > self.deadline:
            raise _OutOfBudget
        self.tried[name] += 1
        try:
            probe, _ = self._replay(trace, _Probe(self._only, rounds=rounds, fair=self._fair))
            if not probe.broken:
                return None
            probe, end = self._replay(trace, _Probe(self._asked, rounds=rounds, fair=self._fair))
        except Exception:
            return None
        if not probe.broken or probe.broken[0].invariant != self.invariant:
            return None
        return self._keep(replace(trace, events=trace.events[:end]), probe.broken[0].round)

    def _replay(self, trace: Trace, probe: _Probe) -> tuple[_Probe, int]:
        """The probe, and how many events it took."""
        end = 0
        with suppress(_Stop):
            run = Replay(trace.node, trace.accounting_rules, target=self.target, monitor=probe)
            for end, event in enumerate(trace.events, 1):
                run.apply(event)
        return probe, end

    def _keep(self, trace: Trace, rounds: int) -> _Found:
        found = _Found(trace, rounds, measure(trace, rounds))
        if self.best is None or found.measure < self.best.measure:
            self.best = found
        return found

    def titled(self, trace: Trace) -> Trace:
        probe, _ = self._replay(trace, _Probe(self._asked))
        return replace(trace, title=f"{self.invariant}: {probe.broken[0].message}") if probe.broken else trace
