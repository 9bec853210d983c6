"""Cost of the search and of the node, as ratios within one run: `python benchmarks/bench_search.py`.

1. Steps per second of the state machine against a machine with the same rules that does nothing.
2. Rounds per second of the node under a plain loop, with and without the invariants.
3. Microseconds of a round that admits one request, with 1, 100 and 10,000 waiting: an admission does not pay for the
   queue.
4. Peak memory after 10,000 and after 100,000 rounds: a node must not remember what is over.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hypothesis import seed
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvledger.events import Hold, Round, Submit, Transferred
from kvledger.monitor import InvariantMonitor
from kvledger.node import PrefillNode
from kvledger.replay import Monitor, Replay
from kvledger.request import Prompt
from kvledger.rules import PRESETS
from kvledger.settings import NodeSettings
from kvledger.testing.machine import actions, observing, state_machine, strategy
from kvledger.testing.moves import MOVES, NODE_DOMAINS, RULES_DOMAINS
from kvledger.testing.search import search_settings

EXAMPLES = 100
SETTINGS = NodeSettings(
    page_size=64,
    checkpoint_align=256,
    chunked_prefill_size=4096,
    max_prefill_tokens=None,
    pool_tokens=64 * 512,
    host_tokens=64 * 512,
)


class EmptyMachine(RuleBasedStateMachine):
    """The same draws, and nothing done with them."""

    steps = 0

    @initialize(**strategy({**NODE_DOMAINS, **RULES_DOMAINS}))
    def begin(self, **_drawn: int) -> None:
        pass

    @rule(action=actions(MOVES))
    def act(self, action: object) -> None:  # noqa: ARG002 - drawn for its cost
        EmptyMachine.steps += 1


def steps_per_second() -> dict[str, float]:
    """The real machine and the empty one, alternating, three runs each; medians."""
    ours, empty = [], []
    for run in range(3):
        machine = state_machine(rules="tail-reserved")
        steps = 0

        def observe(done: object) -> None:
            nonlocal steps
            steps += len(done.world.events)  # type: ignore[attr-defined]

        with observing(observe):
            spent = cpu_seconds(partial(run_machine, machine, run))
        ours.append(steps / spent)
        EmptyMachine.steps = 0
        spent = cpu_seconds(partial(run_machine, EmptyMachine, run))
        empty.append(EmptyMachine.steps / spent)
    return {
        "machine": statistics.median(ours),
        "empty machine": statistics.median(empty),
        "ratio": statistics.median(ours) / statistics.median(empty),
    }


def run_machine(machine: type[RuleBasedStateMachine], seed_number: int) -> None:
    run_state_machine_as_test(seed(seed_number)(machine), settings=search_settings(EXAMPLES))


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def workload(replay: Replay, rounds: int) -> None:
    """A request a round, a third of them on a shared prefix, each transferred two rounds later."""
    for number in range(rounds):
        segments = [("shared", 1024)] if number % 3 == 0 else []
        replay.apply(Submit(f"r{number}", Prompt([*segments, (f"r{number % 64}", 1500)])))
        replay.apply(Round())
        if number >= 2:
            replay.apply(Transferred(f"r{number - 2}"))
            replay.prompts.pop(f"r{number - 2}", None)
            replay.outcome.rounds.clear()


def rounds_per_second(monitor: Callable[[], Monitor], rounds: int = 2000) -> float:
    replay = Replay(SETTINGS, PRESETS["tail-reserved"], monitor=monitor())
    return rounds / cpu_seconds(lambda: workload(replay, rounds))


def admission_microseconds(waiting: int, calls: int = 300) -> float:
    """`add_one_req`, matched and undone each time, for the head of a queue of `waiting`."""
    node = PrefillNode(SETTINGS, PRESETS["tail-reserved"])
    for number in range(waiting):
        node.submit(f"r{number}", Prompt([(f"r{number}", 1500)]))
    head = next(iter(node.waiting.values()))
    seconds = []
    gc.disable()
    for _ in range(calls):
        adder = node._open_books()
        started = time.perf_counter()
        adder.add_one_req(head)
        seconds.append(time.perf_counter() - started)
    gc.enable()
    return statistics.median(seconds) * 1e6


def round_microseconds(waiting: int, rounds: int = 300) -> float:
    """A whole round that admits one request of 1,500 tokens and refuses the next, with `waiting` in the queue."""
    settings = replace(SETTINGS, pool_tokens=64 * 48)
    node = PrefillNode(settings, PRESETS["tail-reserved"])
    for number in range(waiting + rounds):
        node.submit(f"r{number}", Prompt([(f"r{number}", 1500)]))
    seconds = []
    gc.disable()
    for number in range(rounds):
        started = time.perf_counter()
        record = node.run_round()
        seconds.append(time.perf_counter() - started)
        assert [d.request for d in record.joined] == [f"r{number}"], "one request a round"
        node.transferred(f"r{number}")
    gc.enable()
    return statistics.median(seconds) * 1e6


def kept_megabytes(rounds: int) -> float:
    gc.collect()
    tracemalloc.start()
    replay = Replay(SETTINGS, PRESETS["tail-reserved"])
    replay.apply(Hold("somebody", 64))
    workload(replay, rounds)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept / 2**20


def main() -> int:
    report = {
        "steps per CPU second": steps_per_second(),
        "rounds per CPU second": {
            "node": rounds_per_second(Monitor),
            "node with every invariant": rounds_per_second(InvariantMonitor),
        },
        "microseconds per add_one_req, by requests waiting": {
            str(waiting): admission_microseconds(waiting) for waiting in (1, 100, 10_000)
        },
        "microseconds per round, by requests waiting": {
            str(waiting): round_microseconds(waiting) for waiting in (1, 100, 10_000)
        },
        "megabytes kept, by rounds": {str(rounds): kept_megabytes(rounds) for rounds in (10_000, 100_000)},
    }
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
