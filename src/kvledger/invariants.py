"""The promises a scheduler makes, each a named object with its reason and its check.

A check sees evidence, never the scheduler's ledger alone: it is the ledger that is on trial, so what is needed is
counted from the requests and what is there from the pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvledger.adder import AddReqResult
from kvledger.arithmetic import ceil_pages, ceil_tokens, floor_tokens
from kvledger.node import FIRST_TOKEN, NodeSettings
from kvledger.record import Decision, LiveRequest, RoundRecord, Snapshot
from kvledger.replay import Stuck
from kvledger.rules import AccountingRules


class Finding(NamedTuple):
    """Why an invariant does not hold, and the request it shows on."""

    request: str | None
    message: str


@dataclass(slots=True)
class Evidence:
    """What a check may look at. `before` and `after` surround the decision; `earlier` are this round's decisions
    before it. `computed` is how far each admitted, unfinished request had come when the last round ended, in tokens.
    """

    settings: NodeSettings
    rules: AccountingRules
    before: Snapshot
    after: Snapshot
    earlier: list[Decision] = field(default_factory=list)
    computed: dict[str, int] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        return self.settings.page_size

    @property
    def grid_tokens(self) -> int:
        return self.rules.grid_tokens(page_size=self.page_size, node_align=self.settings.checkpoint_align)


@dataclass(frozen=True, slots=True)
class Invariant:
    """`when` it is asked: after a decision, after a round, after any event, at rest or when stuck.

    `needs` are the capabilities of a target without which it is skipped, by name.
    """

    name: str
    reason: str
    when: str
    check: Callable[..., Finding | None]
    needs: frozenset[str] = frozenset()


# --- after every decision


def _promises_covered(e: Evidence, decision: Decision) -> Finding | None:
    """Baseline against what the admitted requests still have to allocate, both counted in pages."""
    needed_pages = sum(needed_pages_of(request, e.page_size) for request in e.after.live)
    baseline_pages = e.after.baseline_pages
    if baseline_pages >= needed_pages:
        return None
    return Finding(
        decision.request,
        f"after {decision.request} was {decision.kind}, admitted prompts still need {needed_pages * e.page_size} "
        f"tokens, and free + evictable is {baseline_pages * e.page_size}",
    )


def needed_pages_of(request: LiveRequest, page_size: int) -> int:
    """Pages that an admitted request has yet to allocate to finish its prefill."""
    return ceil_pages(request.prompt_tokens, page_size) - len(request.pages)


def _order(_: Evidence, decision: Decision) -> Finding | None:
    if decision.cur_rem_tokens >= decision.rem_total_tokens:
        return None
    return Finding(
        decision.request,
        f"cur_rem_tokens {decision.cur_rem_tokens} is below rem_total_tokens {decision.rem_total_tokens}",
    )


def _never_forced(_: Evidence, decision: Decision) -> Finding | None:
    if not decision.forced:
        return None
    return Finding(
        decision.request, f"nothing remained, and {decision.request} was forced to run {decision.tokens} tokens"
    )


def _on_grid(e: Evidence, decision: Decision) -> Finding | None:
    if not decision.joined or decision.tail_tokens <= 0:
        return None
    grid_end = floor_tokens(decision.end, e.grid_tokens)
    if decision.end == grid_end or grid_end <= decision.start:
        return None
    return Finding(
        decision.request,
        f"chunk [{decision.start}, {decision.end}) ends off the grid of {e.grid_tokens}, {grid_end} was in reach",
    )


def _one_half_done(e: Evidence, decision: Decision) -> Finding | None:
    cut = {d.request for d in (*e.earlier, decision) if d.kind == "deferred" or (d.joined and d.tail_tokens > 0)}
    if len(cut) <= 1:
        return None
    return Finding(decision.request, f"{len(cut)} requests are half done: {', '.join(sorted(cut))}")


def _refusal_is_free(e: Evidence, decision: Decision) -> Finding | None:
    if decision.kind != "refused" or e.before == e.after:
        return None
    changed = [name for name in Snapshot.__slots__ if getattr(e.before, name) != getattr(e.after, name)]
    return Finding(decision.request, f"refusing {decision.request} changed {', '.join(changed)}")


def _ledger_exact(e: Evidence, decision: Decision) -> Finding | None:
    """Both offsets and the baseline, counted afresh from the batch and the pages."""
    baseline = e.after.baseline_pages * e.page_size
    now = later = 0
    for d in (*e.earlier, decision):
        d_now, d_later = owed_tokens(d, e.rules, e.page_size)
        now += d_now
        later += d_later
    expected = (baseline, baseline - now, baseline - now - later)
    stated = (decision.baseline, decision.cur_rem_tokens, decision.rem_total_tokens)
    if stated == expected:
        return None
    return Finding(
        decision.request,
        f"(baseline, cur_rem_tokens, rem_total_tokens) is {stated}, the batch and the pages come to {expected}",
    )


def owed_tokens(decision: Decision, rules: AccountingRules, page_size: int) -> tuple[int, int]:
    """Tokens a decision promises under `rules`: due in this batch, and due later."""
    if decision.kind == "refused":
        return 0, 0
    if decision.kind == "deferred":
        return 0, ceil_tokens(decision.tail_tokens, page_size) + FIRST_TOKEN
    now = ceil_tokens(decision.tokens, page_size) + page_size
    if not decision.tail_tokens:
        return now, FIRST_TOKEN
    return now, ceil_tokens(decision.tail_tokens, page_size) + FIRST_TOKEN if rules.reserve_tail else 0


def _gate_covers_charge(e: Evidence, decision: Decision) -> Finding | None:
    """Rounding a last page up may overdraw the books by less than that page; anything more the gate should have met."""
    if decision.kind not in ("whole", "truncated") or decision.rem_total_tokens > -e.page_size:
        return None
    return Finding(
        decision.request,
        f"{decision.request} was admitted and rem_total_tokens fell to {decision.rem_total_tokens}, a page or more "
        "below zero",
    )


def _batch_in_budget(e: Evidence, decision: Decision) -> Finding | None:
    """Compute budgets, counted from the batch: nobody joins once one is spent, no chunk exceeds what is left."""
    if not decision.joined:
        return None
    batch = [d for d in e.earlier if d.joined]
    spent_tokens = sum(ceil_tokens(d.tokens, e.page_size) for d in batch)
    chunk_limit, input_limit = e.settings.chunked_prefill_size, e.settings.max_prefill_tokens
    gap_spent = e.rules.spend_gap and any(d.tail_tokens > 0 for d in batch)
    chunk_left = None if chunk_limit is None else 0 if gap_spent else chunk_limit - spent_tokens
    if chunk_left is not None and (decision.tokens > chunk_left or (batch and chunk_left <= 0)):
        return Finding(decision.request, f"{decision.tokens} tokens joined with {chunk_left} of the chunk budget left")
    if input_limit is not None and batch and spent_tokens >= input_limit:
        return Finding(
            decision.request, f"joined a batch of {spent_tokens} tokens, max_prefill_tokens is {input_limit}"
        )
    return None


def _fix_is_minimal(e: Evidence, decision: Decision) -> Finding | None:
    """A NO_TOKEN must hold against the books counted afresh: tail and newcomer together do not fit."""
    if decision.reason is not AddReqResult.NO_TOKEN:
        return None
    owed = sum(sum(owed_tokens(d, e.rules, e.page_size)) for d in e.earlier)
    left = e.before.baseline_pages * e.page_size - decision.newly_locked_tokens - owed
    need = decision.prompt_tokens - decision.prefix_tokens + FIRST_TOKEN + e.page_size
    if not need < left:
        return None
    return Finding(decision.request, f"refused with NO_TOKEN, but its {need} tokens are below the {left} that remain")


# --- after every round


def _admitted_finishes(e: Evidence, record: RoundRecord) -> Finding | None:
    """No allocation of an admitted request fails, and what it has computed is never computed again."""
    if record.failure is not None:
        return Finding(record.failure.request, record.failure.message)
    for decision in record.joined:
        computed = e.computed.get(decision.request, decision.start)
        if decision.start != computed:
            return Finding(
                decision.request, f"{decision.request} had computed {computed} tokens and went on from {decision.start}"
            )
    alive = {request.rid for request in e.after.live}
    lost = next((rid for rid in e.computed if rid not in alive), None)
    return Finding(lost, f"{lost} was admitted and is gone before its prefill was done") if lost else None


# --- after every event


def _conserved(e: Evidence) -> Finding | None:
    """Free, cached, private and held pages are disjoint by identity, and together they are the pool."""
    s = e.after
    used = [*s.released, *s.held]
    used += [page for page, _, _, _ in s.cached]
    for request in s.live:
        used += request.private_pages
    distinct = set(used)
    in_use_pages = s.pool_pages - len(s.never_used)
    if len(used) == len(distinct) == in_use_pages and (not used or max(used) < in_use_pages):
        return None
    twice = sorted(page for page, times in Counter(used).items() if times > 1)
    missing_pages = in_use_pages - len(distinct)
    return Finding(
        None, f"of {in_use_pages} pages in use, {missing_pages} belong to nobody and {len(twice)} to two: {twice[:5]}"
    )


def _no_use_after_free(e: Evidence) -> Finding | None:
    """A live request's cached pages are cached and locked, its private ones are nobody else's and not free."""
    s = e.after
    if not s.live:
        return None
    locked = {page for page, lock_refs, _, _ in s.cached if lock_refs > 0}
    cached = {page for page, _, _, _ in s.cached}
    free = set(s.released)
    owned: set[int] = set(s.held)
    for request in s.live:
        shared, private = set(request.pages[: request.shared_pages]), set(request.private_pages)
        if len(shared) + len(private) != len(request.pages) or not shared.isdisjoint(private):
            return Finding(request.rid, f"{request.rid} has a page twice in its table")
        if not shared <= locked:
            return Finding(
                request.rid, f"{request.rid} uses cached pages that no lock protects: {_few(shared - locked)}"
            )
        if not private.isdisjoint(free) or not private.isdisjoint(owned) or not private.isdisjoint(cached):
            return Finding(
                request.rid, f"{request.rid} uses pages that are not its own: {_few(private & (free | owned | cached))}"
            )
        owned |= private
    return None


# --- at rest, and when nothing moves


def _quiescent(e: Evidence) -> Finding | None:
    s = e.after
    locked_pages = sum(1 for _, lock_refs, pinned_refs, _ in s.cached if lock_refs != pinned_refs)
    accounted_pages = s.free_pages + len(s.held) + len(s.cached)
    leaked_pages = s.pool_pages - accounted_pages
    if not (locked_pages or leaked_pages or s.live or s.open_promises):
        return None
    return Finding(
        s.live[0].rid if s.live else None,
        f"at rest {locked_pages} pages are locked, {leaked_pages} leaked, {len(s.live)} requests alive and "
        f"{len(s.open_promises)} promises open",
    )


def _progress(e: Evidence, stuck: Stuck) -> Finding | None:
    """Slots that someone outside the trace holds or locks for ever excuse a node: its pool is not empty."""
    if e.after.held or any(pinned_refs for _, _, pinned_refs, _ in e.after.cached):
        return None
    return Finding(stuck.request, f"{stuck.request} fits an empty pool and never finishes: {stuck.message}")


def _few(pages: Iterable[int]) -> str:
    return str(sorted(pages)[:5])


_OFFSETS = frozenset({"offsets", "decisions"})
_DECISIONS = frozenset({"decisions"})
_BATCHES = frozenset({"batches"})
_GRID = frozenset({"batches", "grid"})
_PAGES = frozenset({"pages"})

INVARIANTS: tuple[Invariant, ...] = (
    Invariant(
        "promises-covered", "the pool can still give all that was admitted", "decision", _promises_covered, _BATCHES
    ),
    Invariant("never-forced", "a forced chunk is an allocation nobody counted", "decision", _never_forced, _DECISIONS),
    Invariant("order", "what is due now is part of what is due at all", "decision", _order, _OFFSETS),
    Invariant(
        "ledger-exact",
        "an offset is the sum of what was promised, no more, no less",
        "decision",
        _ledger_exact,
        _OFFSETS,
    ),
    Invariant(
        "gate-covers-charge",
        "an admission is charged no more than its gate asked for",
        "decision",
        _gate_covers_charge,
        _OFFSETS,
    ),
    Invariant("batch-in-budget", "a spent compute budget admits nobody", "decision", _batch_in_budget, _DECISIONS),
    Invariant(
        "fix-is-minimal", "a refusal for memory is never more than safety needs", "decision", _fix_is_minimal, _OFFSETS
    ),
    Invariant(
        "refusal-is-free",
        "a refused candidate must not cost the others anything",
        "decision",
        _refusal_is_free,
        _DECISIONS,
    ),
    Invariant("one-half-done", "there is one place for a half-done request", "decision", _one_half_done, _BATCHES),
    Invariant("on-grid", "KDA state is only saved on the checkpoint grid", "decision", _on_grid, _GRID),
    Invariant(
        "admitted-finishes",
        "a failed allocation ends the process, and every request with it",
        "round",
        _admitted_finishes,
    ),
    Invariant("conserved", "a page has one owner, and none is lost", "event", _conserved, _PAGES),
    Invariant("no-use-after-free", "a page in use must not be given away", "event", _no_use_after_free, _PAGES),
    Invariant("quiescent", "what is left at rest is a leak", "rest", _quiescent, _PAGES),
    Invariant("progress", "a safe scheduler that starves is no scheduler", "stuck", _progress),
)
