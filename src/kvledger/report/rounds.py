"""Rounds as text: a table of decisions with the ledger's figures beside each, and the choice of rounds to show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvledger.adder import AddReqResult
from kvledger.ledger import Due, Promise
from kvledger.record import AllocationFailure, Decision, RoundRecord, amount
from kvledger.replay import Broken, Outcome
from kvledger.report.plain import named, padded, plain, width, wrapped

LEFT_COLUMNS = 58
"""What is decided stands left of here, the ledger's figures right of it."""
EDGE_ROUNDS = 5
NEW_REFUSALS_SHOWN = 20
DECISIONS_SHOWN = 20
PROMISES_SHOWN = 8
REQUESTS_LISTED = 8
REASON_COLUMNS = 200


@dataclass(frozen=True, slots=True)
class Layout:
    """What all rounds share. `everything`: long batches are not cut; `figures`: there is a ledger to show."""

    page_size: int
    name_columns: int
    everything: bool = False
    figures: bool = True


@dataclass(frozen=True, slots=True)
class Gap:
    """Rounds that are left out."""

    records: Sequence[RoundRecord]


# --- which rounds


def rounds_to_show(outcome: Outcome) -> list[RoundRecord | Gap]:
    """The first and last rounds and those with news; the others as gaps, in their places."""
    records = outcome.rounds
    news = _rounds_with_news(outcome)
    shown: list[RoundRecord | Gap] = []
    hidden: list[RoundRecord] = []
    for index, record in enumerate(records):
        at_an_end = index < EDGE_ROUNDS or index >= len(records) - EDGE_ROUNDS
        if not at_an_end and record.round not in news:
            hidden.append(record)
            continue
        if hidden:
            shown.append(hidden[0] if len(hidden) == 1 else Gap(hidden))
            hidden = []
        shown.append(record)
    return shown


def _rounds_with_news(outcome: Outcome) -> set[int]:
    """A broken invariant, a failure, nothing moving, or somebody's first refusal or retraction (not too many)."""
    news = {broken.round for broken in outcome.broken}
    news |= {record.round for record in outcome.rounds if record.aborted}
    news |= {record.round for record in outcome.rounds if record.failure is not None}
    if outcome.stuck is not None:
        news.add(outcome.stuck.round)
    refused: set[str] = set()
    for record in outcome.rounds:
        names = {*(decision.request for decision in record.refused), *(f"back {rid}" for rid in record.retracted)}
        if not names <= refused and len(refused) < NEW_REFUSALS_SHOWN:
            news.add(record.round)
        refused |= names
    return news


def gap_lines(gap: Gap) -> list[str]:
    """How many rounds are missing here, and what happened in them."""
    records = gap.records
    admissions = sum(1 for record in records for decision in record.joined if decision.kind != "resumed")
    refusals = sum(len(record.refused) for record in records)
    tokens, sent_back = (sum(len(getattr(record, name)) for record in records) for name in ("decoded", "retracted"))
    decode = f", {tokens} tokens decoded, {sent_back} requests sent back" if tokens or sent_back else ""
    return wrapped(
        f"... rounds {records[0].round} to {records[-1].round} left out (--all-rounds shows them): {len(records)} "
        f"rounds, {admissions} admissions, {refusals} refusals{decode}",
        4,
    )


# --- one round


def round_lines(record: RoundRecord, broken: Sequence[Broken], layout: Layout) -> list[str]:
    """The decisions in their order, what is promised when they end, and what the round leaves."""
    lines = [f"round {record.round}"]
    if layout.figures:
        lines = [padded(lines[0], LEFT_COLUMNS) + _columns("baseline", "cur_rem", "rem_total", "rem_chunk")]
    lines += _decision_lines(record.decisions, layout) or ["  nothing to decide"]
    lines += _promise_lines(record, layout.everything)
    lines += _decode_lines(record)
    if record.failure is not None:
        lines += wrapped(f"  OUT OF MEMORY: {failure_words(record.failure)}", 12)
    lines += wrapped(f"  after     {_after(record)}", 12)
    if broken:
        lines += wrapped(f"  BROKEN    {', '.join(each.invariant for each in broken)}", 12)
    return lines


def _columns(*cells: object) -> str:
    return "".join(f"{cell!s:>{columns}}" for cell, columns in zip(cells, (10, 10, 11, 11), strict=True))


def _decision_lines(decisions: Sequence[Decision], layout: Layout) -> list[str]:
    """A long batch keeps its ends, and all that is not simply admitted whole."""
    lines: list[str] = []
    left_out = 0
    for index, decision in enumerate(decisions):
        at_an_end = min(index, len(decisions) - 1 - index) < DECISIONS_SHOWN // 2
        if not (layout.everything or at_an_end or decision.kind != "whole"):
            left_out += 1
            continue
        if left_out:
            lines.append(f"  ... {left_out} more admitted whole")
            left_out = 0
        name = padded(named(decision.request), layout.name_columns)
        core, notes = f"  {name}  {decision.kind:<9}  {_what(decision)}", _notes(decision, layout.page_size)
        lines += _row(core, notes, decision if layout.figures else None)
    return lines


