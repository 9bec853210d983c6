"""Mutants of the decode round: who takes a token, who goes back with what, and in what order they are served."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.adder import PrefillAdder, PrefillRequest
from kvledger.decode import retraction_order
from kvledger.pool import PrefillOutOfMemory
from kvledger.record import Decision
from kvledger.request import Request, RequestState
from kvledger.settings import NodeSettings
from kvledger.unified import UnifiedNode
from kvledger.unified_adder import UnifiedAdder
from tests.mutants.mutant import long_beside_decode, mutant

# --- one token each


@mutant("each-decodes-once")
class FullPagePassedOver(UnifiedNode):
    """A running request whose last page is full misses a round."""

    def _decode(self) -> None:
        waiting = [r for r in self.running.values() if r.prefix_tokens % self.page_size == 0]
        if len(waiting) == len(self.running):
            super()._decode()
            return
        for request in waiting:
            del self.running[request.rid]
        super()._decode()
        self.running.update({request.rid: request for request in waiting})


@mutant("output-exact")
class OneTokenTooMany(UnifiedNode):
    """An output ends one token after its last."""

    def _decode(self) -> None:
        for request in self.running.values():
            request.generated_tokens -= 1
        super()._decode()
        for request in self.running.values():
            request.generated_tokens += 1


@mutant("each-decodes-once")
class NewcomerDecodesAtOnce(UnifiedNode):
    """A request whose prompt is done in this batch takes part in the same round's decode, a token too early."""

    def _beside(self, adder: PrefillAdder) -> PrefillOutOfMemory | None:
        failure = super()._beside(adder)
        for chunk in adder.can_run_list:
            request = self.running.get(chunk.request.rid)
            if request is not None and request.prefix_tokens % self.page_size:
                self._told.decoded += [request.rid, request.rid]
        return failure


class _Trusting(UnifiedAdder):
    """Takes a request that runs already for a new one."""

    def _check(self, req: PrefillRequest) -> None:
        self._taken.pop(req.rid, None)
        super()._check(req)


@mutant("output-exact", "ledger-exact")
class HalfDoneMerged(UnifiedNode):
    """A half-done request is merged with those whose prompt is done, and counts as running."""

    adder_type = _Trusting  # the adder itself would refuse it

    def _run_batch(self, adder: PrefillAdder) -> None:
        super()._run_batch(adder)
        if self.chunked_req is not None:
            self.chunked_req.state = RequestState.RUNNING


@mutant("quiescent", "conserved")
class OutputPagesKept(UnifiedNode):
    """What a request grew is not freed when its output is done."""

    def _end(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            del request.pages[max(request.shared_pages, request.prompt_tokens // self.page_size) :]
        super()._end(request)


# --- when the pool is short


@mutant("tail-spared", narrow=long_beside_decode)
class DecodeEatsTail(UnifiedNode):
    """Decode checks what is free, and part of that was promised to a cut request."""

    def _kept_pages(self) -> int:
        return 0


@mutant("admitted-finishes", report="#4602")
class TokensNotPages(UnifiedNode):
    """Decode asks for a token for each request that needs a page."""

    def _short_pages(self) -> int:
        wanted = sum(request.prefix_tokens % self.page_size == 0 for request in self.running.values())
        free_pages = self.pool.free_pages + self.tree.evictable_pages - self._kept_pages()
        return max(0, wanted // max(2, self.page_size) - free_pages)


@mutant("retraction-exact")
class OldestGoesFirst(UnifiedNode):
    """The request that has generated most is sent back: the most work is thrown away."""

    def _make_room(self) -> bool:
        went = False
        for victim in reversed(retraction_order(self.running.values())):
            if not self._short_pages():
                break
            went = True
            self._told.retracted.append(victim.rid)
            self._send_back(victim)
        if went:
            self.ratio.retracted(list(self.running.values()))
        return went


@mutant("retraction-exact")
class OneMoreSentBack(UnifiedNode):
    """When the pool is short, one more goes back than has to."""

    def _make_room(self) -> bool:
        went = super()._make_room()
        if went and len(self.running) > 1:
            victim = retraction_order(self.running.values())[0]
            self._told.retracted.append(victim.rid)
            self._send_back(victim)
        return went


@mutant("comes-back-whole", report="#7434")
class OutputForgottenAtRetraction(UnifiedNode):
    """A request that was sent back comes again with its original prompt, though it goes on from its output."""

    def _send_back(self, request: Request) -> None:
        super()._send_back(request)
        again = self.waiting.get(request.rid)
        if again is not None and again.origin is not None:
            again.prompt = again.origin


@mutant("conserved", "quiescent")
class RetractGivesBackTooLittle(UnifiedNode):
    """Of what a request held when it is sent back, only the cached pages are given up."""

    def _send_back(self, request: Request) -> None:
        del request.pages[request.shared_pages :]
        super()._send_back(request)


@mutant("abort-is-last")
class AbortedInsteadOfSentBack(UnifiedNode):
    """A request that cannot go on is given up, though others will make room for it."""

    def _send_back(self, request: Request) -> None:
        self._told.retracted = [rid for rid in self._told.retracted if rid != request.rid]
        self._abort(request, "no page for its next token")


# --- the queue


def _by_priority(settings: NodeSettings) -> bool:
    return settings.schedule_policy == "priority"


@mutant("in-order", narrow=_by_priority)
class PriorityInverted(UnifiedNode):
    """The least important goes first."""

    def _queue(self) -> Iterable[Request]:
        return sorted(self.waiting.values(), key=lambda request: (request.priority, request.arrival))


@mutant("in-order")
class LastComeFirstServed(UnifiedNode):
    """The queue is taken from its end."""

    def _queue(self) -> Iterable[Request]:
        return list(super()._queue())[::-1]


@mutant("slots-kept")
class SlotsForgotten(UnifiedNode):
    """Nobody asks whether a request slot is left."""

    def _has_request_slot(self) -> bool:
        return True


@mutant("slots-kept", narrow=lambda settings: settings.pp_size > 1)
class WholePoolForOneStage(UnifiedNode):
    """A pipeline stage takes all the request slots, not its share."""

    def _has_request_slot(self) -> bool:
        return len(self.live) < (self.settings.max_running_requests or len(self.live) + 1)


@mutant("full-is-true", "progress")
class FullBatchSticks(UnifiedNode):
    """Once the batch was full it stays so while requests are waiting."""

    _was_full = False

    def _admit(self, adder: PrefillAdder, decisions: list[Decision]) -> bool:
        if self._was_full:
            return True
        self._was_full = super()._admit(adder, decisions)
        return self._was_full


@mutant("progress")
class HeadRefusedAfterRetraction(UnifiedNode):
    """A request that was sent back is asked for room for its whole output once more, on top of what it has."""

    def _send_back(self, request: Request) -> None:
        super()._send_back(request)
        again = self.waiting.get(request.rid)
        if again is not None:
            again.most_new_tokens = again.output.max_new_tokens + self.settings.pool_tokens
            again.output = type(again.output)(again.most_new_tokens, again.ignore_eos, again.priority)
