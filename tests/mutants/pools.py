"""Mutants of second pools: what their gates ask, what they promise, who gives units back and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvledger.adder import Chunk
from kvledger.ledger import Due
from kvledger.pool import OutOfPages
from kvledger.pools import SecondPool
from kvledger.request import CachedPage, Request
from kvledger.settings import NodeSettings
from kvledger.shared import SharedBytes
from kvledger.slots import StateSlots
from kvledger.testing.dimensions import swarm
from kvledger.testing.moves import NODE_SPACE, Space
from kvledger.testing.pools_moves import DOMAINS, POOLS
from kvledger.window import Window, WindowPool
from tests.mutants.mutant import mutant


def _tracking(settings: NodeSettings) -> bool:
    return settings.tracking_slots > 0


def _few_copied_states() -> Space:
    """Nodes with state slots for a request or two, whose hits are copied."""
    domains = {**DOMAINS, "which": (0, 0), "slots": (0, 1), "tracking": (0, 0), "copying": (1, 1)}
    return swarm(NODE_SPACE, [replace(POOLS, domains=domains)], name="+ pools", examples=1, always=True)


def _windowed(settings: NodeSettings) -> bool:
    return settings.window_tokens is not None


def _narrow_window(settings: NodeSettings) -> bool:
    """The pool holds little more than two windows, so that it matters what of one comes back."""
    return 4 <= settings.window_pages <= settings.window_pool_pages / 2 and settings.host_tokens == 0


def _windowed_with_host(settings: NodeSettings) -> bool:
    return settings.window_tokens is not None and settings.host_tokens != 0


def _sharing(settings: NodeSettings) -> bool:
    return settings.shared_bytes is not None


# --- state slots


@mutant("on-grid", narrow=lambda settings: settings.state_slots is not None)
class EveryStateHit(StateSlots):
    """Any cached prefix is a hit, whether the state at its end was saved or not."""

    def ends_hit(self, found: Sequence[CachedPage], pages: int) -> bool:
        return True


@mutant("promises-covered", "admitted-finishes", narrow=_tracking)
class GateCountsLiveSlotOnly(StateSlots):
    """The gate counts a request's live slot, and not those that it will track with."""

    def needed_at_admission(self, req: Any) -> int:
        return 1

    def promise(self, req: Any, start: int, tokens: int) -> None: ...


@mutant("no-use-after-free", space=_few_copied_states())
class CopiedCheckpointTaken(StateSlots):
    """The checkpoint of a hit is given up while its state is being copied into the live slot."""

    def _own_spare(self, path: Sequence[CachedPage]) -> list[CachedPage]:
        copying, self.copy_on_write = self.copy_on_write, False
        try:
            return super()._own_spare(path)
        finally:
            self.copy_on_write = copying


@mutant("refusal-is-free", "conserved", report="#16067, #20182")
class SlotLeaksWhenRefused(StateSlots):
    """A request's slot is taken when it is matched, and is not given back if it is not scheduled after all."""

    def lock(self, req: Any) -> None:
        taken = self._numbers.alloc(1) if self.free_units else []
        self._matched = [*getattr(self, "_matched", []), *taken]

    def admit(self, request: Request) -> None:
        if self._matched:
            self._numbers.free([self._matched.pop()])
        super().admit(request)


@mutant("conserved", narrow=_tracking)
class TrackingTakenForEachChunk(StateSlots):
    """Each chunk takes slots to track with, and those of the chunk before are forgotten."""

    def allocate(self, request: Request, chunk: Chunk) -> None:
        self.tracked.pop(request.rid, None)
        super().allocate(request, chunk)


@mutant("conserved", narrow=_tracking)
class TrackingKeptAtEnd(StateSlots):
    """A request that ends gives back its live slot, and not those that it tracked with."""

    def end(self, rid: str) -> None:
        self.tracked.pop(rid, None)
        super().end(rid)


@mutant("promises-covered", narrow=lambda settings: _tracking(settings) and settings.host_tokens != 0)
class CheckpointTakesPromisedSlot(StateSlots):
    """A checkpoint that comes up from the host takes a slot that somebody else in the batch was promised."""

    def _take_spare(self) -> int | None:
        return self._take()


@mutant("fix-is-minimal")
class GateAsksForTwo(StateSlots):
    """The gate asks for two requests' slots."""

    def needed_at_admission(self, req: Any) -> int:
        return 2 * super().needed_at_admission(req)


# --- the window


@mutant("promises-covered", "admitted-finishes", narrow=_windowed_with_host, report="#27391")
class HostHitNotCharged(WindowPool):
    """What a load-back takes of the window pool is not asked for at the gate."""

    def loaded_pages(self, req: Any) -> int:
        return 0


@mutant("promises-covered", narrow=_windowed, report="#23174")
class WholeWindowTaken(WindowPool):
    """A chunk takes all that the window pool has, and leaves its request no page to go on with."""

    def still_pages(self, last: int, end: int, alone: int) -> int:
        return 0


