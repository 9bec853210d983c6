"""What a sglang world brings along to be held to notices a fault in sglang's own code."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvledger.rules import PRESETS
from kvledger.targets.sglang.space import PLAIN_SPACE
from kvledger.testing.driver import example
from tests.downstream.sglang_released.faults import FAULTS, Fault, in_place

EXAMPLES = 80


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_is_noticed(fault: Fault, sglang: Any) -> None:
    rng = random.Random(0)
    with in_place(fault):
        for _example in range(EXAMPLES):
            _, monitor = example(rng, PRESETS["upstream"], target=sglang, space=PLAIN_SPACE)
            if fault.invariant in {broken.invariant for broken in monitor.broken}:
                return
    pytest.fail(f"{fault.invariant} did not notice it in {EXAMPLES} examples")


def test_no_check_is_left_without_a_fault(sglang: Any) -> None:
    from kvledger.targets.sglang.checks import invariants_of

    assert {invariant.name for invariant in invariants_of(sglang)} <= {fault.invariant for fault in FAULTS}
