"""What two records of a round decided differently, and of what class that is. Figures are no decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Literal

from kvledger.adder import AddReqResult
from kvledger.record import AllocationFailure, Decision, RoundRecord

DifferenceKind = Literal[
    "submit",
    "rounds",
    "order",
    "request",
    "hit",
    "load_back",
    "kind",
    "bounds",
    "reason",
    "running",
    "verdict",
    "figures",
    "pool",
]
KINDS: Mapping[DifferenceKind, str] = MappingProxyType(
    {
        "submit": "one refuses a request at the entry",
        "rounds": "one runs a round that the other does not",
        "order": "the same decisions in another order",
        "request": "a decision about another request, or about none",
        "hit": "another prefix found on the device, and so another decision",
        "load_back": "another prefix found on the host, and so another load-back",
        "kind": "another kind of decision: whole, truncated, resumed, deferred, loading or refused",
        "bounds": "another chunk",
        "reason": "another reason for a refusal",
        "running": "other requests decoded, finished, were sent back, preempted or given up",
        "verdict": "an allocation fails, a request is stuck, or an invariant breaks, on one alone",
        "figures": "the same decisions with other figures of the ledger",
        "pool": "the same decisions and figures, and another rest of free and evictable tokens",
    }
)
"""Every class of difference. All but the last two are differences in what was decided or came of it."""

_RUNNING = MappingProxyType(
    {
        "preempted": "preempted",
        "decoded": "decoded",
        "finished": "finished",
        "retracted": "sent back",
        "rolled_back": "prefill thrown away",
        "gave_up": "given up",
    }
)
"""What a record says of requests about which nothing is decided, and in which words it is told."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs part: the round's number, and what each decided (None: nothing there).

    `place` is the decision's index among those compared; None for what is no single decision. `detail` says what is
    not in the decisions themselves.
    """

    kind: DifferenceKind
    round: int
    request: str | None = None
    place: int | None = None
    decisions: tuple[Decision | None, Decision | None] = (None, None)
    detail: str = ""


def round_difference(
    left: RoundRecord | None, right: RoundRecord | None, number: int, *, by_decisions: bool = True
) -> Difference | None:
    """What first differs between two records of the round `number`; figures aside."""
    if left is None or right is None:
        first = [compared(record, by_decisions)[:1] for record in (left, right)]
        mine, yours = (each[0] if each else None for each in first)
        request = next((each.request for each in (mine, yours) if each is not None), None)
        return Difference("rounds", number, request, 0, (mine, yours))
    decisions = asked_alike(left, right, by_decisions=by_decisions)
    found = _decisions_differ(*decisions, number, by_decisions)
    if found is not None:
        return found
    for name, what in _RUNNING.items():
        mine_ran, yours_ran = (set(getattr(record, name)) for record in (left, right))
        if mine_ran != yours_ran:
            sides = (", ".join(sorted(side)) or "nobody" for side in (mine_ran, yours_ran))
            return Difference(
                "running",
                number,
                min(mine_ran ^ yours_ran),
                detail=f"{what}: {' against '.join(sides)}",
            )
    return _failures_differ(left.failure, right.failure, number)


def _failures_differ(left: AllocationFailure | None, right: AllocationFailure | None, number: int) -> Difference | None:
    """One alone fails, or another request's chunk does, as far as both can tell whose it was."""
    if left is not None and right is not None:
        if left.known and right.known and left.request != right.request:
            detail = f"the chunk of {left.request} finds no slots, against that of {right.request}"
            return Difference("verdict", number, left.request, detail=detail)
        return None
    failure = left or right
    return None if failure is None else Difference("verdict", number, failure.request, detail=failure.message)


def compared(record: RoundRecord | None, by_decisions: bool) -> tuple[Decision, ...]:
    """The decisions of a round that are held against another's: all of them, or those of its batch."""
    if record is None:
        return ()
    return record.decisions if by_decisions else record.joined


def asked_alike(
    left: RoundRecord, right: RoundRecord, *, by_decisions: bool
) -> tuple[tuple[Decision, ...], tuple[Decision, ...]]:
    """What is compared of two records of a round.

    One target asks about one candidate more although nothing remains, and refuses it; another does not ask: that is
    the same answer, and such a last refusal is left out.
    """
    mine, yours = compared(left, by_decisions), compared(right, by_decisions)
    if len(mine) == len(yours) + 1 and _needless(mine[-1], right):
        return mine[:-1], yours
    if len(yours) == len(mine) + 1 and _needless(yours[-1], left):
        return mine, yours[:-1]
    return mine, yours


def _needless(decision: Decision, other: RoundRecord) -> bool:
    return decision.kind == "refused" and other.budget_state is not AddReqResult.CONTINUE


def _decisions_differ(
    left: Sequence[Decision], right: Sequence[Decision], number: int, by_decisions: bool
) -> Difference | None:
    mine_choices, yours_choices = ([_choice(each, by_decisions) for each in side] for side in (left, right))
    same_set = Counter(mine_choices) == Counter(yours_choices)
    for place, (mine, yours) in enumerate(zip_longest(left, right)):
        if mine is None or yours is None or _choice(mine, by_decisions) != _choice(yours, by_decisions):
            kind = "order" if same_set else _kind_of(mine, yours, by_decisions)
            request = (mine or yours or left[0]).request
            return Difference(kind, number, request, place, (mine, yours))
    return None


def _choice(decision: Decision, by_decisions: bool) -> tuple[object, ...]:
    """What was decided, without the figures that led to it. Where a refused one would have begun is no decision."""
    where = (decision.start, decision.end) if decision.kind != "refused" else (0, 0)
    chunk = (decision.request, *where)
    return (*chunk, decision.kind, decision.load_back, decision.reason) if by_decisions else chunk


def _kind_of(mine: Decision | None, yours: Decision | None, by_decisions: bool) -> DifferenceKind:
    """The cause comes before its effects: another prefix found makes another chunk, and perhaps another kind."""
    if mine is None or yours is None or mine.request != yours.request:
        return "request"
    if not by_decisions:
        return "bounds"
    if "resumed" not in (mine.kind, yours.kind) and mine.prefix_tokens != yours.prefix_tokens:
        return "hit"
    if mine.joined and yours.joined and mine.load_back != yours.load_back:
        return "load_back"
    if mine.kind != yours.kind:
        return "kind"
    return "reason" if mine.reason != yours.reason else "bounds"
