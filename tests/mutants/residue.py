"""Mutants of the further causes of a residue: the limit on the half-done request, and the kernel's chunk grid."""

from __future__ import annotations

from dataclasses import replace

from kvledger.adder import AddReqResult, PrefillAdder, PrefillRequest
from kvledger.arithmetic import align_chunk_end, floor_or_keep, floor_tokens
from kvledger.testing.residue_moves import RESIDUE_SPACE
from tests.mutants.mutant import AssembledNode, mutant

# --- the limit


@mutant("batch-in-budget", space=RESIDUE_SPACE)
class LimitIgnored(AssembledNode):
    """The half-done request runs whatever the chunk budget allows, beyond its own limit."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        adder.rules = replace(adder.rules, continuation_limit=None)
        return adder


@mutant("promises-covered", "ledger-exact", space=RESIDUE_SPACE)
class LimitedTailForgotten(PrefillAdder):
    """Only what memory or the budget cut short has a tail to reserve: a limit is policy, and the rest can come now."""

    def _cut(self, req: PrefillRequest, tail_tokens: int) -> None:
        chunk = self.can_run_list[-1]
        if chunk.kind != "resumed" or chunk.tokens != self.rules.continuation_limit:
            super()._cut(req, tail_tokens)


@mutant("other-is-minimal", space=RESIDUE_SPACE)
class LimitForTheWholeBatch(PrefillAdder):
    """The limit on the half-done request ends the batch: whoever comes behind it is refused for compute."""

    def add_one_req(self, req: PrefillRequest) -> AddReqResult:
        limit, ran = self.rules.continuation_limit, sum(chunk.tokens for chunk in self.can_run_list)
        resumed = any(chunk.kind == "resumed" for chunk in self.can_run_list)
        if resumed and limit is not None and self.compute.rem_chunk_tokens is not None:
            self.compute.rem_chunk_tokens = min(self.compute.rem_chunk_tokens, max(0, limit - ran))
        return super().add_one_req(req)


# --- the chunk grid


@mutant("on-grid", space=RESIDUE_SPACE)
class ChunkGridOnlyFresh(PrefillAdder):
    """A resumed cut ends where the budget does, and the kernel's last cell is computed once more."""

    def _resumed_cut_tokens(self, start: int, tokens: int) -> int:
        return align_chunk_end(start, tokens, self.grid_tokens)


@mutant("on-grid", space=RESIDUE_SPACE)
class ChunkGridFromPromptStart(PrefillAdder):
    """The grid is counted from the start of the prompt, and the kernel counts from where it begins."""

    def _resumed_cut_tokens(self, start: int, tokens: int) -> int:
        cell = self.rules.chunk_grid
        end = start + tokens if cell is None else floor_tokens(start + tokens, cell)
        return align_chunk_end(start, end - start if end > start else tokens, self.grid_tokens)


@mutant("progress", "on-grid", space=RESIDUE_SPACE)
class ChunkGridToNothing(PrefillAdder):
    """What a half-done request may run is below one cell: it runs nothing, round after round."""

    def _resumed_cut_tokens(self, start: int, tokens: int) -> int:
        cell = self.rules.chunk_grid
        return super()._resumed_cut_tokens(start, tokens) if cell is None or tokens >= cell else 0


@mutant("promises-covered", "ledger-exact", space=RESIDUE_SPACE)
class TailCountedBeforeChunkGrid(PrefillAdder):
    """The tail that is reserved is what the budget left, and the grid then leaves more."""

    def _cut(self, req: PrefillRequest, tail_tokens: int) -> None:
        cell, left = self.rules.chunk_grid, self.rem_chunk_tokens
        given_up = 0 if cell is None or left is None else max(0, floor_or_keep(left, self.page_size))
        super()._cut(req, max(0, tail_tokens - given_up))


@mutant("other-is-minimal", space=RESIDUE_SPACE)
class ChunkGridForWholePrompts(PrefillAdder):
    """What is left of the chunk budget counts in whole cells, for prompts that would run to their end too."""

    def _admissible_tokens(self, req: PrefillRequest) -> int | AddReqResult:
        cell, left = self.rules.chunk_grid, self.compute.rem_chunk_tokens
        if cell is not None and left is not None and self.can_run_list:
            self.compute.rem_chunk_tokens = floor_tokens(left, cell)
            answer = super()._admissible_tokens(req)
            self.compute.rem_chunk_tokens = left
            return answer
        return super()._admissible_tokens(req)


@mutant("on-grid", space=RESIDUE_SPACE)
class SplitIgnored(AssembledNode):
    """A fresh cut is as long as the budget allows, whatever the split size of deterministic inference."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        adder.rules = replace(adder.rules, truncation_align=None)
        return adder
