"""The search can fail: under the rules that crashed it finds the crash by itself, from any seed."""

from __future__ import annotations

import pytest

from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode, Watcher
from kvledger.replay import TargetFactory
from kvledger.rules import PRESETS, SOUND_PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.testing.fixtures import expectations
from kvledger.testing.search import NOT_CONFIRMED, search


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


class Computing:
    """A target that stands for one with data: the pure node decides for it. `rules`: those that it obeys itself."""

    def __init__(self, rules: AccountingRules | None = None) -> None:
        self.rules = rules
        self.made = 0

    def __call__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> PrefillNode:
        self.made += 1
        return PrefillNode(settings, self.rules or rules, watcher)

    def lean(self, _invariant: str) -> TargetFactory:
        return PrefillNode


def test_unsound_rules_are_searched_on_paper_and_shown_on_the_target() -> None:
    target = Computing()
    result = search("aligned", examples=60, seed=1, target=target, driven_per_example=0)
    assert result.found is not None
    assert NOT_CONFIRMED not in result.missing
    assert target.made == 1, "the smallest trace, once"
    sound = search("upstream", examples=2, seed=1, target=target, driven_per_example=0)
    assert target.made == 1 + sound.examples, "nothing is to be found: all of it on the target itself"


def test_what_is_broken_on_paper_alone_is_not_as_expected() -> None:
    result = search("aligned", examples=60, seed=1, target=Computing(PRESETS["upstream"]), driven_per_example=0)
    assert result.found is not None
    assert NOT_CONFIRMED in result.missing
    assert not result.as_expected


def test_presets_and_expectations_name_each_other() -> None:
    assert set(PRESETS) >= SOUND_PRESETS
    assert set(PRESETS) - SOUND_PRESETS == {"aligned"}, "the one that crashed is the one that must fail"
