"""Mutants of the charge: what an admission, a cut and a load-back put into the memory ledger."""

from __future__ import annotations

from kvledger.adder import ChunkKind, PrefillAdder, PrefillRequest
from kvledger.arithmetic import ceil_tokens
from kvledger.ledger import Due
from tests.mutants.mutant import ALIGNED, DeferringNode, mutant

# --- the tail


@mutant("promises-covered", "ledger-exact", "never-forced", "admitted-finishes")
class TailDropped(PrefillAdder):
    """A cut leaves no promise for its tail, and a newcomer spends it: the hole of the post-mortem."""

    def _cut(self, req: PrefillRequest, tail_tokens: int) -> None:
        pass


@mutant("promises-covered", "ledger-exact")
class TailForgottenOnResume(PrefillAdder):
    """Only a fresh cut reserves: from its second chunk on, a prompt's tail is anybody's."""

    def _cut(self, req: PrefillRequest, tail_tokens: int) -> None:
        if self.can_run_list[-1].kind != "resumed":
            super()._cut(req, tail_tokens)


@mutant("promises-covered", "ledger-exact")
class TailForgottenWhenFresh(PrefillAdder):
    """Only a resumed cut reserves: in its first round a prompt's tail is anybody's."""

    def _cut(self, req: PrefillRequest, tail_tokens: int) -> None:
        if self.can_run_list[-1].kind == "resumed":
            super()._cut(req, tail_tokens)


@mutant("ledger-exact")
class TailReservedRaw(PrefillAdder):
    """The tail is reserved in tokens, not in pages.

    No allocation can fail of it: a last page is short of less than the page of slack in its chunk's charge.
    """

    def _reserve(self, req: PrefillRequest, tail_tokens: int) -> None:
        self.memory.promise(req.rid, "tail", tail_tokens, Due.LATER)
        self.memory.promise(req.rid, "first_token", self.first_token, Due.LATER)


@mutant("ledger-exact", "fix-is-minimal")
class TailChargedTwice(PrefillAdder):
    """The tail is reserved twice over: safe, and it refuses what fits."""

    def _reserve(self, req: PrefillRequest, tail_tokens: int) -> None:
        super()._reserve(req, tail_tokens)
        super()._reserve(req, tail_tokens)


@mutant("ledger-exact", "fix-is-minimal")
class TailChargedForWholePrompt(PrefillAdder):
    """A prompt that runs to its end reserves what it runs once more: safe, and it refuses what fits."""

    def _charge(self, req: PrefillRequest, tokens: int, *, final: bool) -> None:
        super()._charge(req, tokens, final=final)
        if final:
            self._reserve(req, tokens)


class _ReservesNothingWhenDeferred(PrefillAdder):
    def _reserve(self, req: PrefillRequest, tail_tokens: int) -> None:
        if not self.deferred:
            super()._reserve(req, tail_tokens)


@mutant("ledger-exact", rules=ALIGNED, base=DeferringNode)
class DeferredTailForgotten(DeferringNode):
    """A half-done request that is deferred reserves nothing, and the queue takes what it is waiting for."""

    adder_type = _ReservesNothingWhenDeferred


# --- the chunk


def _charge(adder: PrefillAdder, req: PrefillRequest, chunk_tokens: int, slack_tokens: int, *, final: bool) -> None:
    """Step 5 with these sizes in the memory ledger; the compute ledger is right."""
    adder.memory.promise(req.rid, "chunk", chunk_tokens, Due.NOW)
    adder.memory.promise(req.rid, "page_overhead", slack_tokens, Due.NOW)
    if final:
        adder.memory.promise(req.rid, "first_token", adder.first_token, Due.LATER)
    adder.compute.spend(ceil_tokens(chunk_tokens, adder.page_size))


@mutant("ledger-exact", report="#7353, #7397")
class ChunkChargedRaw(PrefillAdder):
    """A chunk is charged in tokens, not in pages.

    No allocation can fail of it: rounding up adds less than the page of slack in the same charge.
    """

    def _charge(self, req: PrefillRequest, tokens: int, *, final: bool) -> None:
        _charge(self, req, tokens, self.page_size, final=final)


@mutant("ledger-exact")
class PageForgottenInCharge(PrefillAdder):
    """The page of slack that the gate asks for is not charged.

    No allocation can fail of it: the chunk is charged in whole pages, and takes no more.
    """

    def _charge(self, req: PrefillRequest, tokens: int, *, final: bool) -> None:
        _charge(self, req, ceil_tokens(tokens, self.page_size), 0, final=final)


@mutant("ledger-exact", report="#5081, #7353, #7397")
class ChunkChargedRawWithoutPage(PrefillAdder):
    """A chunk is charged in tokens and nothing for rounding: on large pages each admission leaves a hole.

    The next gate still asks for a page of slack, so that it takes three short prompts in one batch to fall into it.
    """

    def _charge(self, req: PrefillRequest, tokens: int, *, final: bool) -> None:
        _charge(self, req, tokens, 0, final=final)


@mutant("ledger-exact")
class FirstTokenForgotten(PrefillAdder):
    """A finished prompt's first token is not charged.

    No allocation can fail of it on a prefill node: it is the decode node that takes the slot.
    """

    def _charge(self, req: PrefillRequest, tokens: int, *, final: bool) -> None:
        super()._charge(req, tokens, final=False)


@mutant("ledger-exact")
class FirstTokenChargedForACut(PrefillAdder):
    """Every chunk is charged a first token, the cut ones too, whose tail has it already."""

    def _charge(self, req: PrefillRequest, tokens: int, *, final: bool) -> None:
        super()._charge(req, tokens, final=True)


@mutant("ledger-exact", "fix-is-minimal")
class LoadBackChargedAsWell(PrefillAdder):
    """A load-back is allocated by the time of the charge, and is charged all the same."""

    def _add(
        self, req: PrefillRequest, kind: ChunkKind, start: int, tokens: int, *, final: bool, load_back: int = 0
    ) -> None:
        super()._add(req, kind, start, tokens, final=final, load_back=load_back)
        if load_back:
            self.memory.promise(req.rid, "chunk", load_back, Due.NOW)
