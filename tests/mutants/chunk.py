"""Mutants of the chunk: its alignment, the compute budgets, and the one place for a half-done request."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

from kvledger import adder as adder_module
from kvledger.adder import AddReqResult, ChunkKind, PrefillAdder, PrefillRequest
from kvledger.arithmetic import align_chunk_end, ceil_tokens, floor_tokens
from kvledger.node import PrefillNode, Watcher
from kvledger.record import RoundRecord
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from tests.mutants.mutant import ALIGNED, AssembledNode, DeferringNode, mutant

# --- alignment


class MisalignedNode(PrefillNode):
    """The node while its adder aligns in another way."""

    @staticmethod
    def aligned(start: int, tokens: int, checkpoint_align: int) -> int:
        return align_chunk_end(start, tokens, checkpoint_align)

    def run_round(self) -> RoundRecord:
        with patch.object(adder_module, "align_chunk_end", self.aligned):
            return super().run_round()


@mutant("on-grid")
class AlignmentSkipped(MisalignedNode):
    """A cut chunk ends where the budget does, and its KDA state is lost."""

    @staticmethod
    def aligned(start: int, tokens: int, checkpoint_align: int) -> int:
        return tokens


@mutant("batch-in-budget")
class AlignedUp(MisalignedNode):
    """A cut chunk goes on to the next grid line, beyond its budget."""

    @staticmethod
    def aligned(start: int, tokens: int, checkpoint_align: int) -> int:
        return ceil_tokens(start + tokens, checkpoint_align) - start


@mutant("progress")
class AlignedToStart(MisalignedNode):
    """A chunk that cannot reach the grid is brought back to its start, round after round."""

    @staticmethod
    def aligned(start: int, tokens: int, checkpoint_align: int) -> int:
        return max(0, floor_tokens(start + tokens, checkpoint_align) - start)


@mutant("progress", report="#36344")
class SplitSizeAboveChunk(PrefillNode):
    """Cuts are aligned to a split size larger than any chunk, and a prompt longer than a chunk waits for ever."""

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, replace(rules, truncation_align=2 * settings.pool_tokens), watcher)


# --- compute budgets


@mutant("batch-in-budget")
class ComputeChargedRaw(PrefillAdder):
    """A chunk spends its tokens of the compute budgets, not its pages."""

    def _charge(self, req: PrefillRequest, tokens: int, *, final: bool) -> None:
        super()._charge(req, tokens, final=final)
        self.compute.spend(tokens - ceil_tokens(tokens, self.page_size))


@mutant("batch-in-budget")
class WholeCheckedRaw(PrefillAdder):
    """A prompt runs whole if its tokens fit what is left of the chunk budget, though its last page does not."""

    def _admissible_tokens(self, req: PrefillRequest) -> int | AddReqResult:
        answer = super()._admissible_tokens(req)
        left = req.prompt_tokens - req.prefix_tokens - req.host_hit_tokens
        fits = self.rem_chunk_tokens is not None and left <= self.rem_chunk_tokens
        return left if fits and answer is not AddReqResult.NO_TOKEN else answer


@mutant("batch-in-budget")
class ResumedChunkRunsForFree(PrefillAdder):
    """What a half-done request runs is not taken from the compute budgets."""

    def _add(
        self, req: PrefillRequest, kind: ChunkKind, start: int, tokens: int, *, final: bool, load_back: int = 0
    ) -> None:
        super()._add(req, kind, start, tokens, final=final, load_back=load_back)
        if kind == "resumed":
            self.compute.spend(-ceil_tokens(tokens, self.page_size))


@mutant("batch-in-budget")
class PrefillLimitIgnored(AssembledNode):
    """`max_prefill_tokens` is read and not kept."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        adder.compute.rem_input_tokens = None
        return adder


@mutant("batch-in-budget", narrow=lambda settings: settings.chunked_prefill_size is None)
class TooLongJoinsBatch(PrefillAdder):
    """With chunking off, a prompt beyond what is left of `max_prefill_tokens` joins a batch that has begun."""

    def _admissible_tokens(self, req: PrefillRequest) -> int | AddReqResult:
        answer = super()._admissible_tokens(req)
        if answer is AddReqResult.OTHER and self.rem_chunk_tokens is None:
            return req.prompt_tokens - req.prefix_tokens - req.host_hit_tokens
        return answer


@mutant("batch-in-budget", "promises-covered", rules=AccountingRules(spend_gap=True))
class GapKeptOnResume(PrefillAdder):
    """Only a fresh cut gives up the rest of the chunk budget: behind a resumed one the hole is open."""

    def _cut(self, req: PrefillRequest, tail_tokens: int) -> None:
        if self.can_run_list[-1].kind != "resumed":
            super()._cut(req, tail_tokens)


# --- the half-done request


@mutant("one-half-done", "quiescent")
class SecondHalfDone(PrefillAdder):
    """A prompt is cut although another one is half done."""

    def _truncated_tokens(self, req: PrefillRequest, rem_chunk_tokens: int) -> int | AddReqResult:
        half_done, self.chunked_req = self.chunked_req, None
        answer = super()._truncated_tokens(req, rem_chunk_tokens)
        self.chunked_req = half_done
        return answer


@mutant("quiescent")
class HalfDoneForgotten(PrefillNode):
    """A cut request is not kept for the next round: it is neither half done nor waiting, and holds its pages."""

    def _run_batch(self, adder: PrefillAdder) -> None:
        super()._run_batch(adder)
        self.chunked_req = None


@mutant("other-is-minimal", report="#22984")
class NoCutBesideLastChunk(PrefillAdder):
    """A request that ends in this batch still counts as half done: the next long prompt is refused, not cut."""

    def _truncated_tokens(self, req: PrefillRequest, rem_chunk_tokens: int) -> int | AddReqResult:
        if any(chunk.kind == "resumed" for chunk in self.can_run_list):
            return AddReqResult.OTHER
        return super()._truncated_tokens(req, rem_chunk_tokens)


class _ResumesWhatTheBudgetAllows(PrefillAdder):
    def _resumable_tokens(self, left: int) -> int | None:
        tokens = super()._resumable_tokens(left)
        return tokens if tokens is None or self.rem_chunk_tokens is None else min(self.rem_chunk_tokens, left)


@mutant("admitted-finishes", rules=ALIGNED, base=DeferringNode)
class ResumeOverlooksMemory(DeferringNode):
    """A half-done request runs a whole chunk as long as anything remains, not only as much as remains."""

    adder_type = _ResumesWhatTheBudgetAllows


@mutant("never-forced", rules=ALIGNED, base=DeferringNode)
class ForcedInsteadOfDeferred(DeferringNode):
    """When nothing remains for a half-done request its chunk is forced, though the rules say to wait."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        adder.rules = replace(adder.rules, on_shortage="force")
        return adder


@mutant("never-forced", "admitted-finishes", "promises-covered", report="#30743")
class ContinuedWithNothingLeft(AssembledNode):
    """No tail is reserved, and a continuation runs a whole chunk even if nothing is left to run it in."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        adder.rules = replace(adder.rules, reserve_tail=False, on_shortage="force")
        return adder
