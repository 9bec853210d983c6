"""The Hypothesis state machine over any target: the moves as rules, every invariant asked after every event.

`state_machine(...)` makes a class of its own for each configuration, and each shard is one more class: `pytest -n auto`
hands out test items, and two machines of one source would otherwise run identical cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis import target as towards
from hypothesis.control import current_build_context
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvledger.invariants import INVARIANTS, Invariant
from kvledger.node import PrefillNode
from kvledger.replay import Replay, TargetFactory
from kvledger.rules import PRESETS, AccountingRules
from kvledger.testing.driver import finish, trace_of
from kvledger.testing.moves import MOVES, NODE_DOMAINS, RULES_DOMAINS, Domain, Move, World, draw_rules, draw_settings
from kvledger.testing.reached import SearchMonitor
from kvledger.trace import Trace


class InvariantBroken(AssertionError):
    """An invariant does not hold. Each invariant has a subclass, so that shrinking keeps to the one it found."""


def _broken_class(name: str) -> type[InvariantBroken]:
    return type(name, (InvariantBroken,), {})


_BROKEN: Mapping[str, type[InvariantBroken]] = {invariant.name: _broken_class(invariant.name) for invariant in INVARIANTS}


class AdmissionMachine(RuleBasedStateMachine):
    """One experiment. Subclasses say what is under test; `observe` is told of each that ends, failed or not."""

    rules_name: ClassVar[str]
    accounting: ClassVar[AccountingRules]
    target_factory: ClassVar[TargetFactory]
    asked: ClassVar[tuple[Invariant, ...]] = INVARIANTS
    observe: ClassVar[Callable[[AdmissionMachine], None] | None] = None
    save: ClassVar[Callable[[Trace, str], object] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.monitor = SearchMonitor(self.asked)

    def begin(self, **drawn: int) -> None:
        settings = draw_settings(**{name: drawn[name] for name in NODE_DOMAINS})
        rules = draw_rules(self.accounting, settings, **{name: drawn[name] for name in RULES_DOMAINS})
        self.world = World(Replay(settings, rules, target=self.target_factory, monitor=self.monitor))

    def act(self, action: tuple[Move, dict[str, int]]) -> None:
        move, arguments = action
        assert self.world is not None, "initialize rules come first"
        self.world.apply(move.make(self.world, **arguments))
        self._judge()

    def teardown(self) -> None:
        if self.world is None:
            return
        healthy = not self.monitor.broken
        finish(self.world)
        self.monitor.finished(self.world.replay.outcome)
        if self.monitor.least_slack_pages is not None:
            pool_pages = self.world.settings.pool_pages
            towards(-self.monitor.least_slack_pages / pool_pages, label="nearness to out of memory")
        if self.observe is not None:
            type(self).observe(self)  # type: ignore[misc]
        if self.save is not None and self.monitor.broken and current_build_context().is_final:
            type(self).save(self.trace(), self.monitor.broken[0].invariant)  # type: ignore[misc]
        if healthy:
            self._judge()

    def trace(self) -> Trace:
        """What happened, as a trace under the rules it happened under."""
        assert self.world is not None
        rules = self.world.replay.rules
        name: AccountingRules | str = self.rules_name if rules == PRESETS.get(self.rules_name) else rules
        first = self.monitor.broken[0] if self.monitor.broken else None
        return trace_of(self.world, name, f"{first.invariant}: {first.message}" if first else "")

    def _judge(self) -> None:
        if self.monitor.broken:
            first = self.monitor.broken[0]
            raise _BROKEN[first.invariant](f"round {first.round}: {first.message}")


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
    target: TargetFactory = PrefillNode,
    *,
    rules: str | AccountingRules = "tail-reserved",
    invariants: Iterable[Invariant] = INVARIANTS,
    moves: Iterable[Move] = MOVES,
    shard: int = 0,
    name: str | None = None,
) -> type[AdmissionMachine]:
    """A machine class that puts `target` under test by `rules` (a preset's name or switches)."""
    rules_name = rules if isinstance(rules, str) else "own rules"
    body: dict[str, Any] = dict(
        rules_name=rules_name,
        accounting=PRESETS[rules] if isinstance(rules, str) else rules,
        target_factory=target if isinstance(target, type) else staticmethod(target),
        asked=tuple(invariants),
        begin=initialize(**strategy({**NODE_DOMAINS, **RULES_DOMAINS}))(AdmissionMachine.begin),
        act=rule(action=actions(tuple(moves)))(AdmissionMachine.act),
        shard=shard,
    )
    return type(name or f"Admission_{rules_name.replace('-', '_')}_{shard}", (AdmissionMachine,), body)
