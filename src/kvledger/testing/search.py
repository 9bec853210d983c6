"""The main job: search each preset, expect what it should give, and show what the search has met.

A preset is searched twice. The Hypothesis machine looks for a broken invariant and shrinks what it finds; the plain
driver adds volume and carries each experiment to its end, so that the branches behind a broken promise count too.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode
from kvledger.replay import Broken, TargetFactory
from kvledger.rules import PRESETS
from kvledger.shrink import shrink
from kvledger.testing.driver import MOVES_PER_EXAMPLE, example, trace_of
from kvledger.testing.machine import AdmissionMachine, InvariantBroken, observing, state_machine
from kvledger.testing.moves import NODE_SPACE, Space
from kvledger.testing.reached import expected_branches
from kvledger.trace import Trace

EXAMPLES = NODE_SPACE.examples
DRIVEN_PER_EXAMPLE = 2
"""Plain examples for each of Hypothesis's: several times cheaper, so they bring the volume."""

LEAN_EXAMPLES = 7
"""Times as many, of both kinds, on the lean target that stands for one that computes."""

ON_PAPER = "promises-covered"
NOT_CONFIRMED = "the same on the target itself"

Progress = Callable[[str, int, int], None]
"""Told the preset, the examples so far, and the examples in all."""


@dataclass(slots=True)
class Found:
    """A broken invariant and its smallest trace; `example` is the first that showed it, counted from 1.

    `seconds` until it was found, `shrink_seconds` and `replays` until it was small.
    """

    invariant: str
    message: str
    trace: Trace
    example: int
    seconds: float
    shrink_seconds: float
    replays: int


@dataclass(slots=True)
class SearchResult:
    """What the search of one preset did. `missing` are branches it should have reached and did not; `space` says
    where it searched, if that is not the usual space, which `asks` for branches of its own."""

    rules: str
    sound: bool
    space: str = ""
    asks: tuple[str, ...] | None = None
    examples: int = 0
    rounds: int = 0
    seconds: float = 0.0
    reached: Counter[str] = field(default_factory=Counter)
    missing: tuple[str, ...] = ()
    found: Found | None = None

    @property
    def title(self) -> str:
        return f"{self.rules} {self.space}".strip()

    @property
    def must_reach(self) -> tuple[str, ...]:
        """Branches that it proves nothing without."""
        return expected_branches(PRESETS[self.rules], sound=self.sound) if self.asks is None else self.asks

    @property
    def as_expected(self) -> bool:
        return (self.found is None) == self.sound and not self.missing


def search(
    rules: str,
    *,
    examples: int = EXAMPLES,
    seed: int = 0,
    target: TargetFactory = PrefillNode,
    driven_per_example: int = DRIVEN_PER_EXAMPLE,
    progress: Progress = lambda *_: None,
    space: Space = NODE_SPACE,
) -> SearchResult:
    """Search a preset with `examples` of Hypothesis's examples (fewer once it fails), and plain ones for volume.

    A target that computes may have a lean one that decides the same. Unsound rules are searched there, and longer: what
    they break is broken on paper. The smallest trace must then break the same on the target itself.
    """
    result = SearchResult(rules, rules in space.sound, space.name, space.asks)
    started = time.perf_counter()
    searched = target
    lean = getattr(target, "lean", None)
    if lean is not None and not result.sound:
        searched, examples = lean(ON_PAPER), examples * LEAN_EXAMPLES
    driven = examples * driven_per_example
    total = examples + driven
    _shrinking_search(result, examples, seed, searched, space, lambda done: progress(rules, done, total))
    _driven_search(result, driven, seed, searched, space, lambda done: progress(rules, examples + done, total))
    if space.thorough:
        result.missing = tuple(branch for branch in result.must_reach if not result.reached[branch])
    if searched is not target and result.found is not None:
        broken = checked_replay(result.found.trace, target=target).broken
        if all(one.invariant != result.found.invariant for one in broken):
            result.missing += (NOT_CONFIRMED,)
    result.seconds = time.perf_counter() - started
    return result


