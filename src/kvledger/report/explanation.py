"""A replay in words: how it ended, which promise broke, who spent it, and what would have helped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvledger.diagnose import Diagnosis, diagnosis_of
from kvledger.diagnose_pools import breach_of
from kvledger.diagnose_promise import BrokenPromise, Spending, decoded_since
from kvledger.invariants import INVARIANTS
from kvledger.record import AllocationFailure, amount
from kvledger.replay import Outcome
from kvledger.report.markup import Name, Words, message_words
from kvledger.report.plain import counted
from kvledger.report.recording import Recording
from kvledger.report.shortage import shortage_words
from kvledger.report.waterfall import missing_tails

MAX_ROUNDS_DIAGNOSED = 300
"""A diagnosis replays the trace hundreds of times; a page that is wanted at once cannot wait for it on a longer one."""
SPENDINGS_SHOWN = 4

_HOW = {
    "load-back": "a load-back of {}",
    "lock": "a lock on {} evictable",
    "chunk": "a chunk of {}",
    "rounding": "rounding {} up",
    "forced": "a forced chunk of {}",
    "decode": "decode growing by {}",
    "hold": "a hold of {}",
    "pin": "a pin on {}",
    "leak": "a leak of {}",
}


_DECIDED = {"whole": "admitted whole", "truncated": "admitted and cut", "loading": "admitted, and began to load"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """`lead` is the one thing to read, `headline` how it ended, `details` the rest. `moments`: what happened in which
    round, in time order. `named` are the requests that play a part. `promise` is None if none is known to be broken.
    """

    headline: Words
    lead: Words | None = None
    details: Sequence[Words] = ()
    moments: Sequence[tuple[str, int]] = ()
    named: frozenset[str] = field(default=frozenset())
    promise: BrokenPromise | None = None


def explain(recording: Recording) -> Explanation:
    """The words for a recording. What is not known is not said."""
    outcome = recording.outcome
    headline = _headline(outcome)
    if outcome.verdict == "ok":
        return Explanation(headline)
    diagnosis = _diagnosis(recording)
    if diagnosis is not None:
        promise, spent = diagnosis.broken_promise, diagnosis.spent_by
    else:
        breach = breach_of(recording.history)
        promise, spent = (breach.promise, breach.spent_by) if breach is not None else (None, ())
    lead = _lead(promise, spent, outcome) if promise is not None else _first_broken(outcome)
    short = shortage_words(outcome, promise, spent)
    details: list[Words] = [] if short is None else [["Ran out: ", *short, "."]]
    details += [*_unwritten(recording, promise), *_reason(outcome)]
    details += _diagnosed(diagnosis) if diagnosis is not None else [_too_long(outcome)]
    return Explanation(
        headline,
        lead,
        details,
        _moments(outcome, promise, diagnosis),
        frozenset(_named(outcome, promise, spent)),
        promise,
    )


def _diagnosis(recording: Recording) -> Diagnosis | None:
    if len(recording.rounds) > MAX_ROUNDS_DIAGNOSED:
        return None
    return diagnosis_of(recording.history)


# --- how it ended


def _headline(outcome: Outcome) -> Words:
    if outcome.failure is not None:
        return [f"Out of memory in round {outcome.rounds[-1].round}: ", *failure_words(outcome.failure), "."]
    if outcome.stuck is not None:
        stuck = outcome.stuck
        figures = (
            f" still has {counted(stuck.wanted, 'token')} to compute; free {stuck.free}, evictable {stuck.evictable}; "
        )
        reason = message_words(stuck.message, None)
        return [f"Stuck in round {stuck.round}: ", Name(stuck.request), figures, *reason, "."]
    if outcome.broken:
        return [f"Invariant {outcome.broken[0].invariant} broken in round {outcome.broken[0].round}."]
    return [f"Nothing was violated in {counted(len(outcome.rounds), 'round')}."]


def failure_words(failure: AllocationFailure) -> Words:
    """Who asked for how much, and what there was."""
    on = f" on rank {failure.rank}" if failure.rank else ""
    wanted = amount(failure.wanted, failure.pool)
    figures = f" wanted {wanted}{on}; free {failure.free}, evictable {failure.evictable}"
    return [Name(failure.request) if failure.known else failure.request, figures]


# --- the promise


def _lead(promise: BrokenPromise, spent: Sequence[Spending], outcome: Outcome) -> Words:
    of_what = "" if promise.pool else f"{promise.kind} of "
    words: list[str | Name] = [Name(promise.request), f"'s {of_what}{amount(promise.tokens, promise.pool)}, "]
    words.append(f"promised in round {promise.round}, {f'on rank {promise.rank} ' if promise.rank else ''}")
    decoded = decoded_since(outcome, promise.round)
    if not spent and decoded:
        return [*words, "was spent by requests that decode: ", *_names(decoded), "."]
    if not spent:
        return [*words, "was not there, and no other request took it."]
    words.append("was spent by ")
    shown = spent[:SPENDINGS_SHOWN]
    for number, spending in enumerate(shown):
        if number:
            words.append(" and " if number == len(spent) - 1 else ", ")
        same = number and spending.request == shown[number - 1].request
        words += [] if same else _spender(spending, decoded)
        words.append(
            amount(spending.tokens, promise.pool)
            if spending.how == "share"
            else _HOW[spending.how].format(spending.tokens)
        )
    if len(spent) > len(shown):
        others = spent[len(shown) :]
        words.append(f" and {len(others)} more, {amount(sum(each.tokens for each in others), promise.pool)}")
    return [*words, "."]


def _names(names: Sequence[str]) -> Words:
    shown = [Name(name) for name in names[:SPENDINGS_SHOWN]]
    listed = [word for name in shown for word in (", ", name)][1:]
    return [*listed, f" and {len(names) - len(shown)} more"] if len(names) > len(shown) else listed


def _spender(spending: Spending, decoded: Sequence[str]) -> Words:
    if spending.request is None and spending.how == "decode":
        return ["running requests (", *_names(decoded), "), "]
    if spending.request is None:
        return ["pages that belong to nobody, "] if spending.how == "leak" else ["someone outside, "]
    return [Name(spending.request), ": "]


def _first_broken(outcome: Outcome) -> Words | None:
    if not outcome.broken:
        return None
    first = outcome.broken[0]
    return [f"{first.invariant}, round {first.round}: ", *message_words(first.message, first.request), "."]


def _unwritten(recording: Recording, promise: BrokenPromise | None) -> list[Words]:
    """That the ledger never held the tail that broke."""
    if promise is None or not recording.shows_ledger:
        return []
    view = next((view for view in recording.rounds if view.record.round == promise.round), None)
    if view is None:
        return []
    missing = [each for each in missing_tails(view.record, recording.page_size) if each.request == promise.request]
    if not missing:
        return []
    tokens = counted(missing[0].tokens, "token")
    return [[f"No entry of round {promise.round}'s ledger holds that tail ({tokens} in whole pages)."]]


def _reason(outcome: Outcome) -> list[Words]:
    if not outcome.broken:
        return []
    first = outcome.broken[0]
    reason = next((invariant.reason for invariant in INVARIANTS if invariant.name == first.invariant), None)
    return (
        []
        if reason is None
        else [[f"First broken invariant: {first.invariant}, in round {first.round}. It says: {reason}."]]
    )


# --- the diagnosis


def _diagnosed(diagnosis: Diagnosis) -> list[Words]:
    details: list[Words] = []
    point, searched = diagnosis.point_of_no_return, diagnosis.searched
    if point is not None and not searched.continuations:
        details.append(["The admission of ", Name(point.request), f" in round {point.round} itself failed half-way."])
    elif point is not None:
        limits = "" if searched.complete else ", as far as the search's limits let it look"
        failed = diagnosis.outcome.failure is not None or diagnosis.outcome.stuck is not None
        early = "" if failed else ", unless transfers come early, as they did"
        tried = f"{counted(searched.continuations, 'continuation')} tried{limits}"
        details.append(
            [
                f"Too late from round {point.round} on: after ",
                Name(point.request),
                f" was {_DECIDED.get(point.kind, point.kind)}, ",
                f"no fair continuation keeps every promise{early} ({tried}).",
            ]
        )
    elif diagnosis.unsearched is not None:
        details.append([f"Since when it was too late is not said: {diagnosis.unsearched}."])
    elif diagnosis.broken_promise is not None and searched.continuations:
        details.append(["The promises could still have been kept to the end: there is no point of no return."])
    if not diagnosis.switched:
        return details
    if diagnosis.avoided_by is None:
        details.append(["No change of one or two of the rules' switches makes this trace end ok."])
    elif diagnosis.avoided_by:
        switches = " and ".join(f"{name} = {str(value).lower()}" for name, value in diagnosis.avoided_by)
        details.append([f"The same trace ends ok with {switches}."])
    return details


def _too_long(outcome: Outcome) -> Words:
    return [
        f"Not searched here, because the trace has more than {MAX_ROUNDS_DIAGNOSED} rounds ({len(outcome.rounds)}): "
        "the point of no return, and the change of rules that avoids it. kvledger explain searches."
    ]


def _moments(outcome: Outcome, promise: BrokenPromise | None, diagnosis: Diagnosis | None) -> Sequence[tuple[str, int]]:
    """What to look at, in time order: the same round once, with all that happened in it."""
    found: list[tuple[int, str]] = []
    if promise is not None:
        found.append((promise.round, "promise made"))
    found += [(broken.round, f"{broken.invariant} broken") for broken in outcome.broken]
    if diagnosis is not None and diagnosis.point_of_no_return is not None:
        found.append((diagnosis.point_of_no_return.round, "too late from here"))
    if outcome.failure is not None:
        found.append((outcome.rounds[-1].round, "out of memory"))
    if outcome.stuck is not None:
        found.append((outcome.stuck.round, "stuck"))
    words: dict[int, list[str]] = {}
    for number, what in sorted(found, key=lambda each: each[0]):
        words.setdefault(number, []).append(what)
    return [(", ".join(dict.fromkeys(what)), number) for number, what in words.items()]


def _named(outcome: Outcome, promise: BrokenPromise | None, spent: Sequence[Spending]) -> list[str]:
    names = [broken.request for broken in outcome.broken]
    names += [spending.request for spending in spent[:SPENDINGS_SHOWN]]
    if promise is not None:
        names.append(promise.request)
    for end in (outcome.failure, outcome.stuck):
        if end is not None:
            names.append(end.request)
    return [name for name in names if name is not None]
