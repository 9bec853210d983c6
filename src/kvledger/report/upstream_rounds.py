"""A trace's events and rounds as tables for a reader who does not know kvledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvledger.arithmetic import ceil_tokens
from kvledger.events import (
    Cached,
    Decode,
    Drain,
    Event,
    Fault,
    Hold,
    Pause,
    Pin,
    Release,
    Resume,
    Round,
    Submit,
    Unpin,
)
from kvledger.ledger import Promise
from kvledger.record import Decision, RoundRecord, amount
from kvledger.report.markdown import code, codes, escaped, table
from kvledger.report.plain import counted
from kvledger.report.recording import Pool, Recording, Step
from kvledger.report.rounds import Gap, rounds_to_show
from kvledger.report.upstream_story import Story, victim
from kvledger.trace import Trace

# --- the events


def event_rows(trace: Trace) -> Iterator[tuple[str, ...]]:
    """A row for each event: its number, what it is called, what it means, and its tokens."""
    for number, event in enumerate(trace.events, start=1):
        yield (str(number), *_event_cells(event, trace.node.mode == "prefill"))


def _event_cells(event: Event, sends: bool) -> tuple[str, str, str]:
    match event:
        case Submit(request, prompt, output):
            more = f", up to {output.max_new_tokens} new tokens" if output.max_new_tokens > 1 else ""
            return "submit", f"{code(request)}: {_runs(prompt.segments)}{more}", str(prompt.tokens)
        case Cached(tier, prompt, locked):
            where = f"cached on the {tier}{', locked' if locked else ''}"
            return where, _runs(prompt.segments), str(prompt.tokens)
        case Hold(name, tokens):
            return "hold", f"slots are taken from outside: {code(name)}", str(tokens)
        case Release(name, released):
            return "release", f"and given back: {code(name)}", "all" if released is None else str(released)
        case Round():
            return "round", "one round of the scheduler", ""
        case Decode():
            return "decode", "one decode round", ""
        case Drain():
            later = "; whoever is done keeps its slots until nothing else moves, and leaves then" if sends else ""
            return "drain", f"rounds until nothing is left to do{later}", ""
        case Fault(kind, request):
            return "fault", f"{kind}, for {code(request)}", "" if event.amount is None else str(event.amount)
        case Pin(name, prompt):
            return "pin", f"{code(name)} locks {_runs(prompt.segments)}", str(prompt.tokens)
        case Unpin(name):
            return "unpin", code(name), ""
        case Pause() | Resume():
            return type(event).__name__.lower(), "the scheduler", ""
    return type(event).__name__.lower(), code(event.request), ""


def _runs(segments: Iterable[tuple[str, int]]) -> str:
    """Two prompts share a prefix as far as these runs agree."""
    return " + ".join(f"{tokens} of {code(segment)}" for segment, tokens in segments)


# --- the words

_KINDS = {
    "page_overhead": "one page more",
    "first_token": "output",
    "load_back": "load-back",
    "running": "what it may still make",
    "decode": "next tokens",
}


def shows_charges(recording: Recording) -> bool:
    """The scheduler tells what it charges, beside its figures."""
    return any(record.promises for record in recording.outcome.rounds)


_DECISIONS = {
    "whole": "`whole`: admitted, with all of its prompt in this round",
    "truncated": "`truncated`: admitted, and cut",
    "resumed": "`resumed`: goes on after a cut",
    "loading": "`loading`: admitted, and runs when its load is there",
    "deferred": "`deferred`: half done, and not run in this round",
    "refused": "`refused`: stays in the queue, with the scheduler's own reason",
}
_FORCED = (
    "`forced`: it runs because it is half done, although the scheduler's own figures leave nothing for it "
    "(`rem_total_tokens` is not above 0 before it)"
)


def terms(recording: Recording) -> Iterator[str]:
    """What the tables' words mean, of those that occur, as a list."""
    page_size = recording.page_size
    records = recording.outcome.rounds
    kinds = {decision.kind for record in records for decision in record.decisions}
    if any(isinstance(event, Submit) for event in recording.trace.events):
        yield "- Prompts are runs of tokens with a name: two that begin with the same runs share that prefix."
    yield "- A chunk `a..b of n` runs the tokens from a up to b (b is not part of it) of a prompt of n tokens."
    if page_size > 1:
        yield f"- Slots are allocated in whole pages of {page_size} tokens; what is still needed is in whole pages."
    said = [text for kind, text in _DECISIONS.items() if kind in kinds]
    said += [_FORCED] * any(record.forced for record in records)
    if said:
        yield f"- {'; '.join(said)}."
    if shows_charges(recording):
        yield (
            "- The figures are the scheduler's own, right after each decision; `baseline` is free + evictable at that "
            "moment. `charged` is what makes up the difference: `now` lowers `cur_rem_tokens` and `rem_total_tokens`, "
            "`later` lowers `rem_total_tokens` alone."
        )


# --- the rounds


