"""Anything admitted can always finish its prefill: every sound set of rules, in shards that fill the cores.

With `--kvledger-rules NAME` all shards search that preset instead, and with `--kvledger-target` another scheduler.
"""

from __future__ import annotations

import pytest

from kvledger.rules import PRESETS, AccountingRules
from kvledger.testing import state_machine
from kvledger.testing.session import SESSION

SOUND_RULES: dict[str, str | AccountingRules] = {
    "tail_reserved": "tail-reserved",
    "upstream": "upstream",
    "gap_spent": AccountingRules(spend_gap=True),
    "tail_reserved_and_gap_spent": AccountingRules(reserve_tail=True, spend_gap=True),
}
SHARDS = {"tail_reserved": 4, "upstream": 2, "gap_spent": 1, "tail_reserved_and_gap_spent": 1}

if SESSION.rules is not None:
    SOUND_RULES = {SESSION.rules.replace("-", "_"): SESSION.rules}
    SHARDS = dict.fromkeys(SOUND_RULES, sum(SHARDS.values()))

for _name, _shards in SHARDS.items():
    for _shard in range(_shards):
        _case = state_machine(rules=SOUND_RULES[_name], shard=_shard).TestCase
        _case.__name__ = _case.__qualname__ = f"Test_{_name}_{_shard}"
        globals()[_case.__name__] = _case
        del _case


def test_every_sound_preset_is_searched() -> None:
    if SESSION.rules is not None:
        pytest.skip("one preset was asked for")
    searched = [PRESETS[rules] if isinstance(rules, str) else rules for rules in SOUND_RULES.values()]
    assert PRESETS["upstream"] in searched
    assert PRESETS["tail-reserved"] in searched
    assert set(SHARDS) == set(SOUND_RULES)
