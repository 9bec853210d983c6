"""Whatever leaves chunk budget behind a cut, a reserved tail is kept."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from kvledger.node import PrefillNode
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.testing import state_machine
from kvledger.testing.dimensions import swarm
from kvledger.testing.driver import example
from kvledger.testing.reached_residue import BRANCHES
from kvledger.testing.residue_moves import RESIDUE, RESIDUE_SPACE, draw_residue
from kvledger.testing.session import SESSION
from kvledger.testing.unified_moves import UNIFIED_SPACE

if SESSION.rules is None and SESSION.target is PrefillNode:
    Test_residue_0 = state_machine(rules="tail-reserved", space=RESIDUE_SPACE, shard=200).TestCase
    Test_residue_1 = state_machine(rules=AccountingRules(spend_gap=True), space=RESIDUE_SPACE, shard=201).TestCase
    _BESIDE = swarm(UNIFIED_SPACE, [RESIDUE], name="+ decode + residue", examples=100)
    Test_residue_2 = state_machine(rules="tail-reserved", space=_BESIDE, shard=202).TestCase


def test_every_branch_of_it_is_reached() -> None:
    reached: set[str] = set()
    for seed in range(100):
        _, monitor = example(random.Random(seed), PRESETS["tail-reserved"], space=RESIDUE_SPACE)
        assert not monitor.broken
        reached |= set(monitor.reached)
    assert set(BRANCHES) <= reached
    assert RESIDUE_SPACE.asks == BRANCHES


@pytest.mark.parametrize("cause", ["continuation_limit", "chunk_grid"])
def test_the_search_can_fail(cause: str) -> None:
    """The same nodes and moves under such a cause, no checkpoint grid, no tail: some of 300 examples break."""

    def rules(under: AccountingRules, settings: NodeSettings, **_drawn: int) -> AccountingRules:
        switch: dict[str, Any] = {cause: 3 * settings.page_size}
        return replace(under, **switch)

    space = replace(RESIDUE_SPACE, rules=rules)
    broken: list[str] = []
    for seed in range(300):
        _, monitor = example(random.Random(seed), PRESETS["upstream"], space=space)
        broken += [each.invariant for each in monitor.broken]
    assert 0 < broken.count("promises-covered") < 300


def test_nothing_is_drawn_where_the_tail_is_not_safe() -> None:
    settings = RESIDUE_SPACE.settings(**{name: high for name, (_, high) in RESIDUE_SPACE.domains.items()})
    assert draw_residue(PRESETS["aligned"], settings, limit=2, cell=3) == PRESETS["aligned"]
