"""Rounds as text: a table of decisions with the ledger's figures beside each, and the choice of rounds to show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvledger.adder import AddReqResult
from kvledger.events import Submit
from kvledger.ledger import Due, Promise
from kvledger.record import AllocationFailure, Decision, PoolRound, RankRound, RoundRecord, amount
from kvledger.replay import Broken, Outcome
from kvledger.report.experiment import size_word
from kvledger.report.plain import counted, named, padded, plain, width, wrapped
from kvledger.trace import Trace

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
    """What all rounds share. `everything`: long batches are not cut; `figures`: there is a ledger to show.

    `host`: there is a host tier; `simulated` requests are let in if everybody can come to an end.
    """

    page_size: int
    name_columns: int = 0
    everything: bool = False
    figures: bool = True
    host: bool = True
    simulated: frozenset[str] = frozenset()

    @classmethod
    def of(cls, trace: Trace, name_columns: int = 0, *, everything: bool = False, figures: bool = True) -> Layout:
        """That of a trace's rounds."""
        node = trace.node
        submitted = (event for event in trace.events if isinstance(event, Submit))
        simulated = frozenset(event.request for event in submitted if node.simulates(event.output))
        return cls(node.page_size, name_columns, everything, figures, node.host_pages != 0, simulated)


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
        names = {*(decision.request for decision in record.refused), *(f"back {rid}" for rid in record.went_back)}
        if not names <= refused and len(refused) < NEW_REFUSALS_SHOWN:
            news.add(record.round)
        refused |= names
    return news


def gap_lines(gap: Gap) -> list[str]:
    """How many rounds are missing here, and what happened in them."""
    records = gap.records
    admissions = sum(1 for record in records for decision in record.joined if decision.kind != "resumed")
    refusals = sum(len(record.refused) for record in records)
    words = [counted(len(records), "round"), counted(admissions, "admission"), counted(refusals, "refusal")]
    tokens = sum(len(record.decoded) for record in records)
    sent_back, preempted = (sum(len(getattr(each, name)) for each in records) for name in ("retracted", "preempted"))
    if tokens or sent_back or preempted:
        words += [f"{counted(tokens, 'token')} decoded", f"{counted(sent_back, 'request')} sent back"]
        words += [f"{preempted} preempted"] if preempted else []
    where = f"rounds {records[0].round} to {records[-1].round} left out (--all-rounds shows them)"
    return wrapped(f"... {where}: {', '.join(words)}", 4)


# --- one round


def round_lines(record: RoundRecord, broken: Sequence[Broken], layout: Layout) -> list[str]:
    """The decisions in their order, what is promised when they end, and what the round leaves."""
    lines = [f"round {record.round}"]
    if layout.figures:
        lines = [padded(lines[0], LEFT_COLUMNS) + _columns("baseline", "cur_rem", "rem_total", "rem_chunk")]
    lines += _decision_lines(record, layout) or ["  paused" if record.paused else "  nothing to decide"]
    lines += _promise_lines(record, layout.everything)
    told = (("running", running_words(record)), ("prefill", prefill_words(record)), ("struck", struck_words(record)))
    for label, words in told:
        lines += wrapped(f"  {label:<9} {'; '.join(words)}", 12) if words else []
    if record.failure is not None:
        lines += wrapped(f"  OUT OF MEMORY: {failure_words(record.failure)}", 12)
    lines += wrapped(f"  after     {_after(record, layout.host)}", 12)
    for pool in record.pools:
        lines += wrapped(f"  pool      {pool_words(pool)}", 12)
    for rank in record.ranks:
        lines += wrapped(f"  rank {rank.rank:<4} {rank_words(rank, record)}", 12)
    if broken:
        lines += wrapped(f"  BROKEN    {', '.join(each.invariant for each in broken)}", 12)
    return lines


def _columns(*cells: object) -> str:
    return "".join(f"{cell!s:>{columns}}" for cell, columns in zip(cells, (10, 10, 11, 11), strict=True))


