"""The node's own state machine over a real pool, on one executor, and what it did; also a program, for a process apart:

$ python -m tests.properties.device_machine interpret --rules tail-reserved --examples 5 --shard 0
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

from hypothesis.stateful import run_state_machine_as_test

from kvledger.kernels.device_node import DeviceTarget, device_target
from kvledger.rules import AccountingRules
from kvledger.testing import state_machine
from kvledger.testing.machine import AdmissionMachine, InvariantBroken, observing
from kvledger.testing.search import search_settings


def run_machine(
    target: DeviceTarget, rules: str | AccountingRules, *, examples: int, shard: int = 0, seconds: float | None = None
) -> dict[str, Any]:
    """Run `examples` examples (with `seconds`, shard after shard until they are over); what was done, as plain data."""
    worst = 0.0
    done = compared = given_up = 0
    started = time.perf_counter()

    def look(_machine: AdmissionMachine) -> None:
        nonlocal worst, done, compared, given_up
        node = target.last
        assert node is not None
        node.real_slots.check()
        done, compared = done + 1, compared + node.judge.compared
        worst, given_up = max(worst, node.judge.worst_token), given_up + node.real_slots.given_up

    with observing(look):
        while True:
            machine = state_machine(target, rules=rules, space=target.space, shard=shard)
            run_state_machine_as_test(machine, settings=search_settings(examples))
            shard += 1
            if seconds is None or time.perf_counter() - started > seconds:
                break
    return asdict(target.place.counts) | {
        "examples": done,
        "compared": compared,
        "checkpoints_given_up": given_up,
        "worst_token": worst,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("--rules", default="tail-reserved")
    parser.add_argument("--examples", type=int, default=5)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args(argv)
    try:
        done = run_machine(
            device_target(options.device),
            options.rules,
            examples=options.examples,
            shard=options.shard,
            seconds=options.seconds,
        )
    except InvariantBroken as broken:
        print(f"{type(broken).__name__}: {broken}", file=sys.stderr)
        return 1
    print(json.dumps(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
