"""Mutants of a request's life on the node: its entry, its hit, its page table, and its end."""

from __future__ import annotations

from kvledger.adder import Chunk, PrefillAdder
from kvledger.arithmetic import floor_tokens
from kvledger.node import PrefillNode, Watcher
from kvledger.request import USUAL_OUTPUT, Output, Prompt, Request, RequestState
from kvledger.rules import AccountingRules
from kvledger.settings import FIRST_TOKEN, NodeSettings
from tests.mutants.mutant import ALIGNED, DeferringNode, mutant

# --- entry and hit


@mutant("never-raises")
class RaisesOnAbort(PrefillNode):
    """Somebody else's scheduler, which looks for an aborted request only where it is half done or in flight."""

    foreign = True

    def abort(self, rid: str) -> None:
        self._end(self.live[rid])


@mutant("progress", report="#28530")
class PageForgottenAtEntry(PrefillNode):
    """The entry lets in what fits without the page of slack, and the gate then refuses it for ever."""

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        if prompt.tokens + FIRST_TOKEN < self.settings.pool_pages * self.page_size:
            self.waiting[rid] = Request(rid, prompt)
            return None
        return super().submit(rid, prompt)


@mutant("everyone-served")
class EntryRefusesWhatFits(PrefillNode):
    """The entry refuses every prompt above half the pool."""

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        if 2 * prompt.tokens > self.settings.pool_tokens:
            return "too long"
        return super().submit(rid, prompt)


@mutant("on-grid")
class HitOffGrid(PrefillNode):
    """A hit is taken to its last full page, though KDA state is only there at the last grid line."""

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, rules, watcher)
        self.grid_tokens = settings.page_size


