"""Mutants of decode's part in the books: what outputs are expected to take, and who is let in beside them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, cast

from kvledger.adder import PrefillRequest
from kvledger.decode import CLIP_MAX_NEW_TOKENS, NewTokenRatio, Tokens
from kvledger.ledger import Due
from kvledger.node import Watcher
from kvledger.request import USUAL_OUTPUT, Output, Prompt, Request
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.testing.unified_moves import BEYOND_CLIP
from kvledger.unified import UnifiedNode
from kvledger.unified_adder import UnifiedAdder
from tests.mutants.mutant import long_beside_decode, mutant


def _wide(settings: NodeSettings) -> bool:
    """An output longer than any promise counts on fits the pool."""
    return settings.pool_tokens > BEYOND_CLIP + 2 * settings.page_size


def _preempts(settings: NodeSettings) -> bool:
    return settings.preemption_threshold is not None


def _mixes(settings: NodeSettings) -> bool:
    return settings.mixed_chunk


def _without_cache(settings: NodeSettings) -> bool:
    return not settings.prefix_cache


# --- what is expected of an output


@mutant("ledger-exact", narrow=_wide)
class ClippedBeforeSubtraction(UnifiedAdder):
    """The clip comes first and what was generated is taken off it: a long output's promise melts away."""

    def _share(self, request: Any) -> Tokens:
        left = min(request.max_new_tokens, CLIP_MAX_NEW_TOKENS) - request.generated_tokens
        ratio = Fraction(1) if request.ignore_eos else self.new_token_ratio
        return int(max(0, left)) * ratio


@mutant("ledger-exact", narrow=_wide)
class NeverClipped(UnifiedAdder):
    """An output is promised at its full length, however improbable that is."""

    def _output_tokens(self, req: PrefillRequest) -> int:
        most, generated = (getattr(req, name) for name in ("max_new_tokens", "generated_tokens"))
        return max(0, int(most) - int(generated))


@mutant("ledger-exact", "fix-is-minimal")
class RatioForgotten(UnifiedAdder):
    """Running requests are reserved all that they may take: safe, and it refuses what fits."""

    def _share(self, request: Any) -> Tokens:
        ratio, self.new_token_ratio = self.new_token_ratio, Fraction(1)
        share = super()._share(request)
        self.new_token_ratio = ratio
        return share


@mutant("ledger-exact")
class FixedLengthEstimated(UnifiedAdder):
    """The ratio is applied to a request that ignores the end of sequence, though it will take all of it."""

    def _share(self, request: Any) -> Tokens:
        return int(request.max_new_tokens - request.generated_tokens) * self.new_token_ratio


@mutant("ledger-exact", "gate-covers-charge")
class RunningForgotten(UnifiedAdder):
    """Nothing is reserved for what running requests may still grow."""

    def _share(self, request: Any) -> Tokens:
        return 0


@mutant("ledger-exact")
class GeneratedForgotten(UnifiedAdder):
    """A running request is reserved its whole output, as if it had generated nothing yet."""

    def _share(self, request: Any) -> Tokens:
        return super()._share(Output(request.max_new_tokens, request.ignore_eos, request.priority))


@mutant("ledger-exact")
class TailWithoutOutput(UnifiedAdder):
    """A cut request promises its tail, and not the output that comes after it."""

    def _reserve(self, req: PrefillRequest, tail_tokens: int) -> None:
        super()._reserve(req, tail_tokens)
        self.memory.take_back(req.rid, "output")


# --- the ratio's life


class _Stubborn(NewTokenRatio):
    def decay(self) -> None:
        pass


@mutant("ledger-exact")
class RatioNeverDecays(UnifiedNode):
    """The ratio stays where it began, however well decode goes."""

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, rules, watcher)
        self.ratio = _Stubborn(self.ratio.current)


class _Deaf(NewTokenRatio):
    def retracted(self, kept: Any) -> None:
        pass


@mutant("ledger-exact")
class RatioKeptAtRetraction(UnifiedNode):
    """A retraction teaches nothing: the ratio that was too low is used again."""

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, rules, watcher)
        self.ratio = _Deaf(self.ratio.current)


# --- mixed batches


@mutant("ledger-exact", "batch-in-budget", narrow=_mixes)
class MixedNotCharged(UnifiedAdder):
    """Decode joins the batch, and no budget knows of it."""

    def _mix(self, decode_tokens: int) -> None:
        pass


@mutant("ledger-exact", narrow=_mixes)
class MixedChargedTwice(UnifiedAdder):
    """Each running request's token is taken from every budget twice."""

    def _mix(self, decode_tokens: int) -> None:
        super()._mix(decode_tokens)
        super()._mix(decode_tokens)


@mutant("batch-in-budget", narrow=_mixes)
class MixedRunsForFree(UnifiedAdder):
    """Decode's tokens are in the memory ledger, and the batch computes them on top of a full chunk."""

    def _mix(self, decode_tokens: int) -> None:
        super()._mix(decode_tokens)
        self.compute.spend(-decode_tokens)


# --- the gate and the entry


@mutant("never-forced", narrow=long_beside_decode)
class TailBehindDecode(UnifiedAdder):
    """What running requests may still grow shortens the half-done one's chunk, until nothing is left of it."""

    def _room_of_half_done(self) -> int:
        return int(self.rem_total_tokens)


@mutant("gate-covers-charge", narrow=_without_cache)
class OnlyItselfCanEnd(UnifiedAdder):
    """The simulation asks whether the candidate can come to its end, and forgets those who run beside it."""

    def _ending(self, request: Any) -> tuple[Tokens, int]:
        left, held = super()._ending(request)
        return (left, held) if request not in self.running else (0, held)


@mutant("gate-covers-charge", narrow=_without_cache)
class TailsAreRoomForOutputs(UnifiedAdder):
    """The simulation lets everybody end in slots that a cut request was promised."""

    def _tail_tokens(self) -> int:
        return -4 * self.page_size


@mutant("progress", report="#28530")
class OutputForgottenAtEntry(UnifiedNode):
    """The entry lets in what fits with one token of output, and the gate then refuses it for ever."""

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        reason = super().submit(rid, prompt)
        if reason is None:
            self.waiting[rid].output = output
            self.waiting[rid].most_new_tokens = None
        return reason


# --- preemption


@mutant("ledger-exact", narrow=_preempts, report="#13108", most=4000)
class NewcomersShareGivenBack(UnifiedAdder):
    """A preempted request gives back what the newcomer will take, not what was reserved for itself."""

    def preempt_to_schedule(self, req: PrefillRequest) -> bool:
        before = len(self.preempt_list)
        done = super().preempt_to_schedule(req)
        for victim in self.preempt_list[before:]:
            self.memory.promise(victim.rid, "running", cast(int, self._share(victim)), Due.LATER)
            self.memory.promise(victim.rid, "running", -self._output_tokens(req), Due.LATER)
        return done


@mutant("ledger-exact", narrow=_preempts, most=4000)
class ShareKeptByVictim(UnifiedAdder):
    """What was reserved for a preempted request stays reserved."""

    def preempt_to_schedule(self, req: PrefillRequest) -> bool:
        before = len(self.preempt_list)
        done = super().preempt_to_schedule(req)
        for victim in self.preempt_list[before:]:
            self.memory.promise(victim.rid, "running", cast(int, self._share(victim)), Due.LATER)
        return done


@mutant("everyone-served", narrow=_preempts, most=4000)
class VictimForgotten(UnifiedNode):
    """A preempted request is put back, and into no queue."""

    def _preempt(self, request: Request) -> None:
        super()._preempt(request)
        self.waiting.pop(request.rid, None)