def round_lines(recording: Recording, story: Story) -> Iterator[str]:
    """Each round's decisions and what it left, and what happened between rounds where that matters."""
    steps = [step for step in recording.steps if isinstance(step.event, Round)]
    by_round = {view.record.round: (step, view.pool) for view, step in zip(recording.rounds, steps, strict=True)}
    needs = _needs(recording)
    figures = shows_charges(recording)
    loads = any(decision.load_back for record in recording.outcome.rounds for decision in record.decisions)
    pending = story.between
    for shown in rounds_to_show(recording.outcome):
        last = shown.records[-1].round if isinstance(shown, Gap) else shown.round
        if pending is not None and pending[0] < (shown.records[0].round if isinstance(shown, Gap) else shown.round):
            yield from (pending[1], "")
            pending = None
        if isinstance(shown, Gap):
            yield f"Rounds {shown.records[0].round} to {last} show nothing new."
        else:
            yield f"Round {shown.round}:"
            yield ""
            yield from _decisions(shown, figures=figures, loads=loads)
            yield ""
            yield " ".join(_after(shown, *by_round[shown.round], needs[shown.round], recording.pool_tokens))
        yield ""
    if pending is not None:
        yield from (pending[1], "")


def _decisions(record: RoundRecord, *, figures: bool, loads: bool) -> list[str]:
    if not record.decisions:
        return ["No chunk ran, and nobody was refused." if figures else "No chunk ran."]
    columns = ("request", "decision", "chunk", "left after it", *(["loaded back from the host"] if loads else []))
    more = ("charged", "baseline", "cur_rem_tokens", "rem_total_tokens", "rem_chunk_tokens") if figures else ()
    lines = table((*columns, *more), (_decision_cells(each, record, figures, loads) for each in record.decisions))
    asked = {decision.request for decision in record.decisions}
    others = {promise.request: None for promise in record.promises if promise.request not in asked}
    if figures and others:
        charges = ", ".join(f"{escaped(name)} {_charged(name, record.promises, parts=False)}" for name in others)
        lines += ["", f"Charged beside these, before the first of them: {charges}."]
    return lines


def _decision_cells(decision: Decision, record: RoundRecord, figures: bool, loads: bool) -> tuple[str, ...]:
    chunk = f"{decision.start}..{decision.end} of {decision.prompt_tokens}" if decision.joined else ""
    kind = f"refused, {decision.reason}" if decision.kind == "refused" else decision.kind
    cells = (
        code(decision.request),
        kind + (", forced" if decision.forced else ""),
        chunk,
        str(decision.tail_tokens) if decision.joined else "",
        *([str(decision.load_back or "")] if loads else []),
    )
    if not figures:
        return cells
    charged = _charged(decision.request, record.promises) if decision.joined or decision.kind == "deferred" else ""
    values = (decision.baseline, decision.cur_rem_tokens, decision.rem_total_tokens, decision.rem_chunk_tokens)
    return (*cells, charged, *("" if value is None else str(value) for value in values))


def _charged(request: str, promises: Iterable[Promise], *, parts: bool = True) -> str:
    """By when it is due, and of what it is made."""
    entries: dict[str, list[Promise]] = {}
    for promise in promises:
        if promise.request == request and promise.tokens:
            entries.setdefault(str(promise.due), []).append(promise)
    words = (
        f"{sum(each.tokens for each in found)} {due}{_made_of(found) if parts else ''}"
        for due, found in entries.items()
    )
    return " + ".join(words)


def _made_of(promises: list[Promise]) -> str:
    kinds: dict[str, int] = {}
    for promise in promises:
        kinds[promise.kind] = kinds.get(promise.kind, 0) + promise.tokens
    words = " + ".join(f"{tokens} {escaped(_KINDS.get(kind, kind))}" for kind, tokens in kinds.items())
    return f" ({words})"


def _needs(recording: Recording) -> dict[int, int]:
    """Slots, in whole pages, that half-done prompts have yet to get when a round has ended."""
    page_size = recording.page_size
    rest: dict[str, int] = {}
    found = {}
    gone = dict.fromkeys(
        (each.name, each.rounds) for each in recording.outcome.happenings if each.what in ("aborted", "finished")
    )
    for record in recording.outcome.rounds:
        for name, rounds in gone:
            if rounds < record.round:
                rest.pop(name, None)
        for decision in record.joined:
            whole = ceil_tokens(decision.prompt_tokens, page_size)
            rest[decision.request] = whole - ceil_tokens(decision.end, page_size)
        for name in (*record.rolled_back, *record.went_back):
            rest.pop(name, None)
        found[record.round] = sum(rest.values())
    return found


def _after(record: RoundRecord, step: Step, pool: Pool, needed: int, pool_tokens: int) -> Iterator[str]:
    """What the round left, and whether that is enough for what it has admitted."""
    for names, what in (
        (record.decoded, "Decoded: {}."),
        (record.finished, "Finished: {}."),
        (record.preempted, "Made way, while decoding, for a request of higher priority: {}."),
        (record.retracted, "Sent back while decoding: {}."),
        (record.rolled_back, "**Preempted in the middle of its prefill: {}.**"),
        (record.loading, "Still being loaded: {}."),
    ):
        if names:
            yield what.format(codes(names))
    if record.failure is not None:
        failure = record.failure
        yield (
            f"**Out of memory**: {victim(failure)} wanted {amount(failure.wanted, failure.pool)}, with "
            f"{failure.free} free and {failure.evictable} evictable."
        )
        return
    in_use = pool_tokens - pool.baseline
    yield f"Left: {counted(pool.free, 'token')} free, {pool.evictable} evictable ({in_use} of {pool_tokens} in use)."
    needed = pool.baseline - step.slack if step.slack is not None else needed
    yield f"Prompts that are half done still need {needed}." if needed else "No prompt is half done."
    if needed > pool.baseline:
        yield f"**{needed - pool.baseline} too few.**"
