"""The point of no return: a search over everything the scheduler could still have done.

After a decision the scheduler may still choose, in this round and in each later one, how many of those who wait it
lets in: none, all that its rules take, or any number of them in queue order; whom it passes over comes back in the
next round. Its rules are fixed: a half-done request goes first and gets what they give it (forced or deferred on a
shortage). The environment is fixed too, and is the worst that is still fair, a drain's: transfers complete only when
a round has admitted nothing, nothing new arrives, and what is held or locked from outside stays so. A continuation
keeps the promises if every request it has admitted finishes its prefill and no allocation fails; a decision is
*lost* if none does. Within a stretch in which the environment gives nothing back, what can be done after a decision
can also be done after the one before it, so once lost is lost for the rest of the stretch, and bisection is sound.

Nothing is assumed of the scheduler but the target protocol: a continuation is replayed on a fresh target, passing over
a candidate is withdrawing it before the round, and its coming back is a submission under a name of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvledger.arithmetic import ceil_pages
from kvledger.diagnose_history import History, Moment
from kvledger.replay import Replay, Target
from kvledger.request import Prompt
from kvledger.trace import Submit

MAX_CONTINUATIONS = 2000
MAX_CONTINUATIONS_PER_DECISION = 200
MAX_ROUNDS = 50_000
"""Rounds of all continuations together, those of the common beginning included."""


@dataclass(frozen=True, slots=True)
class Searched:
    """How many continuations and rounds were played. Not `complete`: a limit was met, and what is called lost may not be."""

    continuations: int = 0
    rounds: int = 0
    complete: bool = True


@dataclass(frozen=True, slots=True)
class _Played:
    """`kept` all promises; or, where all were let in, the continuation's first round that `newcomers` joined."""

    kept: bool = False
    at: int = 0
    newcomers: int = 0


class FutureSearch:
    """Plays continuations of a history's decisions and counts them."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._names = {step.request for step in history.steps if isinstance(step, Submit)}
        self._fresh = 0
        self.continuations = 0
        self.rounds = 0
        self.complete = True

    @property
    def searched(self) -> Searched:
        return Searched(self.continuations, self.rounds, self.complete)

    def point_of_no_return(self) -> Moment | None:
        """In a run that failed, the decision from which on it was lost without a break; else the first lost one."""
        stretches = _stretches(self._history)
        if not self._history.failed:
            suspects = ([m for m in stretch if not m.covered] for stretch in stretches)
            return next((found for found in map(self._first_lost, suspects) if found is not None), None)
        point = None
        for stretch in reversed(stretches):
            found = self._first_lost(stretch)
            if found is None:
                break
            point = found
            if found is not stretch[0]:
                break
        return point

    def _first_lost(self, stretch: Sequence[Moment]) -> Moment | None:
        """Bisection in a stretch whose lost decisions are its last ones."""
        if not stretch or not self.lost_after(stretch[-1]):
            return None
        kept_below, lost_at = 0, len(stretch) - 1
        while kept_below < lost_at:
            middle = (kept_below + lost_at) // 2
            if self.lost_after(stretch[middle]):
                lost_at = middle
            else:
                kept_below = middle + 1
        return stretch[lost_at]

    def lost_after(self, moment: Moment) -> bool:
        """No continuation of this decision keeps all promises (as far as the limits let us look)."""
        last = self.continuations + MAX_CONTINUATIONS_PER_DECISION
        # how many to let in, round by round; whether letting nobody in from there on is known to fail
        todo: list[tuple[tuple[int, ...], bool]] = [((), False)]
        while todo:
            if self.continuations >= min(last, MAX_CONTINUATIONS) or self.rounds >= MAX_ROUNDS:
                self.complete = False
                return True
            script, fails_alone = todo.pop()
            if not fails_alone and self._play(moment, script, everyone=False).kept:
                return False
            branch = self._play(moment, script, everyone=True)
            if branch.newcomers:
                passed = (*script, *(0,) * (branch.at - len(script)))
                todo.append(((*passed, 0), True))
                todo += [((*passed, admitted), False) for admitted in range(branch.newcomers, 0, -1)]
        return True

    # --- one continuation

    def _play(self, moment: Moment, script: Sequence[int], *, everyone: bool) -> _Played:
        """Replay up to the moment's round, then go on by `script`, and then let in nobody, or everyone until one joins."""
        self.continuations += 1
        history = self._history
        run = Replay(history.trace.node, history.rules, target=history.target)
        for step in history.steps[: moment.step]:
            run.apply(step)
        self.rounds += len(run.outcome.rounds)
        prompts = dict(run.prompts)
        decided = _decided_by(history, moment)
        for number in range(_most_rounds(run)):
            limit = script[number] if number < len(script) else None if everyone else 0
            passed_over = _withdraw(run.target, decided, limit)
            record = run.target.run_round()
            self.rounds += 1
            newcomers = [d for d in record.joined if d.kind != "resumed" and d.request not in decided]
            if limit is None and newcomers:
                return _Played(at=number, newcomers=len(newcomers))
            if record.failure is not None:
                return _Played()
            for request in passed_over:
                self._submit_again(run.target, request, prompts)
            if not any(not request.in_flight for request in run.target.snapshot().live):
                return _Played(kept=True)
            if not record.joined and not _transfer_all(run.target):
                return _Played()
            decided = frozenset()
        return _Played()

    def _submit_again(self, target: Target, request: str, prompts: dict[str, Prompt]) -> None:
        """Back at the end of the queue, under a name that the target has not met."""
        name = request
        while name in self._names:
            self._fresh += 1
            name = f"again {self._fresh}"
        self._names.add(name)
        prompts[name] = prompts[request]
        target.submit(name, prompts[request])


def _stretches(history: History) -> list[list[Moment]]:
    """The decisions between two events by which the environment gives something back."""
    stretches: list[list[Moment]] = [[]]
    for moment in history.moments:
        if moment.gives_back:
            stretches.append([])
        elif moment.decision is not None:
            stretches[-1].append(moment)
    return [stretch for stretch in stretches if stretch]


def _decided_by(history: History, moment: Moment) -> frozenset[str]:
    """The waiting requests that its round had decided by this moment."""
    decisions = [each.decision for each in history.moments if each.step == moment.step and each.decision is not None]
    assert moment.decision in decisions, "a moment is one of its own round"
    decided = decisions[: decisions.index(moment.decision) + 1]
    return frozenset(decision.request for decision in decided if decision.kind not in ("resumed", "deferred"))


def _withdraw(target: Target, decided: frozenset[str], limit: int | None) -> list[str]:
    """Leave in the queue those decided and the first `limit` others (None: all); returns who was passed over."""
    if limit is None:
        return []
    passed_over = [request for request in target.snapshot().waiting if request not in decided][limit:]
    for request in passed_over:
        target.abort(request)
    return passed_over


def _transfer_all(target: Target) -> bool:
    in_flight = target.in_flight()
    for request in in_flight:
        target.transferred(request)
    return bool(in_flight)


def _most_rounds(run: Replay) -> int:
    """More than any prefill needs: a drain's own bound."""
    pages = sum(ceil_pages(prompt.tokens, run.settings.page_size) for prompt in run.prompts.values())
    return 2 * pages + 3 * len(run.prompts) + 1
