"""Two runs of one trace, round beside round, with the first thing in which they differ marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvledger.differences import Difference, compared, round_difference
from kvledger.record import Decision, RoundRecord
from kvledger.report import Replayed
from kvledger.report.painted import Bars, Line, short_name
from kvledger.report.plain import counted, named, padded, plain, wrapped
from kvledger.report.rounds import prefill_words, running_words, struck_words
from kvledger.report.waterfall_text import bar_columns

SIDE_COLUMNS = 48
NAME_COLUMNS = 10
WHAT_COLUMNS = 27
BAR_COLUMNS = 20
ROUNDS_AROUND = 2
"""Rounds shown before and after the first difference, and at the end."""
DECISIONS_SHOWN = 12
DETAIL_COLUMNS = 300
_MARK, _MIDDLE = ">>", " |  "


@dataclass(frozen=True, slots=True)
class Side:
    """One run: its title, its rounds, and whether the ledger's figures in them mean anything."""

    title: str
    rounds: Sequence[RoundRecord]
    figures: bool = True


def side_by_side_lines(ours: Replayed, theirs: Replayed, bars: Bars, *, all_rounds: bool) -> list[Line]:
    """One target under two sets of rules, in 100 columns."""
    difference = first_difference(ours.outcome.rounds, theirs.outcome.rounds)
    sides = [Side(_title(replayed), replayed.outcome.rounds) for replayed in (ours, theirs)]
    lines = beside_lines(sides[0], sides[1], difference, bars, all_rounds=all_rounds)
    return [*lines, [], *([(line, "bold")] for line in _first_words(ours, theirs, difference))]


def _first_words(ours: Replayed, theirs: Replayed, difference: Difference | None) -> list[str]:
    """What the mark stands at; before it, who only one of the two took in at all."""
    words = []
    for one, other in ((ours, theirs), (theirs, ours)):
        refused = dict(one.outcome.rejected_at_submit).keys() - dict(other.outcome.rejected_at_submit).keys()
        words += [f"{named(request)} is rejected at submit under {_rules(one)} alone" for request in sorted(refused)]
    if difference is None:
        words.append("the decisions are the same, and what came of them")
    elif difference.kind == "rounds":
        words.append(f"{_MARK} the first that differs: only one of the two runs round {difference.round}")
    elif difference.place is not None:
        words.append(f"{_MARK} the first decision that differs")
    else:
        detail = plain(difference.detail, DETAIL_COLUMNS)
        words.append(f"{_MARK} the first that differs, in round {difference.round}: {detail}")
    return [line for each in words for line in wrapped(each, 3)]


def beside_lines(
    one: Side,
    other: Side,
    difference: Difference | None,
    bars: Bars,
    *,
    all_rounds: bool = False,
    by_decisions: bool = True,
) -> list[Line]:
    """Two runs in 100 columns, with their first difference marked.

    A side's figure is rem_total_tokens after each decision, "-" where it has none.
    """
    pairs = list(zip_longest(one.rounds, other.rounds))
    full_tokens = max((record.baseline for pair in pairs for record in pair if record is not None), default=0)
    table = _Table((one.figures, other.figures), by_decisions, full_tokens, bars)
    lines = [_beside(one.title, other.title, "bold")]
    hidden = 0
    for index, pair in enumerate(pairs):
        if not all_rounds and not _shown(index, len(pairs), difference):
            hidden += 1
            continue
        if hidden:
            lines += [[], [(f"... {counted(hidden, 'round')} left out (--all-rounds shows them)", "dim")]]
            hidden = 0
        lines.append([])
        here = difference if difference is not None and difference.round == index + 1 else None
        lines += table.round_lines(pair, here)
    return lines


def first_difference(ours: Sequence[RoundRecord], theirs: Sequence[RoundRecord]) -> Difference | None:
    """The first decision, in time order, that only one run took so, or the first round of which something else came."""
    pairs = enumerate(zip_longest(ours, theirs), start=1)
    found = (round_difference(one, other, number) for number, (one, other) in pairs)
    return next((difference for difference in found if difference is not None), None)


def _shown(index: int, count: int, difference: Difference | None) -> bool:
    middle = difference.round - 1 if difference is not None else 0
    return abs(index - middle) <= ROUNDS_AROUND or index >= count - ROUNDS_AROUND


