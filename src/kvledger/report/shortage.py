"""Which pool ran out where the pictures do not show it: a second pool, or the KV pool of a replaying rank."""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.diagnose_promise import BrokenPromise, Spending
from kvledger.record import RoundRecord, amount
from kvledger.replay import Outcome
from kvledger.report.markup import Name, Words
from kvledger.report.plain import named

TAKERS_SHOWN = 4


def shortage_words(outcome: Outcome, promise: BrokenPromise | None, spent: Sequence[Spending]) -> Words | None:
    """Its name and figures, and who was let in with how much of it; None for the KV pool that the pictures show."""
    if promise is not None and promise.pool is not None:
        return [*_pool_words(outcome.rounds[-1], promise.pool), "; ", *_let_in(promise, spent)]
    if promise is not None and promise.rank:
        return _rank_words(outcome, promise)
    if outcome.stuck is not None:
        return _refused_words(outcome)
    return None


def as_text(words: Words) -> str:
    """Words for a terminal."""
    return "".join(named(word) if isinstance(word, Name) else word for word in words)


def spending_words(spending: Spending, pool: str | None) -> str:
    """What was taken: of a second pool so many of its units, of the KV pool how and how many tokens."""
    return amount(spending.tokens, pool) if spending.how == "share" else f"{spending.how} {spending.tokens}"


def _pool_words(record: RoundRecord, name: str) -> Words:
    pool = next((pool for pool in record.pools if pool.name == name), None)
    if pool is not None:
        figures = f"free {pool.free} + evictable {pool.evictable}, promised {pool.promised}"
    elif record.failure is not None:
        figures = f"free {record.failure.free} + evictable {record.failure.evictable}"
    else:
        figures = "its figures are not shown by this target"
    return [f"{name} in round {record.round}: {figures}"]


def _let_in(promise: BrokenPromise, spent: Sequence[Spending]) -> Words:
    words: list[str | Name] = ["let in: "] if spent else []
    for each in spent[:TAKERS_SHOWN]:
        words += [Name(each.request) if each.request is not None else "others", f" with {each.tokens}, "]
    if len(spent) > TAKERS_SHOWN:
        words.append(f"others with {sum(each.tokens for each in spent[TAKERS_SHOWN:])}, ")
    return [*words, Name(promise.request), f" wanted {amount(promise.tokens, promise.pool)}"]


def _rank_words(outcome: Outcome, promise: BrokenPromise) -> Words | None:
    """That rank when its allocation failed; else when what it had was first found to be too little."""
    broken = [each.round for each in outcome.broken if each.invariant == "promises-covered"]
    at = outcome.rounds[-1].round if outcome.failure is not None else broken[0] if broken else promise.round
    record = next((record for record in outcome.rounds if record.round == at), None)
    rank = next((each for each in record.ranks if each.rank == promise.rank), None) if record is not None else None
    if rank is None or record is None:
        return None
    here = f"free {record.free} + evictable {record.evictable}, protected {record.protected}"
    there = f"free {rank.free} + evictable {rank.evictable}, protected {rank.protected}"
    return [f"the KV pool of rank {rank.rank} in round {at}: {there} (rank 0, which is drawn: {here})"]


def _refused_words(outcome: Outcome) -> Words | None:
    """Where nothing moved because a second pool refused."""
    record = outcome.rounds[-1]
    refused = next((each for each in record.refused if each.short_of is not None), None)
    if refused is None or refused.short_of is None:
        return None
    wanted = refused.short_units
    lacks = [f" needs {wanted[0]}, {wanted[1]} left"] if wanted is not None else [" was refused"]
    return [*_pool_words(record, refused.short_of), "; ", Name(refused.request), *lacks]
