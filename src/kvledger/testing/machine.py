"""The Hypothesis state machine over any target: the moves as rules, every invariant asked after every event.

`state_machine(...)` makes a class of its own for each configuration, and each shard is one more class: `pytest -n auto`
hands out test items, and two machines of one source would otherwise run identical cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from hypothesis import event, seed
from hypothesis import strategies as st
from hypothesis import target as towards
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvledger.invariants import INVARIANTS, Invariant
from kvledger.replay import Replay, TargetFactory
from kvledger.rules import PRESETS, AccountingRules
from kvledger.testing.driver import finish, trace_of
from kvledger.testing.moves import NODE_SPACE, Domain, Move, Space, World
from kvledger.testing.profiles import profile_settings
from kvledger.testing.reached import SearchMonitor
from kvledger.testing.session import SESSION
from kvledger.trace import Trace


class InvariantBroken(AssertionError):
    """An invariant does not hold. Each invariant has a subclass, so that shrinking keeps to the one it found."""

    def __init__(self, message: str, machine: AdmissionMachine) -> None:
        super().__init__(message)
        self.machine = machine


@cache
def _broken_class(name: str) -> type[InvariantBroken]:
    return type(name, (InvariantBroken,), {})


@dataclass(frozen=True, slots=True)
class UnderTest:
    """What a machine class searches: a target by these rules, asked these invariants."""

    target: TargetFactory
    rules_name: str
    rules: AccountingRules
    invariants: tuple[Invariant, ...]
    space: Space = NODE_SPACE
    without: frozenset[str] = frozenset()


class AdmissionMachine(RuleBasedStateMachine):
    """One experiment. Subclasses say what is under test; see `observing` for those who want to know of each."""

    under_test: ClassVar[UnderTest]

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.monitor = SearchMonitor(self.under_test.invariants, self.under_test.without)

    def begin(self, **drawn: int) -> None:
        space = self.under_test.space
        of_node = {name: drawn[name] for name in space.domains}
        settings = space.settings(**of_node)
        rules = space.rules(self.under_test.rules, settings, **{name: drawn[name] for name in space.rules_domains})
        self.world = space.opened(Replay(settings, rules, target=self.under_test.target, monitor=self.monitor), of_node)

    def act(self, action: tuple[Move, dict[str, int]]) -> None:
        move, arguments = action
        assert self.world is not None, "initialize rules come first"
        if SESSION.observe:
            event(f"move {move.name}")
        self.world.apply(move.make(self.world, **arguments))
        self._judge()

    def teardown(self) -> None:
        if self.world is None:
            return
        healthy = not self.monitor.broken
        finish(self.world, self.under_test.space)
        self.monitor.finished(self.world.replay.outcome)
        if self.monitor.least_slack_pages is not None:
            pool_pages = self.world.settings.pool_pages
            towards(-self.monitor.least_slack_pages / pool_pages, label="nearness to out of memory")
        if SESSION.observe:
            for branch in self.monitor.reached:
                event(f"met {branch}")
        for observer in _OBSERVERS:
            observer(self)
        if healthy:
            self._judge()

    def trace(self) -> Trace:
        """What happened, as a trace under the rules it happened under."""
        assert self.world is not None
        rules = self.world.replay.rules
        preset = self.under_test.rules_name
        name: AccountingRules | str = preset if rules == PRESETS.get(preset) else rules
        first = self.monitor.broken[0] if self.monitor.broken else None
        return trace_of(self.world, name, f"{first.invariant}: {first.message}" if first else "")

    def _judge(self) -> None:
        if self.monitor.broken:
            first = self.monitor.broken[0]
            raise _broken_class(first.invariant)(f"round {first.round}: {first.message}", self) from self.monitor.crash


_OBSERVERS: list[Callable[[AdmissionMachine], object]] = []


@contextmanager
def observing(observer: Callable[[AdmissionMachine], object]) -> Iterator[None]:
    """While open, `observer` is told of each experiment that ends, failed or not."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def strategy(domains: Mapping[str, Domain]) -> dict[str, st.SearchStrategy[int]]:
    """The domains of a move or a node as Hypothesis strategies."""
    return {name: st.integers(low, high) for name, (low, high) in domains.items()}


@st.composite
def actions(draw: st.DrawFn, moves: tuple[Move, ...]) -> tuple[Move, dict[str, int]]:
    """A move and arguments for it. One rule draws all moves: Hypothesis switches rules off at random, half of them
    in an average example, and an example without submissions or rounds is wasted."""
    move = draw(st.sampled_from(moves))
    return move, {name: draw(strategy) for name, strategy in _strategies(move).items()}


@cache
def _strategies(move: Move) -> Mapping[str, st.SearchStrategy[int]]:
    return strategy(move.domains)


def state_machine(
    target: TargetFactory | None = None,
    *,
    rules: str | AccountingRules | None = None,
    invariants: Iterable[Invariant] = INVARIANTS,
    without: Iterable[str] = (),
    moves: Iterable[Move] | None = None,
    space: Space = NODE_SPACE,
    shard: int = 0,
    name: str | None = None,
) -> type[AdmissionMachine]:
    """A machine class that puts `target` under test by `rules` (a preset's name or switches).

    What is left out comes from the session: the options of pytest, or the project's own node under `tail-reserved`.
    `space` says which nodes are drawn, and which moves unless `moves` does. `without` names invariants that are not
    asked, so that a known hole does not hide the next one; ValueError if there is none of that name.
    """
    target = target or SESSION.target
    rules = rules or SESSION.rules or "tail-reserved"
    rules_name = rules if isinstance(rules, str) else "own rules"
    invariants, without = tuple(invariants), frozenset(without)
    strangers = without - {invariant.name for invariant in invariants}
    if strangers and not hasattr(target, "invariants"):
        raise ValueError(f"{min(strangers)!r} is none of {', '.join(invariant.name for invariant in invariants)}")
    drawn: Any = strategy({**space.domains, **space.rules_domains})
    beginning: Callable[[Any], Any] = initialize(**drawn)
    body = {
        "under_test": UnderTest(
            target, rules_name, PRESETS[rules] if isinstance(rules, str) else rules, invariants, space, without
        ),
        "begin": beginning(AdmissionMachine.begin),
        "act": rule(action=actions(space.moves if moves is None else tuple(moves)))(AdmissionMachine.act),
        "shard": shard,
    }
    name = name or f"Admission_{rules_name.replace('-', '_')}_{shard}"
    machine: type[AdmissionMachine] = type(name, (AdmissionMachine,), body)
    machine.TestCase.settings = profile_settings(SESSION.profile)
    return machine if SESSION.profile == "nightly" else seed(shard)(machine)
