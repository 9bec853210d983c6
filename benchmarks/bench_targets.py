"""What an admission decision costs each scheduler, on the same traces in one run.

    python benchmarks/bench_targets.py [TRACES] [--json]

Timed are the calls in which a scheduler decides (`Entry.deciding`), nothing around them: no allocation, no cache
insert, no snapshot. A scheduler whose package is not installed is left out, by name. Ratios are to our own adder,
within this run.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kvledger.adder import PrefillAdder
from kvledger.replay import replay
from kvledger.rules import PRESETS
from kvledger.targets import find_target
from kvledger.targets.sglang.space import SHARED_SPACE
from kvledger.testing.driver import example, trace_of
from kvledger.trace import Trace, TraceError

TRACES = 100
SPACE = replace(SHARED_SPACE, settings=lambda **drawn: replace(SHARED_SPACE.settings(**drawn), max_prefill_tokens=None))
"""Nodes that every target takes: vLLM has one budget a step."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A target by its registered name, and the methods of its own in which it decides."""

    target: str
    deciding: Callable[[], tuple[tuple[type, str], ...]]
    counts: str


def _ours() -> tuple[tuple[type, str], ...]:
    return (PrefillAdder, "add_one_req"), (PrefillAdder, "add_chunked_req")


def _sglang() -> tuple[tuple[type, str], ...]:
    from kvledger.targets.sglang.versions import installed_engine

    adder = installed_engine().adder_class
    return (adder, "add_one_req"), (adder, "add_chunked_req")


def _vllm() -> tuple[tuple[type, str], ...]:
    from kvledger.targets.vllm.package import Scheduler

    return ((Scheduler, "schedule"),)


ENTRIES: tuple[Entry, ...] = (
    Entry("node", _ours, "decisions of the adder, load-back included"),
    Entry("sglang", _sglang, "decisions of its PrefillAdder, load-back included"),
    Entry("vllm", _vllm, "whole steps of its scheduler: all decisions of a round, and their blocks"),
)


@dataclass(slots=True)
class Cost:
    """Seconds of each deciding call."""

    calls: list[float] = field(default_factory=list)

    @property
    def microseconds(self) -> float:
        return 1e6 * sum(self.calls) / len(self.calls)

    @property
    def median_microseconds(self) -> float:
        return 1e6 * statistics.median(self.calls)


@contextmanager
def timed(methods: tuple[tuple[type, str], ...]) -> Iterator[Cost]:
    """While open, each call of these methods is timed; one inside another counts once."""
    cost = Cost()
    originals = [(owner, name, owner.__dict__[name]) for owner, name in methods]
    for owner, name, original in originals:
        setattr(owner, name, _timing(original, cost))
    try:
        yield cost
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _timing(method: Callable[..., Any], cost: Cost) -> Callable[..., Any]:
    inside = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return method(*args, **kwargs)
        inside = True
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            cost.calls.append(time.perf_counter() - started)
            inside = False

    return call


def random_traces(count: int) -> list[Trace]:
    """Experiments of the plain driver on our own node, under upstream's rules."""
    rng = random.Random(0)
    traces = []
    for _ in range(count):
        world, _ = example(rng, PRESETS["upstream"], space=SPACE)
        traces.append(trace_of(world, world.replay.rules, ""))
    return traces


def measure(entry: Entry, traces: list[Trace]) -> Cost | str:
    """The cost of a target's decisions, or why it is left out."""
    try:
        target = find_target(entry.target)
        methods = entry.deciding()
    except (ImportError, ValueError) as error:
        return str(error)
    replay(traces[0], target=target)
    with timed(methods) as cost:
        for trace in traces:
            # an outsider may find fewer free slots than on our own node: the trace ends there
            with suppress(TraceError):
                replay(trace, target=target)
    return cost


def main(arguments: list[str]) -> int:
    numbers = [int(argument) for argument in arguments if argument.isdigit()]
    traces = random_traces(numbers[0] if numbers else TRACES)
    costs = {entry.target: measure(entry, traces) for entry in ENTRIES}
    ours = costs["node"]
    assert isinstance(ours, Cost), "our own node needs no package"
    if "--json" in arguments:
        shown = {
            name: cost
            if isinstance(cost, str)
            else {
                "calls": len(cost.calls),
                "mean_us": round(cost.microseconds, 2),
                "median_us": round(cost.median_microseconds, 2),
                "ratio": round(cost.microseconds / ours.microseconds, 2),
            }
            for name, cost in costs.items()
        }
        print(json.dumps({"traces": len(traces), "targets": shown}, indent=2))
        return 0
    print(f"{len(traces)} traces; microseconds per deciding call")
    for entry in ENTRIES:
        cost = costs[entry.target]
        if isinstance(cost, str):
            print(f"  {entry.target:8} left out: {cost}")
            continue
        print(
            f"  {entry.target:8} mean {cost.microseconds:8.1f}  median {cost.median_microseconds:8.1f}  "
            f"x{cost.microseconds / ours.microseconds:5.1f}  {len(cost.calls):6} calls  ({entry.counts})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
