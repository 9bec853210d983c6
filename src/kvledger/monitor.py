"""The monitor that asks every invariant at its moments while a replay runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fractions import Fraction

from kvledger.decode import NewTokenRatio
from kvledger.events import Abort, Event, Fault, Finish, Pause, Ranks, Resume, Submit, Transferred
from kvledger.evidence import Evidence, PutBack
from kvledger.invariants import INVARIANTS, Invariant
from kvledger.node import PrefillNode
from kvledger.record import Decision, RoundRecord
from kvledger.replay import Broken, Monitor, Outcome, Stuck, Target, TargetFactory, ask, replay
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.trace import Trace


class InvariantMonitor(Monitor):
    """Asks each invariant, and those that the target brings along, at its moments; keeps the first time one fails.

    Those named by `without` are not asked.
    """

    def __init__(self, invariants: Iterable[Invariant] = INVARIANTS, without: Collection[str] = ()) -> None:
        super().__init__()
        self._without = without
        self._pending: dict[str, list[Invariant]] = {}
        for invariant in invariants:
            self._pending.setdefault(invariant.when, []).append(invariant)
        self.skipped: list[str] = []
        self.crash: Exception | None = None
        self._round = self._rounds_ended = self._joined = 0
        self._open = False

    def attach(self, target: Target, settings: NodeSettings, rules: AccountingRules) -> None:
        self._target = target
        self.capabilities = target.capabilities
        for invariant in getattr(target, "invariants", ()):
            if all(invariant not in pending for pending in self._pending.values()):
                self._pending.setdefault(invariant.when, []).append(invariant)
        for when, invariants in self._pending.items():
            able = [invariant for invariant in invariants if invariant.fits(target.capabilities)]
            self.skipped += [invariant.name for invariant in invariants if invariant not in able]
            self._pending[when] = [invariant for invariant in able if invariant.name not in self._without]
        snapshot = target.snapshot()
        self.evidence = Evidence(settings, rules, snapshot, snapshot)
        self._ratio = NewTokenRatio(Fraction(settings.new_token_ratio_percent, 100))
        self.evidence.ratio = self._ratio.current
        self.evidence.ranks_ended = [set() for _ in settings.ranks]
        self._to_be_told: set[str] = set()

    def before_round(self) -> None:
        self._round = self._rounds_ended + 1

    def before_decision(self) -> None:
        self._open_round()
        self.evidence.before = self.evidence.after

    def preempted(self) -> None:
        self._open_round()
        e, before = self.evidence, self.evidence.after
        self._look()
        still = {request.rid for request in e.after.live if request.decoding}
        went = tuple(each.rid for each in before.live if each.decoding and each.rid not in still)
        e.put_back.append(PutBack(before, went, e.mixed_tokens))
        e.mixed_tokens = max(0, e.mixed_tokens - len(went))  # they take no token in this batch
        e.before = e.after

    def withdrew(self) -> None:
        self._look()

    def before_decode(self) -> None:
        self._open_round()
        self._look()

    def _open_round(self) -> None:
        """What the round finds, before anything is decided in it."""
        if self._open:
            return
        self._open = True
        if self._to_be_told:
            self._ended_on(None, *self._to_be_told)
            self._to_be_told.clear()
            self._look()  # the plan's head has gone out
        e = self.evidence
        e.queue = e.after.waiting
        running = sum(request.in_flight for request in e.after.live)
        e.mixed_tokens = running if e.settings.mixed_chunk else 0
        matched = getattr(self._target, "matched_tokens", None)
        if matched is not None and e.settings.schedule_policy in ("lpm", "shortest-prefill-first"):
            e.matched = {rid: matched(rid) for rid in e.queue}

    def after_decision(self, decision: Decision) -> None:
        self._look()
        self.evidence.round = self._round = self._rounds_ended + 1
        self._ask("decision", decision)
        if decision.kind == "loading" and decision.load_back:
            self._begins_to_load(decision)
        self.evidence.earlier.append(decision)
        self.evidence.put_back = []

    def _begins_to_load(self, decision: Decision) -> None:
        e, rid = self.evidence, decision.request
        e.computed[rid] = decision.start
        armed = e.late.get(rid)
        if armed:
            e.arrives[rid] = e.round + armed.pop(0)
            if not armed:
                del e.late[rid]

    def after_round(self, record: RoundRecord) -> None:
        self._open_round()
        self._count_output(record)
        self.evidence.departed = ""
        for rid in record.withdrawn:
            self._gave_up(rid, "between the decision about it and its allocation")
        self.evidence.decided = self.evidence.after
        self._look()
        self._round = self._rounds_ended = record.round
        self.evidence.left = frozenset(
            (*record.finished, *record.went_back, *record.rolled_back, *record.withdrawn, *record.gave_up)
        )
        self._ask("round", record)
        if record.failure is None:
            self._ask("event")
            self._note_alive()
        for rid in record.rolled_back:
            self.evidence.computed.pop(rid, None)
        self.evidence.ended.update(record.finished)
        self.evidence.computed.update((d.request, d.end) for d in record.joined)
        unified = self.evidence.settings.mode == "unified" and "decode" in self._target.capabilities
        for d in record.joined:
            if not d.tail_tokens:
                self.evidence.computed.pop(d.request)
                self._joined += 1
                self.evidence.joins[d.request] = self._joined
                if not unified:
                    self.evidence.unserved.discard(d.request)
        aborted = [rid for rid, _ in record.aborted]
        self.evidence.ended.update(aborted)
        self.evidence.unserved.difference_update(record.finished, aborted)
        self.evidence.earlier = []
        self.evidence.mixed_tokens = 0
        self._open = False
        if "decode" in self.capabilities:
            self._count_ratio(record)

    def _count_output(self, record: RoundRecord) -> None:
        """Everybody who decoded, or whose prompt was done, has made a token."""
        e = self.evidence
        e.taken = {}
        if e.settings.mode == "prefill" or record.failure is not None:
            return
        for rid in (*record.decoded, *(d.request for d in record.joined if not d.tail_tokens)):
            e.taken[rid] = e.taken.get(rid, 0) + 1
            e.generated[rid] = e.generated.get(rid, 0) + 1

    def _count_ratio(self, record: RoundRecord) -> None:
        """The ratio that the next round's books should have: recounted from who decoded and who went back."""
        e = self.evidence
        if record.retracted or any(rid not in record.preempted for rid, _ in record.aborted):
            joined = {d.request for d in record.joined if not d.tail_tokens}
            kept = [_Kept(e, rid) for rid in record.decoded if rid not in joined]
            self._ratio.retracted(kept)
        elif record.decoded and not record.joined:
            self._ratio.decay()
        e.ratio = self._ratio.current

    def after_event(self, event: Event) -> None:
        self._note(event)
        self._look()
        self.evidence.left = frozenset()
        self._ask("event")
        self._note_alive()

    def _note_alive(self) -> None:
        """Who has been let in, for the next event to keep."""
        e = self.evidence
        e.alive = frozenset(request.rid for request in e.after.live)
        e.ranks_alive = [frozenset(request.rid for request in rank.live) for rank in e.after.ranks]

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
        e.departed = ""
        match event:
            case Submit(request=rid, prompt=prompt, output=output):
                e.prompts[rid] = prompt.tokens
                e.asked[rid] = prompt
                e.outputs[rid] = output
                fits = e.settings.fits_empty_pool(prompt.tokens, output)
                fits = fits and e.settings.misfit_in_pools(prompt.tokens) is None
                if fits and e.settings.some_batch_holds(prompt.tokens, e.rules):
                    e.unserved.add(rid)
            case Finish(request=rid) if any(r.rid == rid and r.decoding for r in e.after.live):
                e.ended.add(rid)
                e.unserved.discard(rid)
                e.departed = f"{rid} was finished"
            case Abort(request=rid, ranks=ranks):
                e.unserved.discard(rid)
                if ranks is None or 0 in ranks:
                    e.computed.pop(rid, None)
                    e.ended.add(rid)
                    here = rid in e.after.waiting or any(request.rid == rid for request in e.after.live)
                    if here and e.settings.ranks:
                        self._to_be_told.add(rid)
                if rid in e.ended:  # else a rank that it reaches first waits for the plan
                    self._ended_on(ranks, rid)
                e.departed = f"{rid} was aborted"
            case Transferred(request=rid, ranks=ranks) if e.settings.mode == "prefill":
                e.departed = f"{rid} was transferred" if self._transferred(rid, ranks) else ""
            case Fault(kind="load-late", request=rid, amount=int(rounds)):
                e.late.setdefault(rid, []).append(rounds)
            case Pause() | Resume():
                e.paused = isinstance(event, Pause)

    def _transferred(self, rid: str, ranks: Ranks) -> bool:
        """It ends on each rank that hears of it and has sent it; says whether there is one."""
        e = self.evidence
        sent = [any(r.rid == rid and r.in_flight for r in rank.live) for rank in (e.after, *e.after.ranks)]
        for rank, ended in enumerate((e.ended, *e.ranks_ended)):
            sent[rank] = sent[rank] and (ranks is None or rank in ranks)
            if sent[rank]:
                ended.add(rid)
        return any(sent)

    def _ended_on(self, ranks: Ranks, *rids: str) -> None:
        """These have ended on replaying ranks too: on the ones named."""
        for rank, ended in enumerate(self.evidence.ranks_ended, 1):
            if ranks is None or rank in ranks:
                ended.update(rids)

    def _gave_up(self, rid: str, when: str = "") -> None:
        e = self.evidence
        e.computed.pop(rid, None)
        e.unserved.discard(rid)
        e.ended.add(rid)
        e.departed = f"{rid} was aborted {when}".rstrip()

    def _look(self) -> None:
        self.evidence.after = ask(self._target.snapshot)

    def _ask(self, when: str, *facts: object) -> None:
        """First findings only: what follows from a broken promise would bury it."""
        for invariant in tuple(self._pending.get(when, ())):
            finding = invariant.check(self.evidence, *facts)
            if finding is not None:
                self._pending[when].remove(invariant)
                self.broken.append(Broken(invariant.name, self._round, finding.request, finding.message))


class _Kept:
    """A running request that stayed when others went back, as it was before it took its token."""

    def __init__(self, e: Evidence, rid: str) -> None:
        self.generated_tokens = e.generated.get(rid, 0) - 1
        self.max_new_tokens = e.outputs[rid].max_new_tokens


def checked_replay(
    trace: Trace,
    rules: AccountingRules | None = None,
    *,
    target: TargetFactory = PrefillNode,
    source: str = "trace",
) -> Outcome:
    """`replay` with every invariant asked. TraceError names an event that cannot happen."""
    return replay(trace, rules, target=target, monitor=InvariantMonitor(), source=source)
