"""What an invariant may look at, and what it counts from that: needs, debts and budgets, afresh each time.

It is the ledger that is on trial, so what is needed is counted from the requests, and what is there from the pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvledger.arithmetic import ceil_pages, ceil_tokens
from kvledger.node import FIRST_TOKEN, NodeSettings
from kvledger.record import Decision, LiveRequest, Snapshot
from kvledger.rules import AccountingRules


class Finding(NamedTuple):
    """Why an invariant does not hold, and the request it shows on."""

    request: str | None
    message: str


@dataclass(slots=True)
class Evidence:
    """What a check may look at. `before` and `after` surround the decision; `earlier` are this round's decisions
    before it. `computed` is how far each admitted, unfinished request had come when the last round ended, in tokens.
    `unserved` requests fit an empty pool and have neither finished their prefill nor been aborted; `ended` ones were
    aborted, or transferred after their prefill.
    """

    settings: NodeSettings
    rules: AccountingRules
    before: Snapshot
    after: Snapshot
    earlier: list[Decision] = field(default_factory=list)
    computed: dict[str, int] = field(default_factory=dict)
    unserved: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    @property
    def page_size(self) -> int:
        return self.settings.page_size

    @property
    def grid_tokens(self) -> int:
        return self.rules.grid_tokens(page_size=self.page_size, node_align=self.settings.checkpoint_align)


def needed_pages_of(request: LiveRequest, page_size: int) -> int:
    """Pages that an admitted request has yet to allocate to finish its prefill; one that decodes may have more."""
    return max(0, ceil_pages(request.prompt_tokens, page_size) - len(request.pages))


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


def gate_tokens(e: Evidence, decision: Decision) -> tuple[int, int]:
    """What the gate asks for a candidate, and what remains for it, both counted from the batch and the pages."""
    owed = sum(sum(owed_tokens(d, e.rules, e.page_size)) for d in e.earlier)
    left = e.before.baseline_pages * e.page_size - decision.newly_locked_tokens - owed
    return decision.prompt_tokens - decision.prefix_tokens + FIRST_TOKEN + e.page_size, left


def compute_left(e: Evidence) -> tuple[int | None, int | None]:
    """What the batch has left of the chunk budget and of max_prefill_tokens."""
    batch = [d for d in e.earlier if d.joined]
    spent_tokens = sum(ceil_tokens(d.tokens, e.page_size) for d in batch)
    if e.settings.mixed_chunk:
        spent_tokens += sum(1 for request in e.before.live if request.in_flight)  # each takes a token in this batch
    chunk_limit, input_limit = e.settings.chunked_prefill_size, e.settings.max_prefill_tokens
    gap_spent = e.rules.spend_gap and any(d.tail_tokens > 0 for d in batch)
    chunk_left = None if chunk_limit is None else 0 if gap_spent else chunk_limit - spent_tokens
    return chunk_left, None if input_limit is None else input_limit - spent_tokens
