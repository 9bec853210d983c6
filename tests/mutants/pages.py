"""Mutants of the pool and the prefix tree: who owns a page, and who may take it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from kvledger.node import PrefillNode, Watcher
from kvledger.pool import OutOfPages, PagePool
from kvledger.radix import LeafQueue, PrefixTree
from kvledger.request import CachedPage, Request
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from tests.mutants.mutant import AssembledNode, mutant

# --- the pool


@mutant("conserved", "no-use-after-free")
class PageHandedOutAgain(PagePool):
    """The last page that is handed out stays in the free list."""

    def alloc(self, pages: int) -> list[int]:
        taken = super().alloc(pages)
        self._released += taken[-1:]
        return taken


@mutant("conserved", "no-use-after-free")
class PageTwiceInOneTable(PagePool):
    """An allocation of two pages or more names its first page twice."""

    def alloc(self, pages: int) -> list[int]:
        taken = super().alloc(pages)
        return taken if pages < 2 else [*taken[:-1], taken[0]]


# --- copies of a page that is cached already


def _copies(pages: Sequence[int], path: Sequence[CachedPage]) -> list[int]:
    return [page for page, cached in zip(pages, path, strict=True) if cached.page != page]


@mutant("conserved")
class CopyFreedTwice(PrefixTree):
    """A copy of a page that was cached already is given back twice."""

    def insert(self, parent: CachedPage, keys: Sequence[Hashable], pages: Sequence[int]) -> list[CachedPage]:
        path = super().insert(parent, keys, pages)
        self.pool.free(_copies(pages, path))
        return path


@mutant("conserved", "quiescent")
class CopyKept(PrefixTree):
    """A copy of a page that was cached already is never given back."""

    def insert(self, parent: CachedPage, keys: Sequence[Hashable], pages: Sequence[int]) -> list[CachedPage]:
        path = super().insert(parent, keys, pages)
        for page in _copies(pages, path):
            self.pool._released.remove(page)
        return path


@mutant("no-use-after-free")
class FreedCopyStaysInTable(PrefillNode):
    """The copy is given back, and the request's table goes on naming it instead of the cached page."""

    def _cache_full_pages(self, request: Request) -> None:
        own = list(request.pages)
        super()._cache_full_pages(request)
        request.pages = own


# --- locks


class _LocksAllButTheNode(PrefixTree):
    def inc_lock_ref(self, req: Request) -> None:
        self.lock(req.device_hit[:-1])

    def dec_lock_ref(self, req: Request) -> None:
        self.unlock(req.device_hit[:-1])


@mutant("no-use-after-free", report="mini-sglang#52")
class LockWalkSkipsNode(AssembledNode):
    """The walk to the root locks all but the node it starts from: the deepest page of a hit may be evicted."""

    tree_type = _LocksAllButTheNode

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, rules, watcher)
        self._skipped: dict[str, list[CachedPage]] = {}

    def _take_hit(self, request: Request) -> None:
        self._skipped[request.rid] = request.device_hit[-1:]
        super()._take_hit(request)

    def _end(self, request: Request) -> None:
        self.tree.lock(self._skipped.pop(request.rid))
        super()._end(request)


@mutant("ledger-exact")
class SecondLockCountsAgain(PrefixTree):
    """A page that two requests lock leaves the evictable count twice."""

    def lock(self, path: Iterable[CachedPage]) -> None:
        path = list(path)
        locked_before = sum(1 for cached in path if cached.lock_refs and cached.page is not None)
        super().lock(path)
        self.evictable_pages -= locked_before
        self.protected_pages += locked_before


@mutant("ledger-exact")
class FirstUnlockCounts(PrefixTree):
    """A page that two requests lock counts as evictable when the first of them ends."""

    def unlock(self, path: Sequence[CachedPage]) -> None:
        super().unlock(path)
        still_locked = sum(1 for cached in path if cached.lock_refs and cached.page is not None)
        self.evictable_pages += still_locked
        self.protected_pages -= still_locked


@mutant("no-use-after-free", "quiescent")
class UnlockDropsEveryLock(PrefixTree):
    """The end of one request unlocks the pages that it shares with others."""

    def unlock(self, path: Sequence[CachedPage]) -> None:
        for cached in path:
            cached.lock_refs = min(cached.lock_refs, 1)
        super().unlock(path)


# --- eviction


@mutant("no-use-after-free")
class LockedPageEvicted(PrefixTree):
    """Eviction takes the least recently used leaf, locked or not."""

    def evict_one(self) -> None:
        leaves = [cached for cached in self.cached_pages() if cached.page is not None and not cached.device_children]
        oldest = min(leaves, key=lambda cached: (cached.last_used, cached.serial))
        lock_refs, oldest.lock_refs = oldest.lock_refs, 0
        self._device_leaves = LeafQueue(lambda cached: cached is oldest)
        self._device_leaves.offer(oldest)
        super().evict_one()
        oldest.lock_refs = lock_refs


@mutant("conserved")
class EvictedPageKeepsNumber(PrefixTree):
    """The host copy of an evicted page goes on naming the device page, which is somebody else's by now."""

    def evict_one(self) -> None:
        on_device = [(cached, cached.page) for cached in self.device_pages()]
        super().evict_one()
        for cached, page in on_device:
            if cached.page is None:
                cached.page = page
                self._on_device[cached.serial] = cached


@mutant("admitted-finishes")
class OneEvictionShort(PrefixTree):
    """Eviction stops one page before there is room."""

    def allocate(self, pages: int) -> list[int]:
        shortage_pages = pages - self.pool.free_pages
        if shortage_pages <= 0 or shortage_pages > self.evictable_pages:
            return super().allocate(pages)
        for _ in range(shortage_pages - 1):
            self.evict_one()
        raise OutOfPages(pages * self.page_size, self.pool.available_size(), self.evictable_size())


@mutant("conserved")
class HostLimitIgnored(PrefixTree):
    """The host tier grows without end."""

    def _trim_host(self) -> None:
        pass
