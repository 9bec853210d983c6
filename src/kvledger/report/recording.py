"""A checked replay as pictures need it: each round with what surrounds it, and every step in between with its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvledger.diagnose_history import History, Moment, Witness, history_of
from kvledger.events import Event, Round
from kvledger.node import PrefillNode
from kvledger.record import RoundRecord, Snapshot
from kvledger.replay import Outcome, Target, TargetFactory, replay
from kvledger.report import Replayed
from kvledger.rules import AccountingRules
from kvledger.runs import SHOWS_FIGURES
from kvledger.settings import NodeSettings
from kvledger.trace import Trace


@dataclass(frozen=True, slots=True)
class Pool:
    """Where the pool's slots are, in tokens. `lost` ones belong to nobody (below zero: some are counted twice)."""

    free: int
    evictable: int
    protected: int
    private: int
    held: int
    lost: int

    @property
    def baseline(self) -> int:
        return self.free + self.evictable


@dataclass(frozen=True, slots=True)
class RoundView:
    """A round and its surroundings, in tokens.

    `begins` is free + evictable before its first decision, `needed` what admitted prompts still had to allocate when
    its decisions ended; both are None for a target that does not show its decisions. `pool` is how it was left.
    """

    record: RoundRecord
    begins: int | None
    needed: int | None
    pool: Pool

    @property
    def slack(self) -> int | None:
        """Baseline minus what admitted prompts still need: below zero, a promise is broken."""
        return None if self.needed is None else self.record.baseline - self.needed


@dataclass(frozen=True, slots=True)
class Step:
    """An event that happened (a drain's rounds and transfers are steps of their own), and what it left.

    `rounds_before` rounds had ended by then. `slack` as in RoundView, after the step; None if it is not known.
    """

    event: Event
    rounds_before: int
    pool: Pool
    slack: int | None


@dataclass(frozen=True, slots=True)
class Recording:
    """A replay with its rounds and steps. `history` is what a diagnosis reads."""

    replayed: Replayed
    capabilities: frozenset[str]
    start: Pool
    rounds: tuple[RoundView, ...]
    steps: tuple[Step, ...]
    history: History

    @property
    def outcome(self) -> Outcome:
        return self.replayed.outcome

    @property
    def trace(self) -> Trace:
        return self.replayed.trace

    @property
    def page_size(self) -> int:
        return self.trace.node.page_size

    @property
    def pool_tokens(self) -> int:
        """The pool in whole pages."""
        return self.trace.node.pool_pages * self.page_size

    @property
    def shows_ledger(self) -> bool:
        """The target keeps offsets and shows them."""
        return "offsets" in self.capabilities


class _Recorder(Witness):
    """Judges and keeps what a witness does, and where the pool's slots are after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.pools: list[Pool] = []

    def attach(self, target: Target, settings: NodeSettings, rules: AccountingRules) -> None:
        super().attach(target, settings, rules)
        self.start = _pool(self.evidence.after)

    def after_round(self, record: RoundRecord) -> None:
        super().after_round(record)
        self.pools.append(_pool(self.evidence.after, record))

    def after_event(self, event: Event) -> None:
        super().after_event(event)
        self.pools.append(_pool(self.evidence.after))


def record(
    trace: Trace,
    rules: AccountingRules | None = None,
    *,
    target: TargetFactory = PrefillNode,
    source: str = "trace",
    source_in_errors: str | None = None,
) -> Recording:
    """`checked_replay`, and all that pictures need of it. TraceError, naming the source: an event cannot happen."""
    rules = rules or trace.accounting_rules
    recorder = _Recorder()
    outcome = replay(trace, rules, target=target, monitor=recorder, source=source_in_errors or source)
    surroundings = _Surroundings(recorder.moments, recorder.start.baseline, trace.node.page_size)
    steps: list[Step] = []
    rounds: list[RoundView] = []
    for index, (event, pool) in enumerate(zip(recorder.steps, recorder.pools, strict=True)):
        steps.append(Step(event, len(rounds), pool, surroundings.slack_after(index)))
        if isinstance(event, Round):
            begins, needed = surroundings.of_round(index)
            rounds.append(RoundView(outcome.rounds[len(rounds)], begins, needed, pool))
    return Recording(
        Replayed(source, trace, rules, outcome, tuple(recorder.skipped), recorder.capabilities >= SHOWS_FIGURES),
        recorder.capabilities,
        recorder.start,
        tuple(rounds),
        tuple(steps),
        history_of(recorder, trace, rules, target, outcome),
    )


class _Surroundings:
    """Reads moments by their step: what was there before a round and at the end of its decisions."""

    def __init__(self, moments: Sequence[Moment], start_tokens: int, page_size: int) -> None:
        self._start_tokens = start_tokens
        self._page_size = page_size
        self._moments = moments
        self._ends: dict[int, int] = {}
        for index, moment in enumerate(moments):
            self._ends[moment.step] = index

    def slack_after(self, step: int) -> int | None:
        """None where no moment was kept: the target shows no decisions, or the process died in this step."""
        last = self._ends.get(step)
        if last is None or (moment := self._moments[last]).decision is not None:
            return None
        return moment.baseline_pages * self._page_size - self._needed(moment)

    def of_round(self, step: int) -> tuple[int | None, int | None]:
        last = self._ends.get(step)
        if last is None:
            return None, None
        if self._moments[last].decision is None and last and self._moments[last - 1].step == step:
            last -= 1
        # a round without decisions has one moment, its end: nothing was admitted and nothing allocated in it
        needed = self._needed(self._moments[last])
        first = last
        while first and self._moments[first - 1].step == step:
            first -= 1
        begins = self._moments[first - 1].baseline_pages * self._page_size if first else self._start_tokens
        return begins, needed

    def _needed(self, moment: Moment) -> int:
        return sum(pages for _, pages in moment.needs) * self._page_size


def _pool(snapshot: Snapshot, round_record: RoundRecord | None = None) -> Pool:
    """Free, evictable and protected as the outcome states them after a round, else counted from the pages."""
    page_size = snapshot.page_size
    private = sum(len(request.private_pages) for request in snapshot.live) * page_size
    held = len(snapshot.held) * page_size
    if round_record is not None:
        free, evictable, protected = round_record.free, round_record.evictable, round_record.protected
    else:
        free, evictable = snapshot.free_pages * page_size, snapshot.evictable_pages * page_size
        protected = len(snapshot.cached) * page_size - evictable
    lost = snapshot.pool_pages * page_size - free - evictable - protected - private - held
    return Pool(free, evictable, protected, private, held, lost)
