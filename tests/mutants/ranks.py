"""Mutants of a pipeline: what the deciding rank counts with, what it sends, and what the others do with it."""

from __future__ import annotations

from dataclasses import replace

from kvledger.adder import Chunk, PrefillAdder
from kvledger.follower import PlanEntry, ReplayingRank, cut_hit
from kvledger.node import PrefillNode, Watcher
from kvledger.pipeline import LeastMemory, PipelineNode, Ranks
from kvledger.pool import PrefillOutOfMemory
from kvledger.record import Decision
from kvledger.request import USUAL_OUTPUT, Output, Prompt, Request
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings, of_rank
from kvledger.testing.rank_moves import RANK_SPACE
from tests.mutants.mutant import ALIGNED, mutant

FEWER_MOVES = replace(RANK_SPACE, moves=tuple(replace(move, part="") for move in RANK_SPACE.moves))
"""Pipelines whose examples draw which of a pipeline's moves they have, as they do of the others."""

# --- what rank 0 counts with


@mutant("ledger-exact", "gate-covers-charge", "promises-covered", "admitted-finishes")
class BaselineOfRankZero(LeastMemory):
    """The hit is agreed and locked on every rank, and the books count with rank 0's memory alone."""

    def _tightest(self) -> PrefillNode:
        return self._pipeline

    def _owed(self, node: PrefillNode) -> int:
        return 0


@mutant("promises-covered", "gate-covers-charge", space=FEWER_MOVES)
class LoadBacksOfOthersForgotten(LeastMemory):
    """Where a prefix is on rank 0's device and on another rank's host, nobody counts what that rank loads back."""

    def _owed(self, node: PrefillNode) -> int:
        return 0


@mutant("no-use-after-free")
class AgreedHitLockedOnRankZero(LeastMemory):
    """The others take the hit that was agreed without a lock on it."""

    def inc_lock_ref(self, req: Request) -> None:
        self._pipeline.tree.inc_lock_ref(req)

    def dec_lock_ref(self, req: Request) -> None:
        self._pipeline.tree.dec_lock_ref(req)


@mutant("same-batches")
class HitOfRankZero(PipelineNode):
    """The hit is rank 0's, and another rank, which has less of it, computes more."""

    def _match(self, request: Request) -> None:
        PrefillNode._match(self, request)
        hit_tokens = request.prefix_tokens + request.host_hit_tokens
        for other in self.others:
            other.match(request.rid)
        for node, own in self.copies(request):
            cut_hit(own, hit_tokens, node.page_size)


@mutant("fix-is-minimal", "progress")
class LeastOfTwoRanksAtOnce(PipelineNode):
    """The smallest baseline is held against the need of the rank with the shortest device hit, which is another's."""

    def _needed_more(self, request: Request) -> int:
        return request.prefix_tokens - min(own.prefix_tokens for _, own in self.copies(request))

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        needed = adder._needed_tokens
        adder._needed_tokens = (  # type: ignore[method-assign]
            lambda req: needed(req) + self._needed_more(self.waiting[req.rid])
        )
        return adder


@mutant("slots-kept", narrow=lambda settings: settings.max_running_requests is not None)
class SlotsOfRankZero(PipelineNode):
    """A stage on which a transfer is late has no slot left, and is given one more request."""

    def _has_request_slot(self) -> bool:
        return PrefillNode._has_request_slot(self)


@mutant("progress", narrow=lambda settings: settings.max_running_requests is not None, report="#23006")
class StageShareOfNothing(PipelineNode):
    """A stage's share of the request slots is rounded down to none, and nothing is ever scheduled."""

    def _has_request_slot(self) -> bool:
        limit = self.settings.max_running_requests
        return limit is None or len(self.live) < limit // self.settings.pp_size


def _smaller_rank(settings: NodeSettings) -> bool:
    return settings.least_pool_pages < settings.pool_pages


@mutant("progress", narrow=_smaller_rank)
class EntryAsksRankZero(PipelineNode):
    """A prompt that fits rank 0's empty pool is let in, though it never fits another's."""

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        settings, self.settings = self.settings, of_rank(self.settings, 0)
        try:
            return super().submit(rid, prompt, output)
        finally:
            self.settings = settings


