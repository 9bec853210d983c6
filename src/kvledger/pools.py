"""Second pools: what a request takes beside its KV pages, counted by the same promise.

A unit (a state slot, a page of a sliding window) is owned by a request, attached to a cached page, or free. What is
attached and in nobody's use can be given up, least recently used first. Like the KV pool, a second pool has a live
baseline (free and what can be given up) and a ledger of its own, opened afresh each round. The adder asks every one
after its own gate: a request is admitted in all of them or in none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvledger.adder import Chunk
from kvledger.ledger import Due, MemoryLedger
from kvledger.pool import OutOfPages, PagePool
from kvledger.radix import PageMover
from kvledger.record import PoolRound, PoolView
from kvledger.request import CachedPage, Request


class SecondPool(PageMover):
    """`capacity` units, numbered from 0; every figure is in units. A subclass says who takes how many of them, when.

    `limited`: it can run out at all. `promises`: what is admitted is counted until it is taken; without, a gate looks
    at what there is right now.
    """

    name = ""
    unit = ""

    def __init__(self, capacity: int, *, limited: bool = True) -> None:
        self.capacity = capacity
        self.limited = limited
        self.promises = True
        self.shared: PoolOfPools | None = None
        self._numbers = PagePool(capacity, 1)
        self.open_books()

    def open_books(self) -> None:
        """A fresh ledger, as each round begins."""
        self.ledger = MemoryLedger(self.baseline)

    @property
    def free_units(self) -> int:
        return self._numbers.free_pages

    def evictable_units(self) -> int:
        """Attached to cached pages, and in nobody's use."""
        raise NotImplementedError

    def baseline(self) -> int:
        """What can be had right now."""
        return self.free_units + self.evictable_units()

    def rem_units(self) -> int:
        """What may still be promised."""
        return self.ledger.rem_total_tokens

    # --- what the adder asks, on paper

    def lock(self, req: Any) -> None:
        """The candidate's hit is in use from here on; `unlock` undoes it."""

    def unlock(self, req: Any) -> None: ...

    def holdable(self, req: Any, start: int, tokens: int) -> int:
        """Of a chunk of `tokens` from `start` on, as many as it can hold with all that they entail; 0 refuses."""
        raise NotImplementedError

    def within(self, req: Any, start: int, tokens: int, room: int) -> int:
        """The same with `room` units for it, whatever there is."""
        raise NotImplementedError

    def asked_units(self, req: Any, start: int, tokens: int) -> int:
        """What such a chunk asks for until the request's prefill is done, beyond what it has."""
        raise NotImplementedError

    def shortfall(self, req: Any, start: int, tokens: int) -> tuple[int, int]:
        """What a chunk that `holdable` has just refused asks for, and what is left for it; its hit is locked."""
        return self.asked_units(req, start, tokens), self.rem_units()

    def owed_units(self, without: str | None) -> int:  # noqa: ARG002 - for those who promise for later
        """What admitted requests, but for one, are promised and have not taken yet."""
        return self.ledger.rem_total_token_offset

    def own_spare_units(self, req: Any) -> int:  # noqa: ARG002 - for those who have some
        """What is attached to the hit of a candidate, kept by nobody else, and may be given up for it."""
        return 0

    def give_up_own(self, req: Any, units: int) -> int:  # noqa: ARG002 - for those who have some
        """Free so many of them, as far as there are any beside what is at the end of the hit. How many it were."""
        return 0

    def make_way(self, req: Any, start: int, tokens: int) -> None:
        """The candidate is admitted with this chunk, and nothing is taken for it yet: give up what that counts on."""

    def promise(self, req: Any, start: int, tokens: int) -> None:
        """The chunk is part of the batch: write down what it will take."""

    def await_chunk(self, req: Any) -> None:
        """It is admitted, and its first chunk is part of a later batch: what that will take is promised till then."""

    # --- what the node does

    def ends_hit(self, found: Sequence[CachedPage], pages: int) -> bool:
        """A hit may end after so many of a run of cached pages: what belongs to it here is still there."""
        raise NotImplementedError

    def admit(self, request: Request) -> None:
        """The request owns its hit now. OutOfPages if it cannot have what it takes at once."""

    def allocate(self, request: Request, chunk: Chunk) -> None:
        """Take what was promised to this chunk. OutOfPages."""

    def cached(self, request: Request) -> None:
        """The chunk has run, and its full pages are in the tree: what belongs to them is attached."""

    def end(self, rid: str) -> None:
        """The request gives back all that it has or was promised."""

    def cover(self, path: Sequence[CachedPage]) -> None:
        """Somebody else's prefix is cached on the device; what belongs to it comes with it, as far as there is room."""

    def cover_on_host(self, path: Iterable[CachedPage]) -> None:
        """The same on the host, where room for it comes with the page."""

    def give_up_one(self) -> bool:
        """Free the least recently used unit that is attached and in nobody's use; False if there is none."""
        raise NotImplementedError

    # --- what the outside may see

    def view(self) -> PoolView:
        raise NotImplementedError

    def told(self, promised_units: int) -> PoolRound:
        """Its figures for a round's record."""
        return PoolRound(
            name=self.name,
            unit=self.unit,
            free=self.free_units,
            evictable=self.evictable_units(),
            promised=promised_units,
        )

    def promised_now(self) -> tuple[str, ...]:
        """Requests with a promise due in the last round that nothing has settled."""
        return tuple(entry.request for entry in self.ledger.entries() if entry.due is Due.NOW)

    def short(self, wanted: int) -> OutOfPages:
        """The error of an allocation of so many units: of the pool that they are cut from, if only that is short."""
        if self.shared is not None and self.baseline() >= wanted:
            return self.shared.short_for(self, wanted)
        return OutOfPages(wanted, self.free_units, self.evictable_units(), self.name)


