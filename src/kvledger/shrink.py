"""The domain shrinker: from a failing trace to the smallest one that breaks the same invariant first.

Three things make the result the same from any seed. A total order on traces (`measure`) says what smaller means; passes
over events, settings and sizes descend in it until none finds anything; and short shapes are tried from scratch
(`shrink_worlds`), simplest first, so that a result does not keep the mechanism that its seed happened to use. All of it
is counted in evaluations and repeats exactly; the clock only ends what takes too long.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvledger.arithmetic import ceil_pages
from kvledger.events import Cached, Event, Hold, Pin
from kvledger.evidence import coming_pages, needed_pages_of
from kvledger.invariants import INVARIANTS, Invariant
from kvledger.monitor import InvariantMonitor
from kvledger.node import PrefillNode
from kvledger.record import RoundRecord
from kvledger.replay import EventError, Replay, TargetFactory
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.shrink_passes import (
    WITH_PROMPT,
    Measure,
    Pass,
    fewer_events,
    fewer_limits,
    lowered,
    measure,
    named_rules,
    neighbours,
    normal_form,
    one_at_a_time,
    outline,
    reordered,
    scaled,
    simpler_events,
    simpler_prompts,
    simpler_ranks,
    simpler_rules,
)
from kvledger.shrink_worlds import small_worlds
from kvledger.trace import Trace, TraceError, is_document

MAX_EVALUATIONS = 12_000
BUDGET_SECONDS = 5.0
"""Of the processor's time, so that a machine that is busy with other things gives the same answer; a slow target may
ask for more with `shrink_seconds`..."""
WALL_PER_BUDGET = 4
"""...and so many times that by the clock on the wall, for a target that waits instead of computing."""
WORLD_EVALUATIONS = 4000
"""So many small worlds at most, whatever else was spent: how far they are tried must not depend on the seed."""
ROUNDS = 6
"""A trace counts only if it breaks within so many rounds, or as many as the trace to be shrunk took."""
SLOW_STEPS, SLOW_PAGES = 100, 2000
"""A trace of more events and rounds, or of longer prompts, is slow to replay: small worlds come first, and it is
simplified itself only if none of them fails."""
STARTS = 3
"""The best traces of so many nodes of a small world are descended from."""


class NothingToShrink(ValueError):
    """The trace does not break what it should."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest trace found, and what it took: evaluations, in all and by what was tried.

    `limited`: a limit ended the search, so the trace may be neither minimal nor canonical.
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
    budget_seconds: float | None = None,
) -> Shrunk:
    """The canonical trace of a failure: that of the first invariant the trace breaks, or of `invariant` alone.

    `rules`, if given, replace the trace's own, and their switches stay; a trace's own may become a preset.
    NothingToShrink if nothing breaks, TraceError for an event that cannot happen.
    """
    started = time.perf_counter()
    if budget_seconds is None:
        budget_seconds = getattr(target, "shrink_seconds", BUDGET_SECONDS)
    search = _Search(target, max_evaluations, _Clock(budget_seconds))
    first = search.start(trace if rules is None else trace.with_rules(named_rules(rules)), invariant)
    limited = False
    try:
        search.run(first, keep_rules=rules is not None)
    except _OutOfBudget:
        limited = True
    return Shrunk(
        trace=search.result(),
        invariant=search.invariant,
        evaluations=search.tried.total(),
        tried=MappingProxyType(dict(search.tried)),
        seconds=time.perf_counter() - started,
        limited=limited,
    )


# --- one evaluation


class _Clock:
    """Says when time is up. The processor's clock is slow to ask, so it is asked no sooner than it can have run out."""

    def __init__(self, budget_seconds: float) -> None:
        now = time.perf_counter()
        self._cpu_end = time.process_time() + budget_seconds
        self._wall_end = now + budget_seconds * WALL_PER_BUDGET
        self._ask_at = now + budget_seconds

    def check(self) -> None:
        now = time.perf_counter()
        if now < self._ask_at:
            return
        left = self._cpu_end - time.process_time()
        if left <= 0 or now >= self._wall_end:
            raise _OutOfBudget
        self._ask_at = min(now + left, self._wall_end)


class _Stop(BaseException):
    """Ends a replay whose answer is known. Not an Exception, so that no target takes it for its own."""


class _OutOfBudget(BaseException):
    """Too many evaluations, or too much time. Not an Exception, for the same reason."""