def _decision_lines(record: RoundRecord, layout: Layout) -> list[str]:
    """A long batch keeps its ends, and all that is not simply admitted whole."""
    decisions = record.decisions
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
        core, notes = f"  {name}  {decision.kind:<9}  {chunk_words(decision)}", notes_of(decision, layout, record)
        lines += _row(core, notes, decision if layout.figures else None)
    return lines


def chunk_words(decision: Decision) -> str:
    """What of a request was decided to run, or why nothing."""
    if decision.kind == "refused":
        return str(decision.reason)
    if decision.kind in ("deferred", "loading"):
        return f"at {decision.start}"
    return f"{decision.start}..{decision.end} ({decision.tokens})"


def notes_of(decision: Decision, layout: Layout, record: RoundRecord) -> list[str]:
    """What else there is to say of a decision: what it lacks, leaves, loads and locks, and what became of it."""
    lock = decision.newly_locked_tokens
    if decision.short_of is not None:
        wanted = decision.short_units
        return [f"short of {decision.short_of}{f': needs {wanted[0]}, {wanted[1]} left' if wanted else ''}"]
    if decision.reason is AddReqResult.NO_TOKEN:
        need = decision.prompt_tokens - decision.prefix_tokens + decision.output_tokens + layout.page_size
        lacks = "not all could come to their ends" if decision.request in layout.simulated else f"needs {need}"
        return [lacks, *([f"would lock {lock}"] if lock else [])]
    if decision.kind == "refused":
        return []
    notes = (
        ("FORCED", decision.forced),
        (f"tail {decision.tail_tokens}", decision.tail_tokens),
        (limit_words(decision.chunk_limit or 0), decision.chunk_limit and decision.tail_tokens),
        (f"load-back {decision.load_back}", decision.load_back),
        (f"locks {lock}", lock),
        ("its load is here: it runs below", arrived(decision, record)),
        ("withdrawn before it ran", decision.joined and decision.request in record.withdrawn),
    )
    return [note for note, applies in notes if applies]


def arrived(decision: Decision, record: RoundRecord) -> bool:
    """It is in the books as one that waits for its load, which is here: a later decision of the round runs it."""
    return decision.kind == "loading" and any(
        each.joined and each.request == decision.request for each in record.decisions
    )


def limit_words(most_tokens: int) -> str:
    """Why a half-done prompt does not use up the chunk, though memory would let it."""
    return f"at most {most_tokens}, for shorter prompts wait"


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


def _promise_lines(record: RoundRecord, everything: bool) -> list[str]:
    """Who was promised what in this round, and the tails that nobody was promised."""
    by_request: dict[str, list[Promise]] = {}
    for promise in record.open_promises:
        by_request.setdefault(promise.request, []).append(promise)
    tails = {decision.request: decision.tail_tokens for decision in record.joined}
    first = set(list(by_request)[: None if everything else PROMISES_SHOWN])
    shown = {request: None for request in by_request if request in first or tails.get(request)}
    words = [_promised(request, by_request[request], tails.get(request, 0)) for request in shown]
    others = [request for request in by_request if request not in shown]
    if others:
        words.append(f"{len(others)} more {_due(p for request in others for p in by_request[request])}")
    unused = "".join(f" ({note})" for note in unused_words(record))
    return wrapped(f"  promised  {'; '.join(words)}{unused}", 12) if words else []


def unused_words(record: RoundRecord) -> list[str]:
    """That tokens which decode was promised of this batch were for nothing, because there was none."""
    if record.joined or not any(promise.kind == "decode" for promise in record.promises):
        return []
    return ["due now only if there had been a batch"]


def _promised(request: str, promises: Sequence[Promise], tail_tokens: int) -> str:
    words = f"{named(request)} {_due(promises)}"
    if tail_tokens and not any(promise.kind == "tail" for promise in promises):
        words += f" (NOT its tail of {tail_tokens})"
    return words


def _due(promises: Iterable[Promise]) -> str:
    tokens = dict.fromkeys(Due, 0)
    for promise in promises:
        tokens[promise.due] += promise.tokens
    # a share of less than a token may be shown as none
    return " + ".join(f"{tokens[due]} {due}" for due in Due if tokens[due]) or f"0 {Due.LATER}"