class PoolOfPools:
    """What several pools are cut from; without one, a unit is there if its pool has it."""

    def make_room(self, pool: SecondPool, units: int) -> bool:
        """Give up what nobody uses until `units` of `pool` fit; False if they cannot."""
        raise NotImplementedError

    def lacking_units(self, pool: SecondPool) -> int:
        """How many units of `pool` must be given up before there is one that was promised to nobody."""
        raise NotImplementedError

    def may_take(self, pool: SecondPool) -> bool:
        """A unit that was promised to nobody can be had."""
        raise NotImplementedError

    def short_for(self, pool: SecondPool, units: int) -> OutOfPages:
        """The error of an allocation of so many units of `pool`."""
        raise NotImplementedError


class _Movers(PageMover):
    """Tells each of several pools."""

    def __init__(self, movers: Sequence[PageMover]) -> None:
        self._movers = movers

    def evicted(self, cached: CachedPage, page: int) -> None:
        for mover in self._movers:
            mover.evicted(cached, page)

    def dropped(self, cached: CachedPage) -> None:
        for mover in self._movers:
            mover.dropped(cached)

    def filled(self, cached: CachedPage, page: int) -> None:
        for mover in self._movers:
            mover.filled(cached, page)

    def loaded_back(self, path: Sequence[CachedPage]) -> None:
        for mover in self._movers:
            mover.loaded_back(path)


def mover_of(pools: Sequence[PageMover]) -> PageMover | None:
    """One mover that stands for all of them; None for none."""
    return _Movers(pools) if len(pools) > 1 else next(iter(pools), None)


def longest_hit(found: Sequence[CachedPage], grid_pages: int, pools: Sequence[SecondPool]) -> list[CachedPage]:
    """The longest part of a run of cached pages that ends on the grid and that every pool still has its part of."""
    for pages in range(len(found) // grid_pages * grid_pages, 0, -grid_pages):
        if all(pool.ends_hit(found, pages) for pool in pools):
            return list(found[:pages])
    return []


def is_on_device(cached: CachedPage) -> bool:
    """It has a device page; asked again, because taking a unit may have cost it that."""
    return cached.page is not None
