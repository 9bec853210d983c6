"""The Chrome trace: required fields, time that never goes back, slices that nest, counters that are the outcome's."""

from __future__ import annotations

import json
import unicodedata
from itertools import pairwise
from typing import Any

import pytest

from kvledger.events import Round, Submit
from kvledger.ledger import Due
from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode
from kvledger.replay import round_document
from kvledger.report.markup import Name
from kvledger.report.perfetto import BETWEEN_US, PERIOD_US, trace_events
from kvledger.report.recording import record
from kvledger.report.waterfall import due_tokens
from kvledger.trace import Trace
from tests.unit.builders import node_settings, prompt
from tests.unit.report_cases import CASES, HOSTILE_NAMES, INCIDENT_TRACE, SMALL, hostile_trace, long_trace

# by phase, what the trace event format asks for
FIELDS = {
    "M": {"name", "args"},
    "X": {"name", "cat", "ts", "dur", "args"},
    "i": {"name", "cat", "ts", "s", "args"},
    "C": {"name", "ts", "args"},
}
ROUNDS = 0


def document_of(trace: Trace, **options: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads("".join(trace_events(record(trace, **options))))
    return document


def events_of(trace: Trace, **options: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = document_of(trace, **options)["traceEvents"]
    return events


def counter(events: list[dict[str, Any]], name: str) -> list[tuple[int, int]]:
    return [(event["ts"], event["args"]["tokens"]) for event in events if event["ph"] == "C" and event["name"] == name]


@pytest.mark.parametrize("name", CASES)
def test_events_have_the_fields_of_their_phase(name):
    for event in events_of(CASES[name]):
        assert event.keys() >= FIELDS[event["ph"]] | {"pid", "tid", "ts"}
        assert type(event["ts"]) is int
        assert event["ts"] >= 0
        assert isinstance(event["name"], str)
        assert event["name"]
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] > 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "C":
            assert type(event["args"]["tokens"]) is int


@pytest.mark.parametrize("name", CASES)
def test_time_never_goes_back(name):
    times = [event["ts"] for event in events_of(CASES[name])]
    assert all(earlier <= later for earlier, later in pairwise(times))


@pytest.mark.parametrize("name", CASES)
def test_slices_of_a_lane_do_not_overlap(name):
    events = events_of(CASES[name])
    for thread in {event["tid"] for event in events}:
        slices = [event for event in events if event["ph"] == "X" and event["tid"] == thread]
        assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(slices))


@pytest.mark.parametrize("name", CASES)
def test_rounds_last_equally_long_and_carry_the_outcome(name):
    outcome = checked_replay(CASES[name])
    slices = [event for event in events_of(CASES[name]) if event["ph"] == "X" and event["tid"] == ROUNDS]
    assert [event["ts"] for event in slices] == [PERIOD_US * i + BETWEEN_US for i in range(len(outcome.rounds))]
    assert {event["dur"] for event in slices} == {PERIOD_US - BETWEEN_US}
    for event, round_record in zip(slices, outcome.rounds, strict=True):
        figures = {key: value for key, value in round_document(round_record).items() if not isinstance(value, list)}
        assert figures.items() <= event["args"].items()


@pytest.mark.parametrize("name", CASES)
def test_counters_are_the_outcome_s(name):
    outcome, events = checked_replay(CASES[name]), events_of(CASES[name])
    for figure in ("free", "evictable"):
        after = counter(events, figure)
        for index, round_record in enumerate(outcome.rounds):
            assert (PERIOD_US * (index + 1), getattr(round_record, figure)) in after
    starts = [PERIOD_US * index + BETWEEN_US for index in range(len(outcome.rounds))]
    for counter_name, due in (("promised now", Due.NOW), ("promised later", Due.LATER)):
        sums = [due_tokens(round_record, due) for round_record in outcome.rounds]
        assert counter(events, counter_name) == list(zip(starts, sums, strict=True))
    for round_record, start in zip(outcome.rounds, starts, strict=True):
        now, later = (dict(counter(events, f"promised {due}"))[start] for due in Due)
        assert round_record.baseline - now == round_record.cur_rem_tokens
        assert round_record.baseline - now - later == round_record.rem_total_tokens


