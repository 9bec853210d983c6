"""One trace on several targets: whether they decide the same, and where they first do not.

What counts as the same depends on what both of a pair can show. Where both tell their decisions, a decision is a
request, what became of it, its chunk's bounds, its load-back and the reason for a refusal, and the order within a
round counts: it is the order in which a batch is allocated. A last refusal that one makes and the other has no need
to make, because nothing remains, is no difference. Where one tells batches alone, the batches are compared:
which requests ran which chunks, in which order. A figure is compared only where both show it, and a verdict only as
far as both were asked; what is not shown is never taken for equal. Rounds are matched by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from kvledger.differences import Difference, asked_alike, compared, round_difference
from kvledger.record import Decision, RoundRecord
from kvledger.replay import TargetFactory
from kvledger.rules import AccountingRules
from kvledger.runs import LEDGER_FIGURES, Run, run_on
from kvledger.trace import Trace

FORMAT = "kvledger-comparison/1"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs, and their first difference; None: there is none.

    `figures` is the first figure that differs although all before it was decided alike: often the reason for what
    differs later. `rounds_alike` and `decisions_alike` count what stands before the difference.
    """

    one: Run
    other: Run
    by_decisions: bool
    difference: Difference | None
    figures: Difference | None
    rounds_alike: int
    decisions_alike: int

    @property
    def same(self) -> bool:
        return self.difference is None

    @property
    def same_decisions(self) -> bool:
        """They decide alike and come to the same end, whatever their figures say."""
        return self.difference is None or self.difference.kind in ("figures", "pool")

    def sides(self, round_number: int) -> tuple[RoundRecord | None, RoundRecord | None]:
        """That round on both."""
        return _round(self.one, round_number), _round(self.other, round_number)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A trace's runs in the order they were asked for; the first is compared with each of the others."""

    trace: Trace
    rules: AccountingRules
    runs: tuple[Run, ...]
    pairs: tuple[Pair, ...]

    @property
    def same(self) -> bool:
        return all(pair.same for pair in self.pairs)

    @property
    def kind(self) -> str:
        """The class of the first pair's difference, or "same": what a table over many traces counts."""
        return next((pair.difference.kind for pair in self.pairs if pair.difference is not None), "same")

    def document(self) -> dict[str, Any]:
        """The JSON contract, `kvledger-comparison/1`: `format`, `same`, and

        `runs`, each with `target`, `capabilities`, `not_asked` (invariants), `rounds`, `decisions` (how many),
        `verdict` and `violation` (as in an outcome);
        `pairs`, each with `targets` (two), `compared` ("decisions" or "batches"), `same`, `same_decisions`,
        `rounds_alike`, `decisions_alike`, `difference` and `first_figure`. Either of the last two is null or has
        `kind`, `round`, `request`, `detail` and two `sides`, each with `decision` (null: there is none), `figures` and
        `promised` (tokens by request, and by "now" or "later"), which are null if they are not shown.
        """
        return {
            "format": FORMAT,
            "same": self.same,
            "runs": [_run_document(run) for run in self.runs],
            "pairs": [_pair_document(pair) for pair in self.pairs],
        }


def compare(
    trace: Trace,
    targets: Mapping[str, TargetFactory],
    rules: AccountingRules | None = None,
    *,
    source: str = "trace",
) -> Comparison:
    """Run `trace` on each target and hold the first against the others. ValueError for fewer than two targets.

    TraceError, naming the source and the target: an event cannot happen there, or is not modelled.
    """
    if len(targets) < 2:  # noqa: PLR2004 - a comparison has two sides
        raise ValueError(f"{len(targets)} target to compare, not two or more")
    rules = rules or trace.accounting_rules
    runs = tuple(run_on(name, target, trace, rules, f"{source}: on {name}") for name, target in targets.items())
    return Comparison(trace, rules, runs, tuple(compare_runs(runs[0], other) for other in runs[1:]))


def compare_runs(one: Run, other: Run) -> Pair:
    """Hold two runs of one trace against each other."""
    by_decisions = one.tells_decisions and other.tells_decisions
    decided = _first_decided(one, other, by_decisions)
    rounds, place = _alike_until(decided, min(len(one.outcome.rounds), len(other.outcome.rounds)))
    alike = list(_alike(one, other, rounds, place, by_decisions))
    figures = _first_figure(alike) if one.shows_figures and other.shows_figures else None
    difference = decided or _by_verdict(one, other) or figures or _first_rest(one, other)
    return Pair(one, other, by_decisions, difference, figures, rounds, len(alike))


def _alike_until(decided: Difference | None, rounds: int) -> tuple[int, int]:
    """How many whole rounds are alike, and how many decisions of the one after them."""
    if decided is None:
        return rounds, 0
    if decided.place is None and decided.kind != "submit":
        return decided.round - 1, -1
    return decided.round - 1, decided.place or 0


def _alike(
    one: Run, other: Run, rounds: int, place: int, by_decisions: bool
) -> Iterator[tuple[int, int, Decision, Decision]]:
    """The decisions up to there, each as both took it, with its round's number and its place. -1: the whole round."""
    for number, (left, right) in enumerate(zip(one.outcome.rounds, other.outcome.rounds, strict=False), start=1):
        pairs = list(zip(*asked_alike(left, right, by_decisions=by_decisions), strict=False))
        if number > rounds:
            pairs = pairs[: None if place < 0 else place]
        yield from ((number, index, mine, yours) for index, (mine, yours) in enumerate(pairs))
        if number > rounds:
            return


# --- what was decided


