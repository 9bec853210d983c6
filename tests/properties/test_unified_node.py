"""Decode beside prefill: no admitted prefill is rolled back or fails, whatever decodes, and everybody finishes."""

from __future__ import annotations

import pytest

from kvledger.node import PrefillNode
from kvledger.rules import AccountingRules
from kvledger.testing import state_machine
from kvledger.testing.driver import example
from kvledger.testing.session import SESSION
from kvledger.testing.unified_moves import UNIFIED_SPACE

SHARDS: dict[str, tuple[str | AccountingRules, int]] = {
    "tail_reserved": ("tail-reserved", 2),
    "tail_reserved_and_gap_spent": (AccountingRules(reserve_tail=True, spend_gap=True), 1),
}

if SESSION.rules is None and SESSION.target is PrefillNode:
    for _name, (_rules, _shards) in SHARDS.items():
        for _shard in range(_shards):
            _case = state_machine(rules=_rules, space=UNIFIED_SPACE, shard=100 + _shard).TestCase
            _case.__name__ = _case.__qualname__ = f"Test_{_name}_{_shard}"
            globals()[_case.__name__] = _case
            del _case


@pytest.mark.parametrize("seed", [5728, 1])
def test_the_search_can_fail(seed: int) -> None:
    """Under a rule that lets decode take a reserved tail, some of the same examples break."""
    import random

    rules = AccountingRules(reserve_tail=True, decode_yields=False)
    _, monitor = example(random.Random(seed), rules, space=UNIFIED_SPACE)
    _, sound = example(random.Random(seed), AccountingRules(reserve_tail=True), space=UNIFIED_SPACE)
    assert bool(monitor.broken) is (seed == 5728)
    assert not sound.broken
