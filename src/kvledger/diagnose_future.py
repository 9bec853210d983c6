"""The point of no return: a search over everything the scheduler could still have done.

After a decision the scheduler may still choose, in this round and in each later one, how many of those who wait it
lets in: none, all that its rules take, or any number of them in queue order; whom it passes over comes back in the
next round. Its rules are fixed: a half-done request goes first and gets what they give it (forced or deferred on a
shortage). The environment is fixed too, and is the worst that is still fair, a drain's: transfers complete only when
a round has admitted nothing, late loads arrive when they must, pins go when nothing else moves, nothing new arrives,
and what is held or locked from outside stays so. A continuation
keeps the promises if every request it has admitted finishes its prefill and no allocation fails; a decision is
*lost* if none does. Within a stretch in which the environment gives nothing back, what can be done after a decision
can also be done after the one before it, so once lost is lost for the rest of the stretch, and bisection is sound.
Where requests decode nothing is searched: a running one could be sent back in any round, and give its slots up.

Nothing is assumed of the scheduler but the target protocol: a continuation is replayed on a fresh target, passing over
a candidate is withdrawing it before the round, and its coming back is a submission under a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvledger.diagnose_history import History, Moment
from kvledger.events import Submit, Unpin
from kvledger.record import RoundRecord
from kvledger.replay import Replay, Target
from kvledger.request import Prompt

MAX_CONTINUATIONS = 64
"""For each decision that is searched in full."""
MAX_ROUNDS = 20_000
"""Rounds of all continuations together, those before the decision included, after which no search is begun."""


@dataclass(frozen=True, slots=True)
class Searched:
    """The continuations and rounds played. Not `complete`: a limit was met, and what is called lost may not be."""

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
        self._can_pass_over = True
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
            suspects = ([moment for moment in stretch if not moment.covered] for stretch in stretches)
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
        """The first of the lost decisions that end a stretch; a full search only where letting in nobody fails."""
        alone = _first(stretch, lambda moment: not self._kept_alone(moment))
        if alone is None or self.lost_after(stretch[alone]):
            return None if alone is None else stretch[alone]
        rest = stretch[alone + 1 :]
        lost_at = _first(rest, self.lost_after)
        return None if lost_at is None else rest[lost_at]

    def lost_after(self, moment: Moment) -> bool:
        """No continuation of this decision keeps all promises, as far as the limits let us look."""
        if self._kept_alone(moment):
            return False
        limit = self.continuations + MAX_CONTINUATIONS
        # how many to let in, round by round; letting in nobody from there on is known to fail
        todo: list[tuple[int, ...]] = [()]
        while todo:
            if not self._can_pass_over or self.continuations >= limit or self.rounds >= MAX_ROUNDS:
                self.complete = False
                return True
            script = todo.pop()
            branch = self._play(moment, script, everyone=True)
            passed = (*script, *(0,) * (branch.at - len(script)))
            for let_in in range(1, branch.newcomers + 1):
                if self._play(moment, (*passed, let_in), everyone=False).kept:
                    return False
            todo += [(*passed, let_in) for let_in in range(branch.newcomers + 1) if branch.newcomers]
        return True

    # --- one continuation

    def _kept_alone(self, moment: Moment) -> bool:
        """The promises made up to here are kept if nobody else is ever let in."""
        try:
            return self._play(moment, (), everyone=False).kept
        except _CannotPassOver:
            self._can_pass_over = False
            return self._kept_unsubmitted(moment)

    def _play(self, moment: Moment, script: Sequence[int], *, everyone: bool) -> _Played:
        """Replay up to the moment's round, go on by `script`, then let in nobody, or everyone until somebody joins."""
        try:
            return self._played(moment, script, everyone)
        except _CannotPassOver:
            raise
        except Exception:
            # a faulty target may crash where the history did not lead it: no promise is kept that way
            return _Played()

    def _played(self, moment: Moment, script: Sequence[int], everyone: bool) -> _Played:
        run = self._begin(moment)
        prompts = dict(run.prompts)
        decided = _decided_by(self._history, moment)
        for number in range(run.most_prefill_rounds):
            limit = script[number] if number < len(script) else None if everyone else 0
            passed_over = _withdraw(run.target, decided, limit)
            record = run.target.run_round()
            self.rounds += 1
            newcomers = [each for each in record.joined if each.kind != "resumed" and each.request not in decided]
            if limit is None and newcomers:
                return _Played(at=number, newcomers=len(newcomers))
            kept = _ending(run, record)
            if kept is not None:
                return _Played(kept)
            for request in passed_over:
                self._submit_again(run.target, request, prompts)
            decided = frozenset()
        return _Played()

    def _begin(self, moment: Moment, without: Collection[str] = ()) -> Replay:
        """A fresh target as it stood before the moment's round; `without` some requests ever having come."""
        self.continuations += 1
        run = Replay(self._history.trace.node, self._history.rules, target=self._history.target)
        for step in self._history.steps[: moment.step]:
            if not (isinstance(step, Submit) and step.request in without):
                run.apply(step)
        self.rounds += len(run.outcome.rounds)
        return run

    def _submit_again(self, target: Target, request: str, prompts: dict[str, Prompt]) -> None:
        """Back at the end of the queue, under a name that the target has not met."""
        name = request
        while name in self._names:
            self._fresh += 1
            name = f"again {self._fresh}"
        self._names.add(name)
        prompts[name] = prompts[request]
        target.submit(name, prompts[request])

    def _kept_unsubmitted(self, moment: Moment) -> bool:
        """For a target that lets go of nobody who waits: whom it may not let in has never come.

        If that changes anything before the decision, the question stays open, and nothing is called lost.
        """
        decided = _decided_by(self._history, moment)
        waiting = [each for each in self._begin(moment).target.snapshot().waiting if each not in decided]
        run = self._begin(moment, without=waiting)
        as_before = zip(run.outcome.rounds, self._history.outcome.rounds, strict=False)
        if any(now.decisions != then.decisions for now, then in as_before):
            return True
        for _ in range(run.most_prefill_rounds):
            kept = _ending(run, run.target.run_round())
            self.rounds += 1
            if kept is not None:
                return kept
        return False


class _CannotPassOver(Exception):
    """The target does not let a waiting request go."""


def _first(moments: Sequence[Moment], holds: Callable[[Moment], bool]) -> int | None:
    """Index of the first moment of which it holds, where it holds of all after that one; by bisection."""
    if not moments or not holds(moments[-1]):
        return None
    low, high = 0, len(moments) - 1
    while low < high:
        middle = (low + high) // 2
        if holds(moments[middle]):
            high = middle
        else:
            low = middle + 1
    return high


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
    if not set(passed_over).isdisjoint(target.snapshot().waiting):
        raise _CannotPassOver
    return passed_over


def _ending(run: Replay, record: RoundRecord) -> bool | None:
    """After a round: all promises are kept, or they never will be, or (None) it goes on, transfers done where due.

    A load that is on its way is something that moves, and a pin goes as soon as nothing else does.
    """
    if record.failure is not None:
        return False
    if all(request.in_flight for request in run.target.snapshot().live):
        return True
    if record.joined or record.loading or record.withdrawn:
        return None
    in_flight = run.target.in_flight()
    for request in in_flight:
        run.target.transferred(request)
    pins = [] if in_flight else list(run.pins)
    for name in pins:
        run.apply(Unpin(name))
    return None if in_flight or pins else False
