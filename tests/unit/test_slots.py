"""State slots: an admission answer, a place for each checkpoint, and what is given up for whom."""

from __future__ import annotations

import json
import random

import pytest

from kvledger.adder import AddReqResult
from kvledger.events import (
    Cached,
    Drain,
    Event,
    Round,
    Submit,
    Transferred,
)
from kvledger.monitor import InvariantMonitor
from kvledger.node import PrefillNode
from kvledger.replay import Outcome, Replay, replay
from kvledger.request import Prompt
from kvledger.rules import PRESETS
from kvledger.settings import NodeSettings
from kvledger.slots import StateSlots
from kvledger.testing.driver import example
from kvledger.testing.moves import NODE_SPACE, Space
from kvledger.trace import Trace, TraceError, dumps, parse

SETTINGS = NodeSettings(
    page_size=16,
    checkpoint_align=32,
    chunked_prefill_size=96,
    max_prefill_tokens=None,
    pool_tokens=1024,
    host_tokens=None,
)


def prompt(*segments: tuple[str, int]) -> Prompt:
    return Prompt(segments)


def with_slots(slots: int | None) -> NodeSettings:
    return NodeSettings(**{name: getattr(SETTINGS, name) for name in NodeSettings.__slots__} | {"state_slots": slots})


def ran(slots: int | None, *events: Event) -> tuple[Outcome, PrefillNode]:
    run = Replay(with_slots(slots), PRESETS["tail-reserved"], monitor=InvariantMonitor())
    for event in events:
        run.apply(event)
    node = run.target
    assert isinstance(node, PrefillNode)
    if node.slots is not None:
        node.slots.check()
    return run.outcome, node


def slots_of(node: PrefillNode) -> StateSlots:
    assert node.slots is not None
    return node.slots


def test_no_slot_is_an_admission_answer() -> None:
    outcome, node = ran(1, Submit("a", prompt(("a", 40))), Submit("b", prompt(("b", 40))), Round())
    (refused,) = outcome.rounds[0].refused
    assert (refused.request, refused.reason, refused.short_of) == ("b", AddReqResult.NO_TOKEN, "state_slots")
    assert outcome.rounds[0].batch_is_full
    assert slots_of(node).free_slots == 0


def test_a_transfer_frees_the_slot_for_the_next() -> None:
    events: list[Event] = [
        Submit("a", prompt(("a", 40))),
        Submit("b", prompt(("b", 40))),
        Round(),
        Transferred("a"),
        Round(),
    ]
    outcome, node = ran(1, *events)
    assert [d.request for d in outcome.rounds[1].joined] == ["b"]
    assert outcome.verdict == "ok"
    assert list(slots_of(node).live) == ["b"]


def test_each_point_of_the_grid_gets_a_slot_and_the_deepest_first() -> None:
    _, node = ran(8, Submit("a", prompt(("a", 70))), Round())
    assert (len(slots_of(node).live), len(slots_of(node).saved)) == (1, 2)
    _, node = ran(2, Submit("a", prompt(("a", 70))), Round())
    cached = {page.serial: depth for depth, page in enumerate(node.live["a"].locked, start=1)}
    assert [cached[serial] for serial in slots_of(node).saved] == [4], "the state after 64 tokens, not the one after 32"


def test_a_prefix_without_its_checkpoint_is_no_hit() -> None:
    first, again = Submit("a", prompt(("a", 70))), Submit("b", prompt(("a", 64), ("b", 9)))
    hit, _ = ran(3, first, Drain(), again, Round())
    assert hit.rounds[-1].joined[0].prefix_tokens == 64
    other = Submit("o", prompt(("o", 200)))
    lost, node = ran(2, first, Drain(), other, Drain(), again, Round())
    assert lost.rounds[-1].joined[0].prefix_tokens == 0
    assert slots_of(node).given_up
    assert lost.verdict == "ok"


def test_the_only_slot_is_taken_over_from_the_hit_itself() -> None:
    first, again = Submit("a", prompt(("a", 70))), Submit("b", prompt(("a", 64), ("b", 9)))
    outcome, node = ran(1, Cached("device", prompt(("a", 64))), again, Drain(), first, Drain())
    assert outcome.rounds[0].joined[0].prefix_tokens == 64
    assert outcome.verdict == "ok"
    assert not slots_of(node).live


def test_a_checkpoint_goes_to_the_host_and_comes_back_with_its_page() -> None:
    events: list[Event] = [Submit("a", prompt(("a", 160))), Drain(), Submit("big", prompt(("big", 950))), Drain()]
    outcome, node = ran(40, *events, Submit("b", prompt(("a", 160), ("b", 9))), Round())
    (decision,) = outcome.rounds[-1].joined
    assert decision.load_back
    assert decision.start == 160
    assert not slots_of(node).on_host & set(slots_of(node).saved)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("rules", ["upstream", "tail-reserved"])
def test_few_slots_break_no_promise(slots: int, rules: str) -> None:
    """The plain driver's experiments on nodes of every kind, drained to the end."""

    def few(**drawn: int) -> NodeSettings:
        sizes = NODE_SPACE.settings(**drawn)
        return NodeSettings(**{n: getattr(sizes, n) for n in NodeSettings.__slots__} | {"state_slots": slots})

    space = Space(NODE_SPACE.domains, few, NODE_SPACE.moves)
    rng = random.Random(slots)
    for _ in range(60):
        world, monitor = example(rng, PRESETS[rules], space=space)
        assert not monitor.broken, monitor.broken
        target = world.replay.target
        assert isinstance(target, PrefillNode)
        slots_of(target).check()


def test_slots_without_end_change_nothing() -> None:
    rng, again = random.Random(3), random.Random(3)
    for _ in range(60):
        plain, _ = example(rng, PRESETS["tail-reserved"])
        space = Space(NODE_SPACE.domains, _many, NODE_SPACE.moves)
        limited, _ = example(again, PRESETS["tail-reserved"], space=space)
        document = limited.replay.outcome.document()
        assert all([pool["name"] for pool in each.pop("pools")] == ["state_slots"] for each in document["rounds"])
        assert document == plain.replay.outcome.document()


def _many(**drawn: int) -> NodeSettings:
    sizes = NODE_SPACE.settings(**drawn)
    return NodeSettings(**{n: getattr(sizes, n) for n in NodeSettings.__slots__} | {"state_slots": 2**20})


# --- in a trace


def document(**node: int | None) -> dict[str, object]:
    sizes = {n: getattr(SETTINGS, n) for n in NodeSettings.__slots__ if n not in ("state_slots", "ranks")}
    return {"format": "kvledger-trace/1", "node": sizes | node, "rules": "tail-reserved", "events": []}


def test_a_trace_without_limit_does_not_name_it() -> None:
    trace = Trace(SETTINGS, "tail-reserved", ())
    assert "state_slots" not in dumps(trace)
    assert parse(document(), "t") == trace == parse(document(state_slots=None), "t")


def test_a_trace_with_a_limit_keeps_it() -> None:
    trace = Trace(with_slots(7), "tail-reserved", ())
    assert json.loads(dumps(trace))["node"]["state_slots"] == 7
    assert parse(json.loads(dumps(trace)), "t") == trace
    assert replay(trace).verdict == "ok"


def test_no_slot_at_all_is_no_node() -> None:
    with pytest.raises(TraceError, match=r"node\.state_slots"):
        parse(document(state_slots=0), "t")