def _shrinking_search(
    result: SearchResult,
    examples: int,
    seed_number: int,
    target: TargetFactory,
    space: Space,
    progress: Callable[[int], None],
) -> None:
    """Hypothesis looks for a broken invariant, and our own shrinker makes what it finds small."""
    machine = state_machine(target, rules=result.rules, space=space)
    started = time.perf_counter()
    first: tuple[int, float] | None = None
    failing: AdmissionMachine | None = None

    def observe(run: AdmissionMachine) -> None:
        nonlocal first, failing
        result.examples += 1
        result.rounds += run.monitor.rounds
        result.reached.update(run.monitor.reached)
        if run.monitor.broken:
            first = first or (result.examples, time.perf_counter() - started)
            failing = run
        progress(min(result.examples, examples))

    try:
        with observing(observe):
            run_state_machine_as_test(seed(seed_number)(machine), settings=search_settings(examples))
    except InvariantBroken:
        assert failing is not None and first is not None, "a broken invariant is observed before it is raised"
        result.found = _found(failing.monitor.broken[0], failing.trace(), target, *first)


def _found(broken: Broken, trace: Trace, target: TargetFactory, example: int, seconds: float) -> Found:
    lean = getattr(target, "lean", None)  # a target that computes need not, for a promise that is on paper
    target = lean(broken.invariant) if lean else target
    shrunk = shrink(trace, target=target, invariant=broken.invariant)
    message = checked_replay(shrunk.trace, target=target).broken[0].message
    return Found(broken.invariant, message, shrunk.trace, example, seconds, shrunk.seconds, shrunk.evaluations)


def search_settings(examples: int) -> settings:
    """Settings of a search outside pytest: quiet, without a database, the seed alone decides."""
    return settings(
        max_examples=examples,
        stateful_step_count=MOVES_PER_EXAMPLE,
        phases=(Phase.generate, Phase.target),
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=tuple(HealthCheck),
        verbosity=Verbosity.quiet,
    )


def _driven_search(
    result: SearchResult,
    examples: int,
    seed_number: int,
    target: TargetFactory,
    space: Space,
    progress: Callable[[int], None],
) -> None:
    """Volume by the plain driver; what it finds is kept only if Hypothesis found nothing."""
    rng = random.Random(seed_number)
    started = time.perf_counter()
    for number in range(1, examples + 1):
        world, monitor = example(rng, PRESETS[result.rules], target=target, space=space)
        result.examples += 1
        result.rounds += monitor.rounds
        result.reached.update(monitor.reached)
        if monitor.broken and result.found is None:
            trace = trace_of(world, world.replay.rules, "")
            seconds = time.perf_counter() - started
            result.found = _found(monitor.broken[0], trace, target, result.examples, seconds)
        progress(number)


def document(results: list[SearchResult], paths: Mapping[str, str]) -> dict[str, Any]:
    """The results as JSON; `paths` are the fixtures written, by title."""
    return {
        "as_expected": all(result.as_expected for result in results),
        "results": [
            {
                "rules": result.rules,
                **({"space": result.space} if result.space else {}),
                "expected": "no failure" if result.sound else "a failure",
                "as_expected": result.as_expected,
                "examples": result.examples,
                "rounds": result.rounds,
                "seconds": round(result.seconds, 3),
                "reached": dict(sorted(result.reached.items())),
                "missing": list(result.missing),
                "failure": result.found
                and {
                    "invariant": result.found.invariant,
                    "message": result.found.message,
                    "example": result.found.example,
                    "seconds": round(result.found.seconds, 3),
                    "shrink_seconds": round(result.found.shrink_seconds, 3),
                    "replays": result.found.replays,
                    "events": len(result.found.trace.events),
                    "fixture": paths.get(result.title),
                },
            }
            for result in results
        ],
    }
