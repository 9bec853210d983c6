from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict
from typing import Literal

import pytest

from kvledger.rules import PRESETS, AccountingRules

OFF = {"spend_gap": False, "truncation_align": None, "on_shortage": "force"}


def test_the_presets_are_the_three_of_the_post_mortem() -> None:
    assert {name: asdict(rules) for name, rules in PRESETS.items()} == {
        "upstream": {"checkpoint_align": "page_size", "reserve_tail": False} | OFF,
        "aligned": {"checkpoint_align": "node", "reserve_tail": False} | OFF,
        "tail-reserved": {"checkpoint_align": "node", "reserve_tail": True} | OFF,
    }


@pytest.mark.parametrize(("checkpoint_align", "grid_tokens"), [("node", 256), ("page_size", 64), (1024, 1024)])
def test_the_grid_is_the_nodes_the_pages_or_its_own(
    checkpoint_align: int | Literal["node", "page_size"], grid_tokens: int
) -> None:
    rules = AccountingRules(checkpoint_align=checkpoint_align)
    assert rules.grid_tokens(page_size=64, node_align=256) == grid_tokens


def test_rules_cannot_be_changed_in_place() -> None:
    with pytest.raises(FrozenInstanceError):
        PRESETS["aligned"].reserve_tail = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        PRESETS["aligned"] = AccountingRules(reserve_tail=True)  # type: ignore[index]


def test_rules_with_equal_switches_are_equal_and_can_be_keys() -> None:
    assert {AccountingRules(reserve_tail=True): 1}[PRESETS["tail-reserved"]] == 1
    assert AccountingRules() != AccountingRules(spend_gap=True)
