"""One trace under two sets of rules, round beside round, with the first decision that differs marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from kvledger.record import Decision, RoundRecord
from kvledger.report import Replayed
from kvledger.report.painted import Bars, Line, short_name
from kvledger.report.plain import padded, plain
from kvledger.report.waterfall_text import bar_columns

SIDE_COLUMNS = 48
NAME_COLUMNS = 10
WHAT_COLUMNS = 27
BAR_COLUMNS = 20
ROUNDS_AROUND = 2
"""Rounds shown before and after the first difference, and at the end."""
DECISIONS_SHOWN = 12
_MARK, _MIDDLE = ">>", " |  "

Difference = tuple[int, int]
"""Index of a round and of a decision in it."""


def side_by_side_lines(ours: Replayed, theirs: Replayed, bars: Bars, *, all_rounds: bool) -> list[Line]:
    """Both runs in 100 columns. A side's figure is rem_total_tokens after each decision."""
    pairs = list(zip_longest(ours.outcome.rounds, theirs.outcome.rounds))
    difference = first_difference(ours.outcome.rounds, theirs.outcome.rounds)
    full_tokens = max((record.baseline for pair in pairs for record in pair if record is not None), default=0)
    lines = [_beside(_title(ours), _title(theirs), "bold")]
    hidden = 0
    for index, pair in enumerate(pairs):
        if not all_rounds and not _shown(index, len(pairs), difference):
            hidden += 1
            continue
        if hidden:
            lines += [[], [(f"... {hidden} rounds left out (--all-rounds shows them)", "dim")]]
            hidden = 0
        lines.append([])
        marked = difference[1] if difference is not None and difference[0] == index else None
        lines += _round_lines(pair, marked, full_tokens, bars)
    words = "the decisions are the same" if difference is None else f"{_MARK} the first decision that differs"
    return [*lines, [], [(words, "bold")]]


def first_difference(ours: Sequence[RoundRecord], theirs: Sequence[RoundRecord]) -> Difference | None:
    """The first decision, in time order, that only one run took so."""
    for index, (one, other) in enumerate(zip_longest(ours, theirs)):
        left = _choices(one)
        right = _choices(other)
        for place, (mine, yours) in enumerate(zip_longest(left, right)):
            if mine != yours:
                return index, place
        if one is None or other is None:
            return index, 0
    return None


def _choices(record: RoundRecord | None) -> list[tuple[object, ...]]:
    """What was decided, without the figures that led to it."""
    if record is None:
        return []
    return [(d.request, d.kind, d.start, d.end, d.load_back, d.reason) for d in record.decisions]


def _shown(index: int, count: int, difference: Difference | None) -> bool:
    middle = difference[0] if difference is not None else 0
    return abs(index - middle) <= ROUNDS_AROUND or index >= count - ROUNDS_AROUND


def _round_lines(
    pair: tuple[RoundRecord | None, RoundRecord | None], marked: int | None, full_tokens: int, bars: Bars
) -> Iterator[Line]:
    """The round's decisions, one a line, then what each side may still promise."""
    heads = [f"round {record.round}, baseline {record.baseline}" if record else "no such round" for record in pair]
    yield _beside(heads[0], heads[1], "bold")
    left, right = (record.decisions if record is not None else () for record in pair)
    for place, (mine, yours) in enumerate(zip_longest(left, right)):
        if place >= DECISIONS_SHOWN and place != marked:
            continue
        mark = _MARK if place == marked else "  "
        yield _beside(mark + _decision(mine), mark + _decision(yours), "bold red" if mark == _MARK else "")
    longest = max(len(left), len(right))
    if longest > DECISIONS_SHOWN:
        yield [(f"  ... up to {longest - DECISIONS_SHOWN} more decisions", "dim")]
    sides = [_end(record, full_tokens, bars) for record in pair]
    yield _beside(sides[0], sides[1], "green")


def _decision(decision: Decision | None) -> str:
    """Who, what, and what could still be promised after it."""
    if decision is None:
        return "-"
    name = padded(short_name(decision.request, NAME_COLUMNS), NAME_COLUMNS)
    return f"{name} {plain(_what(decision), WHAT_COLUMNS):<{WHAT_COLUMNS}}{decision.rem_total_tokens:>8}"


def _what(decision: Decision) -> str:
    if decision.kind == "refused":
        return f"refused {decision.reason}"
    if decision.kind == "deferred":
        return f"deferred at {decision.start}"
    kind = "forced" if decision.forced else {"truncated": "cut", "resumed": "goes on"}.get(decision.kind, decision.kind)
    loaded = f" +{decision.load_back}" if decision.load_back else ""
    return f"{kind} {decision.start}..{decision.end}{loaded}"


def _end(record: RoundRecord | None, full_tokens: int, bars: Bars) -> str:
    """The round's last figure as a bar, or its failure."""
    if record is None:
        return ""
    if record.failure is not None:
        return (
            f"  OUT OF MEMORY: wanted {record.failure.wanted}, there {record.failure.free + record.failure.evictable}"
        )
    left_columns = bar_columns(record.rem_total_tokens, full_tokens, BAR_COLUMNS)
    before_columns = bar_columns(record.baseline, full_tokens, BAR_COLUMNS)
    bar = bars.left * left_columns + bars.taken * max(0, before_columns - left_columns)
    return f"  rem_total {record.rem_total_tokens:>8}  {bar}"


def _title(replayed: Replayed) -> str:
    return f"{replayed.preset or 'own switches'}: {replayed.outcome.verdict}"


def _beside(left: str, right: str, style: str) -> Line:
    sides = (padded(plain(side, SIDE_COLUMNS), SIDE_COLUMNS) for side in (left, right))
    return [(next(sides), style), (_MIDDLE, "dim"), (next(sides).rstrip(), style)]
