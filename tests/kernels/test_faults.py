"""Each fault of a real pool turns a named invariant red, whoever watches: tables, bits, or float64 alone."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch

from kvledger.kernels.device_node import device_target
from kvledger.monitor import InvariantMonitor
from kvledger.replay import replay
from kvledger.trace import parse
from tests.kernels.faults import FAULTS, MAX_EXAMPLES, WATCHES, hunt, without_bits

pytestmark = pytest.mark.device

RED = {"data-is-right", "no-use-after-free"}


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_shows(name: str, watch: str, record_property) -> None:
    torch.set_num_threads(1)
    examples, broken = hunt(FAULTS[name], **WATCHES[watch])
    record_property("fault", f"{name}: example {examples}: {', '.join(broken)}")
    assert RED & set(broken), f"{name} is not seen in {examples} examples: {broken}"
    assert examples < MAX_EXAMPLES


MOVED = ("load_back_of_the_wrong_page", "load_back_in_the_wrong_order", "past_in_the_wrong_order")
"""Whole pages of the past in other places: what the chunk computes may be right to the last digit."""

LOAD_BACK: dict[str, Any] = {
    "format": "kvledger-trace/1",
    "node": {
        "page_size": 16, "checkpoint_align": 16, "chunked_prefill_size": None, "max_prefill_tokens": None,
        "pool_tokens": 224, "host_tokens": None,
    },
    "rules": "tail-reserved",
    "events": [
        {"event": "cached", "tier": "host", "prompt": [["a", 207]]},
        {"event": "submit", "request": "A", "prompt": [["a", 206]]},
        {"event": "drain"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "interpret"])
@pytest.mark.parametrize("name", [None, *MOVED])
def test_pages_of_the_past_in_other_places_show_in_float64(name: str | None, device: str) -> None:
    if device == "interpret" and find_spec("triton") is None:  # who imports Triton first says whether it interprets
        pytest.skip("no triton")
    target = device_target(device)
    with without_bits(), nullcontext() if name is None else FAULTS[name]():
        outcome = replay(parse(LOAD_BACK, "test"), target=target, monitor=InvariantMonitor())
    assert target.last is not None
    assert target.last.judge.bitwise == 0
    assert outcome.verdict == ("ok" if name is None else "data-is-right")
