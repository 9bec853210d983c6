"""The plain driver: the same moves as the Hypothesis machine, drawn by a seeded `random.Random`, for volume.

It finds and counts; it does not shrink. An example is one node, a few dozen moves and a fair drain at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from kvledger.events import Drain, Release
from kvledger.node import PrefillNode
from kvledger.replay import Replay, TargetFactory
from kvledger.rules import AccountingRules
from kvledger.testing.moves import NODE_SPACE, Domain, Space, World
from kvledger.testing.reached import SearchMonitor
from kvledger.trace import Trace

MOVES_PER_EXAMPLE = 16


def example(
    rng: random.Random,
    rules: AccountingRules,
    *,
    target: TargetFactory = PrefillNode,
    monitor: Callable[[], SearchMonitor] = SearchMonitor,
    space: Space = NODE_SPACE,
) -> tuple[World, SearchMonitor]:
    """One random experiment, carried to its end whatever breaks on the way."""
    drawn = _draw(rng, space.domains)
    settings = space.settings(**drawn)
    watching = monitor()
    drawn_rules = space.rules(rules, settings, **_draw(rng, space.rules_domains))
    world = space.opened(Replay(settings, drawn_rules, target=target, monitor=watching), drawn)
    common = [move for move in space.moves if not move.part]
    moves = rng.sample(common, rng.randint(3, len(common)))
    moves += [move for move in space.moves if move.part in world.parts]  # what an example has is what it is for
    for _ in range(rng.randint(4, MOVES_PER_EXAMPLE)):
        move = rng.choice(moves)
        world.apply(move.make(world, **_draw(rng, move.domains)))
    finish(world, space)
    watching.finished(world.replay.outcome)
    return world, watching


def finish(world: World, space: Space = NODE_SPACE) -> None:
    """Give back what was held, and let everybody finish."""
    space.before_drain(world)
    while world.holds:
        world.apply(Release(world.holds.pop()))
    world.apply(Drain())


def trace_of(world: World, rules: AccountingRules | str, title: str) -> Trace:
    """What happened in this world, as a trace."""
    return Trace(world.settings, rules, tuple(world.events), title)


def _draw(rng: random.Random, domains: Mapping[str, Domain]) -> dict[str, int]:
    return {name: rng.randint(low, high) for name, (low, high) in domains.items()}
