"""Mutants of what a node does when something goes wrong outside of it."""

from __future__ import annotations

from collections.abc import Iterator

from kvledger.adder import LOADING, Loading, PrefillAdder, PrefillRequest
from kvledger.arithmetic import ceil_pages
from kvledger.faults import FaultKind
from kvledger.node import PrefillNode
from kvledger.record import Decision, RoundRecord
from kvledger.request import Prompt, Request
from kvledger.settings import NodeSettings
from kvledger.testing.faults_moves import FAULTS_SPACE
from tests.mutants.mutant import mutant

# --- loads


class PagesMissing(PrefillNode):
    """What is computed without a page to lie in is not cached."""

    def _cache_full_pages(self, request: Request) -> None:
        if len(request.pages) * self.page_size >= request.prefix_tokens:
            super()._cache_full_pages(request)


def _leaves_residue(settings: NodeSettings) -> bool:
    """A cut on the grid leaves a page or more of the chunk budget, and there is a host to load from."""
    chunk = settings.chunked_prefill_size
    return chunk is not None and chunk % settings.checkpoint_align >= settings.page_size and settings.host_tokens != 0


@mutant("table-fits", space=FAULTS_SPACE)
class ShortLoadBelievedWhole(PagesMissing):
    """A load-back brings less than was promised, and the prompt goes on from where all of it would have ended."""

    def _came_short(self, request: Request, pages: int) -> int:
        promised_tokens = request.prefix_tokens + request.host_hit_tokens
        super()._came_short(request, pages)
        request.prefix_tokens = promised_tokens
        return pages * self.page_size


@mutant("no-use-after-free", space=FAULTS_SPACE)
class ShortLoadUnlockedWhole(PrefillNode):
    """A load-back that falls short gives up the locks on what came too, and its request uses it all the same."""

    def _came_short(self, request: Request, pages: int) -> int:
        tokens = super()._came_short(request, pages)
        self.tree.unlock(request.device_hit)
        return tokens


@mutant("promises-covered", report="bytedance-iaas#741, vllm#45388", space=FAULTS_SPACE)
class LateLoadNotPromised(PrefillAdder):
    """Only the slots that a late load fills are taken: what is left of its prompt is promised to nobody."""

    def await_load(self, req: PrefillRequest) -> None:
        self.loading.append(req)


@mutant("promises-covered", space=FAULTS_SPACE)
class LateLoadPromisedOnce(PrefillNode):
    """What is left of a late load's prompt is in the books of the round that admits it, and in no later ones."""

    def _await_loads(self, adder: PrefillAdder, decisions: list[Decision]) -> None:
        pass


@mutant("loaded-before-used", space=FAULTS_SPACE)
class LateLoadUsedAtOnce(PrefillNode):
    """The slots of a load-back are there, so its prompt goes on from them in the same round."""

    def _load_back(self, request: Request) -> int | Loading | None:
        came = super()._load_back(request)
        if came is LOADING:
            del self.loading[request.rid]
            return None
        return came


@mutant("loaded-before-used", space=FAULTS_SPACE)
class LateLoadUsedARoundEarly(PrefillNode):
    """A load that arrives in the next round is taken for one that is there."""

    def arrived(self) -> Iterator[Request]:
        return (request for request, arrives in list(self.loading.values()) if arrives <= self.rounds + 1)


@mutant("one-half-done", space=FAULTS_SPACE, narrow=_leaves_residue, most=3000)
class LoadedOneCutBesideTheHalfDone(PrefillAdder):
    """One whose load has arrived is cut although another is half done, and takes its place."""

    def _loaded_tokens(self, req: PrefillRequest) -> int | None:
        half_done, self.chunked_req = self.chunked_req, None
        tokens = super()._loaded_tokens(req)
        self.chunked_req = half_done
        return tokens


@mutant("everyone-served", space=FAULTS_SPACE)
class LoadedOneIsForgotten(PrefillNode):
    """Nobody looks whether a late load is there when nothing else is to do."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.chunked_req is not None


@mutant("progress", report="vllm#57841", space=FAULTS_SPACE)
class LoadedOneBehindTheHead(PrefillNode):
    """One whose load has arrived is looked at behind the queue, and not at all when the queue's head finds no room."""

    def _run_loaded(self, adder: PrefillAdder, decisions: list[Decision]) -> None:
        pass

    def _admit(self, adder: PrefillAdder, decisions: list[Decision]) -> bool:
        batch_is_full = super()._admit(adder, decisions)
        if not batch_is_full:
            super()._run_loaded(adder, decisions)
        return batch_is_full


# --- inserts, matches, aborts


