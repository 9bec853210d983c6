"""Runs a mutant against seeded examples until the invariants that are to kill it have broken."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

from kvledger.node import Watcher
from kvledger.replay import Target, TargetFactory
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.testing.driver import example
from kvledger.testing.moves import NODE_SPACE, Space
from kvledger.testing.reached import SearchMonitor
from tests.mutants.mutant import Mutant

LEAST_EXAMPLES = 50
"""So many are run in any case, so that the matrix shows who else sees a mutant."""


SEEDS = 100_000
"""Where the search for nodes that a mutant asks for gives up."""


class NotWorthAnExampleError(BaseException):
    """The node that was drawn is none that the mutant asks for. Not an Exception: it is no fault of a target."""


@dataclass(slots=True)
class Hunt:
    """What became of a mutant: the example, counted from 1, in which each invariant first broke.

    `excused` invariants break on these examples without the mutant too, and say nothing about it. `crashes` counts the
    examples that an exception ended: that is nobody's kill.
    """

    mutant: str
    killers: list[str]
    examples: int = 0
    first_broken: dict[str, int] = field(default_factory=dict)
    excused: list[str] = field(default_factory=list)
    crashes: int = 0
    first_crash: str = ""

    @property
    def killed_by(self) -> frozenset[str]:
        return frozenset(self.first_broken) - frozenset(self.excused)


def hunt(mutant: Mutant, *, most: int, least: int = LEAST_EXAMPLES) -> Hunt:
    """The same examples for every mutant and for its base, until the expected killers have all broken."""
    found = Hunt(mutant.name, sorted(mutant.killers))
    for seed in range(SEEDS):
        settled = found.examples >= least and mutant.killers <= found.killed_by
        if settled or found.examples == most:
            break
        try:
            broken, crash = _broken_with(mutant, seed)
        except NotWorthAnExampleError:
            continue
        found.examples += 1
        found.excused = sorted({*found.excused, *broken_without(mutant.base, mutant.rules, seed, mutant.space)})
        for invariant in broken:
            found.first_broken.setdefault(invariant, found.examples)
        if crash:
            found.crashes += 1
            found.first_crash = found.first_crash or crash
    return found


@cache
def broken_without(
    base: TargetFactory, rules: AccountingRules, seed: int, space: Space = NODE_SPACE
) -> tuple[str, ...]:
    """What the unchanged node breaks on this example. If it crashes, that is a bug, and no business of a mutant."""
    watching = SearchMonitor()
    example(random.Random(seed), rules, target=base, monitor=lambda: watching, space=space)
    return tuple(broken.invariant for broken in watching.broken)


def _broken_with(mutant: Mutant, seed: int) -> tuple[tuple[str, ...], str]:
    """The invariants that broke, and the exception that ended the example before its time, if one did."""

    def build(settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> Target:
        if mutant.narrow is not None and not mutant.narrow(settings):
            raise NotWorthAnExampleError
        return mutant.build(settings, rules, watcher)

    watching = SearchMonitor()
    crash = ""
    try:
        example(random.Random(seed), mutant.rules, target=build, monitor=lambda: watching, space=mutant.space)
    except NotWorthAnExampleError:
        raise
    except Exception as error:  # whatever a mutant runs into
        crash = f"{type(error).__name__}: {error}"
    return tuple(broken.invariant for broken in watching.broken), crash
