"""A comparison of targets as text: the decision where two part, the figures and promises of each, and the rounds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from kvledger.compare import Comparison, Pair
from kvledger.differences import KINDS, Difference
from kvledger.record import Decision, RoundRecord
from kvledger.report import Replayed
from kvledger.report.painted import Bars, Line, short_name, unstyled
from kvledger.report.plain import counted, named, padded, plain, wrapped
from kvledger.report.side_by_side import Side, beside_lines, decision_words
from kvledger.report.text import heading_lines
from kvledger.runs import LEDGER_FIGURES, Run

LABEL_COLUMNS = 22
SIDE_COLUMNS = 37
CELL_COLUMNS = 400
NAME_COLUMNS = 30
PROMISES_SHOWN = 8
_NOT_SHOWN = "not shown"


def comparison_lines(comparison: Comparison, source: str, bars: Bars, *, all_rounds: bool = False) -> list[Line]:
    """The trace, then each pair of targets, in 100 columns."""
    first = comparison.runs[0]
    shown = any(run.shows_figures for run in comparison.runs)
    replayed = Replayed(source, comparison.trace, comparison.rules, first.outcome, shows_figures=shown)
    lines = unstyled(heading_lines(replayed))
    for pair in comparison.pairs:
        lines += [[], *pair_lines(pair, bars, all_rounds=all_rounds)]
    if len(comparison.pairs) > 1:
        differ = sum(not pair.same for pair in comparison.pairs)
        summary = (
            f"{len(comparison.pairs)} targets held against {short_name(first.target, NAME_COLUMNS)}: {differ} differ"
        )
        lines += [[], [(summary, "bold")]]
    return lines


def pair_lines(pair: Pair, bars: Bars, *, all_rounds: bool = False) -> list[Line]:
    """Two targets: whether they agree, where they part, both verdicts, and from a difference on the rounds."""
    names = [short_name(run.target, NAME_COLUMNS) for run in (pair.one, pair.other)]
    verdict = wrapped(f"{names[0]} and {names[1]} {_agreement(pair)}", 6)
    lines = unstyled(verdict, "bold" if pair.same else "bold red")
    lines += unstyled(wrapped(_what_is_compared(pair), 6))
    if pair.same and pair.one.outcome.verdict != pair.other.outcome.verdict:
        words = "their verdicts differ because one was asked what the other was not (see `not asked`)"
        lines += unstyled(wrapped(words, 6))
    lines += [[], *unstyled(_row("", names))]
    if pair.difference is not None:
        lines += unstyled(_difference_lines(pair, pair.difference))
    lines += unstyled(line for label, cells in _ends(pair) for line in _row(label, cells))
    if pair.figures is not None and pair.figures is not pair.difference:
        lines += unstyled(wrapped(f"the figures part earlier: {_figure_words(pair.figures)}", 6))
    if pair.difference is not None or all_rounds:
        lines += [[], *_rounds(pair, names, bars, all_rounds)]
    return lines


def _agreement(pair: Pair) -> str:
    counts = f"{counted(pair.rounds_alike, 'round')} and {counted(pair.decisions_alike, _unit(pair))}"
    if pair.difference is None:
        return f"agree: {counts}"
    where = pair.difference
    return f"differ in round {where.round}, after {counts} alike: {where.kind} ({KINDS[where.kind]})"


def _unit(pair: Pair) -> str:
    return "decision" if pair.by_decisions else "chunk"


def _what_is_compared(pair: Pair) -> str:
    """What these two can show of themselves."""
    mute = [short_name(run.target, NAME_COLUMNS) for run in (pair.one, pair.other) if not run.tells_decisions]
    words = "compared: every decision, in order"
    if mute:
        words = f"compared: the chunks of every batch, in order, because {_none_of(mute, 'tell', 'no decisions')}"
    blind = [short_name(run.target, NAME_COLUMNS) for run in (pair.one, pair.other) if not run.shows_figures]
    if blind:
        return f"{words}; no figures of the ledger, because {_none_of(blind, 'show', 'none')}"
    return f"{words}, and {', '.join(LEDGER_FIGURES)} after it"


def _none_of(names: Sequence[str], verb: str, what: str) -> str:
    return f"{' and '.join(names)} {verb}{'s' if len(names) == 1 else ''} {what}"


# --- the difference


def _difference_lines(pair: Pair, difference: Difference) -> Iterator[str]:
    decisions = difference.decisions
    if decisions != (None, None):
        yield from _row(f"round {difference.round}", [_decision(each, _unit(pair)) for each in decisions])
        if pair.by_decisions:
            hits = ["-" if each is None else str(each.prefix_tokens) for each in decisions]
            yield from _row("  device hit", hits)
        sides = zip((pair.one, pair.other), decisions, pair.sides(difference.round), strict=True)
        figures = [_Figures(run.shows_figures, run.figures(each, record)) for run, each, record in sides]
        for name in LEDGER_FIGURES:
            yield from _row(f"  {name}", [each.word(name) for each in figures])
    else:
        name = "" if difference.request is None else f" {named(difference.request)}"
        yield from wrapped(f"round {difference.round}{name}: {plain(difference.detail, 300)}", 6)
    yield from _promise_lines(pair, pair.sides(difference.round))


def _decision(decision: Decision | None, unit: str) -> str:
    if decision is None:
        return f"no such {unit}"
    return f"{short_name(decision.request, 10)} {decision_words(decision)}"


class _Figures(NamedTuple):
    """A side's figures; None: it has no such round, or shows none."""

    shown: bool
    values: dict[str, int | None] | None

    def word(self, name: str) -> str:
        if not self.shown:
            return _NOT_SHOWN
        if self.values is None:
            return "-"
        value = self.values[name]
        return "no limit" if value is None else str(value)


