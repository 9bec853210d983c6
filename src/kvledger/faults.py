"""Faults that a node is told of beforehand, and what they do to its memory when their moment has come.

A fault is armed for one request and strikes once, the next time there is an occasion:

    load-short     a load-back brings its first so many tokens only (0: it fails)
    load-late      a load-back takes its slots at once, and what lies in them can be used so many rounds later
    skip-insert    what a chunk has computed is not put into the prefix tree
    stale-match    what was matched, as far as nobody locks it, is gone from both tiers before it is decided on
    evicted-match  the same, and it has gone to the host
    abort-decided  the request is given up after its chunk was decided, before it is allocated
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from kvledger.adder import LOADING, Loading, PrefillAdder
from kvledger.occupancy import Occupancy
from kvledger.pools import SecondPool
from kvledger.request import CachedPage, Request

FaultKind = Literal["load-short", "load-late", "skip-insert", "stale-match", "evicted-match", "abort-decided"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
FAULT_AMOUNTS: dict[FaultKind, str] = {"load-short": "tokens", "load-late": "rounds"}
"""Kinds that come with a number, and what it counts."""


class ExposedMemory(Occupancy):
    """A node's memory that faults strike. `loading`: who waits for a late load, and the round in which it is there.

    `struck`: the kind and the request of each fault that has struck in this round.
    """

    rounds = 0

    def __init__(self, page_size: int, pool_pages: int, host_pages: int | None) -> None:
        super().__init__(page_size, pool_pages, host_pages)
        self.paused = False
        self.loading: dict[str, tuple[Request, int]] = {}
        self.struck: list[tuple[FaultKind, str]] = []
        self.pools: Sequence[SecondPool] = ()
        self._armed: dict[tuple[FaultKind, str], list[int]] = {}

    # --- what arrives from outside

    def fault(self, kind: FaultKind, rid: str, amount: int | None = None) -> None:
        """Arm a fault for a request. Several of one kind strike one after the other."""
        self._armed.setdefault((kind, rid), []).append(amount or 0)
        self.tree.loader = self._load_back

    def pause(self) -> None:
        """Rounds do nothing from now on."""
        self.paused = True

    def resume(self) -> None:
        """Rounds are rounds again."""
        self.paused = False

    # --- when their moment has come

    def strikes(self, kind: FaultKind, rid: str) -> bool:
        """This is the occasion: is one of this kind armed? It is not any more."""
        if self._next(kind, rid) is None:
            return False
        amounts = self._armed[kind, rid]
        del amounts[0]
        if not amounts:
            del self._armed[kind, rid]
        self.struck.append((kind, rid))
        return True

    def _next(self, kind: FaultKind, rid: str) -> int | None:
        """The amount of the next fault of this kind; None: there is none."""
        amounts = self._armed.get((kind, rid)) if self._armed else None
        return amounts[0] if amounts else None

    def match_strikes(self, request: Request) -> bool:
        """What it has matched is, as far as nobody locks it, not where it was any more: it must be looked for again."""
        rid = request.rid
        if not self._armed:
            return False
        unlocked = [cached for cached in (*request.device_hit, *request.host_hit) if not cached.lock_refs]
        if unlocked and self.strikes("stale-match", rid):
            self.tree.drop_below(unlocked[0])
        elif unlocked and unlocked[0].page is not None and self.strikes("evicted-match", rid):
            self.tree.evict_below(unlocked[0])
        else:
            return False
        return True

    def _load_back(self, request: Request) -> int | Loading | None:
        """The tree's load-back where faults are armed; what it answers is for the adder."""
        rid = request.rid
        tokens = self._next("load-short", rid)
        if tokens is not None and tokens // self.page_size < len(request.host_hit):
            self.strikes("load-short", rid)
            return self._came_short(request, tokens // self.page_size)
        self.tree.load_back(request.host_hit)
        rounds = self._next("load-late", rid)
        if rounds is None:
            return None
        self.strikes("load-late", rid)
        self.loading[rid] = request, self.rounds + rounds
        return LOADING

    def _came_short(self, request: Request, pages: int) -> int:
        """So many of its host pages came: it keeps locked what it can use of them and of its device hit. Tokens of the
        host hit that it can use; 0 too where even its device hit is of less use than it was."""
        for pool in self.pools:
            pool.unlock(request)
        came = request.host_hit[:pages]
        if came:
            self.tree.load_back(came)
        found = request.device_hit + came
        usable = list(self._usable(found))
        self.tree.unlock(found[len(usable) :])
        usable_pages = max(0, len(usable) - len(request.device_hit))
        request.device_hit, request.host_hit = usable, []
        request.prefix_tokens, request.host_hit_tokens = len(usable) * self.page_size, 0
        for pool in self.pools:
            pool.lock(request)
        return usable_pages * self.page_size

    def _usable(self, found: Sequence[CachedPage]) -> Sequence[CachedPage]:
        """The part of a run of cached pages from which a prompt can go on."""
        return found

    def withdraw(self, adder: PrefillAdder) -> bool:
        """Requests of this batch are given up before anything is allocated for them; the others run. Were there any?"""
        gone = [chunk for chunk in adder.can_run_list if self.strikes("abort-decided", chunk.request.rid)]
        for chunk in gone:
            adder.withdraw(chunk)
            self.abort(chunk.request.rid)
        return bool(gone)

    def abort(self, rid: str) -> None:
        """End a request."""
        raise NotImplementedError

    # --- late loads

    def arrived(self) -> Iterator[Request]:
        """Requests whose load is there, and which have not run yet, in the order of their admission."""
        for request, arrives in list(self.loading.values()):
            if arrives <= self.rounds:
                yield request

    def on_the_way(self) -> tuple[str, ...]:
        """Names of those whose load will not be there before the next round."""
        return tuple(rid for rid, (_, arrives) in self.loading.items() if arrives > self.rounds)
