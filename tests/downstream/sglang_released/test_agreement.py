"""Our node's books describe sglang's: every decision and every figure, as long as both have the same pages cached."""

from __future__ import annotations

from kvledger.replay import TargetFactory
from tests.downstream.sglang_released.agreement import HIT, agreement


def test_decision_by_decision(sglang: TargetFactory) -> None:
    result = agreement(130, 0, sglang)
    assert set(result.classes()) <= {HIT}, result.classes()
    same = result.traces - len(result.differences)
    assert same >= 100 and result.decisions >= 1000, f"{same} traces agree, {result.decisions} decisions were compared"
