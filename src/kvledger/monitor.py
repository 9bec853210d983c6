"""The monitor that asks every invariant at its moments while a replay runs."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.events import Abort, Event, Submit, Transferred
from kvledger.evidence import Evidence
from kvledger.invariants import INVARIANTS, Invariant
from kvledger.node import NodeSettings, PrefillNode
from kvledger.record import Decision, RoundRecord
from kvledger.replay import Broken, Monitor, Outcome, Stuck, Target, TargetFactory, replay
from kvledger.rules import AccountingRules
from kvledger.trace import Trace


class InvariantMonitor(Monitor):
    """Asks each invariant, and those that the target brings along, at its moments; keeps the first time one fails."""

    def __init__(self, invariants: Iterable[Invariant] = INVARIANTS) -> None:
        super().__init__()
        self._pending: dict[str, list[Invariant]] = {}
        for invariant in invariants:
            self._pending.setdefault(invariant.when, []).append(invariant)
        self.skipped: list[str] = []
        self.crash: Exception | None = None
        self._round = self._rounds_ended = 0

    def attach(self, target: Target, settings: NodeSettings, rules: AccountingRules) -> None:
        self._target = target
        for invariant in getattr(target, "invariants", ()):
            if all(invariant not in pending for pending in self._pending.values()):
                self._pending.setdefault(invariant.when, []).append(invariant)
        for when, invariants in self._pending.items():
            able = [invariant for invariant in invariants if invariant.fits(target.capabilities)]
            self.skipped += [invariant.name for invariant in invariants if invariant not in able]
            self._pending[when] = able
        snapshot = target.snapshot()
        self.evidence = Evidence(settings, rules, snapshot, snapshot)

    def before_decision(self) -> None:
        self.evidence.before = self.evidence.after

    def after_decision(self, decision: Decision) -> None:
        self._look()
        self._round = self._rounds_ended + 1
        self._ask("decision", decision)
        self.evidence.earlier.append(decision)

    def after_round(self, record: RoundRecord) -> None:
        self._look()
        self._round = self._rounds_ended = record.round
        self._ask("round", record)
        if record.failure is None:
            self._ask("event")
        for rid in record.rolled_back:
            self.evidence.computed.pop(rid, None)
        self.evidence.ended.update(record.finished)
        self.evidence.computed.update((d.request, d.end) for d in record.joined)
        for d in record.joined:
            if not d.tail_tokens:
                self.evidence.computed.pop(d.request)
                self.evidence.unserved.discard(d.request)
        self.evidence.earlier = []

    def after_event(self, event: Event) -> None:
        self._note(event)
        self._look()
        self._ask("event")

    def at_rest(self) -> None:
        self._look()
        self._ask("rest")

    def stuck(self, stuck: Stuck) -> None:
        self._look()
        self._ask("stuck", stuck)

    def crashed(self, error: Exception) -> bool:
        if not getattr(self._target, "foreign", False):
            return False
        self.crash = error
        self._ask("crash", error)
        return True

    def _note(self, event: Event) -> None:
        e = self.evidence
        match event:
            case Submit(request=rid, prompt=prompt, output=output):
                if e.settings.fits_empty_pool(prompt.tokens + output.max_new_tokens - 1):
                    e.unserved.add(rid)
            case Abort(request=rid):
                e.computed.pop(rid, None)
                e.unserved.discard(rid)
                e.ended.add(rid)
            case Transferred(request=rid) if any(r.rid == rid and r.in_flight for r in e.after.live):
                e.ended.add(rid)

    def _look(self) -> None:
        self.evidence.after = self._target.snapshot()

    def _ask(self, when: str, *facts: object) -> None:
        """First findings only: what follows from a broken promise would bury it."""
        for invariant in tuple(self._pending.get(when, ())):
            finding = invariant.check(self.evidence, *facts)
            if finding is not None:
                self._pending[when].remove(invariant)
                self.broken.append(Broken(invariant.name, self._round, finding.request, finding.message))


def checked_replay(
    trace: Trace,
    rules: AccountingRules | None = None,
    *,
    target: TargetFactory = PrefillNode,
    source: str = "trace",
) -> Outcome:
    """`replay` with every invariant asked. TraceError names an event that cannot happen."""
    return replay(trace, rules, target=target, monitor=InvariantMonitor(), source=source)
