"""A vllm world does what the trace says, shows its blocks as they are, and refuses what it has no word for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvledger.events import Abort, Cached, Decode, Drain, Event, Finish, Hold, Release, Round, Submit, Transferred
from kvledger.monitor import InvariantMonitor
from kvledger.replay import EventError, Replay, UnmodelledError
from kvledger.request import Output, Prompt
from kvledger.rules import PRESETS
from kvledger.settings import NodeSettings

PREFILL = NodeSettings(
    page_size=4,
    checkpoint_align=4,
    chunked_prefill_size=16,
    max_prefill_tokens=None,
    pool_tokens=48,
    host_tokens=None,
)
UNIFIED = replace(PREFILL, mode="unified", mixed_chunk=True)


def prompt(*segments: tuple[str, int]) -> Prompt:
    return Prompt(segments)


def run(target: Any, settings: NodeSettings, *events: Event) -> Replay:
    """After the events, with nothing broken."""
    replay = Replay(settings, PRESETS["upstream"], target=target, monitor=InvariantMonitor())
    for event in events:
        replay.apply(event)
    assert not replay.outcome.broken, replay.outcome.broken
    return replay


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"checkpoint_align": 8}, "node.checkpoint_align"),
        ({"state_slots": 3}, "node.state_slots"),
        ({"max_prefill_tokens": 8}, "node.max_prefill_tokens"),
        ({"chunked_prefill_size": None, "max_prefill_tokens": 44}, "node.max_prefill_tokens"),
        ({"mode": "unified"}, "node.mixed_chunk"),
        ({"schedule_policy": "lpm"}, "node.schedule_policy"),
    ],
)
def test_what_it_has_no_word_for_is_refused_by_its_field(change: dict[str, Any], field: str, vllm: Any) -> None:
    with pytest.raises(UnmodelledError) as refused:
        Replay(replace(PREFILL, **change), PRESETS["aligned"], target=vllm.VllmTarget)
    assert refused.value.field == field


def test_the_null_block_is_nobody_s(vllm: Any) -> None:
    replay = run(vllm.VllmTarget, PREFILL)
    snapshot = replay.target.snapshot()
    assert snapshot.released == tuple(range(12))
    assert snapshot.pool_pages == snapshot.baseline_pages == 12


def test_the_entry_asks_the_gate(vllm: Any) -> None:
    replay = run(
        vllm.VllmTarget,
        UNIFIED,
        Submit("A", prompt(("a", 48))),
        Submit("B", prompt(("b", 48)), Output(2)),
        Submit("C", prompt(("c", 47)), Output(2)),
        Drain(),
    )
    assert [rid for rid, _ in replay.outcome.rejected_at_submit] == ["B"]
    assert replay.outcome.verdict == "ok"


def test_a_finished_prompt_keeps_its_blocks_until_transferred(vllm: Any) -> None:
    replay = run(vllm.VllmTarget, PREFILL, Submit("A", prompt(("a", 10))), Round())
    (live,) = replay.target.snapshot().live
    assert (live.rid, live.in_flight, len(live.pages), live.shared_pages) == ("A", True, 3, 2)
    replay.apply(Transferred("A"))
    assert replay.target.snapshot().live == ()
    assert replay.target.snapshot().baseline_pages == 12


def test_a_load_is_done_a_round_later(vllm: Any) -> None:
    shared = ("a", 20)
    replay = run(
        vllm.VllmTarget,
        PREFILL,
        Cached("host", prompt(shared)),
        Submit("A", prompt(shared, ("b", 5))),
        Round(),
        Round(),
        Round(),
    )
    first, second, third = replay.outcome.rounds
    assert first.loading == second.loading == ("A",)
    assert not first.joined and not second.joined
    (decision,) = third.joined
    assert (decision.start, decision.end, decision.load_back, decision.prefix_tokens) == (20, 25, 20, 0)


def test_a_load_that_nobody_waits_for_holds_its_blocks_until_it_is_done(vllm: Any) -> None:
    shared = ("a", 20)
    replay = run(
        vllm.VllmTarget,
        PREFILL,
        Cached("host", prompt(shared)),
        Submit("A", prompt(shared, ("b", 5))),
        Round(),
        Abort("A"),
    )
    assert len(replay.target.snapshot().held) == 5
    replay.apply(Round())
    replay.apply(Round())
    assert replay.target.snapshot().baseline_pages == 12
    assert not replay.outcome.broken


def test_such_a_load_shares_what_was_on_the_device(vllm: Any) -> None:
    """The block that A found is the cache's, and locked until the load is done; only the others are nobody's."""
    shared = ("a", 20)
    replay = run(
        vllm.VllmTarget,
        UNIFIED,
        Cached("device", prompt(("a", 4))),
        Cached("host", prompt(shared)),
        Submit("A", prompt(shared, ("b", 5))),
        Round(),
        Abort("A"),
    )
    snapshot = replay.target.snapshot()
    assert [(page.lock_refs, page.pinned_refs) for page in snapshot.pages()] == [(1, 1)]
    assert len(snapshot.held) == 4
    replay.apply(Drain())
    replay.apply(Round())
    replay.apply(Round())
    assert replay.target.snapshot().baseline_pages == 12
    assert not replay.outcome.broken


def test_the_host_has_room_for_so_many_pages(vllm: Any) -> None:
    small = replace(PREFILL, host_tokens=8)
    replay = run(vllm.VllmTarget, small, Cached("host", prompt(("a", 20))))
    assert replay.target.snapshot().host_pages == 2
    none = replace(PREFILL, host_tokens=0)
    replay = run(vllm.VllmTarget, none, Cached("host", prompt(("a", 20))), Submit("A", prompt(("a", 24))), Round())
    (decision,) = replay.outcome.rounds[0].joined
    assert decision.load_back == 0 and decision.start == 0


def test_what_is_cached_and_locked_stays(vllm: Any) -> None:
    replay = run(
        vllm.VllmTarget,
        PREFILL,
        Cached("device", prompt(("a", 16)), locked=True),
        Cached("device", prompt(("b", 16))),
        Submit("A", prompt(("a", 17))),
        Round(),
    )
    (decision,) = replay.outcome.rounds[0].joined
    assert (decision.start, decision.prefix_tokens) == (16, 16)
    pinned = [page for page in replay.target.snapshot().pages() if page.pinned_refs]
    assert [(page.lock_refs, page.pinned_refs) for page in pinned] == [(2, 1)] * 4


def test_slots_are_held_and_given_back(vllm: Any) -> None:
    replay = run(vllm.VllmTarget, PREFILL, Hold("x", 30), Hold("x", 4))
    assert len(replay.target.snapshot().held) == 9
    with pytest.raises(EventError, match="16 tokens wanted, 12 free"):
        replay.apply(Hold("y", 16))
    replay.apply(Release("x", 8))
    assert len(replay.target.snapshot().held) == 7
    replay.apply(Release("x"))
    assert replay.target.snapshot().free_pages == 12


def test_slots_given_back_in_parts_come_back_in_whole_pages(vllm: Any) -> None:
    replay = run(vllm.VllmTarget, PREFILL, Hold("x", 10), Hold("x", 2))
    left = []
    for _part in range(5):
        replay.apply(Release("x", 3))
        left.append(len(replay.target.snapshot().held))
    assert left == [3, 2, 1, 0, 0]
    assert replay.target.snapshot().free_pages == 12


def test_no_ratio_of_sglang_s_is_counted(vllm: Any) -> None:
    """Whoever stays here when r7 goes back has more of its output than SGLang's books would ever count on."""
    small = replace(UNIFIED, chunked_prefill_size=8, pool_tokens=8)
    run(
        vllm.VllmTarget,
        small,
        Decode(),
        Submit("r1", prompt(("r1", 8)), Output(5)),
        Submit("r2", prompt(("r2", 4)), Output(2)),
        Submit("r3", prompt(("r3", 9)), Output(3)),
        Submit("r4", prompt(("r4", 4)), Output(4)),
        Cached("device", prompt(("r5", 4))),
        Submit("r6", prompt(("r5", 2), ("r6", 6)), Output(8)),
        Round(),
        Submit("r7", prompt(("r7", 1)), Output(4)),
        Submit("r8", prompt(("r8", 12)), Output(2)),
        Drain(),
    )