Told = list[tuple[str, Sequence[str]]]


def told_of_running(record: RoundRecord) -> Told:
    """What became of running requests in a round; `sent back` are those for whose next tokens there were no slots."""
    told: Told = [
        ("preempted", record.preempted),
        ("decoded", record.decoded),
        ("finished", record.finished),
        ("sent back", record.retracted),
    ]
    return [(what, requests) for what, requests in told if requests]


def told_of_faults(record: RoundRecord) -> Told:
    """Whom each kind of fault struck."""
    kinds = dict.fromkeys(kind for kind, _ in record.struck)
    return [(kind, [rid for each, rid in record.struck if each == kind]) for kind in kinds]


def told_of_prefills(record: RoundRecord) -> Told:
    """What became of admitted requests that do not run yet."""
    told: Told = [("thrown away", record.rolled_back), ("still loading", record.loading)]
    return [(what, requests) for what, requests in told if requests]


def running_words(record: RoundRecord) -> list[str]:
    """`told_of_running`, and who was given up, as text."""
    words = [f"{what} {_listed(requests)}" for what, requests in told_of_running(record)]
    given_up = [f"gave up {named(request)}: {plain(reason, REASON_COLUMNS)}" for request, reason in record.aborted]
    return [*words, *given_up]


def struck_words(record: RoundRecord) -> list[str]:
    """`told_of_faults` as text."""
    return [f"{kind} {_listed(requests)}" for kind, requests in told_of_faults(record)]


def prefill_words(record: RoundRecord) -> list[str]:
    """`told_of_prefills` as text."""
    return [f"{what} {_listed(requests)}" for what, requests in told_of_prefills(record)]


def _listed(requests: Sequence[str]) -> str:
    shown = ", ".join(named(request) for request in requests[:REQUESTS_LISTED])
    return shown if len(requests) <= REQUESTS_LISTED else f"{shown} and {len(requests) - REQUESTS_LISTED} more"


def moves_of(record: RoundRecord, host: bool) -> list[str]:
    """Pages that moved in a round. Without a `host` tier an evicted page is gone, and nobody drops it once more."""
    moves = (
        (record.evicted_pages, "evicted"),
        (record.dropped_pages if host else 0, "dropped by the host"),
        (record.shared_pages, "shared"),
    )
    return [f"{counted(pages, 'page')} {what}" for pages, what in moves if pages]


def _after(record: RoundRecord, host: bool) -> str:
    words = [
        f"free {record.free}, evictable {record.evictable}, protected {record.protected}",
        f"budget_state {record.budget_state}{', batch_is_full' if record.batch_is_full else ''}",
        *moves_of(record, host),
    ]
    return "; ".join(words)


def pool_words(pool: PoolRound) -> str:
    """A second pool's figures in a round: what it has left, and what of it is promised."""
    return f"{pool.name}: free {pool.free}, evictable {pool.evictable}, promised {pool.promised} ({pool.unit}s)"


def rank_words(rank: RankRound, record: RoundRecord) -> str:
    """What a replaying rank has left, and what it ran where that is not what was decided."""
    decided = tuple((decision.request, decision.start, decision.end) for decision in record.joined)
    words = [f"free {rank.free}, evictable {rank.evictable}, protected {rank.protected}"]
    if rank.ran != decided:
        ran = ", ".join(f"{named(request)} {start}..{end}" for request, start, end in rank.ran[:REQUESTS_LISTED])
        words.append(f"ran {ran or 'nothing'}")
    moves = (
        ("evicted", rank.evicted_pages),
        ("dropped by the host", rank.dropped_pages),
        ("shared", rank.shared_pages),
    )
    return "; ".join([*words, *(f"{counted(pages, 'page')} {what}" for what, pages in moves if pages)])


def failure_words(failure: AllocationFailure) -> str:
    """Who asked for how much, and what there was."""
    on = f" on rank {failure.rank}" if failure.rank else ""
    return (
        f"{named(failure.request)} wanted {amount(failure.wanted, failure.pool)}{on}; free {failure.free}, evictable "
        f"{failure.evictable}"
    )
