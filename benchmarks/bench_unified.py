"""Cost of a unified node with 256 running requests: `python benchmarks/bench_unified.py`.

1. Microseconds of a decode round, with 1, 1,000 and 10,000 requests waiting behind a full batch.
2. Microseconds of a round that admits 1, 16 and 64 of 1,000 waiting requests, and of each admission in it.

What counts are the ratios within one run: a round costs what it admits and who runs, not who waits.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time

from kvledger.node import PrefillNode
from kvledger.request import Output, Prompt
from kvledger.rules import PRESETS
from kvledger.settings import NodeSettings
from kvledger.unified import UnifiedNode

RUNNING = 256
PROMPT = 64
SETTINGS = NodeSettings(
    page_size=16,
    checkpoint_align=16,
    chunked_prefill_size=RUNNING * PROMPT,
    max_prefill_tokens=None,
    pool_tokens=2**20,
    host_tokens=0,
    mode="unified",
    max_running_requests=RUNNING,
)


def filled(waiting: int, settings: NodeSettings = SETTINGS) -> UnifiedNode:
    """A node with 256 running requests of long outputs, and so many waiting."""
    node = PrefillNode(settings, PRESETS["tail-reserved"])
    assert isinstance(node, UnifiedNode)
    for number in range(RUNNING + waiting):
        node.submit(f"r{number}", Prompt([(f"r{number}", PROMPT)]), Output(512))
    node.run_round()
    assert len(node.running) == RUNNING
    return node


def decode_microseconds(waiting: int, rounds: int = 100) -> float:
    """A round in which nobody can be admitted, and 256 requests take a token each."""
    node = filled(waiting)
    return _median_microseconds(node, rounds)


def admitting_microseconds(admitted: int, rounds: int = 20, waiting: int = 1000) -> float:
    """A round that admits so many into as many request slots that have just become free, without decode in it."""
    node = filled(waiting + rounds * admitted)
    seconds = []
    gc.disable()
    for _ in range(rounds):
        for rid in list(node.running)[:admitted]:
            node.finish(rid)
        started = time.process_time()
        record = node.run_round()
        seconds.append(time.process_time() - started)
        assert len(record.joined) == admitted, f"{len(record.joined)} admitted, not {admitted}"
    gc.enable()
    return statistics.median(seconds) * 1e6


def _median_microseconds(node: UnifiedNode, rounds: int) -> float:
    seconds = []
    gc.disable()
    for _ in range(rounds):
        started = time.process_time()
        record = node.run_round()
        seconds.append(time.process_time() - started)
        assert len(record.decoded) == RUNNING, f"{len(record.decoded)} decoded, not {RUNNING}"
    gc.enable()
    return statistics.median(seconds) * 1e6


def main() -> int:
    decode = {waiting: decode_microseconds(waiting) for waiting in (1, 1_000, 10_000)}
    admitting = {admitted: admitting_microseconds(admitted) for admitted in (1, 16, 64)}
    per_admission = (admitting[64] - admitting[1]) / 63
    report = {
        "microseconds per decode round of 256, by requests waiting": decode,
        "ratio of 10,000 waiting to 1": decode[10_000] / decode[1],
        "microseconds per round beside 256 running, by requests admitted of 1,000 waiting": admitting,
        "microseconds per admission": per_admission,
        "microseconds per decoded token": decode[1_000] / RUNNING,
    }
    print(json.dumps(report, indent=2))
    assert decode[10_000] < 2 * decode[1], "a decode round pays for the queue"
    assert admitting[64] < 64 * admitting[1], "an admission costs a whole round"
    return 0


if __name__ == "__main__":
    sys.exit(main())
