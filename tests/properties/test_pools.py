"""Second pools beside the KV pool: nothing that was admitted fails, starves or leaks in any of them."""

from __future__ import annotations

import random

import pytest

from kvledger.node import PrefillNode
from kvledger.rules import AccountingRules
from kvledger.testing import state_machine
from kvledger.testing.driver import example
from kvledger.testing.pools_moves import POOLS_SPACE
from kvledger.testing.session import SESSION

SHARDS: dict[str, tuple[str | AccountingRules, int]] = {
    "tail_reserved": ("tail-reserved", 2),
    "tail_reserved_and_gap_spent": (AccountingRules(reserve_tail=True, spend_gap=True), 1),
}

if SESSION.rules is None and SESSION.target is PrefillNode:
    for _name, (_rules, _shards) in SHARDS.items():
        for _shard in range(_shards):
            _case = state_machine(rules=_rules, space=POOLS_SPACE, shard=200 + _shard).TestCase
            _case.__name__ = _case.__qualname__ = f"Test_{_name}_{_shard}"
            globals()[_case.__name__] = _case
            del _case


@pytest.mark.parametrize(("seed", "pool"), [(5, "state_slots"), (0, "window_pool"), (1, None)])
def test_the_search_can_fail(seed: int, pool: str | None) -> None:
    """Under gates that look at what each pool can give right now, some of the same examples break."""
    faulty, sound = AccountingRules(reserve_tail=True, promise_pools=False), AccountingRules(reserve_tail=True)
    _, monitor = example(random.Random(seed), faulty, space=POOLS_SPACE)
    _, kept = example(random.Random(seed), sound, space=POOLS_SPACE)
    assert [each.message.partition(":")[0] for each in monitor.broken[:1]] == ([pool] if pool else [])
    assert not kept.broken


def test_every_branch_of_second_pools_is_met() -> None:
    from kvledger.testing.reached_pools import BRANCHES

    met: set[str] = set()
    for seed in range(400):
        _, monitor = example(random.Random(seed), AccountingRules(reserve_tail=True), space=POOLS_SPACE)
        met |= set(monitor.reached)
        if met >= set(BRANCHES):
            return
    assert not set(BRANCHES) - met
