"""One node's memory, made of sglang's own objects: request rows, allocator, prefix cache, host tier, and outsiders.

A world is built afresh for each example. Sizes are tokens; slots are sglang's numbers of single tokens, and page `n`
of the outside is the one whose slots begin at `(n + 1) * page_size`: sglang keeps page 0 for padding.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from kvledger.arithmetic import ceil_pages, floor_tokens
from kvledger.pool import OutOfPages
from kvledger.request import Prompt
from kvledger.settings import NodeSettings
from kvledger.targets.sglang.engine import Engine

SEGMENT_TOKENS = 2**28
"""More than a segment may have: the ids of its tokens are `segment number * SEGMENT_TOKENS + position`."""
MOST_ROWS = 256
ROW_CELLS = 2**23
"""The table of requests has so many cells at most, and up to MOST_ROWS rows."""
UNLIMITED_HOST_POOLS = 16
"""A host tier without a limit has room for so many device pools and 65,536 tokens."""


@dataclass(slots=True)
class Held:
    """Slots that something outside the trace took."""

    tokens: int = 0
    pages: list[Any] = field(default_factory=list)


class TokenIds:
    """Gives every (segment, position) an integer of its own."""

    def __init__(self) -> None:
        self._segments: dict[str, int] = {}

    def of(self, prompt: Prompt) -> array[int]:
        ids = array("q")
        for segment, tokens in prompt.segments:
            base = self._segments.setdefault(segment, len(self._segments)) * SEGMENT_TOKENS
            ids.extend(range(base, base + tokens))
        return ids

    def output(self, rid: str, position: int) -> int:
        """The id of a request's generated token: nobody else's."""
        return self._segments.setdefault(f"output of {rid}", len(self._segments)) * SEGMENT_TOKENS + position


class World:
    """Pools and prefix cache for a node's settings, and what outsiders do to them."""

    def __init__(self, engine: Engine, settings: NodeSettings) -> None:
        self.engine = engine
        self.page_size = settings.page_size
        self.pool_pages = settings.pool_pages
        pool_tokens = self.pool_pages * self.page_size
        self.has_host = settings.host_pages != 0
        engine.configure(settings, _host_ratio(settings))
        context = pool_tokens + self.page_size
        self.rows = engine.pools.ReqToTokenPool(_row_count(context), context, "cpu", False)
        self.row_count = int(self.rows.available_size())
        half = engine.torch.float16
        store = engine.pools.MHATokenToKVPool(pool_tokens, self.page_size, half, 1, 1, 1, "cpu", False)
        self.allocator = self._allocator(pool_tokens, half, store, settings)
        self.tree = engine.cache(self.rows, self.allocator, settings, host=self.has_host)
        self.tree.pretty_print = lambda: None
        self.ids = TokenIds()
        self.held: dict[str, Held] = {}
        self.pins: list[Any] = []
        self.evicted_tokens = 0
        self.host_lost_tokens = 0
        self._count_evictions()
        if self.has_host:
            self._watch_host()

    def _allocator(self, pool_tokens: int, dtype: Any, store: Any, settings: NodeSettings) -> Any:
        """As sglang chooses: pages only where a page has more than one token, free lists sorted on a prefill node."""
        need_sort = settings.mode == "prefill"
        if self.page_size == 1:
            return self.engine.allocators.TokenToKVPoolAllocator(pool_tokens, dtype, "cpu", store, need_sort)
        paged = self.engine.allocators.PagedTokenToKVPoolAllocator
        return self.engine.guarded(paged(pool_tokens, self.page_size, dtype, "cpu", store, need_sort))

    def _count_evictions(self) -> None:
        report = self.tree.update_eviction_metrics

        def counted(evicted_tokens: int, started: float) -> None:
            self.evicted_tokens += evicted_tokens
            report(evicted_tokens, started)

        self.tree.update_eviction_metrics = counted

    def _watch_host(self) -> None:
        """The cache shows its nodes to nobody: what it says of an eviction is held against its pool."""
        evict, pool = self.tree.evict_host, self.engine.host_pool(self.tree)

        def watched(*args: Any, **named: Any) -> int:
            before = pool.available_size()
            evicted_tokens = int(evict(*args, **named))
            self._host_given_back(evicted_tokens, before)
            return evicted_tokens

        self.tree.evict_host = watched

    def _host_given_back(self, tokens: int, available_before: int) -> None:
        self.host_lost_tokens += tokens - int(self.engine.host_pool(self.tree).available_size()) + int(available_before)

    # --- sizes

    def free_tokens(self) -> int:
        return int(self.allocator.available_size())

    def evictable_tokens(self) -> int:
        return int(self.tree.evictable_size())

    def protected_tokens(self) -> int:
        return int(self.tree.protected_size())

    def host_pages(self) -> int:
        """Pages of the host tier that are in use; a prefix that is on the device too counts there as well."""
        if not self.has_host:
            return 0
        pool = self.engine.host_pool(self.tree)
        return int(pool.size - pool.available_size()) // self.page_size

    def pages_of(self, slots: Any) -> list[int]:
        """The pages of slots that begin at a page's start."""
        return [slot // self.page_size - 1 for slot in slots[:: self.page_size].tolist()]

    def lock_cost(self, node: Any) -> int:
        """Evictable tokens that a lock on the node would take away; nothing changes."""
        before = self.evictable_tokens()
        lock = self.engine.lock(self.tree, node)
        cost = before - self.evictable_tokens()
        self.engine.unlock(self.tree, lock)
        return cost

    # --- outsiders

    def settle(self) -> None:
        self.engine.settle(self.tree)

    def _take(self, tokens: int) -> Any:
        """Slots for an outsider, in whole pages. OutOfPages if there are not as many: then nothing is evicted."""
        free_tokens, evictable_tokens = self.free_tokens(), self.evictable_tokens()
        if tokens > free_tokens + evictable_tokens:
            raise OutOfPages(tokens, free_tokens, evictable_tokens)
        self.engine.evict_for(self.tree, tokens)
        free_tokens, evictable_tokens = self.free_tokens(), self.evictable_tokens()
        slots = self.allocator.alloc(tokens) if tokens <= free_tokens else None
        if slots is None:
            raise OutOfPages(tokens, free_tokens, evictable_tokens)
        return slots

    def cache_on_device(self, prompt: Prompt, *, locked: bool) -> None:
        """A request of somebody else computed the prompt's full pages and has gone; `locked`: it has not."""
        ids = self.ids.of(prompt)[: floor_tokens(prompt.tokens, self.page_size)]
        if not ids:
            return
        have_tokens, have_node = self.engine.hit_of(self.tree, ids)
        lock = self.engine.lock(self.tree, have_node)
        try:
            fresh = self._take(len(ids) - have_tokens)
        finally:
            self.engine.unlock(self.tree, lock)
        have = self.engine.node_slots(self.tree, have_node)[:have_tokens]
        slots = self.engine.torch.cat([have, fresh]) if have_tokens else fresh
        node = self.engine.insert(self.tree, ids, slots, have_tokens)
        if locked:
            self.pins.append((node, self.engine.lock(self.tree, node)))
        self.settle()

    def cache_on_host(self, prompt: Prompt) -> None:
        """A prefix arrives in the host tier, as far as that has room."""
        tokens = floor_tokens(prompt.tokens, self.page_size)
        if not self.has_host or not tokens:
            return
        ids = self.ids.of(prompt)[:tokens]
        pool = self.engine.host_pool(self.tree)
        if pool.available_size() < tokens:
            self.tree.evict_host(tokens - pool.available_size())
        tokens = min(tokens, floor_tokens(int(pool.available_size()), self.page_size))
        if not tokens:
            return
        host_slots = pool.alloc(tokens)
        hashes = [f"{number}" for number in range(tokens // self.page_size)]
        unused_tokens = self.engine.insert_on_host(self.tree, ids[:tokens], host_slots, hashes)
        available = pool.available_size()
        pool.free(host_slots[:unused_tokens])
        self._host_given_back(unused_tokens, available)
        self.settle()

    def hold(self, name: str, tokens: int) -> None:
        """Take plain slots, rounded up to pages, out of the pool. OutOfPages if there are not as many."""
        slots = self._take(ceil_pages(tokens, self.page_size) * self.page_size)
        held = self.held.setdefault(name, Held())
        held.tokens += tokens
        held.pages += slots.split(self.page_size)

    def release(self, name: str, tokens: int | None = None) -> None:
        """Give held slots back: all of them, or `tokens`, keeping whole pages for the rest."""
        held = self.held.get(name, Held())
        held.tokens = 0 if tokens is None else max(0, held.tokens - tokens)
        keep_pages = ceil_pages(held.tokens, self.page_size)
        for slots in held.pages[keep_pages:]:
            self.allocator.free(slots)
        del held.pages[keep_pages:]


def _row_count(context: int) -> int:
    return min(MOST_ROWS, max(32, ROW_CELLS // context))


def _host_ratio(settings: NodeSettings) -> float:
    """Host pool over device pool. sglang adds a page to what the ratio gives: half a page keeps it from rounding."""
    pool_tokens = settings.pool_pages * settings.page_size
    host_pages = settings.host_pages
    if host_pages is None:
        return UNLIMITED_HOST_POOLS + 2**16 / pool_tokens
    return max(0.0, (host_pages - 0.5) * settings.page_size / pool_tokens)
