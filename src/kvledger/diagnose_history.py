"""A checked replay kept step by step: after each decision, round and event, what was there and what was still owed."""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.events import Abort, Decode, Event, Release, Round, Submit, Transferred, Unpin
from kvledger.evidence import coming_pages, needed_pages_of
from kvledger.monitor import InvariantMonitor
from kvledger.record import Decision, RoundRecord, Snapshot
from kvledger.replay import Outcome, Stuck, Target, TargetFactory, replay
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.trace import Trace


@dataclass(frozen=True, slots=True)
class Moment:
    """The pages right after a decision, after another event, or (neither of them given) at the end of a round.

    `step` is this step's place in the history, `round` the round it is in or follows. `needs` are the pages that each
    admitted, unfinished request has yet to allocate, in admission order. Pins alone protect `pinned_pages`: they are
    among the baseline's, because they come back, and nobody can have them yet.
    """

    step: int
    round: int
    decision: Decision | None
    event: Event | None
    baseline_pages: int
    leaked_pages: int
    needs: tuple[tuple[str, int], ...]
    pinned_pages: int = 0

    @property
    def covered(self) -> bool:
        """What is there is enough for all that was admitted."""
        return self.baseline_pages >= sum(pages for _, pages in self.needs)

    @property
    def gives_back(self) -> bool:
        """The environment may have returned slots."""
        return isinstance(self.event, Transferred | Release | Abort | Unpin)


@dataclass(frozen=True, slots=True)
class History:
    """Up to the failure, if there is one. `steps` is the trace with its drains written out as rounds and transfers.

    On a pipeline the moments are those of `rank`: where it failed, else where what is there was first too little.
    Without decisions that can be judged there are no moments. `tells_at_once`: each decision is told as it is taken;
    else all of a round's moments show the pages at its end.
    """

    trace: Trace
    rules: AccountingRules
    target: TargetFactory
    outcome: Outcome
    steps: tuple[Event, ...]
    moments: tuple[Moment, ...]
    tells_at_once: bool = True
    rank: int = 0

    @property
    def failed(self) -> bool:
        """It ran out of memory or got stuck; a broken invariant alone may pass without harm."""
        return self.outcome.failure is not None or self.outcome.stuck is not None

    @property
    def decodes(self) -> bool:
        """Requests of this trace may go on to decode on the same pool, or rounds are run for decode alone."""
        events = self.trace.events
        longer = any(event.output.max_new_tokens > 1 for event in events if isinstance(event, Submit))
        return self.trace.node.mode == "unified" and (longer or any(isinstance(event, Decode) for event in events))

    @property
    def page_size(self) -> int:
        return self.trace.node.page_size


class Witness(InvariantMonitor):
    """Judges like InvariantMonitor, and keeps every step and moment."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Event] = []
        self.moments_on: list[list[Moment]] = []
        self.until_stuck: tuple[int, int] | None = None
        self._leaked_pages = 0

    def attach(self, target: Target, settings: NodeSettings, rules: AccountingRules) -> None:
        super().attach(target, settings, rules)
        self.moments_on = [[] for _ in range(len(settings.ranks) + 1)]

    @property
    def moments(self) -> list[Moment]:
        """Those of the deciding rank."""
        return self.moments_on[0]

    def after_decision(self, decision: Decision) -> None:
        super().after_decision(decision)
        self._keep(decision, None)

    def after_round(self, record: RoundRecord) -> None:
        super().after_round(record)
        if record.failure is None:
            self._count_leaks()
            self._keep(None, None)
        self.steps.append(Round())

    def after_event(self, event: Event) -> None:
        super().after_event(event)
        self._count_leaks()
        self._keep(None, event)
        self.steps.append(event)

    def stuck(self, stuck: Stuck) -> None:
        super().stuck(stuck)
        self.until_stuck = self.until_stuck or (len(self.steps), len(self.moments))

    def _keep(self, decision: Decision | None, event: Event | None) -> None:
        if "promises-covered" in self.skipped:
            return
        after = self.evidence.after
        for moments, rank in zip(self.moments_on, (after, *after.ranks), strict=True):
            needs = tuple((each.rid, needed_pages_of(each, rank.page_size)) for each in rank.live if not each.in_flight)
            here = (len(self.steps), self._round, decision, event, coming_pages(rank), self._leaked_pages, needs)
            moments.append(Moment(*here, len(rank.written_back)))

    def _count_leaks(self) -> None:
        if "pages" in self.capabilities:
            self._leaked_pages = _ownerless_pages(self.evidence.after)


def _ownerless_pages(s: Snapshot) -> int:
    """Pages that are neither free nor anybody's; below zero if some are counted twice."""
    private_pages = sum(len(request.pages) - request.shared_pages for request in s.live)
    return s.pool_pages - s.free_pages - len(s.held) - len(s.cached) - private_pages


def watch(trace: Trace, rules: AccountingRules, target: TargetFactory, source: str) -> History:
    """Replay a trace with every invariant asked, and keep its history. TraceError if an event cannot happen."""
    witness = Witness()
    outcome = replay(trace, rules, target=target, monitor=witness, source=source)
    return history_of(witness, trace, rules, target, outcome)


def history_of(
    witness: Witness, trace: Trace, rules: AccountingRules, target: TargetFactory, outcome: Outcome
) -> History:
    """What a witness kept of a replay that it watched, up to the failure or the first time nothing moved."""
    uncovered = (rank for rank, kept in enumerate(witness.moments_on) if not all(moment.covered for moment in kept))
    rank = outcome.failure.rank if outcome.failure is not None else next(uncovered, 0)
    steps, moments = witness.steps, witness.moments_on[rank]
    if outcome.failure is None and witness.until_stuck is not None:
        steps, moments = steps[: witness.until_stuck[0]], moments[: witness.until_stuck[1]]
    return History(
        trace, rules, target, outcome, tuple(steps), tuple(moments), "decisions" in witness.capabilities, rank
    )
