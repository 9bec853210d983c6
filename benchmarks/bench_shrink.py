"""Is the shrunk trace canonical, small and quick? `python benchmarks/bench_shrink.py [SEEDS] [--json]`.

For each kind of failure, the first failing example of every seed is shrunk: how many come to the same trace, its
events, replays and seconds. Then the incident of the post-mortem, which must come to the trace of its kind. A machine
that is busy with other things slows the clock on the wall more than the processor's, so both are given.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvledger.adder import PrefillAdder, PrefillRequest
from kvledger.node import PrefillNode, Watcher
from kvledger.radix import PrefixTree
from kvledger.replay import TargetFactory
from kvledger.request import CachedPage
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.shrink import Shrunk, shrink
from kvledger.testing.driver import example, trace_of
from kvledger.trace import Trace, dumps, load

SEEDS = 30
INCIDENT = Path(__file__).resolve().parents[2] / "shared" / "cases" / "incident-2026-11-02.json"


class PagelessAdder(PrefillAdder):
    """Its gate omits the page that the charge includes."""

    def _needed_tokens(self, req: PrefillRequest) -> int:
        return super()._needed_tokens(req) - self.page_size


class PagelessGateNode(PrefillNode):
    """The node with that gate."""

    def _open_books(self) -> PrefillAdder:
        adder = super()._open_books()
        adder.__class__ = PagelessAdder
        return adder


class TwiceFreeingTree(PrefixTree):
    """A copy of a page that was cached already goes back to the pool twice."""

    def insert(self, parent: CachedPage, keys: Sequence[Hashable], pages: Sequence[int]) -> list[CachedPage]:
        path = super().insert(parent, keys, pages)
        self.pool.free([page for page, cached in zip(pages, path, strict=True) if cached.page != page])
        return path


class TwiceFreeingNode(PrefillNode):
    """The node with that tree."""

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, rules, watcher)
        self.tree = TwiceFreeingTree(self.pool, settings.host_pages)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of failure: the target that has it, the rules it runs by, and the invariant that it breaks first."""

    name: str
    rules: str
    target: TargetFactory
    invariant: str


KINDS = (
    Kind("tail unrecorded", "aligned", PrefillNode, "promises-covered"),
    Kind("gate without its page", "tail-reserved", PagelessGateNode, "gate-covers-charge"),
    Kind("page freed twice", "tail-reserved", TwiceFreeingNode, "conserved"),
)


def failing(kind: Kind, seed: int) -> Trace:
    """The first example of a seed that fails in this way, from its first event to its drain."""
    rng = random.Random(seed)
    while True:
        world, monitor = example(rng, PRESETS[kind.rules], target=kind.target)
        if monitor.broken and monitor.broken[0].invariant == kind.invariant:
            rules = world.replay.rules
            return trace_of(world, kind.rules if rules == PRESETS[kind.rules] else rules, "")


def measured(kind: Kind, seeds: int) -> Iterator[tuple[Shrunk, float]]:
    """What each seed's trace comes to, and the processor seconds it took."""
    for seed in range(seeds):
        trace = failing(kind, seed)
        started = time.process_time()
        yield shrink(trace, target=kind.target), time.process_time() - started


def row(kind: Kind, seeds: int) -> dict[str, Any]:
    """One line of the table."""
    results = list(measured(kind, seeds))
    (canonical, same), *_ = Counter(dumps(shrunk.trace) for shrunk, _ in results).most_common()
    return {
        "kind": kind.name,
        "seeds": seeds,
        "same": same,
        "events": max(len(shrunk.trace.events) for shrunk, _ in results),
        "replays": [f(shrunk.evaluations for shrunk, _ in results) for f in (statistics.median, max)],
        "wall_s": [round(f(shrunk.seconds for shrunk, _ in results), 2) for f in (statistics.median, max)],
        "cpu_s": [round(f(seconds for _, seconds in results), 2) for f in (statistics.median, max)],
        "limited": sum(shrunk.limited for shrunk, _ in results),
        "trace": canonical,
    }


def incident() -> dict[str, Any]:
    """The 121,408 slots of the post-mortem."""
    started = time.process_time()
    shrunk = shrink(load(INCIDENT))
    cpu_s = time.process_time() - started
    return {
        "replays": shrunk.evaluations,
        "wall_s": round(shrunk.seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "tried": dict(shrunk.tried),
        "trace": dumps(shrunk.trace),
    }


def main(arguments: list[str]) -> None:
    """Print the table, the traces and the incident."""
    seeds = next((int(argument) for argument in arguments if argument.isdigit()), SEEDS)
    rows = [row(kind, seeds) for kind in KINDS]
    case = incident()
    case["same_as_searches"] = case["trace"] == rows[0]["trace"]
    if "--json" in arguments:
        print(json.dumps({"kinds": rows, "incident": case}, indent=2))
        return
    print(f"{'kind':24}{'same':>8}{'events':>8}  replays median, max   wall s        cpu s")
    for line in rows:
        same = f"{line['same']}/{line['seeds']}"
        replays = f"{line['replays'][0]:.0f}, {line['replays'][1]}"
        wall, cpu = (f"{line[clock][0]:.2f}, {line[clock][1]:.2f}" for clock in ("wall_s", "cpu_s"))
        limited = f"   {line['limited']} hit a limit" if line["limited"] else ""
        print(f"{line['kind']:24}{same:>8}{line['events']:>8}  {replays:20}   {wall:12}  {cpu:12}{limited}")
    for line in rows:
        print(f"\n{line['kind']}\n{line['trace']}", end="")
    print(
        f"\nthe incident comes to {'the same' if case['same_as_searches'] else 'ANOTHER'} trace as the first kind: ",
        end="",
    )
    print(f"{case['replays']} replays, {case['wall_s']} s ({case['cpu_s']} s of processor time)\n{case['tried']}")


if __name__ == "__main__":
    main(sys.argv[1:])
