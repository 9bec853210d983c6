"""Anything admitted can always finish its prefill: every sound set of rules, in shards that fill the cores."""

from __future__ import annotations

from pathlib import Path
from unittest import TestCase

from hypothesis import seed, settings

from kvledger.rules import PRESETS, AccountingRules
from kvledger.testing.fixtures import save_fixture
from kvledger.testing.machine import state_machine
from kvledger.trace import Trace

REGRESSIONS = Path(__file__).parents[1] / "regressions"

SOUND_RULES: dict[str, str | AccountingRules] = {
    "tail-reserved": "tail-reserved",
    "upstream": "upstream",
    "gap-spent": AccountingRules(spend_gap=True),
    "tail-reserved-and-gap-spent": AccountingRules(reserve_tail=True, spend_gap=True),
}
SHARDS = {"tail-reserved": 4, "upstream": 2, "gap-spent": 1, "tail-reserved-and-gap-spent": 1}


def _save(trace: Trace, invariant: str) -> object:
    return save_fixture(trace, invariant, REGRESSIONS)


def _shard(name: str, shard: int) -> type[TestCase]:
    """A test case of its own class and, where runs must repeat, of its own seed: shards of one source are twins."""
    machine = state_machine(rules=SOUND_RULES[name], shard=shard)
    machine.save = staticmethod(_save)
    if settings.default.derandomize:
        machine = seed(shard)(machine)
    case: type[TestCase] = machine.TestCase
    case.__name__ = case.__qualname__ = f"Test_{name.replace('-', '_')}_{shard}"
    case.__module__ = __name__
    return case


for _name, _shards in SHARDS.items():
    assert _name in SOUND_RULES, f"{_name} has shards, but no rules"
    for _number in range(_shards):
        _case = _shard(_name, _number)
        globals()[_case.__name__] = _case

del _case


def test_every_preset_that_should_be_sound_is_searched() -> None:
    searched = [PRESETS[rules] if isinstance(rules, str) else rules for rules in SOUND_RULES.values()]
    assert PRESETS["upstream"] in searched
    assert PRESETS["tail-reserved"] in searched
    assert set(SHARDS) == set(SOUND_RULES)
