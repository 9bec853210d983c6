"""A diagnosis in words for a terminal: what was promised, who spent it, since when it was too late, what avoids it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvledger.diagnose import Diagnosis
from kvledger.diagnose_promise import BrokenPromise, Spending, decoded_since
from kvledger.record import amount
from kvledger.replay import Outcome
from kvledger.report.plain import COLUMNS, counted, named, plain, wrapped
from kvledger.report.rounds import failure_words
from kvledger.report.shortage import as_text, shortage_words, spending_words

SPENDERS_SHOWN = 6
MESSAGE_COLUMNS = 400
_LABEL_COLUMNS = 12


def explanation_lines(diagnosis: Diagnosis) -> list[str]:
    """The whole explanation, in lines of at most 100 columns."""
    parts = [("verdict", _verdict(diagnosis))]
    if diagnosis.verdict == "ok":
        parts.append(("promises", "nothing broke: whatever was admitted could finish its prefill"))
    else:
        if diagnosis.broken_promise is None:
            preempted = any(record.rolled_back for record in diagnosis.outcome.rounds)
            kept = "none that it keeps: it preempted what it had admitted"
            parts.append(("promises", kept if preempted else _none_broken(diagnosis.outcome)))
        else:
            parts += _promise_parts(diagnosis, diagnosis.broken_promise)
        short = shortage_words(diagnosis.outcome, diagnosis.broken_promise, diagnosis.spent_by)
        parts += [("ran out", as_text(short))] if short is not None else []
        parts += [("broken", words) for words in _broken(diagnosis.outcome)]
        if diagnosis.switched:
            parts.append(("avoided by", _avoided(diagnosis)))
    return [line for label, words in parts for line in wrapped(f"{label:<{_LABEL_COLUMNS}}{words}", _LABEL_COLUMNS)]


def _none_broken(outcome: Outcome) -> str:
    """No memory was short; where an admitted prompt was ended all the same, a promise of another kind was broken."""
    if any(each.invariant == "admitted-finishes" for each in outcome.broken):
        return "no memory ran short, and an admitted prompt was ended before its prefill was done"
    return "nothing that was admitted went short"


def round_notes(diagnosis: Diagnosis) -> list[tuple[int, str]]:
    """What to say of single rounds: where the promise was made, and where it was too late."""
    promise, point = diagnosis.broken_promise, diagnosis.point_of_no_return
    notes = []
    if promise is not None:
        notes.append((promise.round, f"promised here: {_promised(promise)}"))
    if point is not None:
        notes.append((point.round, f"point of no return: {_decision_words(point.kind, point.request)}"))
    return notes


def _verdict(diagnosis: Diagnosis) -> str:
    outcome = diagnosis.outcome
    reason = f" ({diagnosis.reason})" if diagnosis.reason else ""
    if outcome.failure is not None:
        return f"oom in round {outcome.rounds[-1].round}: {failure_words(outcome.failure)}{reason}"
    if outcome.stuck is not None:
        stuck = outcome.stuck
        return (
            f"stuck in round {stuck.round}: {named(stuck.request)} still has {counted(stuck.wanted, 'token')} to "
            f"compute; free {stuck.free}, evictable {stuck.evictable}{reason}"
        )
    return f"{outcome.verdict} in round {outcome.broken[0].round}{reason}" if outcome.broken else outcome.verdict


# --- the promise


def _promise_parts(diagnosis: Diagnosis, promise: BrokenPromise) -> Iterator[tuple[str, str]]:
    yield "promise", f"{_promised(promise)}, made in round {promise.round}{_made_by(diagnosis.outcome, promise)}"
    failure = diagnosis.outcome.failure
    if failure is not None and not failure.known and not diagnosis.spent_by:
        yield "spent by", "not known: the round's chunks were not told before one of them failed"
    else:
        decoded = decoded_since(diagnosis.outcome, promise.round)
        yield "spent by", _spent(diagnosis.spent_by, decoded, promise.pool)
    if promise.pool is None:
        yield "too late", _too_late(diagnosis)


def _promised(promise: BrokenPromise) -> str:
    if promise.pool is not None:
        return f"{named(promise.request)}'s {amount(promise.tokens, promise.pool)}"
    on = f" on rank {promise.rank}" if promise.rank else ""
    return f"{named(promise.request)}'s {promise.kind} of {counted(promise.tokens, 'token')}{on}"


def _made_by(outcome: Outcome, promise: BrokenPromise) -> str:
    """Where the cut was, and whether the ledger had an entry for what it left over."""
    record = next((record for record in outcome.rounds if record.round == promise.round), None)
    decision = next((each for each in record.joined if each.request == promise.request), None) if record else None
    if record is None or decision is None or promise.kind != "tail":
        return ""
    words = f" by the cut at {decision.end} of {decision.prompt_tokens}"
    entries = [each for each in record.promises if each.request == promise.request]
    if not entries or any(each.kind == "tail" for each in entries):
        return words
    return f"{words}; no entry of the ledger holds it"


def _spent(spendings: Sequence[Spending], decoded: Sequence[str], pool: str | None) -> str:
    """Largest first; what one request took is said together."""
    if not spendings and decoded:
        return f"{_listed(decoded)}, by decoding"
    if not spendings:
        return "nobody: it was more than there was when it was made"
    by_name: dict[str | None, list[Spending]] = {}
    for each in spendings:
        by_name.setdefault(each.request, []).append(each)
    words = []
    for name, taken in list(by_name.items())[:SPENDERS_SHOWN]:
        who = _nameless(taken, decoded) if name is None else named(name)
        words.append(f"{who}: {', '.join(spending_words(each, pool) for each in taken)}")
    others = [each.tokens for taken in list(by_name.values())[SPENDERS_SHOWN:] for each in taken]
    return "; ".join([*words, *([f"others: {sum(others)}"] if others else [])])


def _nameless(taken: Sequence[Spending], decoded: Sequence[str]) -> str:
    """Several who decode have no name together; nor has whoever is outside."""
    if {each.how for each in taken} == {"decode"}:
        return f"running requests ({_listed(decoded)})"
    return "someone without a name"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SPENDERS_SHOWN} more" if len(names) > SPENDERS_SHOWN else ""
    return f"{', '.join(map(named, names[:SPENDERS_SHOWN]))}{more}"


def _too_late(diagnosis: Diagnosis) -> str:
    point, searched = diagnosis.point_of_no_return, diagnosis.searched
    if diagnosis.unsearched is not None:
        return f"not said: {diagnosis.unsearched}"
    more = "" if searched.complete else ", more were possible"
    tried = f"{counted(searched.continuations, 'continuation')} tried{more}"
    if point is None and not searched.continuations:
        return "not known: the target shows no decision before it"
    if point is not None and not searched.continuations:
        return f"from {_decision_words(point.kind, point.request)} in round {point.round} on, which failed half-way"
    failure = diagnosis.outcome.failure
    if point is None and failure is not None:
        return f"not before it failed: each decision that was told before could have been lived with ({tried})"
    if point is None:
        return f"at no time: with nobody else let in, what came back was enough ({tried})"
    words = f"from {_decision_words(point.kind, point.request)} in round {point.round} on: whoever else was refused"
    kinder = diagnosis.outcome.failure is None and diagnosis.outcome.stuck is None
    return f"{words}, it could not be kept{' unless transfers came early, and they did' if kinder else ''} ({tried})"


def _decision_words(kind: str, request: str) -> str:
    noun = {"resumed": "chunk", "deferred": "deferral", "loading": "load", "refused": "refusal"}.get(kind, "admission")
    return f"{named(request)}'s {noun}"


# --- the rest


def _broken(outcome: Outcome) -> Iterator[str]:
    """All broken invariants by name; the first with its message."""
    if not outcome.broken:
        return
    first, *others = outcome.broken
    message = first.message
    if first.request is not None and len(first.request) > COLUMNS:
        message = message.replace(first.request, named(first.request))
    yield f"{first.invariant} in round {first.round}: {plain(message, MESSAGE_COLUMNS)}"
    if others:
        yield f"then {', '.join(f'{each.invariant} in round {each.round}' for each in others)}"


def _avoided(diagnosis: Diagnosis) -> str:
    if diagnosis.avoided_by is None:
        return "no one or two switches of the rules"
    return " and ".join(f"{name} {_value(value)}" for name, value in diagnosis.avoided_by)


def _value(value: object) -> str:
    return "off" if value is None else str(value).lower()