@mutant("progress", narrow=_windowed, report="#31205")
class ChunkNotCapped(WindowPool):
    """The gate asks for a whole chunk and a page, and cuts it to nothing less: one that is as large as the pool waits
    for ever."""

    def within(self, req: Any, start: int, tokens: int, room: int) -> int:
        return tokens if super().within(req, start, tokens, room - 1) == tokens else 0


@mutant("conserved", narrow=_windowed)
class TombstoneFreedTwice(WindowPool):
    """A page that leaves the window is freed when the chunk has run, and once more when the request ends."""

    def cached(self, request: Request) -> None:
        first = self.first_page(request.prefix_tokens)
        gone = [unit for index, unit in self.windows[request.rid].own.items() if index < first]
        super().cached(request)
        self._gone = {**getattr(self, "_gone", {}), request.rid: gone}

    def end(self, rid: str) -> None:
        super().end(rid)
        self._numbers.free(self._gone.pop(rid, []))


@mutant("no-use-after-free", narrow=_windowed)
class LiveWindowGivenUp(WindowPool):
    """Pages in the window of one request alone are given up as if nobody needed them."""

    def _spare(self) -> Iterator[CachedPage]:
        return (cached for serial, cached in self._pages.items() if self._uses[serial] <= 1)

    def leave(self, window: Window, indices: Any) -> None:
        super().leave(window, [index for index in indices if window.shared[index].serial in self._uses])


@mutant("table-fits", narrow=_windowed, report="#36458")
class WindowNeverMoves(WindowPool):
    """What leaves the window is kept until the request ends."""

    def first_page(self, end: int) -> int:
        return 0


@mutant("quiescent", narrow=_windowed)
class WindowKeptAtEnd(WindowPool):
    """A request that ends does not let go of the cached pages in its window."""

    def end(self, rid: str) -> None:
        for cached in self.windows[rid].shared.values():
            self._uses[cached.serial] += 1
        super().end(rid)


@mutant("promises-covered", narrow=_narrow_window)
class SharedWindowCountedAsOwn(WindowPool):
    """Pages that somebody else uses too are counted as coming back when the window moves on."""

    def _alone(self, window: Window) -> int:
        return len(window.own) + len(window.shared)


@mutant("refusal-is-free", narrow=_windowed)
class PromiseKeptAfterRefusal(WindowPool):
    """What is promised in the window pool stays promised when another pool refuses."""

    def lock(self, req: Any) -> None:
        super().lock(req)
        self.ledger.promise(req.rid, "chunk", 1, Due.NOW)


# --- shared bytes


@mutant("conserved", narrow=_sharing)
class SharedBytesCountedOnce(SharedBytes):
    """Only KV pages are counted in the bytes that are used."""

    def used_bytes(self) -> int:
        return (self.tree.pool.pool_pages - self.tree.pool.free_pages) * self.page_bytes


@mutant("promises-covered", "admitted-finishes", narrow=_sharing)
class SharedTailForgotten(SharedBytes):
    """A gate forgets the bytes of pages that others will take in later rounds."""

    def _promise_rest(self, without: str | None) -> None: ...


def _states_in_few_bytes(settings: NodeSettings) -> bool:
    """Pages and states share less than a prompt of three quarters of the pool takes."""
    shared = settings.shared_bytes
    if shared is None or settings.state_slot_bytes is None:
        return False
    return settings.bytes_of_one(settings.pool_tokens * 3 // 4) > shared


@mutant("promises-covered", "admitted-finishes", narrow=_states_in_few_bytes)
class OwnCheckpointsKept(SharedBytes):
    """A request's own checkpoints stay, though they lie in bytes that were promised: to itself, or to somebody else."""

    def lacking_units(self, pool: SecondPool) -> int:
        return 0


@mutant("admitted-finishes", narrow=_sharing, report="#34441")
class OnePoolsIdleUnitsKept(SharedBytes):
    """What is idle in a pool is not given up for another one, though the gate counts on it."""

    def _make_room(self, wanted: int) -> bool:
        return self.free_units >= wanted

    def make_room_for_pages(self, pages: int) -> None:
        if self.free_units < pages * self.page_bytes:
            raise OutOfPages(pages * self.page_bytes, self.free_units, self.evictable_units(), self.name)


@mutant("promises-covered", narrow=lambda settings: _sharing(settings) and settings.host_tokens != 0)
class SharedForgetsLoadBack(SharedBytes):
    """The shared pool's gate takes what is on the host for paid."""

    def holdable(self, req: Any, start: int, tokens: int) -> int:
        if req.rid in self._live:
            return super().holdable(req, start, tokens)
        return super().holdable(_WithoutLoad(req), start, tokens)


class _WithoutLoad:
    """A request whose host hit counts as a part of its device hit."""

    def __init__(self, req: Any) -> None:
        self._req = req

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._req, name)
        return value + self._req.host_hit_tokens if name == "prefix_tokens" else value
