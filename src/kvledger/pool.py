"""The page allocator: it knows which pages are free, by identity, and evicts nothing by itself."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(Exception):
    """Not enough free and evictable slots; all figures in tokens, or in the units of a second `pool` that is short."""

    def __init__(self, wanted_tokens: int, free_tokens: int, evictable_tokens: int, pool: str | None = None) -> None:
        super().__init__(wanted_tokens, free_tokens, evictable_tokens)
        self.wanted_tokens = wanted_tokens
        self.free_tokens = free_tokens
        self.evictable_tokens = evictable_tokens
        self.pool = pool

    def __str__(self) -> str:
        if self.pool is not None:
            return (
                f"out of {self.pool}: {self.wanted_tokens} wanted, {self.free_tokens} free + "
                f"{self.evictable_tokens} evictable"
            )
        return (
            f"out of KV slots: {self.wanted_tokens} tokens wanted, "
            f"{self.free_tokens} free + {self.evictable_tokens} evictable"
        )


class PrefillOutOfMemory(OutOfPages):
    """An admitted request's chunk found no slots: in a real node the process ends here."""

    def __init__(
        self, request: str, wanted_tokens: int, free_tokens: int, evictable_tokens: int, pool: str | None = None
    ) -> None:
        super().__init__(wanted_tokens, free_tokens, evictable_tokens, pool)
        self.request = request

    def __str__(self) -> str:
        if self.pool is not None:
            return (
                f"Prefill out of memory: {self.request} tries to allocate {self.wanted_tokens} of {self.pool}, "
                f"available {self.free_tokens + self.evictable_tokens} (free {self.free_tokens} + evictable "
                f"{self.evictable_tokens})"
            )
        return (
            f"Prefill out of memory: {self.request} tries to allocate {self.wanted_tokens} tokens, available "
            f"{self.free_tokens + self.evictable_tokens} (free {self.free_tokens} + evictable {self.evictable_tokens})"
        )


class PagePool:
    """`pool_pages` pages of `page_size` slots, numbered from 0.

    Pages never handed out are a range, so a pool costs what is used of it. `free` does not look for double frees:
    that is what the invariants are there to find.
    """

    def __init__(self, pool_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pool_pages = pool_pages
        self._released: list[int] = []
        self._next_unused = 0

    @property
    def free_pages(self) -> int:
        return len(self._released) + self.pool_pages - self._next_unused

    def available_size(self) -> int:
        """Free slots, in tokens."""
        return self.free_pages * self.page_size

    def alloc(self, pages: int) -> list[int]:
        """Hand out `pages` page numbers; OutOfPages if there are not as many free."""
        if pages > self.free_pages:
            raise OutOfPages(pages * self.page_size, self.available_size(), 0)
        reused = min(pages, len(self._released))
        taken = self._released[len(self._released) - reused :]
        del self._released[len(self._released) - reused :]
        fresh_end = self._next_unused + pages - reused
        taken.extend(range(self._next_unused, fresh_end))
        self._next_unused = fresh_end
        return taken

    def free(self, pages: Iterable[int]) -> None:
        self._released.extend(pages)

    def released(self) -> tuple[int, ...]:
        """Free pages that were in use before, with whatever doubles a faulty owner put there."""
        return tuple(self._released)

    def never_used(self) -> range:
        return range(self._next_unused, self.pool_pages)