def _first_decided(one: Run, other: Run, by_decisions: bool) -> Difference | None:
    """The first thing in time that one run decided otherwise, or that became of it."""
    refused = _first_refused_at_entry(one, other)
    for number, (left, right) in enumerate(zip_longest(one.outcome.rounds, other.outcome.rounds), start=1):
        if refused is not None and refused.round <= number:
            return refused
        crash = (one.crash if left is None else None) or (other.crash if right is None else None)
        if crash is not None:
            return Difference("verdict", number, detail=crash)
        found = round_difference(left, right, number, by_decisions=by_decisions)
        if found is not None:
            return found
    return refused


def _first_refused_at_entry(one: Run, other: Run) -> Difference | None:
    refused = [dict(run.outcome.rejected_at_submit) for run in (one, other)]
    for each in (*one.outcome.happenings, *other.outcome.happenings):
        by = [run.target for run, names in zip((one, other), refused, strict=True) if each.name in names]
        if each.what == "submitted" and len(by) == 1:
            reason = refused[0].get(each.name) or refused[1][each.name]
            return Difference("submit", each.rounds + 1, each.name, detail=f"{by[0]} refuses it: {reason}")
    return None


def _by_verdict(one: Run, other: Run) -> Difference | None:
    """The same decisions, and another end, as far as both were asked."""
    both = one.asked & other.asked
    verdicts = [run.verdict_among(both) for run in (one, other)]
    if verdicts[0] == verdicts[1]:
        return _by_stuck(one, other) or _by_broken(one, other, both)
    rounds = [
        broken.round
        for run, verdict in zip((one, other), verdicts, strict=True)
        for broken in run.outcome.broken
        if broken.invariant == verdict
    ]
    last = max(len(one.outcome.rounds), 1)
    return Difference("verdict", min(rounds, default=last), detail=f"{verdicts[0]} against {verdicts[1]}")


def _by_stuck(one: Run, other: Run) -> Difference | None:
    left, right = one.outcome.stuck, other.outcome.stuck
    if left is None or right is None or left.request == right.request:
        return None
    detail = f"{left.request} is stuck against {right.request}"
    return Difference("verdict", min(left.round, right.round), left.request, detail=detail)


def _by_broken(one: Run, other: Run, asked: frozenset[str]) -> Difference | None:
    """The first invariant that one alone breaks of those that both were asked."""
    broken = [{each.invariant: each for each in run.outcome.broken if each.invariant in asked} for run in (one, other)]
    alone = [
        (each.round, each, run.target)
        for run, mine, yours in zip((one, other), broken, broken[::-1], strict=True)
        for name, each in mine.items()
        if name not in yours
    ]
    if not alone:
        return None
    number, first, target = min(alone, key=lambda each: each[0])
    detail = f"{first.invariant} breaks on {target} alone: {first.message}"
    return Difference("verdict", max(number, 1), first.request, detail=detail)


# --- the figures


def _first_figure(alike: Sequence[tuple[int, int, Decision, Decision]]) -> Difference | None:
    """The first figure that differs although all before it was decided alike."""
    for number, place, mine, yours in alike:
        for name in LEDGER_FIGURES:
            left, right = getattr(mine, name), getattr(yours, name)
            if left != right:
                return Difference("figures", number, mine.request, place, (mine, yours), f"{name} {left} and {right}")
    return None


def _first_rest(one: Run, other: Run) -> Difference | None:
    """The first round that leaves another sum of free and evictable tokens: targets divide it differently."""
    if "counts" not in one.capabilities & other.capabilities:
        return None
    for number, (left, right) in enumerate(zip(one.outcome.rounds, other.outcome.rounds, strict=True), start=1):
        mine, yours = left.free + left.evictable, right.free + right.evictable
        if mine != yours:
            return Difference("pool", number, detail=f"free + evictable {mine} and {yours}")
    return None


# --- the document


def _run_document(run: Run) -> dict[str, Any]:
    outcome = run.outcome.document()
    return {
        "target": run.target,
        "capabilities": sorted(run.capabilities),
        "not_asked": list(run.skipped),
        "rounds": len(run.outcome.rounds),
        "decisions": sum(len(compared(record, run.tells_decisions)) for record in run.outcome.rounds),
        "verdict": outcome["verdict"],
        "violation": outcome["violation"],
    }


def _pair_document(pair: Pair) -> dict[str, Any]:
    return {
        "targets": [pair.one.target, pair.other.target],
        "compared": "decisions" if pair.by_decisions else "batches",
        "same": pair.same,
        "same_decisions": pair.same_decisions,
        "rounds_alike": pair.rounds_alike,
        "decisions_alike": pair.decisions_alike,
        "difference": _difference_document(pair, pair.difference),
        "first_figure": _difference_document(pair, pair.figures),
    }


def _difference_document(pair: Pair, difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    records = pair.sides(difference.round)
    return {
        "kind": difference.kind,
        "round": difference.round,
        "request": difference.request,
        "detail": difference.detail or None,
        "sides": [
            {
                "decision": decision and _decision_document(decision, pair.by_decisions),
                "figures": run.figures(decision, record),
                "promised": run.promises(record),
            }
            for run, decision, record in zip((pair.one, pair.other), difference.decisions, records, strict=True)
        ],
    }


def _decision_document(decision: Decision, by_decisions: bool) -> dict[str, Any]:
    chunk = {"request": decision.request, "start": decision.start, "end": decision.end}
    if not by_decisions:
        return chunk
    reason = None if decision.reason is None else str(decision.reason)
    hit = {"prefix_tokens": decision.prefix_tokens, "load_back": decision.load_back}
    return chunk | {"kind": decision.kind, **hit, "reason": reason}


def _round(run: Run, number: int) -> RoundRecord | None:
    rounds = run.outcome.rounds
    return rounds[number - 1] if 0 < number <= len(rounds) else None
