"""Forcing a chunk against putting it off, on pipelines: `python benchmarks/bench_shortage.py [TRACES]`.

The same drawn traces under `aligned` that forces, under `aligned` that defers, and under `tail-reserved`, where neither
is ever needed. Time to first token is in rounds, from a request's submission to the round that ends its prefill, of
the requests that finish under all three.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvledger.replay import Outcome, replay
from kvledger.rules import PRESETS, AccountingRules
from kvledger.testing.driver import example, trace_of
from kvledger.testing.rank_moves import RANK_SPACE
from kvledger.trace import Trace, TraceError

COLUMNS: dict[str, AccountingRules] = {
    "force": AccountingRules(on_shortage="force"),
    "defer": AccountingRules(on_shortage="defer"),
    "tail-reserved": PRESETS["tail-reserved"],
}


@dataclass
class Column:
    """What became of the traces under one set of rules."""

    forced: int = 0
    deferred: int = 0
    out_of_memory: int = 0
    on_another_rank: int = 0
    stuck: int = 0
    finished: int = 0
    rounds_to_first: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome) -> dict[str, int]:
        """Count one trace; the rounds to the first token of those who finished."""
        decisions = [decision for record in outcome.rounds for decision in record.decisions]
        self.forced += sum(decision.forced for decision in decisions)
        self.deferred += sum(decision.kind == "deferred" for decision in decisions)
        if outcome.failure is not None:
            self.out_of_memory += 1
            self.on_another_rank += outcome.failure.rank > 0
        self.stuck += outcome.stuck is not None
        rounds = dict(rounds_to_first_token(outcome))
        self.finished += len(rounds)
        return rounds


def rounds_to_first_token(outcome: Outcome) -> Iterator[tuple[str, int]]:
    """Each request whose prefill ended, and after how many rounds."""
    submitted = {each.name: each.rounds for each in outcome.happenings if each.what == "submitted"}
    for number, record in enumerate(outcome.rounds, 1):
        if record.failure is None:
            yield from ((d.request, number - submitted[d.request]) for d in record.joined if not d.tail_tokens)


def drawn(traces: int) -> Iterator[Trace]:
    """Pipelines in trouble: of what the search draws, the traces that can happen under all three rules."""
    seed = 0
    while traces:
        world, _ = example(random.Random(seed), PRESETS["tail-reserved"], space=RANK_SPACE)
        seed += 1
        trace = trace_of(world, "tail-reserved", "")
        try:
            for rules in COLUMNS.values():
                replay(trace, rules)
        except TraceError:
            continue  # an outsider takes what is not there under these rules
        traces -= 1
        yield trace


def main(traces: int = 1000) -> int:
    """Print a row a fact, a column a rule."""
    columns = {name: Column() for name in COLUMNS}
    for trace in drawn(traces):
        rounds = {name: columns[name].add(replay(trace, rules)) for name, rules in COLUMNS.items()}
        for rid in set.intersection(*(set(each) for each in rounds.values())):
            for name, column in columns.items():
                column.rounds_to_first.append(rounds[name][rid])
    print(f"{f'{traces} traces':28}" + "".join(f"{name:>16}" for name in columns))
    rows = {
        "forced chunks": [column.forced for column in columns.values()],
        "deferred rounds": [column.deferred for column in columns.values()],
        "out of memory": [column.out_of_memory for column in columns.values()],
        "  of it on a replaying rank": [column.on_another_rank for column in columns.values()],
        "stuck": [column.stuck for column in columns.values()],
        "requests finished": [column.finished for column in columns.values()],
        "first token, median rounds": [statistics.median(column.rounds_to_first) for column in columns.values()],
        "first token, p95 rounds": [percentile(column.rounds_to_first, 95) for column in columns.values()],
        "first token, mean rounds": [f"{statistics.mean(column.rounds_to_first):.3f}" for column in columns.values()],
    }
    for name, cells in rows.items():
        print(f"{name:28}" + "".join(f"{cell!s:>16}" for cell in cells))
    print(f"compared: {len(columns['force'].rounds_to_first)} requests that finish under all three")
    return 0


def percentile(values: list[int], percent: int) -> int:
    """The smallest value that so many percent of all do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
