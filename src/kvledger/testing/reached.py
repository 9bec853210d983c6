"""What a search has met: every branch of a round, counted from decisions and records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvledger.adder import AddReqResult
from kvledger.arithmetic import floor_tokens
from kvledger.decode import CLIP_MAX_NEW_TOKENS
from kvledger.events import (
    Abort,
    Cached,
    Event,
    Finish,
    Hold,
    Release,
    Transferred,
)
from kvledger.evidence import is_simulated, needed_pages_of
from kvledger.invariants import INVARIANTS, Invariant
from kvledger.monitor import InvariantMonitor
from kvledger.record import Decision, RoundRecord
from kvledger.replay import Outcome, Stuck, Target
from kvledger.rules import AccountingRules
from kvledger.testing import reached_faults, reached_pools, reached_ranks, reached_residue

BRANCHES: tuple[str, ...] = (
    "resumed to its end",
    "resumed and cut again",
    "resumed, cut by memory",
    "forced",
    "deferred",
    "whole",
    "truncated",
    "admitted behind a cut",
    "chunk end aligned down",
    "chunk end kept off the grid",
    "chunk starts inside a page",
    "residue of chunk budget",
    "device hit",
    "device hit locked from evictable",
    "load-back",
    "NO_TOKEN",
    "NO_TOKEN only because of a tail",
    "OTHER: a request is half done",
    "OTHER: no page of chunk budget",
    "OTHER: too long for the batch",
    "state NO_TOKEN",
    "state OTHER",
    "batch is full",
    "evicted",
    "dropped from host",
    "copy shared",
    "rejected at submit",
    "cached on host",
    "cached on device",
    "cached and locked",
    "transferred",
    "aborted",
    "held",
    "released",
    "out of memory",
    "stuck",
)

DECODE_BRANCHES: tuple[str, ...] = (
    "decoded",
    "decoded in a mixed batch",
    "decoded beside a half-done request",
    "output done",
    "output ended early",
    "retracted",
    "came back",
    "preempted",
    "no request slot",
    "out of turn by policy",
    "cut short for shorter ones",
    "output beyond the clip",
    "all can end: admitted",
    "all can end: refused",
    "given up by the node",
)
"""What only a node that decodes can reach."""

PARTS = (reached_residue, reached_pools, reached_faults, reached_ranks)
"""Parts that a node may have: each a module with its `BRANCHES`, and `met(evidence, happened)`, which names those
that a decision, a round or an event took; after a decision the evidence's `earlier` ends with it."""

ASKED_OF_DECODE = tuple(branch for branch in DECODE_BRANCHES if branch != "given up by the node")
"""Those that a search must reach without outsiders who never let go."""

_ONLY_WHEN_BROKEN = frozenset({"forced", "deferred", "resumed, cut by memory", "out of memory"})
_ONLY_WITH_COARSE_GRID = frozenset(
    {
        "admitted behind a cut",
        "residue of chunk budget",
        "OTHER: a request is half done",
        "chunk end kept off the grid",
        "chunk starts inside a page",
    }
)


def expected_branches(rules: AccountingRules, *, sound: bool) -> tuple[str, ...]:
    """The branches that a search of plain nodes under these rules must have reached to prove anything."""
    out_of_reach = {"stuck"}  # only outsiders' locks and holds lead there, or a broken invariant
    if sound:
        out_of_reach |= _ONLY_WHEN_BROKEN
    if rules.checkpoint_align == "page_size":
        out_of_reach |= _ONLY_WITH_COARSE_GRID
    if not rules.reserve_tail:
        out_of_reach.add("NO_TOKEN only because of a tail")
    return tuple(branch for branch in BRANCHES if branch not in out_of_reach)


