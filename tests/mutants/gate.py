"""Mutants of the admission: what the gate asks, in which order, and what a refusal leaves behind."""

from __future__ import annotations

from kvledger.adder import AddReqResult, PrefillAdder, PrefillRequest
from kvledger.arithmetic import ceil_tokens
from kvledger.ledger import Due
from kvledger.node import Watcher
from kvledger.pool import OutOfPages, PrefillOutOfMemory
from kvledger.radix import PrefixTree
from kvledger.record import Decision
from kvledger.request import CachedPage, Request
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from tests.mutants.mutant import AssembledNode, mutant

# --- what it asks


@mutant("gate-covers-charge", report="#22495")
class PageForgottenInGate(PrefillAdder):
    """The gate asks for a page less than the charge then takes."""

    def _needed_tokens(self, req: PrefillRequest) -> int:
        return super()._needed_tokens(req) - self.page_size


@mutant("gate-covers-charge", "admitted-finishes")
class LoadBackForgottenInGate(PrefillAdder):
    """The gate asks for what is left to compute, and the slots of the load-back come on top."""

    def _needed_tokens(self, req: PrefillRequest) -> int:
        return super()._needed_tokens(req) - req.host_hit_tokens


@mutant("promises-covered", "gate-covers-charge", report="vllm#45388")
class OnlyLoadedPartInGate(PrefillAdder):
    """A request with a load-back is let in for the loaded part alone, and two of them starve each other."""

    def _needed_tokens(self, req: PrefillRequest) -> int:
        if req.host_hit_tokens:
            return req.host_hit_tokens + self.first_token + self.page_size
        return super()._needed_tokens(req)


@mutant("promises-covered", "gate-covers-charge")
class OnlyFirstChunkInGate(PrefillAdder):
    """The gate asks for what this batch can run of a prompt, not for the whole of it."""

    def _needed_tokens(self, req: PrefillRequest) -> int:
        need = super()._needed_tokens(req)
        left = req.prompt_tokens - req.prefix_tokens - req.host_hit_tokens
        return need if self.rem_chunk_tokens is None else need - max(0, left - self.rem_chunk_tokens)


@mutant("fix-is-minimal")
class SecondPageInGate(PrefillAdder):
    """The gate asks for a second page, to be on the safe side, and refuses what fits."""

    def _needed_tokens(self, req: PrefillRequest) -> int:
        return super()._needed_tokens(req) + self.page_size


@mutant("fix-is-minimal")
class HitAskedForInGate(PrefillAdder):
    """The gate asks for the whole prompt, though its device hit is there already and locked."""

    def _needed_tokens(self, req: PrefillRequest) -> int:
        return super()._needed_tokens(req) + req.prefix_tokens


@mutant("gate-covers-charge")
class EqualityPassesGate(PrefillAdder):
    """`need <= remaining` where the gate says `need < remaining`; so would a gate that forgets the first token.

    No allocation can fail of it: the need includes a page of slack.
    """

    def _needed_tokens(self, req: PrefillRequest) -> int:
        return super()._needed_tokens(req) - 1


@mutant("promises-covered", "admitted-finishes", "ledger-exact", report="FreeToken#367")
class PagesOfEachRequestIgnored(PrefillAdder):
    """Gate and charge count tokens, and the allocator gives each request pages of its own."""

    def _needed_tokens(self, req: PrefillRequest) -> int:
        return req.prompt_tokens - req.prefix_tokens

    def _charge(self, req: PrefillRequest, tokens: int, *, final: bool) -> None:
        self.memory.promise(req.rid, "chunk", tokens, Due.NOW)
        self.compute.spend(ceil_tokens(tokens, self.page_size))


# --- the lock and the load-back around it


@mutant("promises-covered", "gate-covers-charge")
class LockedAfterGate(PrefillAdder):
    """The device hit still counts as evictable while the gate looks, and then the lock takes it away."""

    def _admissible_tokens(self, req: PrefillRequest) -> int | AddReqResult:
        self._unlock(req)
        answer = super()._admissible_tokens(req)
        self._lock(req)
        return answer


@mutant("refusal-is-free", "quiescent")
class LockKeptOnRefusal(PrefixTree):
    """A refused candidate keeps the lock under which it was looked at."""

    def dec_lock_ref(self, req: Request) -> None:
        pass


