"""How soon the search finds the crash by itself: `python benchmarks/bench_seeds.py [SEEDS] [EXAMPLES]`.

Under the rules that crashed, from each seed: examples and seconds until a broken invariant, and until it is small.
"""

from __future__ import annotations

import statistics
import sys

from kvledger.testing.search import search
from kvledger.trace import dumps


def main(seeds: int = 20, examples: int = 2000) -> int:
    """Print a row a seed and the median and worst; 1 if a seed found nothing."""
    print("seed  examples  seconds  shrink  replays  events  invariant")
    found = []
    traces: dict[str, int] = {}
    for seed in range(seeds):
        one = search("aligned", examples=examples, seed=seed, driven_per_example=0).found
        if one is None:
            print(f"{seed:4}  nothing in {examples} examples")
            return 1
        found.append(one)
        text = dumps(one.trace)
        traces[text] = traces.get(text, 0) + 1
        print(
            f"{seed:4}  {one.example:8}  {one.seconds:7.2f}  {one.shrink_seconds:6.2f}  {one.replays:7}  "
            f"{len(one.trace.events):6}  {one.invariant}"
        )
    numbers = [one.example for one in found]
    seconds = [one.seconds + one.shrink_seconds for one in found]
    print(f"examples: median {statistics.median(numbers):.0f}, worst {max(numbers)}")
    print(f"seconds, shrunk: median {statistics.median(seconds):.2f}, worst {max(seconds):.2f}")
    print(f"distinct shrunk traces: {len(traces)}, the commonest from {max(traces.values())} of {seeds} seeds")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
