"""What the pictures are drawn from: slack, claims, lanes and waterfalls of a recorded replay."""

from __future__ import annotations

import pytest

from kvledger.monitor import checked_replay
from kvledger.report.lanes import lanes_of
from kvledger.report.pool_picture import claims_of
from kvledger.report.recording import record
from kvledger.report.waterfall import rows_of
from kvledger.rules import PRESETS
from tests.unit.report_cases import CASES, INCIDENT_TRACE, SMALL


@pytest.mark.parametrize("name", CASES)
def test_outcome_is_that_of_a_checked_replay(name):
    assert record(CASES[name]).outcome == checked_replay(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_waterfall_goes_down_to_the_remainders(name):
    recording = record(CASES[name])
    for view in recording.rounds:
        rows, level, figures = rows_of(view, recording.page_size), None, {}
        for row in rows:
            if row.kind == "figure":
                assert level in (None, row.level)
                figures[row.words] = row.level
            else:
                assert level is not None
                assert row.level == level - row.tokens
            level = row.level
        for figure in ("baseline", "cur_rem_tokens", "rem_total_tokens"):
            assert figures[figure] == getattr(view.record, figure)
        assert figures.get("free + evictable at its start", view.begins) == view.begins


def test_lanes():
    lanes = {lane.request: lane for lane in lanes_of(record(SMALL))}
    assert [(stretch.kind, stretch.begins, stretch.ends) for stretch in lanes["a"].stretches] == [
        ("waiting", 0, 5),
        ("in flight", 5, 6),
    ]
    assert lanes["a"].ended == (6, "transferred")
    assert lanes["b"].ended == (8, "aborted")
    assert lanes["big"].ended == (2, "rejected")
    assert lanes["big"].stretches == []
    assert lanes["late"].answers[0].decision.kind == "refused"
    # a transfer of what is not in flight changes nothing
    assert lanes["late"].ended is not None
    assert lanes["late"].ended[0] > 8


def test_lane_of_the_incident():
    lanes = {lane.request: lane for lane in lanes_of(record(INCIDENT_TRACE))}
    assert lanes["1keim"].failed_step == 8
    assert [answer.missing_tokens for answer in lanes["1keim"].answers] == [4992, 2176, 2112, 0]
    assert [answer.ran for answer in lanes["1keim"].answers] == [True, True, True, False]
    assert lanes["xpkq"].state == "in flight"


def test_slack_of_the_incident():
    recording = record(INCIDENT_TRACE)
    assert [(view.begins, view.needed, view.slack) for view in recording.rounds] == [
        (34624, 21376, -2112),
        (2880, 4992, -2112),
        (64, 2176, -2112),
        (0, 2112, -2112),
    ]
    assert claims_of(recording.rounds[0], 64).tokens == 16576 + 2 + 4992
    fixed = record(INCIDENT_TRACE, PRESETS["tail-reserved"])
    assert min(view.slack or 0 for view in fixed.rounds) >= 0
