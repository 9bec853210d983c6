"""The window pool, a second pool: pages for layers that look no further back than a sliding window.

    prompt   |....tombstones....|<------ window ------>|== chunk ==>|
    pages     freed in this pool  in use: a request's     taken when the
              only, KV stays      own, or attached to     chunk is allocated
                                  cached pages

A chunk takes pages for all it computes, and then keeps those of the last `window_tokens`. What a request keeps and has
cached is attached to the cached page. Outside every live window it can be given up: a tombstone, whose KV stays. A hit
needs the pages of its own window, on the device or on the host; a load-back takes device pages for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvledger.adder import Chunk
from kvledger.arithmetic import ceil_pages, pages_of_window
from kvledger.ledger import Due
from kvledger.pools import SecondPool, is_on_device
from kvledger.record import PoolView
from kvledger.request import CachedPage, Request


@dataclass(slots=True)
class Window:
    """A request's pages in the pool by their place in its prompt: `own` units, and `shared` cached pages.

    It has pages for `end` tokens, in this round's batch up to `planned`, of `last`.
    """

    last: int
    end: int = 0
    planned: int = 0
    own: dict[int, int] = field(default_factory=dict)
    shared: dict[int, CachedPage] = field(default_factory=dict)


class WindowPool(SecondPool):
    """`pages` pages of `page_size` slots for windows of `window_tokens`."""

    name = "window_pool"
    unit = "page"

    def __init__(self, pages: int, page_size: int, window_tokens: int) -> None:
        self.page_size = page_size
        self.window_tokens = window_tokens
        self.window_pages = pages_of_window(window_tokens, page_size)
        self.windows: dict[str, Window] = {}
        self.on_host: set[int] = set()
        self.given_up = 0
        self._units: dict[int, int] = {}
        self._pages: dict[int, CachedPage] = {}
        self._uses: dict[int, int] = {}
        super().__init__(pages)

    def evictable_units(self) -> int:
        """Attached pages that are in no live window."""
        return sum(1 for uses in self._uses.values() if not uses)

    def first_page(self, end: int) -> int:
        """The first page of the window before position `end`."""
        return max(0, end - self.window_tokens) // self.page_size

    # --- on paper

    def ends_hit(self, found: Sequence[CachedPage], pages: int) -> bool:
        first = self.first_page(pages * self.page_size)
        return all(cached.serial in (self.on_host if cached.page is None else self._units)
                   for cached in found[first:pages])  # fmt: skip

    def lock(self, req: Any) -> None:
        for cached in self._hit_window(req):
            if cached.page is not None:
                self._uses[cached.serial] += 1

    def unlock(self, req: Any) -> None:
        for cached in self._hit_window(req):
            if cached.page is not None:
                self._uses[cached.serial] -= 1

    def _hit_window(self, req: Any) -> Sequence[CachedPage]:
        hit = [*req.device_hit, *req.host_hit]
        return hit[self.first_page(len(hit) * self.page_size) :]

    def holdable(self, req: Any, start: int, tokens: int) -> int:
        """As much as the pool can give now, if that leaves what the request needs to come to its end in steps.

        Those are (`still`) a window and a page, less what it has to itself: it comes back as the window moves on.
        """
        if self.promises:
            self._promise_tails(without=req.rid)
        return self.within(req, start, tokens, self.rem_units())

    def within(self, req: Any, start: int, tokens: int, room: int) -> int:
        window = self.windows.get(req.rid)
        loaded = 0 if window is not None else self.loaded_pages(req)
        room -= loaded
        first = ceil_pages(start, self.page_size)
        pages = min(room, ceil_pages(start + tokens, self.page_size) - first)
        if pages < 0:
            return 0
        end = min(start + tokens, (first + pages) * self.page_size)
        if not self.promises:
            return end - start
        still = self._still_after(req, end, loaded + pages)
        return end - start if pages + still <= room else 0

    def asked_units(self, req: Any, start: int, tokens: int) -> int:
        loaded = 0 if req.rid in self.windows else self.loaded_pages(req)
        taken = loaded + ceil_pages(start + tokens, self.page_size) - ceil_pages(start, self.page_size)
        return taken + self._still_after(req, start + tokens, taken)

    def _still_after(self, req: Any, end: int, taken: int) -> int:
        window = self.windows.get(req.rid)
        alone = self._alone(window) if window is not None else self._alone_in_hit(req)
        return self.still_pages(req.prompt_tokens, end, alone + taken)

    def loaded_pages(self, req: Any) -> int:
        """Pages that a load-back of the hit takes at once."""
        return sum(1 for cached in self._hit_window(req) if cached.page is None)

    def still_pages(self, last: int, end: int, alone: int) -> int:
        """Pages that a request which will have computed `end` of `last` tokens must yet be able to take.

        `alone`: what it has to itself by then. What others use too does not come back when its window moves on.
        """
        left = ceil_pages(last, self.page_size) - ceil_pages(end, self.page_size)
        return min(left, max(0, self.window_pages + 1 - alone))

    def _alone(self, window: Window) -> int:
        return len(window.own) + sum(1 for cached in window.shared.values() if self._uses[cached.serial] == 1)

    def _alone_in_hit(self, req: Any) -> int:
        return sum(1 for cached in self._hit_window(req) if cached.page is not None and self._uses[cached.serial] == 1)

    def promise(self, req: Any, start: int, tokens: int) -> None:
        """The chunk's pages, due now."""
        if self.promises:
            pages = ceil_pages(start + tokens, self.page_size) - ceil_pages(start, self.page_size)
            self.ledger.promise(req.rid, "chunk", pages, Due.NOW)
        window = self.windows.setdefault(req.rid, Window(req.prompt_tokens, start))
        window.planned = start + tokens

    def owed_units(self, without: str | None) -> int:
        self._promise_tails(without)
        return super().owed_units(without)

    def _promise_tails(self, without: str | None) -> None:
        """What each admitted request must yet be able to take, counted afresh: a newcomer may share what was its."""
        for rid, window in self.windows.items():
            self.ledger.take_back(rid, "tail")
            if rid != without:
                end = max(window.end, window.planned)
                coming = ceil_pages(end, self.page_size) - ceil_pages(window.end, self.page_size)
                still = self.still_pages(window.last, end, self._alone(window) + coming)
                if still:
                    self.ledger.promise(rid, "tail", still, Due.LATER)

    # --- a request's life

    def admit(self, request: Request) -> None:
        """The window of its hit is its own to keep; what of that comes from the host takes pages here."""
        path = request.locked
        window = self.windows.setdefault(request.rid, Window(request.prompt_tokens))
        window.end = len(path) * self.page_size
        first = self.first_page(window.end)
        for index, cached in enumerate(path):
            from_host = cached.serial in self.on_host and cached.serial not in self._units
            self.on_host.discard(cached.serial)
            if index < first:
                continue
            if from_host:
                self._attach(cached, self._take_or_fail(1))
                self._uses[cached.serial] = 1
            window.shared[index] = cached

    def allocate(self, request: Request, chunk: Chunk) -> None:
        window = self.windows[request.rid]
        first, end = ceil_pages(chunk.start, self.page_size), ceil_pages(chunk.end, self.page_size)
        if end - first > self.baseline():
            raise self.short(end - first)
        for index in range(first, end):
            window.own[index] = self._take_or_fail(end - first)
        window.end = chunk.end
        self.ledger.settle(request.rid)

    def cached(self, request: Request) -> None:
        """What lies in the window and is cached by now is attached; what has left the window is freed, or let go."""
        window = self.windows[request.rid]
        window.end = window.planned = request.prefix_tokens
        first = self.first_page(window.end)
        for index in [index for index in window.own if index < max(first, len(request.locked))]:
            unit = window.own.pop(index)
            cached = request.locked[index] if first <= index < len(request.locked) else None
            if cached is None or cached.serial in self._units:
                self._numbers.free([unit])
            if cached is not None:
                self._attach(cached, unit)
                self._uses[cached.serial] += 1
                window.shared[index] = cached
        self.leave(window, [index for index in window.shared if index < first])

    def leave(self, window: Window, indices: Iterable[int]) -> None:
        """These cached pages are outside the request's window."""
        for index in indices:
            self._uses[window.shared.pop(index).serial] -= 1

    def end(self, rid: str) -> None:
        window = self.windows.pop(rid)
        self.ledger.settle(rid)
        self.ledger.take_back(rid, "tail")
        self.leave(window, list(window.shared))
        self._numbers.free(window.own.values())

    def cover(self, path: Sequence[CachedPage]) -> None:
        for cached in path[self.first_page(len(path) * self.page_size) :]:
            if cached.page is not None and cached.serial not in self._units:
                if not self._has_spare():
                    return
                unit = self._take_or_fail(1)
                if is_on_device(cached):
                    self._attach(cached, unit)
                else:  # it was given up to make room
                    self._numbers.free([unit])

    def _has_spare(self) -> bool:
        return self.baseline() > 0 and (self.shared is None or self.shared.may_take(self))

    def cover_on_host(self, path: Iterable[CachedPage]) -> None:
        self.on_host.update(cached.serial for cached in path if cached.page is None)

    # --- what the prefix tree tells

    def evicted(self, cached: CachedPage, page: int) -> None:  # noqa: ARG002 - for those who keep data
        if cached.serial in self._units:
            self._detach(cached)
            self.on_host.add(cached.serial)

    def dropped(self, cached: CachedPage) -> None:
        self.on_host.discard(cached.serial)

    def filled(self, cached: CachedPage, page: int) -> None:  # noqa: ARG002 - for those who keep data
        self.on_host.discard(cached.serial)

    # --- units

    def _take_or_fail(self, wanted: int) -> int:
        if self.shared is not None and not self.shared.make_room(self, 1):
            raise self.shared.short_for(self, wanted)
        if not self.free_units and not self.give_up_one():
            raise self.short(wanted)
        return self._numbers.alloc(1)[0]

    def give_up_one(self) -> bool:
        """Make a tombstone of the least recently used page that is in no live window; False if there is none."""
        victim = min(self._spare(), key=lambda cached: (cached.last_used, cached.serial), default=None)
        if victim is None:
            return False
        self._detach(victim)
        self.given_up += 1
        return True

    def _spare(self) -> Iterator[CachedPage]:
        return (cached for serial, cached in self._pages.items() if not self._uses[serial])

    def _attach(self, cached: CachedPage, unit: int) -> None:
        """A page that has one already keeps that; what the host has of it is a copy no more."""
        self.on_host.discard(cached.serial)
        if cached.serial not in self._units:
            self._units[cached.serial] = unit
            self._pages[cached.serial] = cached
            self._uses[cached.serial] = 0

    def _detach(self, cached: CachedPage) -> None:
        self._numbers.free([self._units.pop(cached.serial)])
        del self._pages[cached.serial], self._uses[cached.serial]

    # --- what the outside may see

    def view(self) -> PoolView:
        units = self._units
        return PoolView(
            name=self.name,
            unit=self.unit,
            capacity=self.capacity,
            released=self._numbers.released(),
            never_used=self._numbers.never_used(),
            owned=tuple((rid, tuple(window.own.values())) for rid, window in self.windows.items()),
            attached=tuple(
                (
                    unit,
                    -1 if self._pages[serial].page is None else int(self._pages[serial].page or 0),
                    self._uses[serial],
                )
                for serial, unit in units.items()
            ),
            used=tuple(
                (rid, tuple(units.get(cached.serial, -1) for cached in window.shared.values()))
                for rid, window in self.windows.items()
            ),
            promised=self.promised_now(),
        )
