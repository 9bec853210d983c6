"""State slots, a second pool: one for each running request, those it tracks with, and one for each saved checkpoint.

A checkpoint belongs to the cached page that ends at its place on the grid. It goes with that page to the host, where
its room comes with the page's, and back; and it is given up, least recently used first, when a slot is needed and its
page has no lock from inside. A cached prefix without its checkpoint is no hit: its state would have to be computed
again. A slot is a number; what lies in it is somebody else's business (`moved` hooks, empty here).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvledger.adder import Chunk
from kvledger.ledger import Due
from kvledger.pools import SecondPool, is_on_device
from kvledger.record import PoolView
from kvledger.request import CachedPage, Request

UNLIMITED = 2**31


class StateSlots(SecondPool):
    """`limit` slots (None: no limit), numbered from 0. `live`: of requests, by name; `saved`: by page serial.

    A request takes its live slot at its admission, and `tracking` more when its first chunk is allocated.
    `copy_on_write`: the state of a hit on the device is copied, so its checkpoint stays; else it may become the live
    state where it lies, if nothing else is left.
    """

    name = "state_slots"
    unit = "slot"

    def __init__(
        self,
        limit: int | None,
        page_size: int,
        grid_tokens: int,
        *,
        tracking: int = 0,
        copy_on_write: bool = False,
    ) -> None:
        self.limit = UNLIMITED if limit is None else limit
        self.page_size = page_size
        self.grid_tokens = grid_tokens
        self.tracking = tracking
        self.copy_on_write = copy_on_write
        self.live: dict[str, int] = {}
        self.tracked: dict[str, list[int]] = {}
        self.saved: dict[int, int] = {}
        self.on_host: set[int] = set()
        self.given_up = 0
        self._pages: dict[int, CachedPage] = {}
        self._making: dict[str, dict[int, int]] = {}
        self._arriving: list[CachedPage] = []
        self._sources: dict[str, CachedPage] = {}
        super().__init__(self.limit, limited=limit is not None)

    @property
    def free_slots(self) -> int:
        return self.free_units

    def evictable_units(self) -> int:
        """Checkpoints that no request locks."""
        return sum(1 for cached in self._pages.values() if _inside_refs(cached) == 0)

    # --- what a hit is, and whether there is room for one more request

    def has(self, cached: CachedPage) -> bool:
        """The state at this page's end is saved, in either tier."""
        return cached.serial in self.saved or cached.serial in self.on_host

    def ends_hit(self, found: Sequence[CachedPage], pages: int) -> bool:
        return self.has(found[pages - 1])

    def holdable(self, req: Any, start: int, tokens: int) -> int:
        """All of it, if the request has its slots or can have them: then it needs no more until its prefill is done."""
        if req.rid in self.live:
            return tokens
        own = self._own_spare([*req.device_hit, *req.host_hit])
        return self.within(req, start, tokens, self.rem_units() + len(own))

    def within(self, req: Any, start: int, tokens: int, room: int) -> int:  # noqa: ARG002 - wherever it starts
        return tokens if req.rid in self.live or self.needed_at_admission(req) <= room else 0

    def shortfall(self, req: Any, start: int, tokens: int) -> tuple[int, int]:
        own = len(self._own_spare([*req.device_hit, *req.host_hit]))
        return self.asked_units(req, start, tokens), self.rem_units() + own

    def asked_units(self, req: Any, start: int, tokens: int) -> int:  # noqa: ARG002 - whatever the chunk
        return 0 if req.rid in self.live else self.needed_at_admission(req)

    def needed_at_admission(self, req: Any) -> int:  # noqa: ARG002 - for those who ask for less
        """What the gate counts: the live slot, and those that the request will track with."""
        return 1 + self.tracking

    def promise(self, req: Any, start: int, tokens: int) -> None:  # noqa: ARG002 - whatever the chunk
        self._promise_tracking(req.rid, Due.NOW)

    def await_chunk(self, req: Any) -> None:
        self._promise_tracking(req.rid, Due.LATER)

    def _promise_tracking(self, rid: str, due: Due) -> None:
        if self.promises and self.tracking and rid not in self.tracked:
            self.ledger.take_back(rid, "tracking")
            self.ledger.promise(rid, "tracking", self.tracking, due)

    def _own_spare(self, path: Sequence[CachedPage]) -> list[CachedPage]:
        """Checkpoints on the hit of a request that has locked it, and nobody else: the least useful first."""
        spare = [cached for cached in path if cached.serial in self.saved and _inside_refs(cached) == 1]
        return spare[:-1] if self.copy_on_write and spare and spare[-1] is path[-1] else spare

    def own_spare_units(self, req: Any) -> int:
        return 0 if req.rid in self.live else len(self._own_spare([*req.device_hit, *req.host_hit]))

    def give_up_own(self, req: Any, units: int) -> int:
        """The last checkpoint of the hit stays: it may become the live state where it lies."""
        path = [*req.device_hit, *req.host_hit]
        spare = [cached for cached in self._own_spare(path) if cached is not path[-1]][:units]
        for cached in spare:
            self._give_up(cached)
        return len(spare)

    # --- a request's life

    def admit(self, request: Request) -> None:
        self.take_live(request.rid, request.locked)

    def take_live(self, rid: str, path: Sequence[CachedPage]) -> int:
        """A slot for an admitted request, with the state at the end of `path`, which it has locked, if that is one.

        Its own hit's checkpoints go last; where nothing else is left, the hit's checkpoint becomes the live state.
        """
        if self.copy_on_write and path and path[-1].serial in self.saved:
            self._sources[rid] = path[-1]
        slot = self._give_up_own(rid, path)
        slot = self._take() if slot is None else slot
        if slot is None:
            raise self.short(1)
        self.live[rid] = slot
        if path:
            self._restored(slot, path[-1])
        for cached in self._arriving:
            self._settle_arrival(cached)
        self._arriving.clear()
        return slot

    def _give_up_own(self, rid: str, path: Sequence[CachedPage]) -> int | None:
        """Give up as many of the hit's checkpoints as the request lacks; its last one is then its live slot."""
        own_promise = sum(entry.tokens for entry in self.ledger.entries() if entry.request == rid)
        lacking = 1 + self.tracking - (self.rem_units() + own_promise)
        if self.shared is not None:
            lacking = max(lacking, self.shared.lacking_units(self))
        for cached in self._own_spare(path)[: max(0, lacking)]:
            if cached is path[-1]:
                self.given_up += 1
                return self._forget(cached)
            self._give_up(cached)
        return None

    def _give_up(self, cached: CachedPage) -> None:
        slot = self._forget(cached)
        assert slot is not None, "only what is saved is given up"
        self.given_up += 1
        self._free([slot])

    def allocate(self, request: Request, chunk: Chunk) -> None:  # noqa: ARG002 - whatever the chunk
        """The slots that the request tracks with, once."""
        self.ledger.settle(request.rid)
        if not self.tracking or request.rid in self.tracked:
            return
        if self.tracking > self.baseline():
            raise self.short(self.tracking)
        slots = [self._take() for _ in range(self.tracking)]
        if None in slots:
            raise self.short(self.tracking)
        self.tracked[request.rid] = [slot for slot in slots if slot is not None]

    def reserve(self, rid: str, start: int, end: int) -> dict[int, int]:
        """Slots for the checkpoints of a chunk [start, end), by position; the deepest first, as far as there are any.

        Asked again for the same chunk, it gives the same slots.
        """
        making = self._making.setdefault(rid, {})
        for position in range(end // self.grid_tokens * self.grid_tokens, start, -self.grid_tokens):
            slot = making.get(position)
            if slot is None:
                slot = self._take_spare()
            if slot is None:
                break
            making[position] = slot
        return making

    def cached(self, request: Request) -> None:
        self.attach(request.rid, request.locked)

    def attach(self, rid: str, path: Sequence[CachedPage]) -> None:
        """The chunk's pages are cached: their checkpoints are theirs; what is saved already stays, the copy goes."""
        for position, slot in self._making.pop(rid, {}).items():
            cached = path[position // self.page_size - 1]
            if cached.serial in self.saved:
                self._free([slot])
            else:
                self._save(cached, slot)
        self._make_good(rid, path)

    def _make_good(self, rid: str, path: Sequence[CachedPage]) -> None:
        """Pages that somebody had cached are the request's now, and their checkpoints can be given up for nobody else:
        where somebody was promised them, they go."""
        over = -self.rem_units()
        if self.shared is not None:
            over = max(over, self.shared.lacking_units(self) - 1)
        if over > 0:
            spare = [cached for cached in self._own_spare(path) if cached is not self._sources.get(rid)]
            for cached in spare[:over]:
                self._give_up(cached)

    def cover(self, path: Sequence[CachedPage]) -> None:
        for cached in self._at_grid(path):
            if cached.page is not None and cached.serial not in self.saved:
                slot = self._take_spare()
                if slot is None:
                    return
                if is_on_device(cached):
                    self._save(cached, slot)
                    self._brought(cached, slot)
                else:  # it was given up to make room
                    self._free([slot])

    def cover_on_host(self, path: Iterable[CachedPage]) -> None:
        self.on_host.update(cached.serial for cached in self._at_grid(path) if cached.page is None)

    def _at_grid(self, path: Iterable[CachedPage]) -> Iterable[CachedPage]:
        grid_pages = max(1, self.grid_tokens // self.page_size)
        return (cached for number, cached in enumerate(path, start=1) if number % grid_pages == 0)

    def end(self, rid: str) -> None:
        self.ledger.settle(rid)
        self._sources.pop(rid, None)
        self._free([self.live.pop(rid), *self.tracked.pop(rid, ()), *self._making.pop(rid, {}).values()])

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
        slot = self._take_spare()
        if slot is not None:
            self._save(cached, slot)
            self._raised(cached, slot)
        self.on_host.discard(cached.serial)

    def _take_spare(self) -> int | None:
        """A slot for a checkpoint: only one that nobody was promised."""
        if self.rem_units() < 1 or (self.shared is not None and not self.shared.may_take(self)):
            return None
        return self._take()

    def _take(self) -> int | None:
        """A free slot, or the one of the checkpoint that is best given up: nobody inside locks its page."""
        if self.shared is not None and not self.shared.make_room(self, 1):
            return None
        if not self.free_units and not self.give_up_one():
            return None
        return self._numbers.alloc(1)[0]

    def give_up_one(self) -> bool:
        """Free the slot of the least recently used checkpoint that nobody inside locks; False if there is none."""
        spare = (cached for cached in self._pages.values() if _inside_refs(cached) == 0)
        victim = min(spare, key=lambda cached: (cached.last_used, cached.serial), default=None)
        slot = None if victim is None else self._forget(victim)
        if slot is None:
            return False
        self.given_up += 1
        self._free([slot])
        return True

    def _save(self, cached: CachedPage, slot: int) -> None:
        self.saved[cached.serial] = slot
        self._pages[cached.serial] = cached

    def _forget(self, cached: CachedPage) -> int | None:
        self._pages.pop(cached.serial, None)
        return self.saved.pop(cached.serial, None)

    # --- what the outside may see

    def view(self) -> PoolView:
        return PoolView(
            name=self.name,
            unit=self.unit,
            capacity=self.capacity,
            released=self._numbers.released(),
            never_used=self._numbers.never_used(),
            owned=tuple(
                (rid, (slot, *self.tracked.get(rid, ()), *self._making.get(rid, {}).values()))
                for rid, slot in self.live.items()
            ),
            attached=tuple(
                (slot, -1 if (cached := self._pages[serial]).page is None else cached.page, _inside_refs(cached))
                for serial, slot in self.saved.items()
            ),
            used=tuple((rid, (self.saved.get(cached.serial, -1),)) for rid, cached in self._sources.items()),
            promised=self.promised_now(),
        )

    def check(self) -> None:
        """Every slot has one owner, and every checkpoint a page on the device."""
        making = [slot for slots in self._making.values() for slot in slots.values()]
        tracked = [slot for slots in self.tracked.values() for slot in slots]
        used = [*self.live.values(), *tracked, *self.saved.values(), *making]
        assert len(used) == len(set(used)), f"of {len(used)} slots in use, {len(set(used))} are different ones"
        assert len(used) + self.free_slots == self.limit, f"{len(used)} used + {self.free_slots} free of {self.limit}"
        assert set(self.saved) == set(self._pages), f"{len(self.saved)} slots saved for {len(self._pages)} pages"
        adrift = [cached.serial for cached in self._pages.values() if cached.page is None]
        assert not adrift, f"checkpoints on the device of pages that are not: {adrift[:5]}"


def _inside_refs(cached: CachedPage) -> int:
    """Locks of requests. Someone outside who keeps a page there does not need its state."""
    return cached.lock_refs - cached.pinned_refs