@mutant("on-grid")
class HitTakesLastToken(PrefillNode):
    """A prompt that is cached whole is a whole hit, and nothing is left to compute its first token from."""

    def _match(self, request: Request) -> None:
        found = self.tree.match(request.prompt.page_keys(self.page_size))
        usable = found[: floor_tokens(len(found) * self.page_size, self.grid_tokens) // self.page_size]
        request.device_hit = [cached for cached in usable if cached.page is not None]
        request.host_hit = usable[len(request.device_hit) :]
        request.prefix_tokens = len(request.device_hit) * self.page_size
        request.host_hit_tokens = len(request.host_hit) * self.page_size


# --- the page table


@mutant("promises-covered")
class LastPageNotAllocated(PrefillNode):
    """A chunk's last page is not allocated unless it is full."""

    def _allocate(self, request: Request, chunk: Chunk) -> None:
        pages = chunk.end // self.page_size - len(request.pages)
        request.pages.extend(self.tree.allocate(max(0, pages)))


@mutant("table-fits")
class PageForExactMultiple(PrefillNode):
    """A chunk that fills its last page is given one more."""

    def _allocate(self, request: Request, chunk: Chunk) -> None:
        pages = chunk.end // self.page_size + 1 - len(request.pages)
        request.pages.extend(self.tree.allocate(max(0, pages)))


def _chunks_inside_pages(settings: NodeSettings) -> bool:
    """The chunk budget is no whole number of pages, so that a half-done request may have a partly filled one."""
    return settings.chunked_prefill_size is not None and settings.chunked_prefill_size % settings.page_size > 0


@mutant("conserved", "no-use-after-free", narrow=_chunks_inside_pages)
class PartlyFilledPageFreed(PrefillNode):
    """A half-done request's partly filled page is freed after its chunk, and the next chunk goes on in it."""

    def _run_batch(self, adder: PrefillAdder) -> None:
        super()._run_batch(adder)
        if self.chunked_req is not None:
            self.pool.free(self.chunked_req.pages[self.chunked_req.shared_pages :])


@mutant("admitted-finishes", report="#36855")
class InsertSkipped(PrefillNode):
    """A cut chunk is not put into the cache, its prefix does not advance, and the same chunk is run again."""

    def _cache_full_pages(self, request: Request) -> None:
        if request.prefix_tokens < request.prompt_tokens:
            request.prefix_tokens = request.shared_pages * self.page_size
        else:
            super()._cache_full_pages(request)


@mutant("admitted-finishes", rules=ALIGNED, base=DeferringNode, report="sglang-jax#1355")
class ParkedAsComputed(DeferringNode):
    """A request that was deferred is stashed as if its chunk had run, and later runs an empty one."""

    def _run_batch(self, adder: PrefillAdder) -> None:
        super()._run_batch(adder)
        if adder.deferred and self.chunked_req is not None:
            self.chunked_req.prefix_tokens = self.chunked_req.prompt_tokens

    def _cache_full_pages(self, request: Request) -> None:
        end_tokens = request.prefix_tokens
        request.prefix_tokens = min(end_tokens, len(request.pages) * self.page_size)
        super()._cache_full_pages(request)
        request.prefix_tokens = end_tokens


# --- the end


@mutant("conserved", "quiescent")
class LastPageKept(PrefillNode):
    """The partly filled last page of a request is not freed when it ends."""

    def _end(self, request: Request) -> None:
        del request.pages[request.shared_pages :]
        super()._end(request)


@mutant("quiescent")
class LockKeptAtTransfer(PrefillNode):
    """A request that ends leaves its lock on its cached pages."""

    def _end(self, request: Request) -> None:
        self.tree.lock(request.locked)
        super()._end(request)


@mutant("conserved")
class CachedPagesFreedAtTransfer(PrefillNode):
    """A request that ends frees its whole table, cached pages included."""

    def _end(self, request: Request) -> None:
        shared = request.pages[: request.shared_pages]
        super()._end(request)
        self.pool.free(shared)


@mutant("conserved", report="sglang-jax#982")
class CommittedLengthInferred(PrefillNode):
    """The free begins at the hit, as if nothing had been cached since: pages of the cache are freed with the rest."""

    def _take_hit(self, request: Request) -> None:
        super()._take_hit(request)
        self._hit_pages = {**getattr(self, "_hit_pages", {}), request.rid: request.shared_pages}

    def _end(self, request: Request) -> None:
        cached_since = request.pages[self._hit_pages[request.rid] : request.shared_pages]
        super()._end(request)
        self.pool.free(cached_since)


@mutant("no-use-after-free")
class FreedBeforeTransfer(PrefillNode):
    """A request's pages are given up when its prefill is done, while their KV is still being sent."""

    def _run_batch(self, adder: PrefillAdder) -> None:
        super()._run_batch(adder)
        for rid in self.in_flight():
            request = self.live[rid]
            self.tree.unlock(request.locked)
            self.pool.free(request.pages[request.shared_pages :])

    def _end(self, request: Request) -> None:
        if request.state is RequestState.IN_FLIGHT:
            self.tree.lock(request.locked)
        super()._end(request)


@mutant("admitted-finishes")
class TransferEndsHalfDone(PrefillNode):
    """A transfer reported for a request that is still half done ends it."""

    def transferred(self, rid: str) -> None:
        if self.chunked_req is not None and self.chunked_req.rid == rid:
            self._end(self.chunked_req)
        super().transferred(rid)


@mutant("conserved")
class AbortFreesTwice(PrefillNode):
    """An abort gives the request's own pages back a second time."""

    def abort(self, rid: str) -> None:
        own = self.live[rid].pages[self.live[rid].shared_pages :] if rid in self.live else []
        super().abort(rid)
        self.pool.free(own)


@mutant("no-use-after-free")
class AbortedStaysHalfDone(PrefillNode):
    """An abort gives up a half-done request's pages, and the next round goes on with it."""

    def abort(self, rid: str) -> None:
        request = self.chunked_req
        if request is None or request.rid != rid:
            super().abort(rid)
            return
        self.tree.unlock(request.locked)
        self.pool.free(request.pages[request.shared_pages :])


@mutant("ended-is-gone")
class AbortOverlooksQueue(PrefillNode):
    """An abort ends only what was admitted: a waiting request is run all the same."""

    def abort(self, rid: str) -> None:
        if rid not in self.waiting:
            super().abort(rid)


@mutant("kept-until-ended")
class TransferEndsAll(PrefillNode):
    """One request's transfer ends every request that is in flight: KV is let go while it is being sent."""

    def transferred(self, rid: str) -> None:
        for each in self.in_flight():
            super().transferred(each)
