"""Nodes of every kind, with any subset of the parts: what was admitted finishes, and nothing leaks or hangs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvledger.node import PrefillNode
from kvledger.rules import PRESETS, AccountingRules
from kvledger.testing import state_machine
from kvledger.testing.dimensions import Dimension
from kvledger.testing.driver import example
from kvledger.testing.faults_moves import FAULTS_SPACE
from kvledger.testing.session import SESSION
from kvledger.testing.swarm_space import DIMENSIONS, RARE, SWARM_SPACE

if SESSION.rules is None and SESSION.target is PrefillNode:
    for _shard in range(2):
        _case = state_machine(rules="tail-reserved", space=SWARM_SPACE, shard=400 + _shard).TestCase
        _case.__name__ = _case.__qualname__ = f"Test_tail_reserved_{_shard}"
        globals()[_case.__name__] = _case
        del _case


def test_each_part_is_drawn_with_and_without_decode_where_they_go_together() -> None:
    drawn: Counter[str] = Counter()
    for seed in range(150):
        world, monitor = example(random.Random(f"parts {seed}"), PRESETS["tail-reserved"], space=SWARM_SPACE)
        assert not monitor.broken
        drawn.update(f"{part} {world.settings.mode}" for part in world.parts)
        drawn["none"] += not world.parts
        assert "ranks" not in world.parts or not world.parts & {"pools", "faults"}
    names = {dimension.name for dimension in DIMENSIONS}
    both = {f"{name} {mode}" for name in names for mode in ("prefill", "unified")} - {"ranks unified"}
    assert set(drawn) == both | {"none"}


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=lambda dimension: dimension.name)
def test_a_part_asks_for_its_branches_by_name(dimension: Dimension) -> None:
    assert SWARM_SPACE.asks is not None
    assert set(dimension.branches) - set(SWARM_SPACE.asks) == set(dimension.branches) & RARE


def test_what_is_rare_in_the_swarm_is_met_where_every_node_has_faults() -> None:
    rare = RARE & {*DIMENSIONS[-1].branches}
    met: set[str] = set()
    for seed in range(2500):
        _, monitor = example(random.Random(f"faults {seed}"), PRESETS["tail-reserved"], space=FAULTS_SPACE)
        met |= set(monitor.reached)
        if rare <= met:
            return
    assert not rare - met


@pytest.mark.parametrize(
    "switches",
    [{"rank_view": "own"}, {"promise_pools": False}, {"reserve_tail": False}, {"decode_yields": False}],
    ids=min,
)
def test_the_search_can_fail(switches: dict[str, object]) -> None:
    """Some example breaks under a rule that is faulty for one part; what only decode needs is the rarest here."""
    faulty = AccountingRules(**{"reserve_tail": True, **switches})  # type: ignore[arg-type]
    for seed in range(3000):
        _, monitor = example(random.Random(f"faulty {seed}"), faulty, space=SWARM_SPACE)
        if monitor.broken:
            return
    raise AssertionError(f"nothing breaks under {faulty}")
