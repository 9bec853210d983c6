"""What decode asks of the books: how far a running request may still grow, and who goes back when the pool is short.

A share is a real fraction (`new_token_ratio` of what is left of an output). It is never rounded in the ledger or at
the gate: rounding each of many shares up would refuse what fits. It is rounded down in two places only: where a chunk
is cut from what remains (a token is whole, so a chunk may end inside a page), and where a figure is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

Tokens = int | Fraction
"""What is expected of an output: a whole number of tokens, or an exact fraction of one."""

CLIP_MAX_NEW_TOKENS = 4096
"""No promise counts on more of an output than this: few requests use up all that they may."""
DECAY_ROUNDS = 600
RATIO_FLOOR = Fraction(14, 100)
RETRACT_STEPS = 20
SPARE_TOKENS = 1
"""What the simulation keeps for each request that is still running."""


def exact(ratio: Any) -> Fraction:
    """A `new_token_ratio` as the decimal that was written: 0.7 is seven tenths. ValueError, if it is no part of one."""
    if isinstance(ratio, Real) and math.isfinite(ratio):
        part = Fraction(ratio) if isinstance(ratio, Rational) else Fraction(str(ratio))
        if 0 <= part <= 1:
            return part
    raise ValueError(f"new_token_ratio: {ratio!r} is not a number from 0 to 1")


def promised_output(max_new_tokens: int, generated_tokens: int) -> int:
    """What of an output is still to come, as far as a promise counts on it: subtracted first, then clipped."""
    return min(max(max_new_tokens - generated_tokens, 0), CLIP_MAX_NEW_TOKENS)


def running_share(request: Any, ratio: Fraction) -> Tokens:
    """Slots that a running request is expected to take yet; all of them if it ignores the end of sequence."""
    left = promised_output(request.max_new_tokens, request.generated_tokens)
    share = left if request.ignore_eos else left * ratio
    return share.numerator if isinstance(share, Fraction) and share.denominator == 1 else share


class NewTokenRatio:
    """The expected part of what is left of an output: decays while decode goes well, and rises at a retraction."""

    def __init__(self, initial: Fraction) -> None:
        self.current = initial
        self._floor = initial * RATIO_FLOOR
        self._step = (initial - self._floor) / DECAY_ROUNDS

    def decay(self) -> None:
        """A decode round went by without a retraction."""
        self.current = max(self.current - self._step, self._floor)

    def retracted(self, kept: Sequence[Any]) -> None:
        """Some had to go: believe the `kept` ones, and that each goes on for a few steps."""
        generated = sum(request.generated_tokens for request in kept)
        most = sum(request.max_new_tokens for request in kept)
        self.current = min(Fraction(1), Fraction(generated + RETRACT_STEPS * len(kept), most + 1))


def retraction_order(running: Iterable[Any]) -> list[Any]:
    """Who goes first: the fewest tokens generated, and of those the longest prompt. Ties: who joined last."""
    joined = list(running)
    joined.reverse()
    return sorted(joined, key=lambda request: (request.generated_tokens, -request.origin_tokens))


def all_can_end(free_tokens: Tokens, requests: Iterable[tuple[Tokens, int]]) -> bool:
    """Whether requests that all run at once can each come to its end with `free_tokens` slots for what they grow.

    Each is (tokens left, slots held). They end in order of what is left, and each gives back what it held at the
    start; what it grew is not counted, nor is the last token, which is never stored.
    """
    ending = sorted((left, held) for left, held in requests if left > 0)
    freed = 0
    for index, (left, held) in enumerate(ending):
        still_running = len(ending) - index
        if free_tokens + freed - left * still_running <= SPARE_TOKENS * still_running:
            return False
        freed += held
    return True
