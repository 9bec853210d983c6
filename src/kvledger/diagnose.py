"""Why a replay failed: the promise that broke, who spent it, the point of no return, and the change that avoids it.

Everything is found by replays of the trace; nothing of the scheduler is assumed but the target protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

from kvledger.diagnose_future import FutureSearch, Searched
from kvledger.diagnose_history import History, watch
from kvledger.diagnose_pools import breach_of
from kvledger.diagnose_promise import BrokenPromise, Spending
from kvledger.invariants import INVARIANTS
from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode
from kvledger.replay import Outcome, TargetFactory, replay
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.trace import Trace

MAX_CHANGES = 2
"""Switches that are changed together at most."""

BESIDE_DECODE = "beside decode a running request may still be sent back, or end, and give its slots up in time"
"""Why no decision is called the point of no return where requests decode: refusals are not all that could be done."""

Change = tuple[tuple[str, Any], ...]
"""Switches of `AccountingRules`, each with its new value."""

_INVARIANT_OF = {"oom": "admitted-finishes", "stuck": "progress"}


@dataclass(frozen=True, slots=True)
class NoReturn:
    """The decision after which it was too late: the one about `request` in `round`, of that kind."""

    round: int
    request: str
    kind: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `kvledger explain` says of a trace under `rules`; `document` is its JSON contract.

    No promise is broken in a run that is ok, nor in one that breaks another invariant. `point_of_no_return` is None
    if the promises could be kept to the end (transfers came in time, or the rules wait for them), or if that was not
    searched: `unsearched` says why. `avoided_by` are the fewest switches of the rules under which the same trace ends
    ok; None if no one or two of them do, or if the target is not `switched`: it ignores them.
    """

    rules: AccountingRules
    outcome: Outcome
    broken_promise: BrokenPromise | None = None
    spent_by: tuple[Spending, ...] = ()
    point_of_no_return: NoReturn | None = None
    searched: Searched = field(default=Searched())
    avoided_by: Change | None = None
    switched: bool = True
    unsearched: str | None = None

    @property
    def verdict(self) -> str:
        return self.outcome.verdict

    @property
    def reason(self) -> str | None:
        """Why the invariant behind the verdict must hold, in a phrase."""
        name = _INVARIANT_OF.get(self.verdict, self.verdict)
        return next((invariant.reason for invariant in INVARIANTS if invariant.name == name), None)

    def document(self) -> dict[str, Any]:
        promise, point = self.broken_promise, self.point_of_no_return
        return {
            "broken_promise": promise
            and {
                "request": promise.request,
                "kind": promise.kind,
                "tokens": promise.tokens,
                "round": promise.round,
                **({"rank": promise.rank} if promise.rank else {}),
                **({"pool": promise.pool} if promise.pool else {}),
            },
            "spent_by": [{"request": each.request, "how": each.how, "tokens": each.tokens} for each in self.spent_by],
            "point_of_no_return": point and {"round": point.round, "request": point.request},
            "avoided_by": None if self.avoided_by is None else dict(self.avoided_by),
        }


def diagnose(
    trace: Trace,
    rules: AccountingRules | None = None,
    target: TargetFactory = PrefillNode,
    *,
    source: str = "trace",
) -> Diagnosis:
    """Explain how `trace` ends, under its own rules or others. TraceError, with `source`: an event cannot happen."""
    return diagnosis_of(watch(trace, rules or trace.accounting_rules, target, source))


def diagnosis_of(history: History) -> Diagnosis:
    """Explain a run that was watched."""
    outcome = history.outcome
    if outcome.verdict == "ok":
        return Diagnosis(history.rules, outcome)
    breach = breach_of(history)
    switched = "rules" not in getattr(history.target, "ignores", ())
    search = FutureSearch(history)
    unsearched = BESIDE_DECODE if breach is not None and history.decodes else None
    in_kv_pool = breach is not None and breach.promise.pool is None
    point = _point_of_no_return(history, search) if in_kv_pool and unsearched is None else None
    return Diagnosis(
        rules=history.rules,
        outcome=outcome,
        broken_promise=None if breach is None else breach.promise,
        spent_by=() if breach is None else breach.spent_by,
        point_of_no_return=point,
        searched=search.searched,
        avoided_by=_avoided_by(history) if switched else None,
        switched=switched,
        unsearched=unsearched,
    )


def _point_of_no_return(history: History, search: FutureSearch) -> NoReturn | None:
    moment = search.point_of_no_return()
    if moment is not None and moment.decision is not None:
        return NoReturn(moment.round, moment.decision.request, moment.decision.kind)
    failure = history.outcome.failure
    if failure is None or not failure.known or not history.moments:
        return None
    record = history.outcome.rounds[-1]
    begun = dict(history.moments[-1].needs).keys() | {decision.request for decision in record.joined}
    # all finished decisions could have been lived with: it is the one that failed half-way, in its load-back
    return None if failure.request in begun else NoReturn(record.round, failure.request, "admitted")


def _avoided_by(history: History) -> Change | None:
    """The fewest switches to change, in the order of `_changes`, so that the trace ends ok.

    Where outsiders hold so much that it cannot, what at least breaks nothing will do.
    """
    changes = list(_changes(history.rules, history.trace.node))
    harmless: Change | None = None
    for count in range(1, MAX_CHANGES + 1):
        for chosen in combinations(changes, count):
            verdict = _verdict_under(history, replace(history.rules, **dict(chosen)))
            if verdict == "ok":
                return chosen
            if verdict == "harmless" and history.outcome.verdict != "stuck":
                harmless = harmless or chosen
    return harmless


def _changes(rules: AccountingRules, node: NodeSettings) -> Iterator[tuple[str, Any]]:
    """Each switch turned to its safe side, the fix first."""
    if not rules.promise_pools:
        yield "promise_pools", True
    if not rules.reserve_tail:
        yield "reserve_tail", True
    if not rules.decode_yields:
        yield "decode_yields", True
    if rules.rank_view == "own" and node.ranks:
        yield "rank_view", "least"
    if rules.replay_gate != "follow" and node.ranks:
        yield "replay_gate", "follow"
    if not rules.spend_gap:
        yield "spend_gap", True
    if rules.grid_tokens(page_size=node.page_size, node_align=node.checkpoint_align) != node.page_size:
        yield "checkpoint_align", "page_size"
    if rules.on_shortage == "force":
        yield "on_shortage", "defer"
    for name in ("truncation_align", "continuation_limit", "chunk_grid"):
        if getattr(rules, name) is not None:
            yield name, None


def _verdict_under(history: History, rules: AccountingRules) -> Literal["ok", "harmless", "no"]:
    """A bare replay tells of a failure sooner than a checked one."""
    try:
        if replay(history.trace, rules, target=history.target).failure is not None:
            return "no"
        outcome = checked_replay(history.trace, rules, target=history.target)
    except Exception:
        # an event cannot happen under these rules, or a faulty target crashes under them: no cure either way
        return "no"
    return "ok" if outcome.verdict == "ok" else "no" if outcome.broken else "harmless"
