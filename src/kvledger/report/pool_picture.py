"""The pool over the rounds, and what is promised of it, as two stacked pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvledger.ledger import Due
from kvledger.report.markup import Html, element
from kvledger.report.recording import Pool, Recording, RoundView
from kvledger.report.svg import Columns, frame, group
from kvledger.report.waterfall import due_tokens, missing_tails

MAX_BINS = 240
POOL_HEIGHT = 100
CLAIMS_HEIGHT = 160
HEADROOM = 16
"""Pixels above the highest bar of claims, for what is said of it."""

PARTS: tuple[tuple[str, Callable[[Pool], int]], ...] = (
    ("protected", lambda pool: pool.protected),
    ("private", lambda pool: pool.private),
    ("held", lambda pool: pool.held),
    ("lost", lambda pool: pool.lost),
    ("evictable", lambda pool: pool.evictable),
    ("free", lambda pool: pool.free),
)
"""The pool from the bottom up: what is in use, and on top of it what can be given out."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a round's decisions laid claim to, in tokens: promised now, later, and tails that no entry holds."""

    now: int
    later: int
    missing: int

    @property
    def tokens(self) -> int:
        return self.now + self.later + self.missing


def claims_of(view: RoundView, page_size: int) -> Claims:
    """The claims of one round, read off its entries and its cut prompts."""
    missing = sum(each.tokens for each in missing_tails(view.record, page_size))
    return Claims(due_tokens(view.record, Due.NOW), due_tokens(view.record, Due.LATER), missing)


@dataclass(frozen=True, slots=True)
class Bin:
    """Neighbouring rounds drawn as one bar, the bar of their tightest round."""

    views: Sequence[RoundView]

    @property
    def tightest(self) -> RoundView:
        """The round with the least that is neither spent nor needed."""
        return min(self.views, key=_left_tokens)

    @property
    def title(self) -> str:
        first, last = self.views[0].record.round, self.views[-1].record.round
        if first == last:
            return f"round {first}"
        return f"rounds {first} to {last}, tightest {self.tightest.record.round}"


def _left_tokens(view: RoundView) -> int:
    return view.slack if view.slack is not None else min(view.record.rem_total_tokens, view.pool.baseline)


def bin_size(rounds: int) -> int:
    """How many rounds one bar stands for."""
    return max(1, -(-rounds // MAX_BINS))


def bins_of(views: Sequence[RoundView]) -> list[Bin]:
    """One bin for each round, or equal ones where there are too many rounds for that."""
    size = bin_size(len(views))
    return [Bin(views[first : first + size]) for first in range(0, len(views), size)]


# --- the pool


def pool_picture(recording: Recording, views: Sequence[RoundView]) -> Html:
    """The pool after each round, stacked; for a bin also a line from its least to its most free + evictable."""
    bins = bins_of(views)
    columns = Columns(len(bins))
    bars = [
        _pool_bar(each, columns.bar(index), columns.x(index + 0.5), recording.pool_tokens)
        for index, each in enumerate(bins)
    ]
    label = f"The pool of {recording.pool_tokens} tokens after each round; the table of all rounds has the figures"
    return frame(POOL_HEIGHT, label, bars)


def _pool_bar(each: Bin, bar: dict[str, str], middle: str, pool_tokens: int) -> Html:
    pool = each.tightest.pool
    shapes = _Scale(POOL_HEIGHT, 0, pool_tokens).stack([(name, tokens_of(pool)) for name, tokens_of in PARTS], bar)
    if len(each.views) > 1:
        left = [view.pool.baseline for view in each.views]
        top, bottom = (f"{POOL_HEIGHT * tokens / pool_tokens:.1f}" for tokens in (min(left), max(left)))
        shapes.append(element("line", class_="range", x1=middle, x2=middle, y1=top, y2=bottom))
    figures = [f"{name} {_span([tokens_of(view.pool) for view in each.views])}" for name, tokens_of in PARTS]
    return group(f"{each.title}: {', '.join(figures)}", *shapes)


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"


# --- what is promised of it


def claims_scale(recording: Recording, views: Sequence[RoundView]) -> int:
    """The top of the picture of claims, in tokens."""
    drawn = [each.tightest for each in bins_of(views)]
    return max([1, *(max(claims_of(view, recording.page_size).tokens, view.record.baseline) for view in drawn)])


def claims_picture(recording: Recording, views: Sequence[RoundView]) -> Html:
    """What each round's decisions laid claim to, against the baseline that they had."""
    bins = bins_of(views)
    columns, scale = Columns(len(bins)), _Scale(CLAIMS_HEIGHT, HEADROOM, claims_scale(recording, views))
    bars = [_claims_bar(each, recording.page_size, scale, columns, index) for index, each in enumerate(bins)]
    label = "What was promised when each round's decisions ended, against free + evictable"
    return frame(CLAIMS_HEIGHT, label, bars)


def _claims_bar(each: Bin, page_size: int, scale: _Scale, columns: Columns, index: int) -> Html:
    view, bar = each.tightest, columns.bar(index)
    claims, baseline = claims_of(view, page_size), view.record.baseline
    short_tokens = -view.slack if view.slack is not None and view.slack < 0 else 0
    missing = "missing short" if short_tokens else "missing"
    shapes = scale.stack([("now", claims.now), ("later", claims.later), (missing, claims.missing)], bar)
    if claims.tokens > baseline:
        shapes.append(scale.rect("over", baseline, claims.tokens, bar))
    shapes.append(element("rect", class_="baseline", y=f"{scale.y(baseline) - 1:.1f}", height=2, **bar))
    if short_tokens and columns.labelled:
        y = f"{scale.y(claims.tokens) - 4:.0f}"
        name = f"short{columns.label_class}"
        shapes.append(element("text", f"short {short_tokens}", class_=name, x=columns.x(index + 0.5), y=y))
    words = f"promised now {claims.now}, later {claims.later}, tails in no entry {claims.missing}, baseline {baseline}"
    slack = "" if view.slack is None else f", baseline minus what admitted prompts still need {view.slack}"
    return group(f"{each.title}: {words}{slack}", *shapes)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Tokens as pixels from the bottom up; `most` tokens reach up to `headroom` pixels below the top."""

    height: int
    headroom: int
    most: int

    def y(self, tokens: int) -> float:
        return self.height - (self.height - self.headroom) * tokens / self.most

    def rect(self, name: str, low: int, high: int, bar: dict[str, str]) -> Html:
        top = self.y(high)
        return element("rect", class_=name, y=f"{top:.1f}", height=f"{self.y(low) - top:.1f}", **bar)

    def stack(self, parts: Sequence[tuple[str, int]], bar: dict[str, str]) -> list[Html]:
        """The parts on top of each other."""
        shapes, base = [], 0
        for name, tokens in parts:
            if tokens > 0:
                shapes.append(self.rect(name, base, base + tokens, bar))
                base += tokens
        return shapes
