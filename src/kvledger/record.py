"""What a target lets the outside see: decisions, rounds, and a snapshot of every page and live request.

Plain frozen data, so that reports and invariants never hold a scheduler's own objects. Sizes are tokens unless a name
says pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvledger.adder import AddReqResult
from kvledger.ledger import Promise

POOL_UNITS = {"state_slots": "slot", "window_pool": "page", "shared_bytes": "byte"}
"""What each second pool counts in."""


def amount(units: int, pool: str | None) -> str:
    """So much of a pool, in words: tokens of the KV pool, or a second pool's own units."""
    if pool is None:
        return f"{units} token{'' if units == 1 else 's'}"
    return f"{units} {POOL_UNITS.get(pool, 'unit')}{'' if units == 1 else 's'} of {pool}"


DecisionKind = Literal["whole", "truncated", "resumed", "deferred", "loading", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One answer of the adder, with the ledger's figures right after it.

    [start, end) is the chunk (empty for a refusal); `prefix_tokens` the device hit, of which `newly_locked_tokens`
    were evictable until this request's lock; `load_back` what was copied up from the host at once. `short_of` names
    the second pool that refused, where it was not the KV pool, and `short_units` what was wanted of it and what was
    left. `output_tokens`: what the gate counts on of its output.
    `chunk_limit`: what the half-done one may compute at most, because the rest of the budget is kept for shorter ones.
    `rank_hits`: (`prefix_tokens`, `newly_locked_tokens`) on each replaying rank, where the gate asked them too.
    "loading" is admitted and runs when its load is there: with a `load_back` in the round that admits it, without one
    in each later one. `faults` are the kinds that struck while it was decided.
    """

    request: str
    kind: DecisionKind
    prompt_tokens: int
    prefix_tokens: int
    start: int
    end: int
    load_back: int = 0
    newly_locked_tokens: int = 0
    reason: AddReqResult | None = None
    forced: bool = False
    short_of: str | None = None
    short_units: tuple[int, int] | None = None
    faults: tuple[str, ...] = ()
    output_tokens: int = 1
    chunk_limit: int | None = None
    rank_hits: tuple[tuple[int, int], ...] = ()
    baseline: int
    rem_total_tokens: int
    cur_rem_tokens: int
    rem_chunk_tokens: int | None
    rem_input_tokens: int | None

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def tail_tokens(self) -> int:
        return self.prompt_tokens - self.end

    @property
    def joined(self) -> bool:
        """It is to be part of this round's batch."""
        return self.kind in ("whole", "truncated", "resumed")

    @property
    def let_in(self) -> bool:
        """It is to be part of this round's batch, or begins to load."""
        return self.joined or (self.kind == "loading" and self.load_back > 0)

    @property
    def from_queue(self) -> bool:
        """It was waiting until this decision."""
        return self.kind == "refused" or (self.let_in and self.kind != "resumed")


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """An admitted request's allocation that found too little: `wanted` tokens against `free` and `evictable`.

    Not `known`: the target cannot tell whose it was; `request` then says in words who comes into question. `rank` is
    the pipeline rank whose pool it was. `pool` names a second pool, if it is that which had too little; the figures are
    then in its units.
    """

    request: str
    wanted: int
    free: int
    evictable: int
    message: str
    known: bool = True
    rank: int = 0
    pool: str | None = None

    @property
    def named(self) -> str | None:
        """The request, if it is known which."""
        return self.request if self.known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRound:
    """A round on a pipeline rank that replays: the chunks (request, start, end) it was to run, in order, whose prefill
    it put off, and its pool after the round."""

    rank: int
    ran: tuple[tuple[str, int, int], ...]
    deferred: tuple[str, ...]
    free: int
    evictable: int
    protected: int
    evicted_pages: int = 0
    dropped_pages: int = 0
    shared_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRound:
    """A second pool in a round, in its own `unit`: free and evictable (it can be given up) after the round, or at its
    failure; `promised` is what those admitted had yet to take of it when the decisions ended."""

    name: str
    unit: str
    free: int
    evictable: int
    promised: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round: the ledger's figures when the decisions ended, the pool's after the round (or at its failure).

    In this round so many pages left the device, left the host, and were found to be cached already when inserted.
    Requests that `decoded` took a token, `finished` their output, had their admitted prefill `rolled_back`, or wait for
    a copy that goes on after the round (`loading`). Of the running ones `retracted` went back to the queue because the
    pool had no slots for everybody's next token, `preempted` to make way for a more important one; nobody is in both.
    `aborted` ones could not go on, each with the reason: they may have gone back first. `struck` are the faults that
    did, each with its request. `ranks` are the pipeline ranks that replayed it; all else is the deciding rank's.
    `pools` are the second pools that have a limit, where there are any. A `paused` one did nothing.
    """

    round: int
    baseline: int
    rem_total_tokens: int
    cur_rem_tokens: int
    rem_chunk_tokens: int | None
    budget_state: AddReqResult
    batch_is_full: bool
    decisions: tuple[Decision, ...]
    promises: tuple[Promise, ...]
    free: int
    evictable: int
    protected: int
    evicted_pages: int = 0
    dropped_pages: int = 0
    shared_pages: int = 0
    failure: AllocationFailure | None = None
    decoded: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    retracted: tuple[str, ...] = ()
    rolled_back: tuple[str, ...] = ()
    loading: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    aborted: tuple[tuple[str, str], ...] = ()
    ranks: tuple[RankRound, ...] = ()
    struck: tuple[tuple[str, str], ...] = ()
    pools: tuple[PoolRound, ...] = ()
    paused: bool = False

    @property
    def joined(self) -> tuple[Decision, ...]:
        """What ran in the batch."""
        gone = self.withdrawn
        return tuple(each for each in self.decisions if each.joined and each.request not in gone)

    @property
    def withdrawn(self) -> tuple[str, ...]:
        """Requests that were given up between the decision about them and its allocation."""
        return tuple(rid for kind, rid in self.struck if kind == "abort-decided") if self.struck else ()

    @property
    def open_promises(self) -> tuple[Promise, ...]:
        """The `promises`, but for those that went with their requests before anything was allocated."""
        gone = self.withdrawn
        return tuple(each for each in self.promises if each.request not in gone) if gone else self.promises

    @property
    def refused(self) -> tuple[Decision, ...]:
        return tuple(decision for decision in self.decisions if decision.kind == "refused")

    @property
    def went_back(self) -> tuple[str, ...]:
        """Running requests that gave up their slots, for whatever reason, in the order in which they did."""
        return (*self.preempted, *self.retracted)

    @property
    def gave_up(self) -> tuple[str, ...]:
        """The `aborted` ones, without their reasons."""
        return tuple(request for request, _ in self.aborted)

    @property
    def forced(self) -> bool:
        return any(decision.forced for decision in self.decisions)


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """An admitted request whose pages are still held. The first `shared_pages` of `pages` are cached and locked.

    `in_flight`: its prefill is done; `decoding`: and it goes on here. `prompt_tokens` count in what one that was sent
    back had generated.
    """

    rid: str
    prompt_tokens: int
    pages: tuple[int, ...]
    shared_pages: int
    in_flight: bool
    decoding: bool = False

    @property
    def private_pages(self) -> tuple[int, ...]:
        return self.pages[self.shared_pages :]


@dataclass(frozen=True, slots=True)
class PageView:
    """A cached page: its device page number, locks (`pinned_refs` of them from outside), recency."""

    page: int
    lock_refs: int
    pinned_refs: int
    last_used: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """A second pool, unit by unit. `owned`: units that a request has to itself. `attached`: (unit, device page, uses),
    where `uses` counts the live requests that need it; without any it can be given up. `used`: attached units that a
    request needs right now. `promised`: requests with a promise of the last round that no allocation has settled.

    A pool that others are cut from has no units of its own: `weights` says what a unit of each of them costs, where
    the KV pool is called "".
    """

    name: str
    unit: str
    capacity: int
    released: tuple[int, ...] = ()
    never_used: range = range(0)
    owned: tuple[tuple[str, tuple[int, ...]], ...] = ()
    attached: tuple[tuple[int, int, int], ...] = ()
    used: tuple[tuple[str, tuple[int, ...]], ...] = ()
    promised: tuple[str, ...] = ()
    weights: tuple[tuple[str, int], ...] = ()

    @property
    def free_units(self) -> int:
        return len(self.released) + len(self.never_used)

    @property
    def evictable_units(self) -> int:
        return sum(1 for _, _, uses in self.attached if uses == 0)

    @property
    def baseline_units(self) -> int:
        """Free, and attached to cached pages without being needed, counted unit by unit."""
        return self.free_units + self.evictable_units

    @property
    def taken_units(self) -> int:
        return self.capacity - self.free_units


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every page of the pool by identity, and every live request. `never_used` pages are free too.

    Of the host tier it has a count and, through `clock`, whether any page of either tier was used: a host may be a
    hundred times the pool. `open_promises` were due in the last round and were not settled by an allocation. `ranks`
    are the same of each pipeline rank that replays. Only pins, which somebody will take away again, protect the
    `written_back` pages. `pools` are the second ones, where there are any.
    """

    page_size: int
    pool_pages: int
    released: tuple[int, ...]
    never_used: range
    cached: tuple[tuple[int, int, int, int], ...]
    live: tuple[LiveRequest, ...]
    waiting: tuple[str, ...]
    held: tuple[int, ...] = ()
    host_pages: int = 0
    clock: int = 0
    open_promises: tuple[Promise, ...] = field(default=())
    ranks: tuple[Snapshot, ...] = ()
    written_back: tuple[int, ...] = ()
    pools: tuple[PoolView, ...] = ()

    def pages(self) -> tuple[PageView, ...]:
        """The cached pages as named fields; the search reads the bare tuples, which are much cheaper to make."""
        return tuple(PageView(*page) for page in self.cached)

    @property
    def free_pages(self) -> int:
        return len(self.released) + len(self.never_used)

    @property
    def evictable_pages(self) -> int:
        return [lock_refs for _, lock_refs, _, _ in self.cached].count(0)

    @property
    def baseline_pages(self) -> int:
        """Free and evictable, counted page by page."""
        return self.free_pages + self.evictable_pages

    @property
    def least_baseline_pages(self) -> int:
        """The smallest baseline of all ranks."""
        return min(snapshot.baseline_pages for snapshot in (self, *self.ranks))
