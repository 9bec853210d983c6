"""Each invariant that vllm is held to notices a fault in vllm's own code."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvledger.invariants import INVARIANTS
from kvledger.node import Watcher
from kvledger.rules import PRESETS
from kvledger.settings import NodeSettings
from kvledger.testing.driver import example
from tests.downstream.vllm.faults import FAULTS, Fault, in_place

EXAMPLES = 150


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_is_noticed(fault: Fault, vllm: Any) -> None:
    target = getattr(vllm, fault.target)
    rng = random.Random(0)
    with in_place(fault):
        for _example in range(EXAMPLES):
            _, monitor = example(rng, PRESETS["upstream"], target=target, space=target.space)
            if fault.invariant in {broken.invariant for broken in monitor.broken}:
                return
    pytest.fail(f"{fault.invariant} did not notice it in {EXAMPLES} examples")


def test_no_invariant_is_left_out(vllm: Any) -> None:
    """Whatever a vllm world can be held to has its fault."""
    settings = NodeSettings(
        page_size=4,
        checkpoint_align=4,
        chunked_prefill_size=16,
        max_prefill_tokens=None,
        pool_tokens=48,
        host_tokens=None,
    )
    target = vllm.VllmStrictTarget(settings, PRESETS["upstream"], Watcher())
    asked = {invariant.name for invariant in INVARIANTS if invariant.fits(target.capabilities)}
    assert asked | {invariant.name for invariant in target.invariants} == {fault.invariant for fault in FAULTS}
