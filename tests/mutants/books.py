"""Mutants of the ledger: the offsets' sums, when a promise ends, and the baseline that both are taken from."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.adder import PrefillAdder
from kvledger.ledger import Due, MemoryLedger
from tests.mutants.mutant import AssembledNode, mutant

# --- the two offsets


@mutant("order", "ledger-exact")
class TotalForgetsThisBatch(MemoryLedger):
    """The total offset holds only what is due later, so that it seems smaller than this batch's."""

    @property
    def rem_total_token_offset(self) -> int:
        return self._due_tokens[Due.LATER]


@mutant("order", "ledger-exact")
class OffsetsExchanged(MemoryLedger):
    """What is due later counts against this batch, and what is due at all counts without it."""

    @property
    def cur_rem_token_offset(self) -> int:
        return super().rem_total_token_offset

    @property
    def rem_total_token_offset(self) -> int:
        return self._due_tokens[Due.NOW]


# --- when a promise ends


@mutant("ledger-exact")
class SettledAtPromise(MemoryLedger):
    """A promise leaves the books when it is made, before anything is allocated for it."""

    def promise(self, request: str, kind: str, tokens: int, due: Due) -> None:
        super().promise(request, kind, tokens, due)
        self.settle(request)


@mutant("quiescent")
class NeverSettled(MemoryLedger):
    """An allocation leaves its promise open."""

    def settle(self, request: str) -> None:
        pass


@mutant("ledger-exact", "fix-is-minimal")
class TailCarriedOver(AssembledNode):
    """The tail promised in the last round is still in this round's books, which promise it again."""

    def _open_books(self) -> PrefillAdder:
        last_round = [] if self._unsettled is None else list(self._unsettled.memory.entries())
        adder = super()._open_books()
        for promise in last_round:
            if promise.kind == "tail":
                adder.memory.promise(promise.request, promise.kind, promise.tokens, promise.due)
        return adder


# --- the baseline


@mutant("ledger-exact", "promises-covered")
class BaselineReadOnce(MemoryLedger):
    """The baseline is read when the round begins: locks and load-backs after that do not show."""

    def __init__(self, baseline: Callable[[], int]) -> None:
        at_the_beginning = baseline()
        super().__init__(lambda: at_the_beginning)


@mutant("ledger-exact", "progress", "fix-is-minimal")
class BaselineForgetsEvictable(AssembledNode):
    """The baseline is what is free: once the cache has filled the pool, nobody is admitted any more."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        adder.memory = MemoryLedger(self.pool.available_size)
        return adder


@mutant("ledger-exact", "promises-covered", "admitted-finishes")
class BaselineCountsProtected(AssembledNode):
    """Cached pages under a lock count as if they could be evicted."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        pool, tree = self.pool, self.tree
        adder.memory = MemoryLedger(lambda: pool.available_size() + tree.evictable_size() + tree.protected_size())
        return adder
