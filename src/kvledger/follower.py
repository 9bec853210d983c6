"""A pipeline rank that replays: a pool, a prefix tree and requests of its own, and no will of its own.

What it is told is the plan, one entry as each decision is taken: who has ended, who runs how much, whose prefill waits.
A rank that only follows acts on nothing else but its own memory. One whose gate checks the plan asks books of its own
first, and leaves out what they refuse: it is here to show what that breaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from kvledger.adder import AddReqResult, Chunk, ChunkKind, PrefillAdder
from kvledger.node import PrefillNode
from kvledger.pool import OutOfPages, PrefillOutOfMemory
from kvledger.radix import PrefixTree
from kvledger.record import DecisionKind, RankRound
from kvledger.request import Request
from kvledger.rules import AccountingRules
from kvledger.settings import FIRST_TOKEN, NodeSettings


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One request of the plan: its chunk [start, end) in tokens, empty where it was deferred."""

    request: str
    kind: DecisionKind
    start: int
    end: int


class ReplayBooks(PrefillAdder):
    """The adder of a rank that replays: entries of the plan join without being asked about."""

    def join(self, chunk: Chunk) -> None:
        self.can_run_list.append(chunk)
        if chunk.end < chunk.request.prompt_tokens:
            self.chunked_req = chunk.request

    def put_off(self, request: Request) -> None:
        """The half-done request runs nothing in this round; where tails are reserved, its own is."""
        self.deferred = True
        self.chunked_req = request
        self._reserve(request, request.prompt_tokens - request.prefix_tokens)


class _Locked:
    """A tree whose lock hooks are left out: for books on a request that is locked already."""

    def __init__(self, tree: PrefixTree) -> None:
        self.evictable_size = tree.evictable_size
        self.init_load_back = tree.init_load_back


def cut_hit(request: Request, tokens: int, page_size: int) -> None:
    """Shorten a waiting request's hit to its first `tokens`."""
    pages = tokens // page_size
    request.device_hit = request.device_hit[:pages]
    request.host_hit = request.host_hit[: pages - len(request.device_hit)]
    request.prefix_tokens = len(request.device_hit) * page_size
    request.host_hit_tokens = len(request.host_hit) * page_size


class ReplayingRank(PrefillNode):
    """Rank `rank` of a pipeline. `agreed`: a candidate's hit is found and locked before it is told of it."""

    def __init__(self, settings: NodeSettings, rules: AccountingRules, rank: int) -> None:
        super().__init__(settings, rules)
        self.rank = rank
        self.gate = rules.replay_gate
        self.agreed = rules.rank_view == "least"
        self.books = self._own_books()
        self._before = self._counters()

    def _own_books(self) -> ReplayBooks:
        return ReplayBooks(
            self.page_size,
            _Locked(self.tree) if self.agreed else self.tree,
            self.pool,
            rem_input_tokens=self.settings.max_prefill_tokens,
            rem_chunk_tokens=self.settings.chunked_prefill_size,
            rules=self.rules,
            checkpoint_align=self.settings.checkpoint_align,
            first_token=FIRST_TOKEN,
            deciding_rank=self.gate == "reserve",
        )

    # --- a round, as it is told of it

    def open_round(self, ended: Iterable[str]) -> None:
        """The plan's head: requests that the deciding rank has ended since the last one."""
        for rid in ended:
            self.abort(rid)
        self._before = self._counters()
        self._unsettled = self.books = self._own_books()

    def match(self, rid: str) -> int:
        """Find what of a waiting request is cached here; tokens of it in both tiers."""
        return self._matched_tokens(self.waiting[rid])

    def replay(self, entry: PlanEntry) -> None:
        """One entry of the plan. PrefillOutOfMemory if its load-back finds too few slots here."""
        if entry.kind in ("resumed", "deferred"):
            request = self.live.get(entry.request)
            if request is not None:
                self._go_on(request, entry)
        elif entry.request in self.waiting:
            self._join(self.waiting[entry.request], entry)

    def _go_on(self, request: Request, entry: PlanEntry) -> None:
        if entry.kind == "deferred":
            self.books.put_off(request)
        elif self.gate == "follow":
            self.books.join(Chunk(request, "resumed", request.prefix_tokens, entry.end))
        else:
            self.books.add_chunked_req(request)

    def _join(self, request: Request, entry: PlanEntry) -> None:
        """Take the hit as far as the plan's chunk does not compute it; run the rest up to the plan's end."""
        if not self.agreed:
            self._match(request)
            cut_hit(request, entry.start, self.page_size)
        try:
            joined = self._take_in(request) if self.gate == "follow" else self._asks_for(request)
        except OutOfPages as error:
            raise PrefillOutOfMemory(
                request.rid, request.host_hit_tokens, error.free_tokens, error.evictable_tokens
            ) from error
        if not joined:
            return
        self._take_hit(request)
        del self.waiting[request.rid]
        if self.gate == "follow":
            self.books.join(Chunk(request, cast(ChunkKind, entry.kind), request.prefix_tokens, entry.end))

    def _take_in(self, request: Request) -> bool:
        if not self.agreed:
            self.tree.inc_lock_ref(request)
        self.tree.init_load_back(request)
        return True

    def _asks_for(self, request: Request) -> bool:
        """The gate of its own books, which load back as they admit."""
        batch = len(self.books.can_run_list)
        answer = self.books.add_one_req(request)
        joined = len(self.books.can_run_list) > batch
        if not joined and self.agreed:
            self.tree.dec_lock_ref(request)
        assert joined or answer is not AddReqResult.CONTINUE, f"{request.rid} neither joined nor was refused"
        return joined

    def allocate(self) -> PrefillOutOfMemory | None:
        """Step 8, on this rank's pool."""
        return self._allocate_batch(self.books)

    def run(self) -> None:
        """Step 9, into this rank's tree."""
        self._run_batch(self.books)

    def told(self) -> RankRound:
        """What became of the round here."""
        evicted_pages, dropped_pages, shared_pages = (
            after - before for before, after in zip(self._before, self._counters(), strict=True)
        )
        half_done = self.books.chunked_req
        return RankRound(
            rank=self.rank,
            ran=tuple((chunk.request.rid, chunk.start, chunk.end) for chunk in self.books.can_run_list),
            deferred=(half_done.rid,) if self.books.deferred and half_done is not None else (),
            free=self.pool.available_size(),
            evictable=self.tree.evictable_size(),
            protected=self.tree.protected_size(),
            evicted_pages=evicted_pages,
            dropped_pages=dropped_pages,
            shared_pages=shared_pages,
        )
