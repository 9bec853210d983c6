"""Swarm over dimensions: a space whose examples each draw which parts a node has, and then those parts.

A dimension is one part that a node may have or not, such as a second pool. Its moves are always among the space's, and
do what any node can do (a round) in an example that has not drawn it: nothing is filtered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvledger.events import Event, Round
from kvledger.rules import SOUND_BESIDE_DECODE, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.testing.moves import Domain, Move, Space, World

WHICH = "parts"


@dataclass(frozen=True, eq=False)
class Dimension:
    """One part, of which a search must reach the `branches`.

    `extend(settings, **drawn)` gives a node the part, drawn from `domains`; `rules(rules, settings, **drawn)` draws
    what it leaves open of the rules, from `rules_domains`. `moves` happen only where it was drawn and the node `has`
    it, for not every part goes with every other.
    """

    name: str
    domains: Mapping[str, Domain]
    extend: Callable[..., NodeSettings]
    branches: tuple[str, ...]
    moves: tuple[Move, ...] = ()
    has: Callable[[NodeSettings], bool] = lambda _node: True
    rules_domains: Mapping[str, Domain] = field(default_factory=dict)
    rules: Callable[..., AccountingRules] = lambda rules, _settings: rules


def swarm(
    base: Space,
    dimensions: Sequence[Dimension],
    *,
    name: str,
    examples: int,
    sound: frozenset[str] = SOUND_BESIDE_DECODE,
    always: bool = False,
) -> Space:
    """The `base` space with any subset of `dimensions` in each example; `always`: with all of them."""
    every = 2 ** len(dimensions) - 1

    def chosen(drawn: Mapping[str, int]) -> list[Dimension]:
        return [dimension for bit, dimension in enumerate(dimensions) if drawn[WHICH] >> bit & 1]

    def settings(**drawn: int) -> NodeSettings:
        node = base.settings(**{key: drawn[key] for key in base.domains})
        for dimension in chosen(drawn):
            node = dimension.extend(node, **_own(dimension, dimension.domains, drawn))
        return node

    def rules(under: AccountingRules, node: NodeSettings, **drawn: int) -> AccountingRules:
        under = base.rules(under, node, **{key: drawn[key] for key in base.rules_domains})
        for dimension in dimensions:
            under = dimension.rules(under, node, **_own(dimension, dimension.rules_domains, drawn))
        return under

    return replace(
        base,
        domains={
            **base.domains,
            WHICH: (every if always else 0, every),
            **{_key(each, key): domain for each in dimensions for key, domain in each.domains.items()},
        },
        settings=settings,
        moves=(*base.moves, *(_where_it_is(each, move) for each in dimensions for move in each.moves)),
        rules_domains={
            **base.rules_domains,
            **{_key(each, key): domain for each in dimensions for key, domain in each.rules_domains.items()},
        },
        rules=rules,
        parts=lambda node, **drawn: frozenset(part.name for part in chosen(drawn) if part.has(node)),
        asks=(*(base.asks or ()), *(branch for dimension in dimensions for branch in dimension.branches)),
        name=name,
        examples=examples,
        sound=sound,
    )


def _key(dimension: Dimension, key: str) -> str:
    return f"{dimension.name}_{key}"


def _own(dimension: Dimension, domains: Mapping[str, Domain], drawn: Mapping[str, int]) -> dict[str, int]:
    return {key: drawn[_key(dimension, key)] for key in domains}


def _where_it_is(dimension: Dimension, move: Move) -> Move:
    def make(world: World, **arguments: int) -> Event:
        return move.make(world, **arguments) if dimension.name in world.parts else Round()

    return Move(move.name, move.domains, make, part=dimension.name)