class SearchMonitor(InvariantMonitor):
    """Judges like InvariantMonitor and keeps what was reached, and how near it came to running out."""

    def __init__(self, invariants: Iterable[Invariant] = INVARIANTS, without: Collection[str] = ()) -> None:
        super().__init__(invariants, without)
        self.reached: Counter[str] = Counter()
        self.rounds = 0
        self.least_slack_pages: int | None = None

    def after_decision(self, decision: Decision) -> None:
        earlier = tuple(self.evidence.earlier)
        super().after_decision(decision)
        self.reached.update(self._decision_branches(decision, earlier))
        if self.evidence.settings.mode == "unified":
            self.reached.update(self._output_branches(decision, earlier))
        self._meet(decision)
        needed_pages = sum(needed_pages_of(request, self.evidence.page_size) for request in self.evidence.after.live)
        slack_pages = self.evidence.after.baseline_pages - needed_pages
        if self.least_slack_pages is None or slack_pages < self.least_slack_pages:
            self.least_slack_pages = slack_pages

    def after_round(self, record: RoundRecord) -> None:
        super().after_round(record)
        self.rounds += 1
        self.reached.update(_round_branches(record))
        if self.evidence.settings.mode == "unified":
            self.reached.update(self._decode_branches(record))
        self._meet(record)

    def after_event(self, event: Event) -> None:
        super().after_event(event)
        branch = _event_branch(event)
        if branch is not None and not is_ignored(self._target, event):
            self.reached[branch] += 1
        self._meet(event)

    def _meet(self, happened: Decision | RoundRecord | Event) -> None:
        for part in PARTS:
            self.reached.update(part.met(self.evidence, happened))

    def stuck(self, stuck: Stuck) -> None:
        super().stuck(stuck)
        self.reached["stuck"] += 1

    def finished(self, outcome: Outcome) -> None:
        """An example is over: count what only its outcome tells."""
        self.reached["rejected at submit"] += len(outcome.rejected_at_submit)

    def _decode_branches(self, record: RoundRecord) -> Iterable[str]:
        half_done = any(not request.in_flight for request in self.evidence.after.live)
        told = {
            "decoded": bool(record.decoded),
            "decoded in a mixed batch": bool(record.decoded and record.joined),
            "decoded beside a half-done request": bool(record.decoded and half_done),
            "output done": bool(record.finished),
            "retracted": bool(record.retracted),
            "preempted": bool(record.preempted),
            "given up by the node": bool(record.aborted),
            "no request slot": record.batch_is_full and not record.refused,
        }
        return [branch for branch, reached in told.items() if reached]

    def _output_branches(self, decision: Decision, earlier: Sequence[Decision]) -> Iterable[str]:
        e, rid = self.evidence, decision.request
        if decision.kind != "loading" and not decision.from_queue:
            budget = e.settings.chunked_prefill_size
            waits = decision.rem_chunk_tokens is not None and decision.rem_chunk_tokens >= e.page_size
            if decision.tail_tokens and waits and budget and e.settings.schedule_policy == "shortest-prefill-first":
                yield "cut short for shorter ones"
            return
        if is_simulated(e, decision):
            yield f"all can end: {'admitted' if decision.joined else 'refused'}"
        elif e.outputs[rid].max_new_tokens > CLIP_MAX_NEW_TOKENS and decision.joined:
            yield "output beyond the clip"
        if e.generated.get(rid) and decision.joined:
            yield "came back"
        place = sum(1 for d in earlier if d.from_queue)
        if place < len(e.queue) and e.queue[place] != rid:
            yield "out of turn by policy"

    def _decision_branches(self, decision: Decision, earlier: Sequence[Decision]) -> Iterable[str]:
        if decision.kind == "refused":
            return self._refusal_branches(decision, earlier)
        if decision.kind == "deferred":
            return ("deferred",)
        if decision.kind == "loading":
            return ("load-back",) if decision.load_back else ()
        return (*self._chunk_branches(decision, earlier), *_hit_branches(decision))

    def _refusal_branches(self, decision: Decision, earlier: Sequence[Decision]) -> Iterable[str]:
        if decision.reason is AddReqResult.NO_TOKEN:
            yield "NO_TOKEN"
            tails = sum(d.tail_tokens for d in earlier if d.kind in ("truncated", "resumed"))
            need = decision.prompt_tokens - decision.prefix_tokens + self.evidence.page_size
            if (
                self.evidence.rules.reserve_tail
                and need < decision.rem_total_tokens - decision.newly_locked_tokens + tails
            ):
                yield "NO_TOKEN only because of a tail"
        elif decision.rem_chunk_tokens is None:
            yield "OTHER: too long for the batch"
        elif decision.rem_chunk_tokens < self.evidence.page_size:
            yield "OTHER: no page of chunk budget"
        else:
            yield "OTHER: a request is half done"

    def _chunk_branches(self, decision: Decision, earlier: Sequence[Decision]) -> Iterable[str]:
        cut = decision.tail_tokens > 0
        earlier_cut = any(d.joined and d.tail_tokens > 0 for d in earlier)
        if decision.kind == "resumed":
            yield "forced" if decision.forced else "resumed and cut again" if cut else "resumed to its end"
            budget = self.evidence.settings.chunked_prefill_size
            if cut and budget is not None and self.evidence.before.baseline_pages * self.evidence.page_size < budget:
                yield "resumed, cut by memory"
        else:
            yield decision.kind
            if earlier_cut:
                yield "admitted behind a cut"
        if decision.start % self.evidence.page_size:
            yield "chunk starts inside a page"
        if cut:
            yield from self._cut_branches(decision)

    def _cut_branches(self, decision: Decision) -> Iterable[str]:
        on_grid = floor_tokens(decision.end, self.evidence.grid_tokens) == decision.end
        yield "chunk end aligned down" if on_grid else "chunk end kept off the grid"
        if decision.rem_chunk_tokens is not None and decision.rem_chunk_tokens >= self.evidence.page_size:
            yield "residue of chunk budget"


def _hit_branches(decision: Decision) -> Iterable[str]:
    if decision.kind == "resumed":
        return
    if decision.prefix_tokens:
        yield "device hit"
    if decision.newly_locked_tokens:
        yield "device hit locked from evictable"
    if decision.load_back:
        yield "load-back"


def _round_branches(record: RoundRecord) -> Iterable[str]:
    if record.budget_state is not AddReqResult.CONTINUE:
        yield f"state {record.budget_state}"
    if record.batch_is_full:
        yield "batch is full"
    if record.evicted_pages:
        yield "evicted"
    if record.dropped_pages:
        yield "dropped from host"
    if record.shared_pages:
        yield "copy shared"
    if record.failure is not None:
        yield "out of memory"


def is_ignored(target: Target, event: Event) -> bool:
    """The target says that it does nothing with such an event."""
    ignores = getattr(target, "ignores", ())
    match event:
        case Cached():
            return "cached" in ignores
        case Hold() | Release():
            return "held" in ignores
    return False


def _event_branch(event: Event) -> str | None:
    match event:
        case Cached(locked=True):
            return "cached and locked"
        case Cached(tier=tier):
            return f"cached on {tier}"
        case Transferred():
            return "transferred"
        case Abort():
            return "aborted"
        case Hold():
            return "held"
        case Release():
            return "released"
        case Finish():
            return "output ended early"
    return None
