"""Volume for one space of nodes: `python benchmarks/soak.py parts 5000 [--rules tail-reserved] [--seed 0]`.

Prints what broke, if anything did, how many rounds were run, and how often each branch was met. Exit status 1 if
anything broke.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from kvledger.rules import PRESETS, named_rules
from kvledger.testing.driver import example
from kvledger.testing.faults_moves import FAULTS_SPACE, FAULTS_UNIFIED_SPACE
from kvledger.testing.moves import NODE_SPACE
from kvledger.testing.pools_moves import POOLS_SPACE
from kvledger.testing.rank_moves import RANK_SPACE
from kvledger.testing.residue_moves import RESIDUE_SPACE
from kvledger.testing.swarm_space import SWARM_SPACE
from kvledger.testing.unified_moves import UNIFIED_SPACE

SPACES = {
    "node": NODE_SPACE,
    "decode": UNIFIED_SPACE,
    "residue": RESIDUE_SPACE,
    "pools": POOLS_SPACE,
    "faults": FAULTS_SPACE,
    "decode-faults": FAULTS_UNIFIED_SPACE,
    "ranks": RANK_SPACE,
    "parts": SWARM_SPACE,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", choices=SPACES)
    parser.add_argument("examples", type=int)
    parser.add_argument("--rules", choices=PRESETS, default="tail-reserved")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    space, rules = SPACES[asked.space], named_rules(asked.rules)
    started, rounds, broken = time.perf_counter(), 0, 0
    reached: Counter[str] = Counter()
    for number in range(asked.examples):
        world, monitor = example(random.Random(f"{asked.seed} {number}"), rules, space=space)
        rounds += monitor.rounds
        reached.update(monitor.reached)
        if monitor.broken:
            broken += 1
            first = monitor.broken[0]
            print(f"example {number} ({', '.join(sorted(world.parts)) or 'plain'}): {first.invariant}: {first.message}")
    seconds = time.perf_counter() - started
    print(f"{asked.examples:,} examples, {rounds:,} rounds, {seconds:.0f} s: {broken} broke a promise")
    for branch, times in reached.most_common():
        print(f"{times:>12,}  {branch}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
