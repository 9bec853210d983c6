from __future__ import annotations

from typing import Any

import pytest

from kvledger.events import Event, Round, Submit
from kvledger.policy import LONGEST_MATCHED_QUEUE, SchedulePolicy, continuation_limit, ordered, victims
from kvledger.replay import Replay
from kvledger.request import Output, Request
from kvledger.rules import PRESETS
from tests.unit.builders import node_settings, prompt


def request(rid: str, *runs: tuple[str, int], priority: int = 0, arrival: int = 0) -> Request:
    return Request(rid, prompt(*(runs or ((rid, 100),))), output=Output(priority=priority), arrival=arrival)


def order(policy: SchedulePolicy, queue: list[Request], hits: dict[str, int] | None = None, page: int = 16) -> str:
    matched = hits or {}
    return " ".join(each.rid for each in ordered(policy, queue, lambda r: matched.get(r.rid, 0), page))


def test_first_come_first_served_is_the_queue_itself() -> None:
    queue = [request("a"), request("b")]
    assert ordered("fcfs", queue, lambda _: pytest.fail("nobody is matched"), 16) is queue


def test_priority_and_then_arrival() -> None:
    queue = [request("a", arrival=3), request("b", arrival=1), request("c", priority=2, arrival=2)]
    assert order("priority", queue) == "c b a"


def test_the_longest_match_first() -> None:
    assert order("lpm", [request("a"), request("b"), request("c")], {"b": 64, "c": 96}) == "c b a"


def test_who_shares_a_prefix_that_another_is_about_to_fill_waits() -> None:
    queue = [request("a", ("doc", 64), ("a", 9)), request("b", ("doc", 64), ("b", 9)), request("c")]
    assert order("lpm", queue) == "a c b"
    assert order("lpm", queue, {"a": 64, "b": 64}) == "a b c", "it is cached already"
    assert order("lpm", [request("a", ("doc", 24), ("a", 9)), request("b", ("doc", 24), ("b", 9))]) == "a b", (
        "too short"
    )


def test_a_long_queue_is_not_matched() -> None:
    queue = [request(f"r{number}") for number in range(LONGEST_MATCHED_QUEUE + 1)]
    assert [*ordered("lpm", queue, lambda _: pytest.fail("nobody is matched"), 16)] == queue


def test_the_least_to_compute_first() -> None:
    queue = [request("a", ("a", 90)), request("b", ("b", 200)), request("c", ("c", 91))]
    assert order("shortest-prefill-first", queue, {"b": 160}) == "b a c"


@pytest.mark.parametrize(
    ("work", "left", "budget", "limit"),
    [
        ([900, 900, 900], 6904, 4096, 1216),
        ([512, 1024], 16384, 4096, 2560),
        ([1], 10000, 4096, 4032),
        ([64], 10000, 4096, 4032),
        ([65], 10000, 4096, 3968),
        ([4032], 10000, 4096, 64),
        ([4033], 10000, 4096, None),  # a page of the half-done one must remain
        ([900, 20000, 900], 16384, 4096, 3136),  # the first that is not shorter ends it
        ([900], 900, 4096, None),
        ([], 900, 4096, None),
        ([64], 900, 127, None),
        ([64], 900, None, None),
        ([10], 900, 100, None),
        ([10], 900, 130, 64),  # a budget that is no whole number of pages
    ],
)
def test_the_continuation_limit(work: list[int], left: int, budget: int | None, limit: int | None) -> None:
    assert continuation_limit(work, left, budget, 64) == limit


def test_the_least_important_goes_first_and_of_equals_the_latest() -> None:
    running: list[Any] = [request("a", priority=1, arrival=1), request("b", arrival=2), request("c", arrival=3)]
    assert [each.rid for each in victims(running, 2, 0)] == ["c", "b", "a"]
    assert [each.rid for each in victims(running, 2, 1)] == ["c", "b"]
    assert [each.rid for each in victims(running, 2, 2)] == []
    assert [each.rid for each in victims(running, 0, 0, low_values_first=True)] == ["a"]


def test_a_prefill_node_serves_by_policy_too() -> None:
    settings = node_settings(schedule_policy="shortest-prefill-first", pool_tokens=6400)
    run = Replay(settings, PRESETS["tail-reserved"])
    events: list[Event] = [Submit("a", prompt(("a", 900))), Submit("b", prompt(("b", 64))), Round()]
    for event in events:
        run.apply(event)
    assert [decision.request for decision in run.outcome.rounds[0].joined] == ["b", "a"]
