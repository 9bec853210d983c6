"""The search can fail: under the rules that crashed it finds the crash by itself, from any seed."""

from __future__ import annotations

import pytest

from kvledger.monitor import checked_replay
from kvledger.rules import PRESETS, SOUND_PRESETS
from kvledger.testing.fixtures import expectations
from kvledger.testing.search import search


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_aligned_rules_break_and_the_fix_holds_on_the_same_trace(seed: int) -> None:
    found = search("aligned", examples=400, seed=seed, driven_per_example=0).found
    assert found is not None, "400 examples under the rules that crashed, and nothing found"
    assert found.invariant == "promises-covered"
    assert checked_replay(found.trace).broken[0].invariant == "promises-covered"
    expect = expectations(found.trace)
    assert expect["tail-reserved"] == "ok"
    assert expect["upstream"] == "ok"


def test_a_search_that_reached_too_little_is_not_as_expected() -> None:
    result = search("tail-reserved", examples=2, seed=0)
    assert result.found is None
    assert result.missing, "two examples cannot have met every branch"
    assert not result.as_expected


def test_the_same_seed_searches_the_same_examples() -> None:
    first, second = (search("upstream", examples=30, seed=7) for _ in range(2))
    assert (first.examples, first.rounds, first.reached) == (second.examples, second.rounds, second.reached)


def test_presets_and_expectations_name_each_other() -> None:
    assert set(PRESETS) >= SOUND_PRESETS
    assert set(PRESETS) - SOUND_PRESETS == {"aligned"}, "the one that crashed is the one that must fail"
