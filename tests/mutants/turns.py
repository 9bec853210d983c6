"""Mutants of turns: who decodes beside a batch, who makes way, and where one waits that was sent back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvledger.adder import PrefillAdder, PrefillRequest
from kvledger.decode import retraction_order
from kvledger.policy import ordered, victims
from kvledger.pool import PrefillOutOfMemory
from kvledger.record import Decision
from kvledger.request import Request
from kvledger.settings import NodeSettings
from kvledger.unified import UnifiedNode
from kvledger.unified_adder import UnifiedAdder
from tests.mutants.mutant import mutant


def _mixes(settings: NodeSettings) -> bool:
    return settings.mixed_chunk


def _preempts(settings: NodeSettings) -> bool:
    return settings.preemption_threshold is not None


# --- beside a batch


class _Otherwise(UnifiedNode):
    """Decode beside a batch as if `mixed_chunk` were set the other way."""

    def _beside(self, adder: PrefillAdder) -> PrefillOutOfMemory | None:
        settings = self.settings
        self.settings = replace(settings, mixed_chunk=bool(adder.can_run_list) and not settings.mixed_chunk)
        try:
            return super()._beside(adder)
        finally:
            self.settings = settings


@mutant("each-decodes-once", narrow=_mixes)
class MixedNeverDecodes(_Otherwise):
    """A mixed batch is charged for decode, and nobody in it takes a token."""


@mutant("each-decodes-once", narrow=lambda settings: not settings.mixed_chunk)
class DecodesBesideUnmixed(_Otherwise):
    """Running requests decode beside a batch that no budget counts them in."""


class _InABatch(UnifiedNode):
    """Sends others back than it should where decode joins a batch."""

    _mixed = False

    def _beside(self, adder: PrefillAdder) -> PrefillOutOfMemory | None:
        self._mixed = bool(adder.can_run_list)
        return super()._beside(adder)

    def _make_room(self) -> bool:
        if not self._mixed or not self._short_pages() or len(self.live) == 1:
            return super()._make_room()
        for victim in self._wrong(retraction_order(self.running.values())):
            self._told.retracted.append(victim.rid)
            self._send_back(victim)
        self.ratio.retracted(list(self.running.values()))
        return True

    def _wrong(self, order: Sequence[Request]) -> Iterable[Request]:
        raise NotImplementedError


@mutant("retraction-exact", narrow=_mixes, most=4000)
class MixedRetractsMostGenerated(_InABatch):
    """In a mixed batch the request that has generated most is sent back first."""

    def _wrong(self, order: Sequence[Request]) -> Iterable[Request]:
        for victim in reversed(order):
            if not self._short_pages():
                return
            yield victim


@mutant("retraction-exact", narrow=_mixes, most=4000)
class MixedRetractsAll(_InABatch):
    """A mixed batch that lacks a page sends everybody back."""

    def _wrong(self, order: Sequence[Request]) -> Iterable[Request]:
        return order


# --- who makes way


@mutant("preemption-fair", narrow=_preempts)
class EqualPriorityPreempted(UnifiedAdder):
    """A request is put back for one that is more important by no more than the threshold."""

    def preempt_to_schedule(self, req: PrefillRequest) -> bool:
        self.threshold -= 1
        try:
            return super().preempt_to_schedule(req)
        finally:
            self.threshold += 1


@mutant("preemption-fair", narrow=_preempts, most=4000)
class MostImportantVictim(UnifiedAdder):
    """Of those who may be put back the most important goes first."""

    def _victims(self, priority: int) -> list[Any]:
        return super()._victims(priority)[::-1]


@mutant("preemption-fair", narrow=_preempts, most=4000)
class PreemptsEverybodyBelow(UnifiedAdder):
    """Everybody who may be put back is, though the first made room enough."""

    def preempt_to_schedule(self, req: PrefillRequest) -> bool:
        if not super().preempt_to_schedule(req):
            return False
        self._put_back(victims(self.running, int(getattr(req, "priority", 0)), self.threshold))
        return True


@mutant("other-is-minimal", narrow=lambda settings: _preempts(settings) and _mixes(settings), most=4000)
class VictimsTokenStaysInBudget(UnifiedAdder):
    """A preempted request takes no token in this batch, and the compute budget still counts it."""

    def _put_back(self, chosen: Sequence[Any]) -> None:
        compute = replace(self.compute)
        super()._put_back(chosen)
        self.compute = compute


# --- the queue


def _by_match(settings: NodeSettings) -> bool:
    return settings.schedule_policy == "lpm"


def _shortest_first(settings: NodeSettings) -> bool:
    return settings.schedule_policy == "shortest-prefill-first"


@mutant("in-order", narrow=_by_match)
class ShortestMatchFirst(UnifiedNode):
    """Who finds least in the cache goes first."""

    def _queue(self) -> Iterable[Request]:
        return list(super()._queue())[::-1]


@mutant("in-order", narrow=_shortest_first)
class LongestPrefillFirst(UnifiedNode):
    """Who has most to compute goes first."""

    def _queue(self) -> Iterable[Request]:
        return list(super()._queue())[::-1]


@mutant("in-order", narrow=lambda settings: not settings.prefix_cache and _shortest_first(settings))
class WaitsForWhatNobodyKeeps(UnifiedNode):
    """Who shares a prefix with an earlier one waits for it, though nothing is kept for others."""

    def _queue(self) -> Iterable[Request]:
        return ordered(self.settings.schedule_policy, self.waiting.values(), self._matched_tokens, self.page_size)


@mutant("in-order", narrow=_shortest_first)
class NoContinuationLimit(UnifiedNode):
    """The half-done request takes all of the chunk budget, and the shorter ones wait behind it."""

    def _resume(self, adder: PrefillAdder, decisions: list[Decision]) -> None:
        settings = self.settings
        self.settings = replace(settings, schedule_policy="fcfs")
        try:
            super()._resume(adder, decisions)
        finally:
            self.settings = settings


@mutant("queue-kept")
class RetractedToTheFront(UnifiedNode):
    """A request that was sent back is first in the queue, and takes its pages back before anybody else."""

    def _send_back(self, request: Request) -> None:
        super()._send_back(request)
        if request.rid in self.waiting:
            self.waiting.move_to_end(request.rid, last=False)


@mutant("full-is-true")
class BatchNeverFull(UnifiedNode):
    """Memory or request slots end the batch, and it is not called full."""

    def _admit(self, adder: PrefillAdder, decisions: list[Decision]) -> bool:
        super()._admit(adder, decisions)
        return False
