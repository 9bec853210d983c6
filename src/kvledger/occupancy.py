"""What a node's memory holds, and what outsiders do to it: prefixes cached by others, pages pinned, slots taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvledger.arithmetic import ceil_pages
from kvledger.pool import OutOfPages, PagePool
from kvledger.radix import PrefixTree
from kvledger.request import CachedPage, Prompt


@dataclass(slots=True)
class Held:
    """Slots that something outside the trace took, and the pages they occupy."""

    tokens: int = 0
    pages: list[int] = field(default_factory=list)


class Occupancy:
    """A pool of `pool_pages`, a prefix tree over it with a host tier of `host_pages` (None: no limit), and holds."""

    def __init__(self, page_size: int, pool_pages: int, host_pages: int | None) -> None:
        self.page_size = page_size
        self.pool = PagePool(pool_pages, page_size)
        self.tree = PrefixTree(self.pool, host_pages)
        self.held: dict[str, Held] = {}
        self.pins: dict[str, list[CachedPage]] = {}

    def cache_on_device(self, prompt: Prompt, *, locked: bool) -> None:
        """Put a prompt's full pages on the device; `locked` ones stay so. OutOfPages if they do not fit."""
        keys = prompt.page_keys(self.page_size)
        on_device = [cached for cached in self.tree.match(keys) if cached.page is not None]
        self.tree.lock(on_device)
        try:
            pages = self.tree.allocate(len(keys) - len(on_device))
        except OutOfPages:
            self.tree.unlock(on_device)
            raise
        parent = on_device[-1] if on_device else self.tree.root
        path = on_device + self.tree.insert(parent, keys[len(on_device) :], pages)
        self.tree.touch(path)
        if locked:
            for cached in path:
                cached.pinned_refs += 1
        else:
            self.tree.unlock(path)

    def cache_on_host(self, prompt: Prompt) -> None:
        self.tree.insert_on_host(prompt.page_keys(self.page_size))

    def hold(self, name: str, tokens: int) -> None:
        """Take plain slots, rounded up to pages, out of the pool. OutOfPages if there are not as many."""
        pages = self.tree.allocate(ceil_pages(tokens, self.page_size))
        held = self.held.setdefault(name, Held())
        held.tokens += tokens
        held.pages += pages

    def release(self, name: str, tokens: int | None = None) -> None:
        """Give held slots back: all of them, or `tokens`, keeping whole pages for the rest."""
        held = self.held.get(name, Held())
        held.tokens = 0 if tokens is None else max(0, held.tokens - tokens)
        keep_pages = ceil_pages(held.tokens, self.page_size)
        self.pool.free(held.pages[keep_pages:])
        del held.pages[keep_pages:]

    def pin(self, name: str, prompt: Prompt) -> None:
        """Lock what is cached of a prompt on the device, as a write-back does while it copies."""
        found = self.tree.match(prompt.page_keys(self.page_size))
        path = [cached for cached in found if cached.page is not None]
        self.tree.lock(path)
        for cached in path:
            cached.pinned_refs += 1
        self.pins.setdefault(name, []).extend(path)

    def unpin(self, name: str) -> None:
        """Let go of all that `name` has pinned."""
        path = self.pins.pop(name, [])
        for cached in path:
            cached.pinned_refs -= 1
        self.tree.unlock(path)

    def written_back(self) -> tuple[int, ...]:
        """Device pages that only pins protect: they can be had again as soon as those are gone."""
        if not self.pins:
            return ()
        refs = Counter(cached for path in self.pins.values() for cached in path)
        return tuple(c.page for c, times in refs.items() if c.page is not None and c.lock_refs == times)