class _Probe(InvariantMonitor):
    """Asks until the first invariant breaks, or until more rounds have passed than are of interest.

    It looks at the target only if there may be something to ask. `unfair`: something outside the scheduler took slots
    that had been promised; if only what is `fair` counts, that ends the replay.
    """

    def __init__(
        self,
        invariants: Iterable[Invariant],
        *,
        rounds: int | None = None,
        fair: bool = False,
        clock: _Clock | None = None,
    ) -> None:
        super().__init__(invariants)
        self._rounds_limit = rounds
        self._fair = fair
        self._clock = clock
        self._stale = False
        self.unfair = False

    def before_decision(self) -> None:
        if self._rounds_limit is not None and self._rounds_ended >= self._rounds_limit:
            raise _Stop
        super().before_decision()

    def after_round(self, record: RoundRecord) -> None:
        super().after_round(record)
        if self._rounds_limit is not None and record.round > self._rounds_limit:
            raise _Stop
        if self._clock is not None:
            self._clock.check()

    def after_event(self, event: Event) -> None:
        if isinstance(event, (Hold, Cached, Pin)):
            snapshot = self._target.snapshot()
            needed_pages = sum(needed_pages_of(request, snapshot.page_size) for request in snapshot.live)
            # what is pinned comes back, and is waited for where the rules say so
            waits = self.evidence.rules.on_shortage == "defer"
            there_pages = coming_pages(snapshot) if waits else snapshot.baseline_pages
            self.unfair = self.unfair or there_pages < needed_pages
            if self.unfair and self._fair:
                raise _Stop
        super().after_event(event)

    def _look(self) -> None:
        # a decision is judged by what was there before it, so there each look counts
        if self._pending.get("decision"):
            super()._look()
        else:
            self._stale = True

    def _ask(self, when: str, *facts: object) -> None:
        if self._pending.get(when):
            if self._stale:
                super()._look()
                self._stale = False
            super()._ask(when, *facts)
            if self.broken:
                raise _Stop


# --- the search


@dataclass(frozen=True, slots=True)
class _Found:
    """A trace that breaks the invariant first, and its place in the order."""

    trace: Trace
    rounds: int
    measure: Measure


def _place(found: _Found) -> Measure:
    return found.measure


def _slow(found: _Found) -> bool:
    prompts = [event.prompt for event in found.trace.events if isinstance(event, WITH_PROMPT)]
    pages = sum(ceil_pages(prompt.tokens, found.trace.node.page_size) for prompt in prompts)
    return len(found.trace.events) + found.rounds > SLOW_STEPS or pages > SLOW_PAGES


_SIMPLIFYING: dict[str, Pass] = {
    "rules": one_at_a_time(simpler_rules),
    "drop events": one_at_a_time(fewer_events),
    "fewer limits": one_at_a_time(fewer_limits),
    "simpler ranks": one_at_a_time(simpler_ranks),
    "simpler events": one_at_a_time(simpler_events),
    "simpler prompts": one_at_a_time(simpler_prompts),
    "reorder": one_at_a_time(reordered),
}
_SIZING: dict[str, Pass] = {
    "scale": one_at_a_time(scaled),
    "lower": lowered,
    "neighbours": one_at_a_time(neighbours),
}