def _what(decision: Decision) -> str:
    if decision.kind == "refused":
        return str(decision.reason)
    if decision.kind == "deferred":
        return f"at {decision.start}"
    return f"{decision.start}..{decision.end} ({decision.tokens})"


def _notes(decision: Decision, page_size: int) -> list[str]:
    lock = decision.newly_locked_tokens
    if decision.short_of is not None:
        return [f"short of {decision.short_of}"]
    if decision.reason is AddReqResult.NO_TOKEN:
        need = decision.prompt_tokens - decision.prefix_tokens + decision.output_tokens + page_size
        return [f"needs {need}", *([f"would lock {lock}"] if lock else [])]
    if decision.kind == "refused":
        return []
    notes = (
        ("FORCED", decision.forced),
        (f"tail {decision.tail_tokens}", decision.tail_tokens),
        (f"load-back {decision.load_back}", decision.load_back),
        (f"locks {lock}", lock),
    )
    return [note for note, applies in notes if applies]


def _row(core: str, notes: list[str], figures_of: Decision | None) -> list[str]:
    """One decision and its figures, if they are shown; what does not fit left of the figures goes above or below."""
    d = figures_of
    chunk = None if d is None else size_word(d.rem_chunk_tokens, "-")
    figures = "" if d is None else _columns(d.baseline, d.cur_rem_tokens, d.rem_total_tokens, chunk)
    left, below = core, list(notes)
    while below and width(left) + 2 + width(below[0]) <= LEFT_COLUMNS:
        left += f"  {below.pop(0)}"
    above = []
    if width(left) > LEFT_COLUMNS:
        above, left, below = [left], " " * 6 + "  ".join(below), []
    return [*above, (padded(left, LEFT_COLUMNS) + figures).rstrip(), *([f"      {'  '.join(below)}"] if below else [])]


def size_word(size: int | None, word: str) -> str:
    """A size, or `word` where there is none."""
    return word if size is None else str(size)


def _promise_lines(record: RoundRecord, everything: bool) -> list[str]:
    """Who was promised what in this round, and the tails that nobody was promised."""
    by_request: dict[str, list[Promise]] = {}
    for promise in record.promises:
        by_request.setdefault(promise.request, []).append(promise)
    tails = {decision.request: decision.tail_tokens for decision in record.joined}
    first = set(list(by_request)[: None if everything else PROMISES_SHOWN])
    shown = {request: None for request in by_request if request in first or tails.get(request)}
    words = [_promised(request, by_request[request], tails.get(request, 0)) for request in shown]
    others = [request for request in by_request if request not in shown]
    if others:
        words.append(f"{len(others)} more {_due(p for request in others for p in by_request[request])}")
    return wrapped(f"  promised  {'; '.join(words)}", 12) if words else []


def _promised(request: str, promises: Sequence[Promise], tail_tokens: int) -> str:
    words = f"{named(request)} {_due(promises)}"
    if tail_tokens and not any(promise.kind == "tail" for promise in promises):
        words += f" (NOT its tail of {tail_tokens})"
    return words


def _due(promises: Iterable[Promise]) -> str:
    tokens = dict.fromkeys(Due, 0)
    for promise in promises:
        tokens[promise.due] += promise.tokens
    return " + ".join(f"{tokens[due]} {due}" for due in Due if tokens[due])


def decode_words(record: RoundRecord) -> list[tuple[str, Sequence[str]]]:
    """What decode did in a round, and to whom; `sent back` are those who gave up their slots for lack of them."""
    sent_back = [rid for rid in record.retracted if rid not in record.preempted]
    told: list[tuple[str, Sequence[str]]] = [
        ("decoded", record.decoded),
        ("finished", record.finished),
        ("sent back", sent_back),
        ("preempted", record.preempted),
        ("prefill thrown away", record.rolled_back),
        ("still loading", record.loading),
    ]
    return [(what, requests) for what, requests in told if requests]


def _decode_lines(record: RoundRecord) -> list[str]:
    words = [f"{what} {_listed(requests)}" for what, requests in decode_words(record)]
    words += [f"gave up {named(request)}: {plain(reason, REASON_COLUMNS)}" for request, reason in record.aborted]
    return wrapped(f"  decode    {'; '.join(words)}", 12) if words else []


def _listed(requests: Sequence[str]) -> str:
    shown = ", ".join(named(request) for request in requests[:REQUESTS_LISTED])
    return shown if len(requests) <= REQUESTS_LISTED else f"{shown} and {len(requests) - REQUESTS_LISTED} more"


def _after(record: RoundRecord) -> str:
    moves = (
        ("evicted", record.evicted_pages),
        ("dropped by the host", record.dropped_pages),
        ("shared", record.shared_pages),
    )
    words = [
        f"free {record.free}, evictable {record.evictable}, protected {record.protected}",
        f"budget_state {record.budget_state}{', batch_is_full' if record.batch_is_full else ''}",
        *(f"{pages} pages {what}" for what, pages in moves if pages),
    ]
    return "; ".join(words)


def failure_words(failure: AllocationFailure) -> str:
    """Who asked for how much, and what there was."""
    return (
        f"{named(failure.request)} wanted {amount(failure.wanted, failure.pool)}; free {failure.free}, "
        f"evictable {failure.evictable}"
    )
