"""The prefix tree: one node a page, on the device or on the host, with lock references and LRU leaf eviction.

    root - [page 7, lock 1] - [page 3, lock 1] - [page 9] - (host) - (host)
            protected          protected          evictable   must be loaded back

On any path the device pages come first. A lock counts on every page from the root down, so an unlocked page never has
a locked one below it, and all unlocked device pages can go, leaves first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence

from kvledger.adder import Loading
from kvledger.pool import OutOfPages, PagePool
from kvledger.request import CachedPage, Request


def _with_all_below(top: CachedPage) -> list[CachedPage]:
    """Parents before their children."""
    found = [top]
    for cached in found:
        found.extend(cached.children.values())
    return found


class LeafQueue:
    """Leaves by recency. Entries go stale when their page is used, locked or grows a child; met, they are dropped."""

    def __init__(self, is_leaf: Callable[[CachedPage], bool]) -> None:
        self._is_leaf = is_leaf
        self._heap: list[tuple[int, int, CachedPage]] = []
        self._compact_at = 64

    def offer(self, page: CachedPage) -> None:
        if self._is_leaf(page):
            heapq.heappush(self._heap, (page.last_used, page.serial, page))
            if len(self._heap) > self._compact_at:
                self._compact()

    def pop(self) -> CachedPage | None:
        """The least recently used leaf, or None."""
        while self._heap:
            last_used, _, page = heapq.heappop(self._heap)
            if page.last_used == last_used and self._is_leaf(page):
                return page
        return None

    def _compact(self) -> None:
        """Drop what is stale, so that the queue stays within twice the number of its leaves."""
        fresh = {page: (used, serial, page) for used, serial, page in self._heap if page.last_used == used}
        self._heap = [entry for page, entry in fresh.items() if self._is_leaf(page)]
        heapq.heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + 64


def _is_device_leaf(page: CachedPage) -> bool:
    return page.page is not None and not page.lock_refs and not page.device_children


def _is_host_leaf(page: CachedPage) -> bool:
    return page.page is None and page.parent is not None and not page.lock_refs and not page.children


class PageMover:
    """Told of each cached page that changes its tier, so that what belongs to it can follow; here nothing does."""

    def evicted(self, cached: CachedPage, page: int) -> None:
        """It leaves device page `page`, which is still its own, for the host."""

    def dropped(self, cached: CachedPage) -> None:
        """It has left the host."""

    def filled(self, cached: CachedPage, page: int) -> None:
        """It is on device `page`, freshly computed; a copy on the host is one no more."""

    def loaded_back(self, path: Sequence[CachedPage]) -> None:
        """These have device pages now, and come from the host."""


class PrefixTree:
    """Prefixes over a device pool and a host tier of `host_pages` (None: no limit). Counts: pages; sizes: tokens.

    `disable` is for the adder to read: the node neither looks here nor keeps anything.
    """

    def __init__(self, pool: PagePool, host_pages: int | None) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.host_limit_pages = host_pages
        self.mover: PageMover | None = None
        self.loader: Callable[[Request], int | Loading | None] | None = None
        self.room_maker: Callable[[int], None] | None = None
        self.disable = False
        self.root = CachedPage(None, None, 0)
        self.evictable_pages = 0
        self.protected_pages = 0
        self.host_pages = 0
        self.evicted_pages = 0
        self.dropped_pages = 0
        self.shared_pages = 0
        self._clock = 0
        self._serial = 0
        self._cached: dict[int, CachedPage] = {}
        self._on_device: dict[int, CachedPage] = {}
        self._device_leaves = LeafQueue(_is_device_leaf)
        self._host_leaves = LeafQueue(_is_host_leaf)

    # --- sizes and lookups

    def evictable_size(self) -> int:
        """Cached slots that no lock protects, in tokens."""
        return self.evictable_pages * self.page_size

    def protected_size(self) -> int:
        return self.protected_pages * self.page_size

    def cached_pages(self) -> Iterable[CachedPage]:
        """All pages, in either tier."""
        return self._cached.values()

    def device_pages(self) -> Iterable[CachedPage]:
        """Those on the device: never more than the pool has, whatever the host holds."""
        return self._on_device.values()

    @property
    def clock(self) -> int:
        """Recency's clock: it ticks whenever a page is used, in either tier."""
        return self._clock

    def match(self, keys: Sequence[Hashable]) -> list[CachedPage]:
        """The run of cached pages from the root on: device pages first, then host pages. Touches nothing."""
        found: list[CachedPage] = []
        here = self.root
        for key in keys:
            child = here.children.get(key)
            if child is None:
                break
            found.append(child)
            here = child
        return found

    # --- the hooks that PrefillAdder calls

    def inc_lock_ref(self, req: Request) -> None:
        self.lock(req.device_hit)

    def dec_lock_ref(self, req: Request) -> None:
        self.unlock(req.device_hit)

    def init_load_back(self, req: Request) -> int | Loading | None:
        """Copy the request's host hit up: its slots are allocated here and now, and locked. A `loader`, where there is
        one, does it instead, and answers to the adder."""
        if self.loader is not None:
            return self.loader(req)
        self.load_back(req.host_hit)
        return None

    # --- locks and recency

    def lock(self, path: Iterable[CachedPage]) -> None:
        for cached in path:
            cached.lock_refs += 1
            if cached.lock_refs == 1 and cached.page is not None:
                self.evictable_pages -= 1
                self.protected_pages += 1

    def unlock(self, path: Sequence[CachedPage]) -> None:
        for cached in path:
            cached.lock_refs -= 1
            if not cached.lock_refs and cached.page is not None:
                self.protected_pages -= 1
                self.evictable_pages += 1
                self._device_leaves.offer(cached)

    def touch(self, path: Iterable[CachedPage]) -> None:
        """Recency: these were inserted, loaded back or locked by an admission just now."""
        self._clock += 1
        for cached in path:
            cached.last_used = self._clock
            if not cached.lock_refs:
                (self._host_leaves if cached.page is None else self._device_leaves).offer(cached)

    # --- allocation and eviction

    def allocate(self, pages: int) -> list[int]:
        """Take `pages` from the pool, evicting the least recently used unlocked leaves if it must; else OutOfPages."""
        shortage_pages = pages - self.pool.free_pages
        if shortage_pages > self.evictable_pages:
            raise OutOfPages(pages * self.page_size, self.pool.available_size(), self.evictable_size())
        for _ in range(shortage_pages):
            self.evict_one()
        if self.room_maker is not None:
            self.room_maker(pages)  # free pages are not all: what they are cut from must have room too
        return self.pool.alloc(pages)

    def evict_one(self) -> None:
        """The least recently used unlocked leaf leaves the device; there must be one."""
        victim = self._device_leaves.pop()
        assert victim is not None, f"{self.evictable_pages} pages count as evictable, but no leaf is"
        self._evict(victim)

    def _evict(self, victim: CachedPage) -> None:
        """An unlocked device leaf goes to the host."""
        assert victim.page is not None and victim.parent is not None
        if self.mover is not None:
            self.mover.evicted(victim, victim.page)
        self.pool.free([victim.page])
        victim.page = None
        del self._on_device[victim.serial]
        self.evictable_pages -= 1
        self.evicted_pages += 1
        self._lost_device_child(victim.parent)
        self.host_pages += 1
        self._host_leaves.offer(victim)
        self._trim_host()

    def evict_below(self, top: CachedPage) -> None:
        """An unlocked page, and all below it, leave the device for the host, leaves first."""
        for cached in reversed(_with_all_below(top)):
            if cached.page is not None:
                self._evict(cached)

    def drop_below(self, top: CachedPage) -> None:
        """An unlocked page, and all below it, are gone from both tiers. A device page keeps its number, so that who
        still has it in hand has the number of a free page."""
        for cached in reversed(_with_all_below(top)):
            page, parent = cached.page, cached.parent
            assert parent is not None and not cached.lock_refs
            if page is not None:
                if self.mover is not None:
                    self.mover.evicted(cached, page)
                self.pool.free([page])
                del self._on_device[cached.serial]
                self.evictable_pages -= 1
                self.evicted_pages += 1
                parent.device_children -= 1
            else:
                self.host_pages -= 1
                self.dropped_pages += 1
            cached.last_used = -1  # what the queues of leaves have of it is stale now
            if self.mover is not None:
                self.mover.dropped(cached)
            del parent.children[cached.key]
            del self._cached[cached.serial]
        assert top.parent is not None
        self._device_leaves.offer(top.parent)
        self._host_leaves.offer(top.parent)

    def _lost_device_child(self, parent: CachedPage) -> None:
        parent.device_children -= 1
        self._device_leaves.offer(parent)

    def _trim_host(self) -> None:
        """Drop the least recently used host pages beyond the host's limit; what is being loaded back stays."""
        while self.host_limit_pages is not None and self.host_pages > self.host_limit_pages:
            victim = self._host_leaves.pop()
            assert victim is not None and victim.parent is not None, f"{self.host_pages} host pages, but no leaf"
            del victim.parent.children[victim.key]
            del self._cached[victim.serial]
            self.host_pages -= 1
            self.dropped_pages += 1
            if self.mover is not None:
                self.mover.dropped(victim)
            self._host_leaves.offer(victim.parent)

    # --- growth

    def load_back(self, path: Sequence[CachedPage]) -> None:
        """Move host pages to newly allocated device pages, locked before anything is evicted for them. OutOfPages."""
        self.lock(path)
        try:
            pages = self.allocate(len(path))
        except OutOfPages:
            for cached in path:
                cached.lock_refs -= 1
            raise
        for cached, page in zip(path, pages, strict=True):
            self._land_on_device(cached, page)
        if self.mover is not None:
            self.mover.loaded_back(path)
        self.touch(path)

    def insert(self, parent: CachedPage, keys: Sequence[Hashable], pages: Sequence[int]) -> list[CachedPage]:
        """Put freshly filled device pages below `parent`, locked once for the caller; returns the path's pages.

        A page that is there already is shared, and the caller's copy goes back to the pool.
        """
        path: list[CachedPage] = []
        for key, page in zip(keys, pages, strict=True):
            cached = parent.children.get(key) or self._grow(parent, key)
            self.lock([cached])
            if cached.page is None:
                self._land_on_device(cached, page)
                if self.mover is not None:
                    self.mover.filled(cached, page)
            else:
                self.pool.free([page])
                self.shared_pages += 1
            path.append(cached)
            parent = cached
        self.touch(path)
        return path

    def insert_on_host(self, keys: Sequence[Hashable]) -> None:
        """Put a prefix into the host tier, as far as that has room; pages already on the device stay there."""
        path: list[CachedPage] = []
        parent = self.root
        for key in keys:
            parent = parent.children.get(key) or self._grow(parent, key)
            path.append(parent)
        self.touch(path)
        self._trim_host()

    def _grow(self, parent: CachedPage, key: Hashable) -> CachedPage:
        self._serial += 1
        cached = CachedPage(key, parent, self._serial)
        parent.children[key] = cached
        self._cached[cached.serial] = cached
        self.host_pages += 1
        return cached

    def _land_on_device(self, cached: CachedPage, page: int) -> None:
        """A page of the host (or a new one) gets its device page; it is locked, so it counts as protected."""
        assert cached.page is None and cached.parent is not None and cached.lock_refs
        cached.page = page
        self._on_device[cached.serial] = cached
        cached.parent.device_children += 1
        self.host_pages -= 1
        self.protected_pages += 1
