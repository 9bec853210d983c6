"""Our own node and sglang on the same random traces, decision by decision: do the books of one describe the other?

    python -m tests.downstream.sglang_released.agreement 400

Traces are made on our node, under upstream's rules with a drawn split size for cuts, first come, first served; they
hold host tiers, hits, holds, transfers and aborts. What may differ, and why, is in docs/sglang-differences.md.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvledger.adder import AddReqResult
from kvledger.node import PrefillNode
from kvledger.record import Decision, RoundRecord
from kvledger.replay import Outcome, Replay, TargetFactory, replay
from kvledger.rules import PRESETS
from kvledger.targets.sglang.space import SHARED_SPACE
from kvledger.testing.driver import MOVES_PER_EXAMPLE, finish, trace_of
from kvledger.testing.moves import World
from kvledger.trace import Trace, dumps

HIT = "what is cached differs"
"""The one class of difference that is documented: later decisions follow from it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs part: what kind of thing differs, in which round, and both values."""

    what: str
    round: int
    ours: object
    theirs: object


@dataclass(slots=True)
class Agreement:
    """What was compared, up to where two runs part, and where they do."""

    traces: int = 0
    rounds: int = 0
    decisions: int = 0
    differences: list[tuple[Trace, Difference]] = field(default_factory=list)

    def classes(self) -> Counter[str]:
        return Counter(difference.what for _, difference in self.differences)


def random_trace(rng: random.Random) -> Trace:
    """One experiment of the plain driver on our own node."""

    def draw(domains: dict[str, tuple[int, int]]) -> dict[str, int]:
        return {name: rng.randint(low, high) for name, (low, high) in domains.items()}

    settings = SHARED_SPACE.settings(**draw(dict(SHARED_SPACE.domains)))
    rules = SHARED_SPACE.rules(PRESETS["upstream"], settings, **draw(dict(SHARED_SPACE.rules_domains)))
    world = World(Replay(settings, rules, target=PrefillNode))
    moves = rng.sample(SHARED_SPACE.moves, rng.randint(3, len(SHARED_SPACE.moves)))
    for _ in range(rng.randint(4, MOVES_PER_EXAMPLE)):
        move = rng.choice(moves)
        world.apply(move.make(world, **draw(dict(move.domains))))
    finish(world)
    return trace_of(world, rules, "")


def agreement(traces: int, seed: int, theirs: TargetFactory) -> Agreement:
    """Compare so many random traces."""
    rng = random.Random(seed)
    result = Agreement()
    for _ in range(traces):
        trace = random_trace(rng)
        result.traces += 1
        difference = _first_difference(replay(trace), replay(trace, target=theirs), result)
        if difference is not None:
            result.differences.append((trace, difference))
    return result


def _first_difference(ours: Outcome, theirs: Outcome, result: Agreement) -> Difference | None:
    for mine, yours in zip(ours.rounds, theirs.rounds, strict=False):
        difference = _round_difference(mine, yours, result)
        if difference is not None:
            return difference
        result.rounds += 1
    if len(ours.rounds) != len(theirs.rounds):
        return Difference("how many rounds", 0, len(ours.rounds), len(theirs.rounds))
    if ours.verdict != theirs.verdict:
        return Difference("verdict", 0, ours.verdict, theirs.verdict)
    return None


def _round_difference(mine: RoundRecord, yours: RoundRecord, result: Agreement) -> Difference | None:
    decisions = _without_the_last_question(mine, yours)
    for ours, theirs in zip(mine.decisions, decisions, strict=False):
        if _choice(ours) != _choice(theirs):
            same_hit = (ours.prefix_tokens, ours.load_back) == (theirs.prefix_tokens, theirs.load_back)
            what = "decision" if same_hit or ours.request != theirs.request else HIT
            return Difference(what, mine.round, ours, theirs)
        if _books(ours) != _books(theirs):
            return Difference("books", mine.round, ours, theirs)
        result.decisions += 1
    if len(mine.decisions) != len(decisions):
        return Difference("how many decisions", mine.round, mine.decisions, yours.decisions)
    for name in ("budget_state", "batch_is_full", "protected"):
        if getattr(mine, name) != getattr(yours, name):
            return Difference(name, mine.round, getattr(mine, name), getattr(yours, name))
    if mine.free + mine.evictable != yours.free + yours.evictable:
        return Difference("available", mine.round, (mine.free, mine.evictable), (yours.free, yours.evictable))
    if (mine.failure is None) != (yours.failure is None):
        return Difference("failure", mine.round, mine.failure, yours.failure)
    return None


def _without_the_last_question(mine: RoundRecord, yours: RoundRecord) -> Sequence[Decision]:
    """sglang puts one more candidate before an adder that has nothing left, and is told so; our node does not ask."""
    asked_more = len(yours.decisions) == len(mine.decisions) + 1
    if asked_more and mine.joined and yours.decisions[-1].reason is AddReqResult.NO_TOKEN:
        return yours.decisions[:-1]
    return yours.decisions


def _choice(decision: Decision) -> tuple[object, ...]:
    chunk = (decision.start, decision.end) if decision.joined else None
    return decision.request, decision.kind, chunk, decision.load_back, decision.reason


def _books(decision: Decision) -> tuple[object, ...]:
    return decision.baseline, decision.rem_total_tokens, decision.cur_rem_tokens, decision.rem_chunk_tokens


def main(traces: int, seed: int = 0) -> int:
    """Print how many agree, and the first trace of each class of difference."""
    from kvledger.targets.sglang import SglangTarget

    started = time.perf_counter()
    result = agreement(traces, seed, SglangTarget)
    same = result.traces - len(result.differences)
    print(
        f"sglang {SglangTarget.version}: {same} of {result.traces} traces agree to their end; compared {result.rounds} "
        f"rounds and {result.decisions} decisions in {time.perf_counter() - started:.0f} s"
    )
    shown = set()
    for what, count in result.classes().most_common():
        print(f"  {what}: {count}")
    for trace, difference in result.differences:
        if difference.what not in shown:
            shown.add(difference.what)
            print(f"\n{difference.what}, round {difference.round}")
            print(f"  ours   {difference.ours}\n  theirs {difference.theirs}")
            print(dumps(trace))
    return 0 if set(result.classes()) <= {HIT} else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
