"""A prefill node of a disaggregated deployment: it prefills, hands the KV over, and decodes nothing.

`run_round` is the pinned round: open fresh books, resume the half-done request, admit from the queue, and only then
allocate and run. Step numbers in comments are those of the design.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kvledger.adder import AddReqResult, Chunk, PrefillAdder
from kvledger.arithmetic import ceil_pages, floor_tokens
from kvledger.faults import ExposedMemory
from kvledger.policy import continuation_limit, ordered, prefill_work
from kvledger.pool import OutOfPages, PrefillOutOfMemory
from kvledger.pools import longest_hit, mover_of
from kvledger.record import Decision, DecisionKind, RoundRecord, Snapshot
from kvledger.request import USUAL_OUTPUT, CachedPage, Output, Prompt, Request, RequestState
from kvledger.rules import AccountingRules
from kvledger.second_pools import open_pools, opened_books
from kvledger.settings import FIRST_TOKEN, NodeSettings
from kvledger.slots import StateSlots
from kvledger.views import decision_of, device_page, failure_of, ledger_facts, snapshot_of


class Watcher:
    """Told of each decision while the node stands still; the default watches nothing."""

    def before_decision(self) -> None: ...
    def after_decision(self, decision: Decision) -> None: ...
    def preempted(self) -> None:
        """Between two decisions, running requests have been put back for the next candidate."""

    def withdrew(self) -> None:
        """Requests of the batch were given up after the decisions; what is left of it will run."""

    def before_decode(self) -> None:
        """The batch, if there is one, has run; what runs beside it, or in its place, comes next."""


class PrefillNode(ExposedMemory):
    """The project's own scheduler, pool and prefix cache. Names of requests are unique over its life.

    Settings of another mode, or with pipeline ranks, build the node that has registered itself for it (`modes`).
    """

    capabilities = frozenset({"batches", "counts", "grid", "decisions", "offsets", "pages", "decode", "one-cut"})
    features = frozenset({"lpm", "shortest-prefill-first", "priority", "faults", "pools"})
    modes: ClassVar[dict[str, type[PrefillNode]]] = {}

    def __new__(cls, settings: NodeSettings, *_arguments: Any, **_named: Any) -> PrefillNode:
        kind = "ranks" if settings.ranks else settings.mode
        return super().__new__(cls.modes.get(kind, cls) if cls is PrefillNode else cls)

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings.page_size, settings.pool_pages, settings.host_pages)
        self.settings = settings
        self.rules = rules
        self.watcher = watcher or Watcher()
        self.grid_tokens = rules.grid_tokens(page_size=settings.page_size, node_align=settings.checkpoint_align)
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.chunked_req: Request | None = None
        self.live: dict[str, Request] = {}
        self.rank = 0
        self.rounds = 0
        self._arrivals = 0
        self._candidates: Iterable[Request] = ()
        self._unsettled: PrefillAdder | None = None
        self._promised_units: dict[str, int] = {}
        self.slots = self._open_slots()
        self.pools = open_pools(settings, rules, self)
        self.tree.mover = mover_of(self.pools)

    # --- what arrives from outside

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        """Queue a request, or say why it could never be admitted: the entry asks what the gate will ask."""
        if not self.settings.fits_empty_pool(prompt.tokens, output):
            need = self.settings.needed_tokens(prompt.tokens, output)
            pages_tokens = (2 if self.settings.simulates(output) else 1) * self.page_size
            new_tokens = need - prompt.tokens - pages_tokens
            what = "first token" if new_tokens == FIRST_TOKEN else "output"
            pool_tokens = self.settings.least_pool_pages * self.page_size
            return (
                f"prompt {prompt.tokens} + {what} {new_tokens} + page {pages_tokens} = {need} tokens is not "
                f"below the empty pool's {pool_tokens}"
            )
        misfit = self.settings.misfit_in_pools(prompt.tokens) if self.pools else None
        if misfit is not None:
            return misfit
        self._arrivals += 1
        self.waiting[rid] = Request(
            rid,
            prompt,
            output=output,
            arrival=self._arrivals,
            most_new_tokens=self.settings.most_new_tokens(prompt.tokens),
        )
        return None

    def transferred(self, rid: str) -> None:
        """The decode node has the KV: an in-flight request ends. For any other nothing happens."""
        request = self.live.get(rid)
        if request is not None and request.state is RequestState.IN_FLIGHT:
            self._end(request)

    def abort(self, rid: str) -> None:
        """End a request wherever it is; nothing happens if it has ended already."""
        if self.waiting.pop(rid, None) is None and rid in self.live:
            self._end(self.live[rid])

    def cache_on_device(self, prompt: Prompt, *, locked: bool) -> None:
        super().cache_on_device(prompt, locked=locked)
        for pool in self.pools:
            pool.cover(self.tree.match(prompt.page_keys(self.page_size)))

    def cache_on_host(self, prompt: Prompt) -> None:
        super().cache_on_host(prompt)
        for pool in self.pools:
            pool.cover_on_host(self.tree.match(prompt.page_keys(self.page_size)))

    # --- one round

    def run_round(self) -> RoundRecord:
        """Steps 1 to 9. A failed allocation is in the record; the node is of no use after it."""
        self._begin_round()
        counters = self._counters()
        adder = self._unsettled = self._open_books()
        adder.pools = opened_books(self.pools)
        if self.paused:
            return self._record(ledger_facts(adder), counters)
        decisions: list[Decision] = []
        failure: PrefillOutOfMemory | None = None
        batch_is_full = False
        try:
            self._candidates = self._queue()
            self._await_loads(adder, decisions)
            self._resume(adder, decisions)
            self._run_loaded(adder, decisions)
            batch_is_full = self._admit(adder, decisions)
        except PrefillOutOfMemory as error:
            failure = error
        facts = ledger_facts(adder)
        if failure is None and self.withdraw(adder):
            self.watcher.withdrew()
        self._promised_units = {pool.name: pool.owed_units(None) for pool in self.pools if pool.promises}
        if failure is None:
            failure = self._allocate_batch(adder)
        if failure is None:
            self._run_batch(adder)
            failure = self._beside(adder)
        return self._record(facts, counters, tuple(decisions), batch_is_full, failure)

    def _begin_round(self) -> None:
        self.rounds += 1
        self.struck.clear()
        self._promised_units = {}

    def _record(
        self,
        facts: dict[str, Any],
        counters: tuple[int, int, int],
        decisions: tuple[Decision, ...] = (),
        batch_is_full: bool = False,
        failure: PrefillOutOfMemory | None = None,
    ) -> RoundRecord:
        """What the decisions left in the books (`facts`), and what became of the pool since `counters`."""
        evicted_pages, dropped_pages, shared_pages = (
            after - before for before, after in zip(counters, self._counters(), strict=True)
        )
        return RoundRecord(
            round=self.rounds,
            decisions=decisions,
            batch_is_full=batch_is_full,
            free=self.pool.available_size(),
            evictable=self.tree.evictable_size(),
            protected=self.tree.protected_size(),
            evicted_pages=evicted_pages,
            dropped_pages=dropped_pages,
            shared_pages=shared_pages,
            failure=None if failure is None else failure_of(failure),
            loading=self.on_the_way(),
            struck=tuple(self.struck),
            paused=self.paused,
            pools=tuple(pool.told(self._promised_units.get(pool.name, 0)) for pool in self.pools if pool.limited),
            **facts,
        )

    def _beside(self, adder: PrefillAdder) -> PrefillOutOfMemory | None:  # noqa: ARG002 - for those who decode
        """What runs beside a prefill batch, or in the place of one: here nothing does."""
        return None

    def _open_books(self) -> PrefillAdder:
        """Step 1: both offsets 0, full compute budgets."""
        return PrefillAdder(
            self.page_size,
            *self._memory_in_view(),
            rem_input_tokens=self.settings.max_prefill_tokens,
            rem_chunk_tokens=self.settings.chunked_prefill_size,
            rules=self.rules,
            checkpoint_align=self.settings.checkpoint_align,
            first_token=FIRST_TOKEN,
        )

    def _memory_in_view(self) -> tuple[Any, Any]:
        """The cache and the allocator that the books count with."""
        return self.tree, self.pool

    def _open_slots(self) -> StateSlots | None:
        """The books of the state slots; None where they have no limit and nobody keeps states."""
        if self.settings.state_slots is None:
            return None
        return StateSlots(
            self.settings.state_slots,
            self.page_size,
            self.grid_tokens,
            tracking=self.settings.tracking_slots,
            copy_on_write=self.settings.copy_on_write,
        )

    def _queue(self) -> Iterable[Request]:
        """The waiting requests in the order of the schedule policy."""
        return ordered(
            self.settings.schedule_policy,
            self.waiting.values(),
            self._matched_tokens,
            self.page_size,
            caches=self.settings.prefix_cache,
        )

    def matched_tokens(self, rid: str) -> int:
        """Tokens of a waiting request that are cached by now, on the device or the host."""
        return self._matched_tokens(self.waiting[rid])

    def _matched_tokens(self, request: Request) -> int:
        self._match(request)
        return request.prefix_tokens + request.host_hit_tokens

    def _resume(self, adder: PrefillAdder, decisions: list[Decision]) -> None:
        """Step 2."""
        request = self.chunked_req
        if request is None:
            return
        if self.settings.schedule_policy == "shortest-prefill-first":
            work_tokens = (prefill_work(each, each.prefix_tokens + each.host_hit_tokens) for each in self._candidates)
            left_tokens = request.prompt_tokens - request.prefix_tokens
            adder.chunked_req_limit = continuation_limit(
                work_tokens, left_tokens, adder.rem_chunk_tokens, self.page_size
            )
        self.watcher.before_decision()
        adder.add_chunked_req(request)
        kind: DecisionKind = "deferred" if adder.deferred else "resumed"
        self._decided(decisions, decision_of(adder, request, kind))

    def _await_loads(self, adder: PrefillAdder, decisions: list[Decision]) -> None:
        """Who was admitted and waits for a late load is in every round's books, before anybody else."""
        for request, _ in self.loading.values():
            self.watcher.before_decision()
            adder.await_load(request)
            self._decided(decisions, decision_of(adder, request, "loading"))

    def _run_loaded(self, adder: PrefillAdder, decisions: list[Decision]) -> None:
        """Those of them whose load is there, behind the half-done request and before the queue."""
        for request in self.arrived():
            self.watcher.before_decision()
            if adder.add_loaded_req(request):
                del self.loading[request.rid]
                self._decided(decisions, decision_of(adder, request, "resumed"))

    def _admit(self, adder: PrefillAdder, decisions: list[Decision]) -> bool:
        """Step 3: the queue, until an answer that is not CONTINUE. Says whether room was what ended it: of memory, or
        of request slots."""
        state = AddReqResult.CONTINUE
        admitted: list[Request] = []
        for request in self._candidates:
            if adder.can_run_list:
                state = adder.budget_state()
            if state is AddReqResult.CONTINUE:
                if not self._has_request_slot() and not self._make_way(adder, request):
                    state = AddReqResult.NO_TOKEN
                    break
                state, joined = self._decide(adder, decisions, request)
                if joined:
                    admitted.append(request)
            if state is not AddReqResult.CONTINUE:
                break
        for request in admitted:
            del self.waiting[request.rid]
        return state is AddReqResult.NO_TOKEN

    def _has_request_slot(self) -> bool:
        """Every admitted request has one until it ends, the half-done one too."""
        slots = self.settings.request_slots
        return slots is None or len(self.live) < slots

    def _make_way(self, adder: PrefillAdder, request: Request) -> bool:  # noqa: ARG002 - for those who decode
        """Put running requests back for this one; here nobody runs."""
        return False

    def _decide(self, adder: PrefillAdder, decisions: list[Decision], request: Request) -> tuple[AddReqResult, bool]:
        """One candidate: match, ask the adder, and on admission give it its cached pages."""
        struck_before = len(self.struck)
        self._match(request)
        self.watcher.before_decision()
        if self.match_strikes(request):
            self._match_again(request)
        hit_pages, newly_locked_pages = len(request.device_hit), self._newly_locked_pages(request)
        batch_before, loading_before = len(adder.can_run_list), len(adder.loading)
        try:
            state = adder.add_one_req(request)
            refused = state is AddReqResult.NO_TOKEN and len(adder.can_run_list) == batch_before
            if refused and adder.short_of is None and self._make_way(adder, request):
                hit_pages, newly_locked_pages = len(request.device_hit), self._newly_locked_pages(request)
                state = adder.add_one_req(request)
            joined, late = len(adder.can_run_list) > batch_before, len(adder.loading) > loading_before
            # where a load fell short less of the device hit may be of use; what it gave up are the last of its pages
            newly_locked_pages = max(0, newly_locked_pages - max(0, hit_pages - len(request.device_hit)))
            loads = request.host_hit_tokens if late else 0
            if joined or late:
                self._take_hit(request)
        except OutOfPages as error:
            wanted = request.host_hit_tokens if error.pool is None else error.wanted_tokens
            raise PrefillOutOfMemory(
                request.rid, wanted, error.free_tokens, error.evictable_tokens, error.pool
            ) from error
        kind: DecisionKind = adder.can_run_list[-1].kind if joined else "loading" if late else "refused"
        decision = decision_of(
            adder,
            request,
            kind,
            reason=None if joined or late else state,
            newly_locked_tokens=newly_locked_pages * self.page_size,
            loads=loads,
            faults=tuple(kind for kind, _ in self.struck[struck_before:]),
            short_units=self._short_units(adder, request) if kind == "refused" else None,
        )
        self._decided(decisions, decision)
        return state, joined or late

    def _short_units(self, adder: PrefillAdder, request: Request) -> tuple[int, int] | None:
        """What a refused candidate wanted of the second pool that refused it, and what was left; its hit is locked for
        the count, as it was for the refusal."""
        pool = next((pool for pool in self.pools if pool.name == adder.short_of), None)
        if pool is None:
            return None
        self.tree.inc_lock_ref(request)
        for each in self.pools:
            each.lock(request)
        start = request.prefix_tokens + request.host_hit_tokens
        left_tokens, chunk_tokens = request.prompt_tokens - start, adder.rem_chunk_tokens
        tokens = left_tokens if chunk_tokens is None else min(left_tokens, chunk_tokens)
        found = pool.shortfall(request, start, tokens)
        for each in self.pools:
            each.unlock(request)
        self.tree.dec_lock_ref(request)
        return found

    def _newly_locked_pages(self, request: Request) -> int:
        """By how many pages the lock on its device hit will lower the baseline."""
        return sum(1 for cached in request.device_hit if not cached.lock_refs)

    def _match(self, request: Request) -> None:
        """The usable hit: full pages without the last token, device first."""
        keys = request.prompt.page_keys(self.page_size)[: (request.prompt_tokens - 1) // self.page_size]
        found = self.tree.match(keys) if self.settings.prefix_cache else []
        usable = list(self._usable(found))
        request.device_hit = [cached for cached in usable if cached.page is not None]
        request.host_hit = usable[len(request.device_hit) :]
        request.prefix_tokens = len(request.device_hit) * self.page_size
        request.host_hit_tokens = len(request.host_hit) * self.page_size

    def _match_again(self, request: Request) -> None:
        """What it had matched was not locked yet, and is not there any more."""
        self._match(request)

    def _usable(self, found: Sequence[CachedPage]) -> Sequence[CachedPage]:
        """Down to the grid, where state is saved, and to where every second pool has its part."""
        usable = found[: floor_tokens(len(found) * self.page_size, self.grid_tokens) // self.page_size]
        return longest_hit(usable, max(1, self.grid_tokens // self.page_size), self.pools) if self.pools else usable

    def _take_hit(self, request: Request) -> None:
        """An admitted request owns its hit: locked, used just now, first in its page table."""
        self.tree.touch(request.device_hit + request.host_hit)
        request.locked = request.device_hit + request.host_hit
        request.pages = [device_page(cached) for cached in request.locked]
        request.prefix_tokens += request.host_hit_tokens
        request.host_hit_tokens = 0
        request.device_hit, request.host_hit = [], []
        request.state = RequestState.ADMITTED
        self.live[request.rid] = request
        for pool in self.pools:
            pool.admit(request)

    def _allocate_batch(self, adder: PrefillAdder) -> PrefillOutOfMemory | None:
        """Step 8, in batch order. Stops at the first chunk that finds too few slots."""
        for chunk in adder.can_run_list:
            request = self.live[chunk.request.rid]
            try:
                self._allocate(request, chunk)
            except OutOfPages as error:
                wanted = chunk.tokens if error.pool is None else error.wanted_tokens
                return PrefillOutOfMemory(request.rid, wanted, error.free_tokens, error.evictable_tokens, error.pool)
            adder.memory.settle(request.rid)
        return None

    def _allocate(self, request: Request, chunk: Chunk) -> None:
        """Pages from ceil(start) to ceil(end): a chunk that starts inside a page goes on in it."""
        pages = ceil_pages(chunk.end, self.page_size) - ceil_pages(chunk.start, self.page_size)
        request.pages.extend(self.tree.allocate(pages))
        for pool in self.pools:
            pool.allocate(request, chunk)

    def _run_batch(self, adder: PrefillAdder) -> None:
        """Step 9: every chunk's full pages become cached; a finished prompt is in flight."""
        self.chunked_req = self.live[adder.chunked_req.rid] if adder.chunked_req is not None else None
        for chunk in adder.can_run_list:
            request = self.live[chunk.request.rid]
            request.prefix_tokens = chunk.end
            keeps = self.settings.prefix_cache and not self.strikes("skip-insert", request.rid)
            keeps_states = self.slots if keeps else None  # a state is saved with its page
            if keeps_states is not None:
                keeps_states.reserve(request.rid, chunk.start, chunk.end)
            if keeps:
                self._cache_full_pages(request)
            for pool in self.pools:
                pool.cached(request)
            if chunk.end == request.prompt_tokens:
                self._prompt_done(request)

    def _prompt_done(self, request: Request) -> None:
        """Its first token is made: from now on its KV is being sent."""
        request.state = RequestState.IN_FLIGHT

    def _cache_full_pages(self, request: Request) -> None:
        first, end = request.shared_pages, request.prefix_tokens // self.page_size
        keys = request.prompt.page_keys(self.page_size)[first:end]
        parent = request.locked[-1] if request.locked else self.tree.root
        path = self.tree.insert(parent, keys, request.pages[first:end])
        request.locked.extend(path)
        request.pages[first:end] = [device_page(cached) for cached in path]

    def _end(self, request: Request) -> None:
        """The request's lock goes, its cached pages become evictable, its partly filled last page is freed."""
        self.tree.unlock(request.locked)
        self.pool.free(request.pages[request.shared_pages :])
        for pool in self.pools:
            pool.end(request.rid)
        request.state = RequestState.ENDED
        self.loading.pop(request.rid, None)
        del self.live[request.rid]
        if self.chunked_req is request:
            self.chunked_req = None

    # --- what the outside may see

    @property
    def has_work(self) -> bool:
        """Something is waiting, half done or loading."""
        return bool(self.waiting) or self.chunked_req is not None or bool(self.loading)

    def in_flight(self) -> tuple[str, ...]:
        """Names of requests whose KV is being sent, in admission order."""
        return tuple(rid for rid, request in self.live.items() if request.state is RequestState.IN_FLIGHT)

    def _counters(self) -> tuple[int, int, int]:
        return self.tree.evicted_pages, self.tree.dropped_pages, self.tree.shared_pages

    def _decided(self, decisions: list[Decision], decision: Decision) -> None:
        decisions.append(decision)
        self.watcher.after_decision(decision)

    def snapshot(self) -> Snapshot:
        pools = tuple(pool.view() for pool in self.pools if pool.limited)
        return snapshot_of(self, self.live.values(), self.waiting, self._unsettled, pools)