@dataclass(frozen=True, slots=True)
class _Table:
    """What all rounds of a pair share: whose figures are shown, what is compared, and the scale of the bars."""

    figures: tuple[bool, bool]
    by_decisions: bool
    full_tokens: int
    bars: Bars

    def round_lines(
        self, pair: tuple[RoundRecord | None, RoundRecord | None], difference: Difference | None
    ) -> Iterator[Line]:
        """The round's decisions, one a line, what came of running requests, then what each side may still promise."""
        marked = None if difference is None else difference.place
        head, beside = (_head(record, shown) for record, shown in zip(pair, self.figures, strict=True))
        yield _beside(head, beside, "bold")
        left, right = (compared(record, self.by_decisions) for record in pair)
        for place, both in enumerate(zip_longest(left, right)):
            if place >= DECISIONS_SHOWN and place != marked:
                continue
            mark = _MARK if place == marked else "  "
            mine, yours = (mark + _decision(each, shown) for each, shown in zip(both, self.figures, strict=True))
            yield _beside(mine, yours, "bold red" if mark == _MARK else "")
        longest = max(len(left), len(right))
        if longest > DECISIONS_SHOWN:
            yield [(f"  ... up to {counted(longest - DECISIONS_SHOWN, 'more decision')}", "dim")]
        kind = None if difference is None else difference.kind
        yield from _told_lines(pair, marked=kind == "running" or (kind == "rounds" and not longest))
        mine, yours = (self._end(record, shown) for record, shown in zip(pair, self.figures, strict=True))
        if kind == "verdict":
            yield _beside(f"{_MARK}{mine[2:]}", f"{_MARK}{yours[2:]}", "bold red")
        else:
            yield _beside(mine, yours, "green")

    def _end(self, record: RoundRecord | None, shown: bool) -> str:
        """The round's last figure as a bar (without a ledger, what is left of the pool), or its failure."""
        if record is None:
            return ""
        if record.failure is not None:
            there = record.failure.free + record.failure.evictable
            return f"  OUT OF MEMORY: wanted {record.failure.wanted}, there {there}"
        tokens = record.rem_total_tokens if shown else record.free + record.evictable
        left_columns = bar_columns(tokens, self.full_tokens, BAR_COLUMNS)
        before_columns = bar_columns(record.baseline, self.full_tokens, BAR_COLUMNS)
        bar = self.bars.left * left_columns + self.bars.taken * max(0, before_columns - left_columns)
        return f"  {'rem_total' if shown else 'left     '} {tokens:>8}  {bar}"


def _told_lines(pair: tuple[RoundRecord | None, RoundRecord | None], *, marked: bool) -> Iterator[Line]:
    """What became of requests in a round without a decision about them: a thing a line, not always on both sides."""
    sides = [[] if record is None else _told(record) for record in pair]
    for both in zip_longest(*sides, fillvalue=""):
        mark = _MARK if marked and both[0] != both[1] else "  "
        mine, yours = (f"{mark}{plain(words, SIDE_COLUMNS - 2)}" for words in both)
        yield _beside(mine, yours, "bold red" if mark == _MARK else "")


def _head(record: RoundRecord | None, shown: bool) -> str:
    if record is None:
        return "no such round"
    return f"round {record.round}" + (f", baseline {record.baseline}" if shown else "")


def _decision(decision: Decision | None, shown: bool) -> str:
    """Who, what, and what could still be promised after it."""
    if decision is None:
        return "-"
    name = padded(short_name(decision.request, NAME_COLUMNS), NAME_COLUMNS)
    figure = str(decision.rem_total_tokens) if shown else "-"
    return f"{name} {plain(decision_words(decision), WHAT_COLUMNS):<{WHAT_COLUMNS}}{figure:>8}"


def decision_words(decision: Decision) -> str:
    """What became of a request, in a few words."""
    if decision.kind == "refused":
        return f"refused {decision.reason}"
    if decision.kind in ("deferred", "loading"):
        return f"{decision.kind} at {decision.start}"
    kind = "forced" if decision.forced else {"truncated": "cut", "resumed": "goes on"}.get(decision.kind, decision.kind)
    loaded = f" +{decision.load_back}" if decision.load_back else ""
    return f"{kind} {decision.start}..{decision.end}{loaded}"


def _title(replayed: Replayed) -> str:
    return f"{_rules(replayed)}: {replayed.outcome.verdict}"


def _rules(replayed: Replayed) -> str:
    return replayed.preset or "own switches"


def _beside(left: str, right: str, style: str) -> Line:
    sides = (padded(plain(side, SIDE_COLUMNS), SIDE_COLUMNS) for side in (left, right))
    return [(next(sides), style), (_MIDDLE, "dim"), (next(sides).rstrip(), style)]


def _told(record: RoundRecord) -> list[str]:
    return [*running_words(record), *prefill_words(record), *(f"struck by {each}" for each in struck_words(record))]