def _promise_lines(pair: Pair, records: tuple[RoundRecord | None, RoundRecord | None]) -> Iterator[str]:
    """A row for each request that one of the two promised something in that round."""
    promised = [run.promises(record) for run, record in zip((pair.one, pair.other), records, strict=True)]
    if promised == [None, None]:
        yield from _row("  promised", [_NOT_SHOWN] * 2)
        return
    requests = list(dict.fromkeys(request for each in promised for request in each or ()))
    for request in requests[:PROMISES_SHOWN]:
        yield from _row(f"  promised {short_name(request, 11)}", [_due(each, request) for each in promised])
    if len(requests) > PROMISES_SHOWN:
        yield f"  promised to {len(requests) - PROMISES_SHOWN} more"


def _due(promised: dict[str, dict[str, int]] | None, request: str) -> str:
    if promised is None:
        return _NOT_SHOWN
    return " + ".join(f"{tokens} {due}" for due, tokens in promised.get(request, {}).items()) or "nothing"


def _figure_words(figures: Difference) -> str:
    name = "" if figures.request is None else f" {named(figures.request)}"
    return f"round {figures.round}, after{name}: {figures.detail}"


# --- the ends, and the rounds


def _ends(pair: Pair) -> Iterator[tuple[str, Sequence[str]]]:
    runs = (pair.one, pair.other)
    yield "verdict", [_verdict(run) for run in runs]
    failures = [run.outcome.failure for run in runs]
    if failures != [None, None]:
        words = [
            "-" if f is None else f"{named(f.request)} wanted {f.wanted}, there {f.free + f.evictable}"
            for f in failures
        ]
        yield "  out of memory", words
    broken = [", ".join(f"{b.invariant} ({b.round})" for b in run.outcome.broken) or "-" for run in runs]
    if broken != ["-", "-"]:
        yield "  broken (in round)", broken
    if any(run.skipped for run in runs):
        yield "  not asked", [", ".join(run.skipped) or "-" for run in runs]


def _verdict(run: Run) -> str:
    violation = run.outcome.document()["violation"]
    return run.outcome.verdict + ("" if violation is None else f" in round {violation['round']}")


def _rounds(pair: Pair, names: Sequence[str], bars: Bars, all_rounds: bool) -> list[Line]:
    one, other = (
        Side(f"{name}: {run.outcome.verdict}", run.outcome.rounds, run.shows_figures)
        for name, run in zip(names, (pair.one, pair.other), strict=True)
    )
    return beside_lines(one, other, pair.difference, bars, all_rounds=all_rounds, by_decisions=pair.by_decisions)


def _row(label: str, cells: Sequence[str]) -> list[str]:
    """A label and a cell for each side; what is too long for its column goes on below."""
    columns = [textwrap.wrap(plain(cell, CELL_COLUMNS), SIDE_COLUMNS) or [""] for cell in cells]
    labels = [plain(label, LABEL_COLUMNS - 1)]
    return [
        "".join([padded(head, LABEL_COLUMNS), *(padded(cell, SIDE_COLUMNS + 2) for cell in row)]).rstrip()
        for head, *row in zip_longest(labels, *columns, fillvalue="")
    ]
