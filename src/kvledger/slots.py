"""State slots, the node's second pool: one for each running request, one for each saved checkpoint.

A checkpoint belongs to the cached page that ends at its place on the grid. It goes with that page to the host, where
its room comes with the page's, and back; and it is given up, least recently used first, when a slot is needed and its
page has no lock from inside. A cached prefix without its checkpoint is no hit: its state would have to be computed
again. A slot is a number; what lies in it is somebody else's business (`moved` hooks, empty here).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvledger.pool import PagePool
from kvledger.radix import PageMover
from kvledger.request import CachedPage

UNLIMITED = 2**31


class StateSlots(PageMover):
    """`limit` slots (None: no limit), numbered from 0. `live`: of requests, by name; `saved`: by page serial."""

    def __init__(self, limit: int | None, page_size: int, grid_tokens: int) -> None:
        self.limit = UNLIMITED if limit is None else limit
        self.page_size = page_size
        self.grid_tokens = grid_tokens
        self.grid_pages = max(1, grid_tokens // page_size)
        self.live: dict[str, int] = {}
        self.saved: dict[int, int] = {}
        self.on_host: set[int] = set()
        self.given_up = 0
        self._numbers = PagePool(self.limit, 1)
        self._pages: dict[int, CachedPage] = {}
        self._making: dict[str, dict[int, int]] = {}
        self._arriving: list[CachedPage] = []

    @property
    def free_slots(self) -> int:
        return self._numbers.free_pages

    # --- what a hit is, and whether there is room for one more request

    def has(self, cached: CachedPage) -> bool:
        """The state at this page's end is saved, in either tier."""
        return cached.serial in self.saved or cached.serial in self.on_host

    def usable(self, found: Sequence[CachedPage]) -> Sequence[CachedPage]:
        """The longest part of a run of cached pages that ends at a saved state."""
        for pages in range(len(found) // self.grid_pages * self.grid_pages, 0, -self.grid_pages):
            if self.has(found[pages - 1]):
                return found[:pages]
        return ()

    def has_room(self) -> bool:
        """A request could have a slot: one is free, or a checkpoint that nobody inside locks can be given up."""
        return self.free_slots > 0 or any(_inside_refs(cached) == 0 for cached in self._pages.values())

    # --- a request's life

    def take_live(self, rid: str, path: Sequence[CachedPage]) -> int:
        """A slot for an admitted request, with the state at the end of `path`, which it has locked, if that is one.

        Its own hit's checkpoints go last; where nothing else is left, the hit's checkpoint becomes the live state.
        """
        own = {cached.serial: depth for depth, cached in enumerate(path)}
        slot = self._take(own)
        assert slot is not None, f"{rid} was admitted, but of {self.limit} state slots none can be had"
        self.live[rid] = slot
        if path:
            self._restored(slot, path[-1])
        for cached in self._arriving:
            self._settle_arrival(cached)
        self._arriving.clear()
        return slot

    def reserve(self, rid: str, start: int, end: int) -> dict[int, int]:
        """Slots for the checkpoints of a chunk [start, end), by position; the deepest first, as far as there are any.

        Asked again for the same chunk, it gives the same slots.
        """
        making = self._making.setdefault(rid, {})
        for position in range(end // self.grid_tokens * self.grid_tokens, start, -self.grid_tokens):
            slot = making.get(position)
            if slot is None:
                slot = self._take({})
            if slot is None:
                break
            making[position] = slot
        return making

    def attach(self, rid: str, path: Sequence[CachedPage]) -> None:
        """The chunk's pages are cached: their checkpoints are theirs; what is saved already stays, the copy goes."""
        for position, slot in self._making.pop(rid, {}).items():
            cached = path[position // self.page_size - 1]
            if cached.serial in self.saved:
                self._free([slot])
            else:
                self._save(cached, slot)

    def cover(self, path: Iterable[CachedPage]) -> None:
        """Somebody else's prefix is cached on the device: its states come with it, as far as there are slots."""
        for number, cached in enumerate(path, start=1):
            if number % self.grid_pages == 0 and cached.page is not None and cached.serial not in self.saved:
                slot = self._take({})
                if slot is None:
                    return
                self._save(cached, slot)
                self._brought(cached, slot)

    def cover_on_host(self, path: Iterable[CachedPage]) -> None:
        """The same on the host, where room for a state comes with the page."""
        for number, cached in enumerate(path, start=1):
            if number % self.grid_pages == 0 and cached.page is None:
                self.on_host.add(cached.serial)

    def end(self, rid: str) -> None:
        self._free([self.live.pop(rid), *self._making.pop(rid, {}).values()])

    # --- what the prefix tree tells

    def evicted(self, cached: CachedPage, page: int) -> None:  # noqa: ARG002 - for those who keep data
        slot = self._forget(cached)
        if slot is not None:
            self.on_host.add(cached.serial)
            self._free([slot])

    def dropped(self, cached: CachedPage) -> None:
        self.on_host.discard(cached.serial)

    def filled(self, cached: CachedPage, page: int) -> None:  # noqa: ARG002 - for those who keep data
        self.on_host.discard(cached.serial)

    def loaded_back(self, path: Sequence[CachedPage]) -> None:
        self._arriving += [cached for cached in path if cached.serial in self.on_host]

    # --- hooks for those who keep the states themselves

    def _restored(self, slot: int, cached: CachedPage) -> None:
        """The live `slot` takes the state at `cached`'s end, from its checkpoint; it may be that very slot."""

    def _raised(self, cached: CachedPage, slot: int) -> None:
        """`slot` takes the state that came up from the host with `cached`."""

    def _brought(self, cached: CachedPage, slot: int) -> None:
        """`slot` takes the state at `cached`'s end, which somebody else has computed."""

    def _free(self, slots: Iterable[int]) -> None:
        self._numbers.free(slots)

    # --- slots

    def _settle_arrival(self, cached: CachedPage) -> None:
        """A checkpoint that came up with its page takes a slot, or is lost."""
        if cached.serial not in self.on_host or cached.page is None:
            return  # or it was not settled when it came, and has gone again
        slot = self._take({})
        if slot is not None:
            self._save(cached, slot)
            self._raised(cached, slot)
        self.on_host.discard(cached.serial)

    def _take(self, own: dict[int, int]) -> int | None:
        """A free slot, or the one of the checkpoint that is best given up; `own` pages have one lock of the taker."""
        if self.free_slots:
            return self._numbers.alloc(1)[0]
        victim = min(
            (c for c in self._pages.values() if _inside_refs(c) == (c.serial in own)),
            key=lambda c: (own.get(c.serial, -1), c.last_used, c.serial),
            default=None,
        )
        if victim is None:
            return None
        self.given_up += 1
        slot = self._forget(victim)
        assert slot is not None
        if own and own.get(victim.serial) == len(own) - 1:
            return slot  # the hit's own checkpoint becomes the live state, where it lies
        self._free([slot])
        return self._numbers.alloc(1)[0]

    def _save(self, cached: CachedPage, slot: int) -> None:
        self.saved[cached.serial] = slot
        self._pages[cached.serial] = cached

    def _forget(self, cached: CachedPage) -> int | None:
        self._pages.pop(cached.serial, None)
        return self.saved.pop(cached.serial, None)

    def check(self) -> None:
        """Every slot has one owner, and every checkpoint a page on the device."""
        making = [slot for slots in self._making.values() for slot in slots.values()]
        used = [*self.live.values(), *self.saved.values(), *making]
        assert len(used) == len(set(used)), f"of {len(used)} slots in use, {len(set(used))} are different ones"
        assert len(used) + self.free_slots == self.limit, f"{len(used)} used + {self.free_slots} free of {self.limit}"
        assert set(self.saved) == set(self._pages), f"{len(self.saved)} slots saved for {len(self._pages)} pages"
        adrift = [cached.serial for cached in self._pages.values() if cached.page is None]
        assert not adrift, f"checkpoints on the device of pages that are not: {adrift[:5]}"


def _inside_refs(cached: CachedPage) -> int:
    """Locks of requests. Someone outside who keeps a page there does not need its state."""
    return cached.lock_refs - cached.pinned_refs
