"""Faults: whatever goes wrong outside slows a node; nobody who was admitted fails, and nothing leaks or hangs."""

from __future__ import annotations

import random

import pytest

from kvledger.node import PrefillNode
from kvledger.rules import PRESETS, AccountingRules
from kvledger.testing import state_machine
from kvledger.testing.driver import example
from kvledger.testing.faults_moves import FAULTS_SPACE, FAULTS_UNIFIED_SPACE
from kvledger.testing.moves import Space
from kvledger.testing.session import SESSION

SHARDS: dict[str, tuple[str | AccountingRules, Space, int]] = {
    "tail_reserved": ("tail-reserved", FAULTS_SPACE, 2),
    "tail_reserved_beside_decode": ("tail-reserved", FAULTS_UNIFIED_SPACE, 1),
}

if SESSION.rules is None and SESSION.target is PrefillNode:
    for _name, (_rules, _space, _shards) in SHARDS.items():
        for _shard in range(_shards):
            _case = state_machine(rules=_rules, space=_space, shard=200 + _shard).TestCase
            _case.__name__ = _case.__qualname__ = f"Test_{_name}_{_shard}"
            globals()[_case.__name__] = _case
            del _case


@pytest.mark.parametrize("seed", [49, 1])
def test_the_search_can_fail(seed: int) -> None:
    """Where nobody is admitted behind a cut no tail needs a promise, and what waits for a late load needs one still."""
    _, monitor = example(random.Random(seed), PRESETS["upstream"], space=FAULTS_SPACE)
    _, sound = example(random.Random(seed), PRESETS["tail-reserved"], space=FAULTS_SPACE)
    assert bool(monitor.broken) is (seed == 49)
    assert not sound.broken
