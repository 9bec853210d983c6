"""Shared bytes: one amount that the KV pool and second pools are cut from, with a ledger that counts bytes of them all.

Each of them keeps its own books, in its own units. Here a page and a slot are what they cost; what nobody uses of one
can be given up for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvledger.adder import Chunk
from kvledger.arithmetic import ceil_pages
from kvledger.ledger import Due
from kvledger.pool import OutOfPages
from kvledger.pools import PoolOfPools, SecondPool
from kvledger.radix import PrefixTree
from kvledger.record import PoolView
from kvledger.request import CachedPage, Request

KV = ""
"""The KV pool's name among the parts."""


class SharedBytes(SecondPool, PoolOfPools):
    """`capacity` bytes, of which a KV page of `tree` takes `page_bytes` and a unit of each of `parts` its own number.

    `live` are the admitted requests. Every figure is in bytes. `parts` are asked in turn: first those that a chunk asks
    for as much, however short it is.
    """

    name = "shared_bytes"
    unit = "byte"

    def __init__(
        self,
        capacity: int,
        tree: PrefixTree,
        page_bytes: int,
        parts: Sequence[tuple[SecondPool, int]],
        live: Mapping[str, Request],
    ) -> None:
        self.tree = tree
        self.page_bytes = page_bytes
        self.parts = tuple(parts)
        self._live = live
        super().__init__(capacity)
        tree.room_maker = self.make_room_for_pages
        for pool, _ in self.parts:
            pool.shared = self

    # --- what is there

    def used_bytes(self) -> int:
        pages = self.tree.pool.pool_pages - self.tree.pool.free_pages
        return pages * self.page_bytes + sum((pool.capacity - pool.free_units) * cost for pool, cost in self.parts)

    @property
    def free_units(self) -> int:
        return self.capacity - self.used_bytes()

    def evictable_units(self) -> int:
        """Of cached pages without a lock, and of what is attached to cached pages and in nobody's use."""
        of_parts = sum(pool.evictable_units() * cost for pool, cost in self.parts)
        return self.tree.evictable_pages * self.page_bytes + of_parts

    def make_room_for_pages(self, pages: int) -> None:
        """Before so many KV pages are taken. OutOfPages if their bytes cannot be had."""
        if not self._make_room(pages * self.page_bytes):
            raise self.short(pages * self.page_bytes)

    def make_room(self, pool: SecondPool, units: int) -> bool:
        return self._make_room(units * self._cost_of(pool))

    def _make_room(self, wanted: int) -> bool:
        """Give up cached pages, and what is attached to them, and then what is attached to pages in use."""
        while self.free_units < wanted:
            if self.tree.evictable_pages:
                self.tree.evict_one()
            elif not any(pool.give_up_one() for pool, _ in self.parts):
                return False
        return True

    def short_for(self, pool: SecondPool, units: int) -> OutOfPages:
        return self.short(units * self._cost_of(pool))

    def _cost_of(self, pool: SecondPool) -> int:
        return next(cost for part, cost in self.parts if part is pool)

    def lacking_units(self, pool: SecondPool) -> int:
        return max(0, 1 - self._room() // self._cost_of(pool))

    def may_take(self, pool: SecondPool) -> bool:
        return self._room() >= self._cost_of(pool)

    # --- on paper

    def _room(self, without: str | None = None) -> int:
        """What may still be promised, once everything that the admitted requests will take is."""
        if self.promises:
            self._promise_rest(without)
        return self.rem_units()

    def _promise_rest(self, without: str | None) -> None:
        """Pages that each admitted request has yet to take, and what it is promised in the parts, counted afresh."""
        for rid, request in self._live.items():
            self.ledger.take_back(rid, "pages")
            if rid != without:
                pages = ceil_pages(request.prompt_tokens, self.tree.page_size) - len(request.pages)
                self.ledger.promise(rid, "pages", pages * self.page_bytes, Due.LATER)
        for pool, cost in self.parts:
            self.ledger.take_back(pool.name, "units")
            self.ledger.promise(pool.name, "units", pool.owed_units(without) * cost, Due.LATER)

    def holdable(self, req: Any, start: int, tokens: int) -> int:
        """As much of the chunk as the parts can hold beside all pages that the request will ever take."""
        room = self._room_for(req, start, tokens)
        if room < 0:
            return 0
        for pool, cost in self.parts:
            tokens = pool.within(req, start, tokens, room // cost)
            room -= pool.asked_units(req, start, tokens) * cost
        return tokens

    def _room_for(self, req: Any, start: int, tokens: int) -> int:
        """What is left for the parts beside its pages, with what its own hit can give up for it."""
        request = self._live.get(req.rid)
        size = self.tree.page_size
        if request is not None:
            pages = ceil_pages(request.prompt_tokens, size) - len(request.pages)
        else:
            pages = ceil_pages(req.prompt_tokens - req.prefix_tokens, size)
        if not self.promises:
            pages = ceil_pages(start + tokens, size) - ceil_pages(req.prefix_tokens, size)
        spare = sum(pool.own_spare_units(req) * cost for pool, cost in self.parts)
        return self._room(without=req.rid) + spare - pages * self.page_bytes

    def make_way(self, req: Any, start: int, tokens: int) -> None:
        """What is attached to its own hit goes where the bytes are short: a load-back takes its pages next."""
        asked = sum(pool.asked_units(req, start, tokens) * cost for pool, cost in self.parts)
        for pool, cost in self.parts:
            spare = pool.own_spare_units(req) * cost
            lacking = asked + spare - self._room_for(req, start, tokens)
            if spare and lacking > 0:
                pool.give_up_own(req, -(-lacking // cost))

    def asked_units(self, req: Any, start: int, tokens: int) -> int:
        pages = ceil_pages(req.prompt_tokens - req.prefix_tokens, self.tree.page_size)
        of_parts = sum(pool.asked_units(req, start, tokens) * cost for pool, cost in self.parts)
        return pages * self.page_bytes + of_parts

    def owed_units(self, without: str | None) -> int:
        if self.promises:
            self._promise_rest(without)
        return super().owed_units(without)

    def allocate(self, request: Request, chunk: Chunk) -> None:
        """The KV pool and the parts have taken it."""

    def admit(self, request: Request) -> None:
        """The parts have."""

    def ends_hit(self, found: Sequence[CachedPage], pages: int) -> bool:  # noqa: ARG002 - the parts say
        return True

    def short(self, wanted: int) -> OutOfPages:
        return OutOfPages(wanted, self.free_units, self.evictable_units(), self.name)

    def view(self) -> PoolView:
        weights = ((KV, self.page_bytes), *((pool.name, cost) for pool, cost in self.parts))
        return PoolView(name=self.name, unit=self.unit, capacity=self.capacity, weights=weights)
