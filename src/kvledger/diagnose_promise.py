"""Who was promised what, and who spent it: read off a history, without a guess about rules or ledgers.

A promise breaks at the moment after which what is there never again covers what was admitted (or, in a run that came
to no harm, the first moment it does not). Its owner is the request that the pool failed, else the first one whose
need is not covered when needs are met as they fall due. What others took after the owner's last chunk was decided is
what spent it; if nobody did, what its own batch had taken before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from kvledger.arithmetic import ceil_pages
from kvledger.diagnose_history import History, Moment
from kvledger.events import Abort, Cached, Hold, Pin, Release, Transferred, Unpin
from kvledger.ledger import Due
from kvledger.record import Decision, RoundRecord
from kvledger.replay import Outcome
from kvledger.settings import of_rank

How = Literal["load-back", "lock", "chunk", "rounding", "forced", "decode", "hold", "pin", "leak", "share"]


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """`tokens` that `request` was promised in `round`: "tail" after its cut there, its "chunk", or its "load-back".

    `rank` is the pipeline rank that could not keep it. Of a second `pool`, its "share", in the pool's units.
    """

    request: str
    kind: Literal["tail", "chunk", "load-back", "share"]
    tokens: int
    round: int
    rank: int = 0
    pool: str | None = None


@dataclass(frozen=True, slots=True)
class Spending:
    """`tokens` slots that `request` (a hold's name counts as one; None: someone without a name) took from the pool.

    load-back, lock and chunk are an admission's three takes; "rounding" is the part of a chunk's last page that its
    charge left out; "forced" a chunk run although nothing remained; "decode" what running requests grew (of several:
    without a name); "hold", "pin" (its name) and "leak" are no scheduler's takes. "share" is all that
    an admission takes of a second pool, in its units.
    """

    request: str | None
    how: How
    tokens: int


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken promise, who spent it (largest first), and the moment that broke it, None if only the failure shows."""

    promise: BrokenPromise
    spent_by: tuple[Spending, ...]
    moment: Moment | None


def find_breach(history: History) -> Breach | None:
    """The promise that broke; None if whatever was admitted was always covered."""
    at = _uncovered_from(history)
    if at is None:
        return _breach_at_failure(history)
    if not history.tells_at_once:
        at = _last_of_round(history, at)
    owner = _owner(history, at)
    made = _last_chunk(history, at, owner)
    if made is None:
        return _breach_at_failure(history)
    decision = history.moments[made].decision
    assert decision is not None, "a moment of a chunk has its decision"
    promise = BrokenPromise(
        owner,
        "tail" if decision.tail_tokens else "chunk",
        decision.tail_tokens or decision.tokens,
        history.moments[made].round,
        history.rank,
    )
    lasting = history.failed and not any(moment.covered for moment in history.moments[at:])
    end = len(history.moments) if lasting else at + 1
    spent = _spent(history, made + 1, end, owner)
    if not spent:
        spent = _spent(history, _first_of_round(history, made), made, owner)
    return Breach(promise, _by_size(spent), history.moments[at])


def decoded_since(outcome: Outcome, round_number: int) -> tuple[str, ...]:
    """Who took tokens by decoding from that round on: nobody's decision, and slots all the same."""
    rounds = (record for record in outcome.rounds if record.round >= round_number)
    return tuple(dict.fromkeys(request for record in rounds for request in record.decoded))


# --- the owner


def _uncovered_from(history: History) -> int | None:
    """Index of the moment that broke the promise."""
    moments = history.moments
    first = len(moments)
    while history.failed and first and not moments[first - 1].covered:
        first -= 1
    if first < len(moments):
        return first
    if history.outcome.failure is not None:
        return None
    return next((index for index, moment in enumerate(moments) if not moment.covered), None)


def _owner(history: History, at: int) -> str:
    """Whose need the moment at `at` does not cover."""
    moment = history.moments[at]
    needs = dict(moment.needs)
    victim = history.outcome.failure or history.outcome.stuck
    if victim is not None and needs.get(victim.request):
        return victim.request
    due_pages = 0
    for request, pages in _as_due(history, at):
        due_pages += pages
        if due_pages > moment.baseline_pages:
            return request
    raise AssertionError(f"{due_pages} pages are due and {moment.baseline_pages} there: the moment is covered")


def _as_due(history: History, at: int) -> Iterator[tuple[str, int]]:
    """What is needed at a moment, in pages: this batch's chunks in their order, then everyone's rest."""
    needs = dict(history.moments[at].needs)
    if history.moments[at].decision is not None:
        for moment in history.moments[_first_of_round(history, at) : at + 1]:
            decision = moment.decision
            if decision is not None and decision.joined and decision.request in needs:
                pages = min(_chunk_pages(decision, history.page_size), needs[decision.request])
                needs[decision.request] -= pages
                yield decision.request, pages
    yield from needs.items()


def _first_of_round(history: History, index: int) -> int:
    """Index of the first decision of the round that the decision at `index` is part of."""
    step = history.moments[index].step
    while index and history.moments[index - 1].step == step:
        index -= 1
    return index


def _last_of_round(history: History, index: int) -> int:
    """Index of the last decision of the round that the moment at `index` is part of."""
    step = history.moments[index].step
    while index + 1 < len(history.moments) and history.moments[index + 1].step == step:
        index += 1
    return index if history.moments[index].decision is not None else max(index - 1, 0)


def _last_chunk(history: History, at: int, owner: str) -> int | None:
    """Index of the decision, up to `at`, that last gave `owner` a chunk, or began its load."""
    for index in range(at, -1, -1):
        decision = history.moments[index].decision
        if decision is not None and decision.let_in and decision.request == owner:
            return index
    return None


# --- the spenders


def _spent(history: History, start: int, end: int, owner: str) -> list[Spending]:
    """What others took in moments[start:end] and had not given back at its end."""
    taken: dict[tuple[str | None, How], int] = {}
    for index in range(start, end):
        moment = history.moments[index]
        before_pages = (
            history.moments[index - 1].baseline_pages if index else of_rank(history.trace.node, history.rank).pool_pages
        )
        dropped_tokens = (before_pages - moment.baseline_pages) * history.page_size
        match moment.event:
            case Hold(name=name):
                _add(taken, (Spending(name, "hold", dropped_tokens),))
            case Cached(locked=True):
                _add(taken, (Spending(None, "lock", dropped_tokens),))
            case Release(name=name):
                _add(taken, (Spending(name, "hold", dropped_tokens),))
            case Transferred(request=request) | Abort(request=request) if request not in dict(moment.needs):
                taken = {key: tokens for key, tokens in taken.items() if key[0] != request or key[1] == "hold"}
        decision = moment.decision
        if decision is None and moment.event is None:
            _add(taken, _grown(history, moment.round, dropped_tokens))
        if decision is not None and decision.request != owner:
            _add(taken, _takes(history, moment.round, decision))
            if decision.kind == "refused":
                # only a faulty refusal leaves anything behind
                _add(taken, (Spending(decision.request, "lock", dropped_tokens),))
    if start < end:
        leaked_pages = history.moments[end - 1].leaked_pages - history.moments[max(start - 1, 0)].leaked_pages
        _add(taken, (Spending(None, "leak", leaked_pages * history.page_size),))
    return [Spending(request, how, tokens) for (request, how), tokens in taken.items() if tokens > 0]


def _grown(history: History, round_number: int, dropped_tokens: int) -> Iterator[Spending]:
    """What decode took of the `dropped_tokens` that a round's batch and its decode took together."""
    record = next(record for record in reversed(history.outcome.rounds) if record.round == round_number)
    if record.decoded:
        chunk_pages = sum(_chunk_pages(decision, history.page_size) for decision in record.joined)
        who = record.decoded[0] if len(record.decoded) == 1 else None
        yield Spending(who, "decode", dropped_tokens - chunk_pages * history.page_size)


def _add(taken: dict[tuple[str | None, How], int], spendings: Iterable[Spending]) -> None:
    for each in spendings:
        key = (each.request, each.how)
        taken[key] = taken.get(key, 0) + each.tokens


def _takes(history: History, round_number: int, decision: Decision) -> Iterator[Spending]:
    """What a decision takes from the pool, now or when its batch is allocated."""
    if not decision.let_in:
        return
    yield Spending(decision.request, "load-back", decision.load_back)
    yield Spending(decision.request, "lock", decision.newly_locked_tokens)
    page_size = history.page_size
    chunk_tokens = _chunk_pages(decision, page_size) * page_size
    record = next(record for record in reversed(history.outcome.rounds) if record.round == round_number)
    uncharged_tokens = chunk_tokens - _charged_tokens(record, decision.request)
    # a charge that is missing altogether, or for which the target shows no entries, is not a matter of rounding
    rounding_tokens = uncharged_tokens if 0 < uncharged_tokens < min(page_size, chunk_tokens) else 0
    yield Spending(decision.request, "forced" if decision.forced else "chunk", chunk_tokens - rounding_tokens)
    yield Spending(decision.request, "rounding", rounding_tokens)


def _charged_tokens(record: RoundRecord, request: str) -> int:
    return sum(each.tokens for each in record.promises if each.request == request and each.due is Due.NOW)


def _chunk_pages(decision: Decision, page_size: int) -> int:
    return ceil_pages(decision.end, page_size) - ceil_pages(decision.start, page_size)


def _by_size(spendings: Iterable[Spending]) -> tuple[Spending, ...]:
    return tuple(sorted(spendings, key=lambda each: -each.tokens))


# --- a failure that no moment foretold


def _breach_at_failure(history: History) -> Breach | None:
    """The slots were there on paper, or the target shows no decisions: only the failed allocation itself is known."""
    failure = history.outcome.failure
    if failure is None:
        return None
    pinned = _breach_by_pins(history, failure.request)
    if pinned is not None:
        return pinned
    record = history.outcome.rounds[-1]
    joined = any(decision.request == failure.request for decision in record.joined)
    chunk_failed = joined or not record.decisions or not history.tells_at_once
    kind: Literal["chunk", "load-back"] = "chunk" if chunk_failed else "load-back"
    taken: dict[tuple[str | None, How], int] = {}
    for decision in record.joined:
        if decision.request != failure.request:
            _add(taken, _takes(history, record.round, decision))
    spent = [Spending(request, how, tokens) for (request, how), tokens in taken.items() if tokens > 0]
    promise = BrokenPromise(failure.request, kind, failure.wanted, record.round, failure.rank)
    return Breach(promise, _by_size(spent), None)


def _breach_by_pins(history: History, owner: str) -> Breach | None:
    """All was covered by pages that come back, and the allocation came first: the last promise to `owner` since which
    pins took what was counted on; None if none did."""
    for made in range(len(history.moments) - 1, -1, -1):
        decision = history.moments[made].decision
        if decision is None or not decision.let_in or decision.request != owner or not decision.tail_tokens:
            continue
        taken = _pinned_since(history, made)
        if taken:
            promise = BrokenPromise(owner, "tail", decision.tail_tokens, history.moments[made].round, history.rank)
            return Breach(promise, _by_size(taken), None)
    return None


def _pinned_since(history: History, made: int) -> list[Spending]:
    """What pins took after that moment and hold still."""
    taken: dict[str, int] = {}
    for index in range(made + 1, len(history.moments)):
        moment = history.moments[index]
        more_pages = moment.pinned_pages - history.moments[index - 1].pinned_pages
        match moment.event:
            case Pin(name=name):
                taken[name] = taken.get(name, 0) + more_pages * history.page_size
            case Unpin(name=name):
                taken.pop(name, None)
    return [Spending(name, "pin", tokens) for name, tokens in taken.items() if tokens > 0]
