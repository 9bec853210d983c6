"""What a smaller trace no longer has of the one it was made from: the same invariant may break for another reason."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvledger.events import Fault, Pause, Pin
from kvledger.rules import PRESETS
from kvledger.trace import Trace

SOUND = PRESETS["tail-reserved"]
SWITCHES = (
    *("reserve_tail", "truncation_align", "continuation_limit", "chunk_grid"),
    *("decode_yields", "rank_view", "replay_gate", "promise_pools"),
)
"""Switches with a side on which something may break; each is sound as `tail-reserved` has it."""
POOLS = ("state_slots", "window_tokens", "shared_bytes")


def lost_causes(before: Trace, after: Trace) -> tuple[str, ...]:
    """In words, what may have been the cause in `before` and is nowhere in `after`: kinds of faulty events, second
    pools, ranks, decode, and switches that `after` has back on their sound side."""
    return tuple(dict.fromkeys(cause for cause in _causes(before) if cause not in set(_causes(after))))


def _causes(trace: Trace) -> Iterator[str]:
    for event in trace.events:
        match event:
            case Fault(kind):
                yield f"fault {kind}"
            case Pin():
                yield "pin"
            case Pause():
                yield "pause"
    yield from (key for key in POOLS if getattr(trace.node, key) is not None)
    if trace.node.ranks:
        yield "ranks"
    if trace.node.mode == "unified":
        yield "decode"
    rules = trace.accounting_rules
    for key in SWITCHES:
        if getattr(rules, key) != getattr(SOUND, key):
            yield f"rules {key}: {json.dumps(getattr(rules, key))}"
