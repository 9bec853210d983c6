"""What happened, for a reader who does not know kvledger: a title, a few sentences, what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvledger.arithmetic import ceil_tokens
from kvledger.diagnose import Diagnosis, diagnosis_of
from kvledger.diagnose_pools import breach_of
from kvledger.diagnose_promise import BrokenPromise, Spending, decoded_since
from kvledger.events import Abort, Event, Fault, Hold, Pin, Release, Round, Submit, Transferred, Unpin
from kvledger.invariants import INVARIANTS
from kvledger.monitor import InvariantMonitor
from kvledger.record import AllocationFailure, RoundRecord, amount
from kvledger.replay import Broken, Outcome, Replay, replay
from kvledger.report.explanation import MAX_ROUNDS_DIAGNOSED, SPENDINGS_SHOWN
from kvledger.report.markdown import code, codes, escaped
from kvledger.report.plain import counted
from kvledger.report.recording import Recording
from kvledger.report.waterfall import missing_tails

TITLE_COLUMNS = 120
_EXPECTED = {
    "oom": "an admitted prompt can always finish its prefill",
    "stuck": "with nothing in flight and nothing arriving, whatever fits an empty pool is served",
    "admitted-finishes": "an admitted prompt finishes its prefill, and does not begin it again",
    "promises-covered": "what is free or evictable is enough for the rest of every admitted prompt",
    "never-forced": "no chunk runs although the scheduler's own figures leave nothing for it",
    "never-raises": "a scheduler answers, whatever happens",
    "conserved": "each slot of the pool is free, cached, or somebody's, and only one of these",
    "quiescent": "with nothing left to do, all slots are free or evictable again",
    "one-half-done": "at most one prompt is half done at a time",
    "everyone-served": "each request that was accepted is served or was aborted",
}
_REASONS = {invariant.name: invariant.reason for invariant in INVARIANTS}
_SHORT = {
    "oom": "an admitted prompt finds no slots",
    "stuck": "a request is never served",
    "conserved": "slots belong to nobody, or to two",
    "quiescent": "slots are not given back",
    "never-raises": "the same exception",
    "one-half-done": "two prompts are half done",
    "everyone-served": "a request is never served",
    "promises-covered": "too few slots for what was admitted",
    "never-forced": "too few slots for what was admitted",
    "admitted-finishes": "an admitted prompt is preempted, begun again, or finds no slots",
    "progress": "a request is never served",
}
_HOW = {
    "load-back": "a load-back of {} tokens",
    "lock": "a lock on {} evictable tokens",
    "chunk": "a chunk of {} tokens",
    "rounding": "{} tokens more, to the end of its page",
    "forced": "a chunk of {} tokens that ran although nothing was left for it",
    "decode": "decoding, {} tokens in whole pages",
    "hold": "slots taken from outside, {} tokens",
    "pin": "a write-back that keeps {} tokens",
    "leak": "a leak of {} tokens",
    "share": "{} of its own",
}
_DECIDED = {
    "whole": "admitted whole",
    "truncated": "admitted and cut",
    "resumed": "resumed",
    "deferred": "put off",
    "loading": "admitted, to run when its load is there",
}


@dataclass(frozen=True, slots=True)
class Story:
    """Markdown, except `expected` (plain text). `short`: what the script looks for, in a few words.

    `between`: what to say after which round, of something that happened between rounds.
    """

    title: str
    sentences: Sequence[str]
    expected: str
    actual: str
    short: str
    between: tuple[int, str] | None = None


def story_of(recording: Recording) -> Story:
    """The story of a run that broke something."""
    outcome = recording.outcome
    known = _EXPECTED.get(outcome.verdict)
    reason = escaped(_REASONS.get(outcome.verdict, "the target asks for it"))
    title, sentences, actual, between = _told(recording)
    return Story(
        title,
        sentences,
        known or f"the invariant {outcome.verdict} holds ({reason})",
        actual,
        _SHORT.get(outcome.verdict, outcome.verdict),
        between,
    )


Told = tuple[str, list[str], str, tuple[int, str] | None]


def _told(recording: Recording) -> Told:
    outcome = recording.outcome
    if outcome.failure is not None:
        title = f"Out of memory: {victim(outcome.failure)} was admitted, and its prefill finds no slots"
        number = outcome.rounds[-1].round
        return title, [*_failed(recording), *_promise(recording)], _actual(number, outcome.failure.message), None
    if outcome.stuck is not None:
        stuck = outcome.stuck
        title = f"Stuck: {code(stuck.request)} waits for ever"
        return title, [*_stuck(recording), *_promise(recording)], _actual(stuck.round, stuck.message), None
    first = outcome.broken[0]
    if first.invariant == "never-raises":
        return _raised(recording, first)
    if first.invariant == "conserved":
        return _lost(recording, first)
    if first.invariant == "admitted-finishes" and first.request in _rolled_back(outcome):
        return _preempted(recording, first)
    title = f"{first.invariant}: {escaped(first.message, TITLE_COLUMNS)}"
    sentence = f"In round {first.round}: {escaped(first.message)}."
    return title, [sentence, *_promise(recording)], _actual(first.round, first.message), None


def _actual(number: int, message: str) -> str:
    return f"round {number}: {escaped(message)}"


def victim(failure: AllocationFailure) -> str:
    """Whose allocation failed; who comes into question, in words, where the target cannot tell."""
    return code(failure.request) if failure.known else escaped(failure.request)


# --- the ways to end


def _pages(tokens: int, page_size: int) -> str:
    """Slots come in whole pages: what that makes of so many tokens."""
    whole = ceil_tokens(tokens, page_size)
    return f"{tokens} tokens" if whole == tokens else f"{tokens} tokens ({whole} in whole pages of {page_size})"


def _failed(recording: Recording) -> Iterator[str]:
    failure = recording.outcome.failure
    assert failure is not None
    pool = failure.pool
    slots = f"slots for {_pages(failure.wanted, recording.page_size)}"
    wanted = slots if pool is None else amount(failure.wanted, pool)
    yield (
        f"In round {recording.outcome.rounds[-1].round} {victim(failure)} wants {wanted}; "
        f"{failure.free} are free and {failure.evictable} evictable."
    )


def _stuck(recording: Recording) -> Iterator[str]:
    outcome = recording.outcome
    stuck = outcome.stuck
    assert stuck is not None
    name = code(stuck.request)
    ends = [d.end for record in outcome.rounds for d in record.joined if d.request == stuck.request]
    came = f" It had come to {max(ends)} tokens of its prompt before." if ends else ""
    lost = [record.round for record in outcome.rounds if stuck.request in record.rolled_back]
    when = f" In round {lost[0]} it lost its slots in the middle of its prefill." if lost else ""
    yield (
        f"From round {stuck.round} on nothing runs any more: {name} waits, {stuck.free} tokens are free and "
        f"{stuck.evictable} evictable, nothing is in flight, and nobody else is served.{came}{when}"
    )


def _rolled_back(outcome: Outcome) -> set[str]:
    return {name for record in outcome.rounds for name in record.rolled_back}


def _preempted(recording: Recording, first: Broken) -> Told:
    """What it lost is told by where it goes on: whatever is still cached is not computed again."""
    name = code(first.request or "?")
    had, went_on = 0, None
    lost_in = next(record.round for record in recording.outcome.rounds if first.request in record.rolled_back)
    for record in recording.outcome.rounds:
        for decision in record.joined:
            if decision.request != first.request:
                continue
            if record.round < lost_in:
                had = decision.end
            elif went_on is None:
                went_on = (record.round, decision.start)
    again = "it does not run again in this trace"
    if went_on is not None and went_on[1] >= had:
        again = (
            f"it goes on from there in round {went_on[0]}: the prefix cache still had all of it, and nothing is "
            "computed again"
        )
    elif went_on is not None:
        again = f"it goes on from {went_on[1]} in round {went_on[0]}: {had - went_on[1]} tokens are computed again"
    title = f"Preempted in its prefill: {name} was admitted, and loses its slots half-way"
    tokens = counted(had, "token")
    sentence = f"In round {lost_in} {name}, which was admitted and had computed {tokens}, loses its slots; {again}."
    actual = f"round {lost_in}: {name} loses its slots with {tokens} computed; {again}"
    return title, [sentence], actual, None


class _WhenLost(InvariantMonitor):
    """Remembers after which event the slots no longer added up, and by how many tokens."""

    event: Event | None = None
    rounds = lost_tokens = 0

    def after_round(self, record: RoundRecord) -> None:
        super().after_round(record)
        self._seen(Round(), record.round - 1)

    def after_event(self, event: Event) -> None:
        super().after_event(event)
        self._seen(event, self._round)

    def _seen(self, event: Event, rounds: int) -> None:
        if self.event is None and any(each.invariant == "conserved" for each in self.broken):
            s = self.evidence.after
            private_pages = sum(len(request.private_pages) for request in s.live)
            lost_pages = s.pool_pages - s.free_pages - len(s.held) - len(s.cached) - private_pages
            self.event, self.rounds, self.lost_tokens = event, rounds, lost_pages * s.page_size


def _lost(recording: Recording, first: Broken) -> Told:
    """Played once more, to name the event after which the slots no longer add up."""
    watcher = _WhenLost()
    replay(recording.trace, recording.history.rules, target=recording.history.target, monitor=watcher)
    lost = watcher.lost_tokens
    if watcher.event is None or not lost:
        title = f"Slots do not add up: {escaped(first.message, TITLE_COLUMNS)}"
        actual = _actual(first.round, first.message)
        return title, [f"After round {first.round}: {escaped(first.message)}."], actual, None
    what = f"{lost} tokens of slots belong to nobody" if lost > 0 else f"{-lost} tokens of slots are counted twice"
    in_a_round = isinstance(watcher.event, Round)
    where = f"in round {watcher.rounds + 1}" if in_a_round else f"when {happened(watcher.event)}"
    place = where if in_a_round else f"{where}, {_since(watcher.rounds)}"
    title = f"{f'Leak: {what}' if lost > 0 else what.capitalize()} {where}"
    sentence = f"{place[0].upper()}{place[1:]}: of {recording.pool_tokens} tokens in the pool, {what}."
    between = (watcher.rounds + in_a_round, f"**{place[0].upper()}{place[1:]}: {what}.**")
    return title, [sentence], f"{place}: {what}", between


def _since(rounds: int) -> str:
    return f"after round {rounds}" if rounds else "before the first round"


def happened(event: Event) -> str:
    """Something between rounds, in a few words."""
    match event:
        case Abort(request):
            return f"{code(request)} is aborted"
        case Transferred(request):
            return f"{code(request)}, whose prefill is done, is handed over and leaves"
        case Submit(request):
            return f"{code(request)} is submitted"
        case Hold(name) | Release(name):
            return f"slots are {'taken' if isinstance(event, Hold) else 'given back'} from outside ({code(name)})"
        case Fault(kind, request):
            return f"a fault of kind `{kind}` is armed for {code(request)}"
        case Pin(name) | Unpin(name):
            return f"a write-back ({code(name)}) {'pins pages' if isinstance(event, Pin) else 'is done'}"
    return f"`{type(event).__name__.lower()}` happens"


def _raised(recording: Recording, first: Broken) -> Told:
    """Which event the exception ended: it is played once more, event by event."""
    history = recording.history
    again = Replay(recording.trace.node, history.rules, target=history.target, monitor=InvariantMonitor())
    place = "at rest"
    for event in recording.trace.events:
        again.apply(event)
        if again.crashed:
            rounds = len(again.outcome.rounds)
            runs = type(event).__name__ in ("Round", "Decode", "Drain")
            place = f"in round {rounds + 1}" if runs else f"when {happened(event)}, {_since(rounds)}"
            break
    message = escaped(first.message)
    title = f"Exception: {escaped(first.message, TITLE_COLUMNS)}"
    comma = "" if place.startswith("in ") else ","
    sentence = f"{place[0].upper()}{place[1:]}{comma} the scheduler raises: {message}."
    return title, [sentence], f"{place}: {message}", (len(recording.outcome.rounds), f"**{sentence}**")


# --- what was admitted, and who took its slots


def _promise(recording: Recording) -> Iterator[str]:
    diagnosis: Diagnosis | None = None
    promise: BrokenPromise | None
    spent: Sequence[Spending]
    if len(recording.rounds) <= MAX_ROUNDS_DIAGNOSED:
        diagnosis = diagnosis_of(recording.history)
        promise, spent = diagnosis.broken_promise, diagnosis.spent_by
    else:
        breach = breach_of(recording.history)
        promise, spent = (breach.promise, breach.spent_by) if breach is not None else (None, ())
    if promise is None:
        return
    yield _what_was_left(promise, recording.page_size)
    yield _who_took(recording.outcome, promise, spent)
    yield from _uncharged(recording, promise)
    if diagnosis is not None:
        yield from _too_late(diagnosis)


def _what_was_left(promise: BrokenPromise, page_size: int) -> str:
    name, tokens = code(promise.request), _pages(promise.tokens, page_size)
    if promise.pool is not None:
        return f"{name} was admitted in round {promise.round}, to take {amount(promise.tokens, promise.pool)}."
    if promise.kind == "tail":
        return f"{name} was cut in round {promise.round} with {tokens} of its prompt left to compute."
    return f"{name} was admitted with a {promise.kind} of {tokens} in round {promise.round}."


def _who_took(outcome: Outcome, promise: BrokenPromise, spent: Sequence[Spending]) -> str:
    decoded = decoded_since(outcome, promise.round)
    if not spent and not decoded:
        return "No other request took slots after that: it was more than there was."
    if not spent:
        return f"The slots for it went to requests that decode: {codes(decoded[:SPENDINGS_SHOWN])}."
    by_name: dict[str | None, list[Spending]] = {}
    for each in spent[:SPENDINGS_SHOWN]:
        by_name.setdefault(each.request, []).append(each)
    parts = [f"{_taker(name, taken, decoded)}: {_takes(taken)}" for name, taken in by_name.items()]
    others = sum(each.tokens for each in spent[SPENDINGS_SHOWN:])
    more = f"; others: {others} tokens" if others else ""
    return f"The slots for it went to {'; '.join(parts)}{more}."


def _taker(name: str | None, taken: Sequence[Spending], decoded: Sequence[str]) -> str:
    if name is not None:
        return code(name)
    hows = {each.how for each in taken}
    if hows == {"decode"}:
        return f"running requests ({codes(decoded[:SPENDINGS_SHOWN])})"
    return "nobody" if hows == {"leak"} else "someone outside"


def _takes(taken: Sequence[Spending]) -> str:
    return " and ".join(_HOW[each.how].format(each.tokens) for each in taken)


def _uncharged(recording: Recording, promise: BrokenPromise) -> Iterator[str]:
    """Only of a scheduler whose charges are told."""
    record = next((each for each in recording.outcome.rounds if each.round == promise.round), None)
    if record is None or not record.promises:
        return
    missing = [each for each in missing_tails(record, recording.page_size) if each.request == promise.request]
    if missing:
        tokens = missing[0].tokens
        yield f"Nothing that was charged in round {promise.round} stands for {tokens} tokens of what was left."


def _too_late(diagnosis: Diagnosis) -> Iterator[str]:
    point, searched = diagnosis.point_of_no_return, diagnosis.searched
    if point is None or not searched.continuations:
        return
    failed = diagnosis.outcome.failure is not None or diagnosis.outcome.stuck is not None
    early = "" if failed else ", unless finished prompts leave early, as they did here"
    limit = "" if searched.complete else "; more were possible"
    yield (
        f"After {code(point.request)} was {_DECIDED.get(point.kind, point.kind)} in round {point.round}, refusing "
        f"everybody else no longer avoids it{early} ({counted(searched.continuations, 'way')} to go on were "
        f"replayed{limit})."
    )