# --- what it sends


@mutant("ended-is-gone", report="#26912")
class EndedNotInThePlan(PipelineNode):
    """Who has ended on rank 0 is not in the plan, and the others wait until they hear of it themselves."""

    def _open_books(self) -> PrefillAdder:
        self._ended = []
        return super()._open_books()


class DeferringPipeline(PipelineNode):
    """A pipeline under rules that defer on a shortage, whatever was drawn."""

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, replace(rules, on_shortage="defer"), watcher)


def _runs_short(settings: NodeSettings) -> bool:
    """Two chunks and a bit fill the pool, and no request slot is what ends a round."""
    chunk = settings.chunked_prefill_size
    return chunk is not None and 2 * settings.pool_tokens <= 5 * chunk and settings.max_running_requests is None


class RankDeafToDeferrals(ReplayingRank):
    """It goes on with what rank 0 has put off."""

    def _go_on(self, request: Request, entry: PlanEntry) -> None:
        if entry.kind != "deferred":
            super()._go_on(request, entry)
            return
        most = self.settings.chunked_prefill_size or request.prompt_tokens
        end = min(request.prompt_tokens, request.prefix_tokens + most)
        self.books.join(Chunk(request, "resumed", request.prefix_tokens, end))


@mutant("same-batches", rules=ALIGNED, base=DeferringPipeline, narrow=_runs_short)
class DeferralNotSent(DeferringPipeline):
    """Rank 0 puts its half-done request off, the others hear nothing of it and go on with it."""

    rank_type = RankDeafToDeferrals


@mutant("same-batches", "queue-kept")
class AdmissionsNotSent(PipelineNode):
    """Only what goes on is sent: whom rank 0 admits the others go on waiting for."""

    def _decided(self, decisions: list[Decision], decision: Decision) -> None:
        others = self.others
        if decision.kind in ("whole", "truncated"):
            self.others = ()
        try:
            super()._decided(decisions, decision)
        finally:
            self.others = others


# --- what the others do with it


@mutant("same-batches", "queue-kept")
class ReplayingRankRefuses(ReplayingRank):
    """A rank that replays leaves out what its free pages alone cannot hold, though evicting would make room."""

    def _join(self, request: Request, entry: PlanEntry) -> None:
        if entry.end - entry.start <= self.pool.available_size():
            super()._join(request, entry)
        elif self.agreed:
            self.tree.dec_lock_ref(request)


@mutant("same-batches", "queue-kept", report="#34572, #30476")
class AbortActedOnAtOnce(PipelineNode):
    """An abort that reaches a replaying rank first ends the request there, and the plan still has it."""

    def abort(self, rid: str, ranks: Ranks = None) -> None:
        for other in self.others:
            if ranks is not None and other.rank in ranks:
                other.abort(rid)
        super().abort(rid, ranks)


@mutant("conserved", "no-use-after-free")
class TransferCountedTwice(ReplayingRank):
    """A transfer gives a request's pages back once as it is sent and once as its end is told."""

    def _end(self, request: Request) -> None:
        shared, own = list(request.locked), request.pages[request.shared_pages :]
        super()._end(request)
        self.pool.free(own)
        self.tree.unlock(shared)


@mutant("same-batches", narrow=lambda settings: settings.schedule_policy != "fcfs")
class BatchInOrderOfOwnQueue(ReplayingRank):
    """The chunks are the plan's, and run in the order in which their requests came."""

    def allocate(self) -> PrefillOutOfMemory | None:
        self.books.can_run_list.sort(
            key=lambda chunk: chunk.request.rid in self.live and self.live[chunk.request.rid].arrival
        )
        return super().allocate()


@mutant("table-fits")
class PageMoreOnOthers(ReplayingRank):
    """A rank that replays takes a page more for each chunk, to be on the safe side."""

    def _allocate(self, request: Request, chunk: Chunk) -> None:
        super()._allocate(request, chunk)
        request.pages.extend(self.tree.allocate(1))