class _Search:
    """What is looked for, what it has cost, and the smallest trace that broke it so far."""

    def __init__(self, target: TargetFactory, max_evaluations: int, clock: _Clock) -> None:
        self.target = target
        self.max_evaluations = max_evaluations
        self.clock = clock
        self.tried: Counter[str] = Counter()
        self.invariant = ""
        self._asked: tuple[Invariant, ...] = INVARIANTS
        self._only: tuple[Invariant, ...] = ()
        self._fair = True
        self._rounds = ROUNDS
        self._best: _Found | None = None
        self._known: dict[tuple[Trace, int], _Found | None] = {}

    def start(self, trace: Trace, invariant: str | None) -> _Found:
        """What the trace breaks first, or `invariant` alone, and the trace up to there."""
        probe, end = self._replay(trace, _Probe(INVARIANTS))
        if invariant is not None and [broken.invariant for broken in probe.broken] != [invariant]:
            self._asked = tuple(asked for asked in INVARIANTS if asked.name == invariant)
            probe, end = self._replay(trace, _Probe(self._asked))
        if not probe.broken:
            raise NothingToShrink(f"the trace does not break {invariant or 'any invariant'}")
        self.invariant = probe.broken[0].invariant
        self._only = tuple(asked for asked in INVARIANTS if asked.name == self.invariant)
        self._fair = not probe.unfair
        self._rounds = max(ROUNDS, probe.broken[0].round)
        return self._keep(trace, end, probe.broken[0].round)

    def run(self, found: _Found, *, keep_rules: bool) -> None:
        """Descend from the trace and from small worlds, until neither finds anything smaller."""
        simplifying = dict(_SIMPLIFYING)
        if keep_rules:
            del simplifying["rules"]
        else:
            found = self._descend(found, {"rules": simplifying["rules"]})
        rules = found.trace.rules
        if _slow(found):
            small = self._small_world(found)
            found = self._descend(found, simplifying) if small is None else found
        else:
            found = self._descend(found, simplifying)
            small = self._small_world(found)
        ends = [end for end in (small, found) if end is not None]
        if small is not None and outline(small.trace) < outline(found.trace):
            ends = [small]
        found = min((self._descend(end, simplifying | _SIZING) for end in ends), key=_place)
        if found.trace.rules != rules:
            # now that sizes are small the rules could become simpler, and small worlds depend on them
            self.run(found, keep_rules=keep_rules)

    def result(self) -> Trace:
        """The smallest trace in its normal form, unless names matter to the target; the title says what it breaks."""
        assert self._best is not None, "start() keeps what it is given"
        for trace in (normal_form(self._best.trace), self._best.trace):
            with suppress(Exception):
                probe, _ = self._replay(trace, _Probe(self._asked))
                if probe.broken and probe.broken[0].invariant == self.invariant:
                    return replace(trace, title=f"{self.invariant}: {probe.broken[0].message}")
        return replace(self._best.trace, title=f"{self.invariant}, but not each time")

    def _small_world(self, found: _Found) -> _Found | None:
        """The smallest of what the first failing outline gives, none of them beyond that of `found`."""
        bound = outline(found.trace)
        left = WORLD_EVALUATIONS
        finest = 1 if self._runs_pages_of_one(found.trace.rules) else found.trace.node.page_size
        for shape, traces in small_worlds(found.trace.rules, finest):
            if shape > bound or left <= 0:
                break
            hits: dict[NodeSettings, _Found] = {}
            for trace in traces:
                left -= 1
                hit = self._breaks(trace, "small worlds", ROUNDS)
                if hit is not None:
                    hits[trace.node] = min(hit, hits.get(trace.node, hit), key=_place)
            if hits:
                starts = sorted(hits.values(), key=_place)[:STARTS]
                return min((self._descend(start, _SIZING) for start in starts), key=_place)
        return None

    def _runs_pages_of_one(self, rules: str | AccountingRules) -> bool:
        """Some targets do not: their kernels are made for larger pages."""
        _, traces = next(small_worlds(rules))
        try:
            self._replay(next(traces), _Probe(()))
        except Exception:
            return False
        return True

    def _descend(self, found: _Found, passes: Mapping[str, Pass]) -> _Found:
        before = None
        while found != before:
            before = found
            for name, make in passes.items():
                while (smaller := self._sweep(found, name, make)) != found:
                    found = smaller
        return found

    def _sweep(self, found: _Found, name: str, make: Pass) -> _Found:
        """One run of a pass."""
        candidates = make(found.trace)
        with suppress(StopIteration):
            candidate = next(candidates)
            while True:
                smaller = self._smaller(found, candidate, name)
                found = smaller or found
                candidate = candidates.send(smaller is not None)
        return found

    def _smaller(self, found: _Found, candidate: Trace, name: str) -> _Found | None:
        place = measure(candidate, found.rounds)
        if not place < found.measure:
            return None
        same_shape = place[:2] == found.measure[:2]
        return self._breaks(candidate, name, found.rounds if same_shape else self._rounds)

    def _breaks(self, trace: Trace, name: str, rounds: int) -> _Found | None:
        key = trace, rounds
        if key not in self._known:
            if self.tried.total() >= self.max_evaluations:
                raise _OutOfBudget
            self.clock.check()
            self.tried[name] += 1
            self._known[key] = self._evaluate(trace, rounds)
        return self._known[key]

    def _evaluate(self, trace: Trace, rounds: int) -> _Found | None:
        """Asked of the one invariant, then of all whether it is the first. Most candidates fail the cheap question."""
        for invariants in (self._only, self._asked):
            try:
                probe, end = self._replay(trace, _Probe(invariants, rounds=rounds, fair=self._fair, clock=self.clock))
            except Exception:  # an event that cannot happen, or a target that falls over: another failure than this one
                return None
            if not probe.broken or probe.broken[0].invariant != self.invariant:
                return None
        return self._keep(trace, end, probe.broken[0].round) if is_document(trace) else None

    def _replay(self, trace: Trace, probe: _Probe) -> tuple[_Probe, int]:
        """The probe, and how many events it took."""
        end = 0
        with suppress(_Stop):
            run = Replay(trace.node, trace.accounting_rules, target=self.target, monitor=probe)
            for end, event in enumerate(trace.events, 1):
                try:
                    run.apply(event)
                except EventError as error:
                    raise TraceError(f"trace: events[{end - 1}].{error.field}: {error}") from error
        return probe, end

    def _keep(self, trace: Trace, end: int, rounds: int) -> _Found:
        trace = Trace(trace.node, trace.rules, trace.events[:end])
        found = _Found(trace, rounds, measure(trace, rounds))
        if self._best is None or found.measure < self._best.measure:
            self._best = found
        return found
