from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict
from typing import Literal

import pytest

from kvledger.rules import PRESETS, SOUND_BESIDE_DECODE, SOUND_PRESETS, AccountingRules

OFF = {
    "spend_gap": False,
    "truncation_align": None,
    "continuation_limit": None,
    "chunk_grid": None,
    "on_shortage": "force",
    "decode_yields": True,
    "rank_view": "least",
    "replay_gate": "follow",
    "promise_pools": True,
}


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


@pytest.mark.parametrize(("reserve_tail", "decode_yields", "first"), [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 0)])
def test_decode_yields_only_to_a_tail_that_is_reserved(reserve_tail: int, decode_yields: int, first: int) -> None:
    rules = AccountingRules(reserve_tail=bool(reserve_tail), decode_yields=bool(decode_yields))
    assert rules.tail_first is bool(first)


def test_what_is_sound_beside_decode_puts_the_tail_first() -> None:
    assert {name for name in SOUND_PRESETS if PRESETS[name].tail_first} == SOUND_BESIDE_DECODE == {"tail-reserved"}


@pytest.mark.parametrize(
    ("truncation_align", "chunk_grid", "unit"), [(None, None, None), (128, None, 128), (None, 64, 64), (128, 192, 384)]
)
def test_a_fresh_cut_keeps_to_the_split_size_and_the_chunk_grid(
    truncation_align: int | None, chunk_grid: int | None, unit: int | None
) -> None:
    assert AccountingRules(truncation_align=truncation_align, chunk_grid=chunk_grid).cut_unit == unit


def test_what_leaves_chunk_budget_behind_a_cut() -> None:
    upstream = PRESETS["upstream"]
    assert upstream.uses_up_budget
    assert not PRESETS["aligned"].uses_up_budget
    for cause in ("truncation_align", "continuation_limit", "chunk_grid"):
        switched = AccountingRules(checkpoint_align="page_size", **{cause: 64})  # type: ignore[arg-type]
        assert not switched.uses_up_budget, cause
    assert AccountingRules(spend_gap=True, chunk_grid=64).uses_up_budget
