"""Pipelines: what the deciding rank admits finishes on every rank, in the same batches, whatever reaches whom when."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvledger.node import PrefillNode
from kvledger.rules import AccountingRules
from kvledger.testing import state_machine
from kvledger.testing.driver import example
from kvledger.testing.rank_moves import RANK_SPACE
from kvledger.testing.reached_ranks import BRANCHES
from kvledger.testing.session import SESSION

SHARDS: dict[str, tuple[str | AccountingRules, int]] = {
    "tail_reserved": ("tail-reserved", 2),
    "tail_reserved_and_gap_spent": (AccountingRules(reserve_tail=True, spend_gap=True), 1),
}

if SESSION.rules is None and SESSION.target is PrefillNode:
    for _name, (_rules, _shards) in SHARDS.items():
        for _shard in range(_shards):
            _case = state_machine(rules=_rules, space=RANK_SPACE, shard=300 + _shard).TestCase
            _case.__name__ = _case.__qualname__ = f"Test_{_name}_{_shard}"
            globals()[_case.__name__] = _case
            del _case


@pytest.mark.parametrize(("seed", "breaks"), [(5, True), (2, False)])
def test_the_search_can_fail(seed: int, breaks: bool) -> None:
    """Where rank 0 counts with itself alone, some of the same examples break."""
    own = AccountingRules(reserve_tail=True, rank_view="own")
    _, monitor = example(random.Random(seed), own, space=RANK_SPACE)
    _, sound = example(random.Random(seed), AccountingRules(reserve_tail=True), space=RANK_SPACE)
    assert bool(monitor.broken) is breaks
    assert not sound.broken


def test_a_few_hundred_examples_meet_every_place_where_ranks_differ() -> None:
    met: Counter[str] = Counter()
    for seed in range(150):
        _, monitor = example(random.Random(seed), AccountingRules(reserve_tail=True), space=RANK_SPACE)
        met.update(monitor.reached)
    assert not [branch for branch in BRANCHES if not met[branch]]