def test_incident():
    events = events_of(INCIDENT_TRACE)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "rounds", 1: "v9uj", 2: "1keim", 3: "xpkq"}
    lane = [(e["name"], e["ts"], e["dur"], e["args"].get("tokens")) for e in events if e["ph"] == "X" and e["tid"] == 2]
    assert lane == [
        ("waiting", 66, 34, None),
        ("chunk", 100, 900, 2304),
        ("half done", 1000, 100, None),
        ("chunk", 1100, 900, 2816),
        ("half done", 2000, 100, None),
        ("chunk", 2100, 900, 64),
        ("half done", 3000, 100, None),
        ("chunk (failed)", 3100, 900, 2056),
    ]
    other = [
        (e["name"], e["ts"], e["dur"], e["args"].get("tokens")) for e in events if e["ph"] == "X" and e["tid"] == 3
    ]
    assert other == [
        ("waiting", 83, 17, None),
        ("load-back", 100, 200, 15360),
        ("chunk", 300, 700, 185),
        ("in flight", 1000, 3100, None),
    ]
    instants = [(event["name"], event["ts"], event["tid"]) for event in events if event["ph"] == "i"]
    assert instants == [
        ("submitted", 50, 1),
        ("submitted", 66, 2),
        ("submitted", 83, 3),
        ("promises-covered broken", 100, 0),
        ("never-forced broken", 3100, 0),
        ("admitted-finishes broken", 3100, 0),
        ("forced", 3100, 2),
        ("out of memory", 4000, 2),
    ]
    slack = dict(counter(events, "slack"))
    assert [slack[at] for at in (66, 100, 1000, 1100, 3100)] == [34624, -2112, -2112, -2112, -2112]


def test_ends_and_refusals_are_instants():
    instants = [(event["name"], event["args"]["request"]) for event in events_of(SMALL) if event["ph"] == "i"]
    assert ("rejected at submit", "big") in instants
    assert ("transferred", "a") in instants
    assert ("aborted", "b") in instants
    assert ("refused NO_TOKEN", "late") in instants
    refusals = sum(len(round_record.refused) for round_record in checked_replay(SMALL).rounds)
    assert sum(name.startswith("refused") for name, _ in instants) == refusals


def test_deferral_and_stuck_are_instants():
    names = [event["name"] for event in events_of(CASES["deferring"]) if event["ph"] == "i"]
    assert "deferred" in names
    assert "forced" not in names


def test_metadata_says_what_time_means():
    about = document_of(INCIDENT_TRACE, source="i.json")["otherData"]
    assert about["round_us"] == PERIOD_US
    assert "a round is 1000 us: 100 us of events" in about["time"]
    assert (about["source"], about["rules"], about["verdict"]) == ("i.json", "aligned", "oom")


def test_hostile_names():
    written = "".join(trace_events(record(hostile_trace(), source="\udcff\u202e.json")))
    assert written.isascii()
    document = json.loads(written)
    shown = [
        event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M" and "name" in event["args"]
    ]
    assert not [c for c in "".join(shown) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert all(len(name) <= 140 for name in shown)
    assert {Name(name).short for name in HOSTILE_NAMES} <= set(shown)
    whole = {event["args"]["request"] for event in document["traceEvents"] if event["name"] == "submitted"}
    assert set(HOSTILE_NAMES) <= whole
    assert len(written) < 500_000


def test_target_that_shows_no_decisions_has_no_slack():
    class Opaque(PrefillNode):
        capabilities = frozenset({"pages"})

    events = events_of(INCIDENT_TRACE, target=Opaque)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"free", "evictable"}


def test_trace_without_rounds():
    events = events_of(Trace(node_settings(), "aligned", (Submit("a", prompt(("a", 64))),)))
    assert [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"] == [
        ("waiting", 50, 50)
    ]


def test_very_many_events_between_two_rounds_keep_their_order():
    arrivals = [Submit(f"r{number}", prompt((f"r{number}", 64))) for number in range(300)]
    events = events_of(Trace(node_settings(), "aligned", (Round(), *arrivals, Round())))
    submitted = [event for event in events if event["name"] == "submitted"]
    assert [event["args"]["request"] for event in submitted] == [each.request for each in arrivals]
    assert all(PERIOD_US <= event["ts"] < PERIOD_US + BETWEEN_US for event in submitted)


def test_many_rounds_stay_small():
    written = "".join(trace_events(record(long_trace(rounds=400, requests=100))))
    assert len(written) < 1_500_000