@mutant("admitted-finishes", report="#36855", space=FAULTS_SPACE)
class PrefixTakenFromTheCache(PrefillNode):
    """How far a prompt has come is read off the prefix tree after the insert: a skipped insert, and the same chunk is
    computed again."""

    def _run_batch(self, adder: PrefillAdder) -> None:
        super()._run_batch(adder)
        for chunk in adder.can_run_list:
            request = self.live.get(chunk.request.rid)
            if request is self.chunked_req and request is not None and self.settings.prefix_cache:
                request.prefix_tokens = request.shared_pages * self.page_size + chunk.end % self.page_size


@mutant("conserved", space=FAULTS_SPACE)
class SkippedInsertFreesThePages(PrefillNode):
    """What is not put into the prefix tree is given back to the pool, though the prompt is not done with it."""

    def strikes(self, kind: FaultKind, rid: str) -> bool:
        struck = super().strikes(kind, rid)
        if struck and kind == "skip-insert":
            request = self.live[rid]
            self.pool.free(request.pages[request.shared_pages :])
        return struck


@mutant("no-use-after-free", space=FAULTS_SPACE)
class StaleMatchUsed(PrefillNode):
    """What was matched is used, although it is not there any more."""

    def _match_again(self, request: Request) -> None:
        pass


@mutant("conserved", space=FAULTS_SPACE)
class WithdrawnChunkStillAllocated(PrefillNode):
    """A request is given up after the decision, and its chunk's slots are taken all the same."""

    def withdraw(self, adder: PrefillAdder) -> bool:
        batch = list(adder.can_run_list)
        withdrew = super().withdraw(adder)
        for chunk in batch:
            if chunk not in adder.can_run_list:
                pages = ceil_pages(chunk.end, self.page_size) - ceil_pages(chunk.start, self.page_size)
                self.tree.allocate(min(pages, self.pool.free_pages))
        return withdrew


@mutant("conserved", report="sglang-jax#982", space=FAULTS_SPACE)
class WithdrawnFreesWhatTheTreeFrees(PrefillNode):
    """A request that is given up before its chunk is allocated frees the pages of its whole table, as if none of them
    were the prefix tree's, which frees them once more when it evicts them."""

    def withdraw(self, adder: PrefillAdder) -> bool:
        tables = {chunk.request.rid: list(self.live[chunk.request.rid].pages) for chunk in adder.can_run_list}
        withdrew = super().withdraw(adder)
        for rid, pages in tables.items():
            if rid not in self.live:
                self.pool.free(pages)
        return withdrew


@mutant("quiescent", space=FAULTS_SPACE)
class WithdrawnKeepsItsLock(PrefillNode):
    """A request that is given up before its chunk is allocated leaves its hit locked."""

    def withdraw(self, adder: PrefillAdder) -> bool:
        for chunk in adder.can_run_list:
            if self._next("abort-decided", chunk.request.rid) is not None:
                self.tree.lock(self.live[chunk.request.rid].locked)
        return super().withdraw(adder)


# --- a shortage that passes


@mutant("admitted-finishes", report="sglang-jax#1355", space=FAULTS_SPACE)
class ParkedChunkStashedAsIfComputed(PagesMissing):
    """A half-done request that must wait for pinned pages is put away as if its chunk had run."""

    def _resume(self, adder: PrefillAdder, decisions: list[Decision]) -> None:
        super()._resume(adder, decisions)
        request = self.chunked_req
        if adder.deferred and request is not None:
            request.prefix_tokens = min(request.prefix_tokens + self.grid_tokens, request.prompt_tokens - 1)


@mutant("ledger-exact", space=FAULTS_SPACE)
class PinNotCounted(PrefillNode):
    """A write-back's locks are on the pages, and in no count of what is evictable."""

    def pin(self, name: str, prompt: Prompt) -> None:
        evictable, protected = self.tree.evictable_pages, self.tree.protected_pages
        super().pin(name, prompt)
        self.tree.evictable_pages, self.tree.protected_pages = evictable, protected


@mutant("no-use-after-free", space=FAULTS_SPACE)
class UnpinnedTwice(PrefillNode):
    """The end of a write-back takes away a lock more than it had put there."""

    def unpin(self, name: str) -> None:
        path = list(self.pins.get(name, []))
        super().unpin(name)
        self.tree.unlock([cached for cached in path if cached.lock_refs])


@mutant("paused-is-still", space=FAULTS_SPACE)
class PausedNodeStillAdmits(PrefillNode):
    """A pause keeps nobody from being let in."""

    def run_round(self) -> RoundRecord:
        paused, self.paused = self.paused, False
        try:
            return super().run_round()
        finally:
            self.paused = paused