@mutant("refusal-is-free")
class RefusalTouchesRecency(PrefixTree):
    """Looking at a candidate makes its pages the most recently used, and others are evicted in their stead."""

    def inc_lock_ref(self, req: Request) -> None:
        super().inc_lock_ref(req)
        self.touch(req.device_hit)


class _LoadsBackBeforeGate(PrefillAdder):
    def _admissible_tokens(self, req: PrefillRequest) -> int | AddReqResult:
        if req.host_hit_tokens:
            self._load_back(req)
        return super()._admissible_tokens(req)


class _LoadsBackOnce(PrefixTree):
    def init_load_back(self, req: Request) -> None:
        if req.host_hit[0].page is None:
            super().init_load_back(req)


@mutant("refusal-is-free", report="#16067")
class LoadBackBeforeGate(AssembledNode):
    """The load-back starts before the gate is asked, and a refusal leaves its pages allocated and locked."""

    adder_type = _LoadsBackBeforeGate
    tree_type = _LoadsBackOnce


class _PromisesNoLoadBack(PrefillAdder):
    def _needed_tokens(self, req: PrefillRequest) -> int:
        return super()._needed_tokens(req) - req.host_hit_tokens


class _LoadsBackLater(PrefixTree):
    def init_load_back(self, req: Request) -> None:
        self.lock(req.host_hit)


@mutant("promises-covered", "admitted-finishes", report="bytedance-iaas#741")
class LoadBackOutsideBudget(AssembledNode):
    """Load-backs are asynchronous: their slots are taken after the round's decisions, and nobody has counted them."""

    adder_type = _PromisesNoLoadBack
    tree_type = _LoadsBackLater

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, rules, watcher)
        self._loading: dict[str, list[CachedPage]] = {}

    def _take_hit(self, request: Request) -> None:
        self._loading[request.rid] = request.host_hit
        loaded_tokens, request.host_hit, request.host_hit_tokens = request.host_hit_tokens, [], 0
        super()._take_hit(request)
        request.prefix_tokens += loaded_tokens

    def _allocate_batch(self, adder: PrefillAdder) -> PrefillOutOfMemory | None:
        for rid, host_hit in self._loading.items():
            missing = [cached for cached in host_hit if cached.page is None]
            try:
                self.tree.load_back(missing)
            except OutOfPages as error:
                wanted_tokens = len(missing) * self.page_size
                return PrefillOutOfMemory(rid, wanted_tokens, error.free_tokens, error.evictable_tokens)
            self.tree.unlock(missing)
            self.live[rid].locked += host_hit
            self.live[rid].pages += [cached.page for cached in host_hit if cached.page is not None]
        self._loading.clear()
        return super()._allocate_batch(adder)


# --- the queue behind it


@mutant("batch-in-budget")
class StateNeverChecked(PrefillAdder):
    """Between two candidates nobody asks whether the budgets are spent."""

    def budget_state(self) -> AddReqResult:
        return AddReqResult.CONTINUE


@mutant("batch-in-budget")
class QueueGoesOnAfterRefusal(AssembledNode):
    """A refused candidate is passed over, and whoever is short enough overtakes it round after round."""

    def _admit(self, adder: PrefillAdder, decisions: list[Decision]) -> bool:
        state = AddReqResult.CONTINUE
        for request in self.waiting.values():
            if adder.can_run_list and adder.budget_state() is not AddReqResult.CONTINUE:
                break
            state, _ = self._decide(adder, decisions, request)
        for chunk in adder.can_run_list:
            self.waiting.pop(chunk.request.rid, None)
        return state is AddReqResult.NO_TOKEN


@mutant("progress")
class BatchFullSticks(AssembledNode):
    """Once the batch was full it stays so: only an admission would clear the flag, and the flag forbids it."""

    _batch_was_full = False

    def _admit(self, adder: PrefillAdder, decisions: list[Decision]) -> bool:
        self._batch_was_full = self._batch_was_full or super()._admit(adder, decisions)
        return self._batch_was_full


@mutant("everyone-served")
class RefusedLeavesQueue(AssembledNode):
    """A candidate that is refused for memory is dropped from the queue without a word."""

    def _admit(self, adder: PrefillAdder, decisions: list[Decision]) -> bool:
        batch_is_full = super()._admit(adder, decisions)
        for decision in decisions:
            if decision.reason is AddReqResult.NO_TOKEN:
                del self.waiting[decision.request]
        return batch_is_full