def test_a_decode_round_lets_nobody_in(vllm: Any) -> None:
    replay = run(
        vllm.VllmTarget,
        UNIFIED,
        Submit("A", prompt(("a", 4)), Output(5)),
        Round(),
        Submit("B", prompt(("b", 4)), Output(5)),
        Decode(),
        Round(),
        Finish("A"),
    )
    _, decode, mixed = replay.outcome.rounds
    assert (decode.joined, decode.decoded) == ((), ("A",))
    assert ([d.request for d in mixed.joined], mixed.decoded) == (["B"], ("A",))
    assert [request.rid for request in replay.target.snapshot().live] == ["B"]


def test_the_larger_priority_goes_first(vllm: Any) -> None:
    replay = run(
        vllm.VllmTarget,
        replace(UNIFIED, schedule_policy="priority"),
        Submit("A", prompt(("a", 16))),
        Submit("B", prompt(("b", 16)), Output(priority=1)),
        Round(),
    )
    assert [d.request for d in replay.outcome.rounds[0].joined] == ["B"]


def test_who_loses_blocks_is_told_apart(vllm: Any) -> None:
    """A and B decode, C is half done: C's prefill is rolled back; without C, B is sent back."""
    a, b = Submit("A", prompt(("a", 11)), Output(3)), Submit("B", prompt(("b", 6)), Output(2))
    replay = run(vllm.VllmTarget, UNIFIED, a, b, Submit("C", prompt(("c", 25))), Drain())
    assert [record.rolled_back for record in replay.outcome.rounds] == [(), (), ("C",), ()]
    target: Any = replay.target
    assert target.rolled_back == 1
    small = replace(UNIFIED, pool_tokens=20)
    replay = run(vllm.VllmTarget, small, a, Submit("B", prompt(("b", 6)), Output(4)), Drain())
    assert ("B",) in [record.retracted for record in replay.outcome.rounds]
    assert not any(record.rolled_back for record in replay.outcome.rounds)


def test_the_gate_of_a_hybrid_model_counts_one_state(vllm: Any) -> None:
    """Prompt 40 of block 4: 10 attention blocks and two states. The gate is content with 11, startup is not."""
    settings = replace(PREFILL, pool_tokens=44)
    submit = Submit("A", prompt(("a", 40)))
    assert run(vllm.VllmAlignTarget, settings, submit).outcome.rejected_at_submit == []
    ((_, reason),) = run(vllm.VllmAlignServedTarget, settings, submit).outcome.rejected_at_submit
    assert "would not start" in reason
    assert run(vllm.VllmAlignServedTarget, PREFILL, submit).outcome.rejected_at_submit == []
