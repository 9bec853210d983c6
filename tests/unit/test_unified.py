"""The unified node by itself: gates, decode rounds, retraction, mixed batches, preemption, entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from kvledger.events import Abort, Cached, Decode, Drain, Event, Finish, Hold, Round, Submit
from kvledger.monitor import InvariantMonitor, checked_replay
from kvledger.node import PrefillNode
from kvledger.record import RoundRecord
from kvledger.replay import Outcome, Replay
from kvledger.request import Output, Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.trace import Trace
from kvledger.unified import UnifiedNode
from tests.unit.builders import node_settings

RULES = PRESETS["tail-reserved"]


def unified(**changes: Any) -> NodeSettings:
    sizes = {"page_size": 4, "checkpoint_align": 4, "chunked_prefill_size": 16, "pool_tokens": 80, "host_tokens": 0}
    return node_settings(**(sizes | {"mode": "unified"} | changes))


def ask(rid: str, tokens: int, output: int = 1, *, ignore_eos: bool = False, priority: int = 0) -> Submit:
    return Submit(rid, Prompt([(rid.lower(), tokens)]), Output(output, ignore_eos, priority))


def run(events: Sequence[Event], settings: NodeSettings | None = None, rules: AccountingRules = RULES) -> Replay:
    replay = Replay(settings or unified(), rules, monitor=InvariantMonitor())
    for event in events:
        replay.apply(event)
    return replay


def node_of(replay: Replay) -> UnifiedNode:
    assert isinstance(replay.target, UnifiedNode)
    return replay.target


def last(replay: Replay) -> RoundRecord:
    return replay.outcome.rounds[-1]


def healthy(replay: Replay) -> Outcome:
    assert not replay.outcome.broken
    return replay.outcome


# --- which node


def test_the_mode_decides_which_node_is_built() -> None:
    assert type(PrefillNode(unified(), RULES)) is UnifiedNode
    assert type(PrefillNode(node_settings(), RULES)) is PrefillNode
    assert PrefillNode.features < UnifiedNode.features


# --- decode


def test_each_running_request_takes_a_token_and_a_page_when_its_last_is_full() -> None:
    replay = run([ask("A", 7, 4), ask("B", 2, 9), Round()])
    assert (last(replay).decoded, [len(r.pages) for r in node_of(replay).live.values()]) == ((), [2, 1])
    pages = []
    for _ in range(3):
        replay.apply(Round())
        pages.append({r.rid: len(r.pages) for r in node_of(replay).live.values()})
    assert [record.decoded for record in replay.outcome.rounds] == [(), ("A", "B"), ("A", "B"), ("A", "B")]
    assert pages == [{"A": 2, "B": 1}, {"A": 3, "B": 1}, {"B": 2}], "A holds 8, 9 and 10 tokens"
    assert last(replay).finished == ("A",)
    healthy(replay)


def test_one_token_is_made_by_the_prefill_itself() -> None:
    replay = run([ask("A", 7), Round()])
    assert (last(replay).finished, last(replay).decoded, replay.target.has_work) == (("A",), (), False)
    assert last(replay).evictable == 4, "its full page stays cached, its last one is free"


def test_an_output_ends_early() -> None:
    replay = run([ask("A", 7, 9), ask("B", 7, 9), Round(), Finish("A"), Finish("nobody"), Round()])
    assert last(replay).decoded == ("B",)
    replay.apply(Drain())
    assert healthy(replay).verdict == "ok"


def test_a_decode_round_admits_nobody() -> None:
    replay = run([ask("A", 7, 9), Round(), ask("B", 7), Decode()])
    assert (last(replay).decisions, last(replay).decoded, list(node_of(replay).waiting)) == ((), ("A",), ["B"])


def test_a_half_done_request_runs_before_decode_and_is_in_no_decode() -> None:
    replay = run([ask("A", 3, 9), Round(), ask("B", 40, 2), Round(), Round(), Round(), Round()])
    assert [record.decoded for record in replay.outcome.rounds] == [(), (), (), (), ("A", "B")]
    healthy(replay)


def test_a_mixed_batch_has_a_token_of_each_running_request_in_every_budget() -> None:
    replay = run([ask("A", 3, 9), Round(), ask("B", 40, 2), Round()], unified(mixed_chunk=True, max_prefill_tokens=20))
    (decision,) = last(replay).decisions
    assert (decision.end, decision.rem_chunk_tokens, decision.rem_input_tokens) == (12, 3, 7)
    assert last(replay).decoded == ("A",)
    assert [(p.request, p.tokens) for p in last(replay).promises if p.kind == "decode"] == [("A", 1)]
    healthy(replay)


def test_an_empty_queue_does_not_stop_what_is_half_done() -> None:
    replay = run([ask("A", 40), Round(), Round()], unified(max_running_requests=1))
    assert [d.kind for record in replay.outcome.rounds for d in record.decisions] == ["truncated", "resumed"]


# --- request slots


@pytest.mark.parametrize(("slots", "stages", "admitted"), [(None, 1, 3), (2, 1, 2), (4, 2, 2), (5, 3, 1), (3, 3, 1)])
def test_a_stage_has_its_share_of_the_request_slots(slots: int | None, stages: int, admitted: int) -> None:
    settings = unified(max_running_requests=slots, pp_size=stages, chunked_prefill_size=64)
    replay = run([*(ask(rid, 4, 3) for rid in "ABC"), Round()], settings)
    assert len(last(replay).joined) == admitted
    assert last(replay).batch_is_full is (admitted < 3)
    assert not last(replay).refused, "nobody is looked at without a slot"
    replay.apply(Drain())
    assert healthy(replay).verdict == "ok"


def test_the_flag_of_a_full_batch_does_not_stick() -> None:
    replay = run([ask("A", 4, 2), ask("B", 4, 2), Round(), Round(), Round()], unified(max_running_requests=1))
    assert [record.batch_is_full for record in replay.outcome.rounds] == [True, True, False]


# --- retraction


TIGHT = {"pool_tokens": 40, "new_token_ratio_percent": 1}


def tight(*more: Event) -> Replay:
    """Ten pages; A and B, four tokens each, were let in for outputs that they cannot both have."""
    return run([ask("A", 4, 24), Round(), Round(), ask("B", 4, 23), Round(), *more], unified(**TIGHT))


def until_retracted() -> Replay:
    replay = tight()
    for _ in range(40):
        if last(replay).retracted:
            return replay
        replay.apply(Round())
    raise AssertionError("nobody went back")


def test_the_one_with_the_fewest_tokens_goes_back_with_what_it_has() -> None:
    replay = until_retracted()
    assert last(replay).retracted == ("B",)
    generated = node_of(replay).waiting["B"].generated_tokens
    assert node_of(replay).waiting["B"].prompt_tokens == 4 + generated
    assert node_of(replay).retractions == 1
    stayed = node_of(replay).running["A"].generated_tokens - 1  # as it was before this round's token
    assert node_of(replay).ratio.current == min(Fraction(1), Fraction(stayed + 20, 24 + 1))
    replay.apply(Drain())
    assert healthy(replay).verdict == "ok"
    again = [d for record in replay.outcome.rounds for d in record.joined if d.request == "B"]
    assert again[1].prompt_tokens == 4 + generated


def test_a_retracted_request_gives_back_all_its_pages() -> None:
    replay = until_retracted()
    (alone,) = node_of(replay).live.values()
    assert last(replay).free + last(replay).evictable == 40 - 4 * len(alone.pages)


def test_the_last_one_that_cannot_go_on_is_given_up_with_a_reason() -> None:
    replay = run([ask("A", 4, 24), Round(), Hold("x", 32), *[Round()] * 5], unified(**TIGHT))
    aborted = [pair for record in replay.outcome.rounds for pair in record.aborted]
    assert aborted == [
        ("A", "alone on the node but for x, who holds slots from outside, and the pool has no page for its next token")
    ]
    assert not replay.target.has_work
    document = next(record for record in replay.outcome.document()["rounds"] if "aborted" in record)
    assert document["aborted"] == [{"request": "A", "reason": aborted[0][1]}]
    healthy(replay)


def test_no_prompt_finds_the_output_of_a_request_that_was_sent_back() -> None:
    """Nor one whose segment is called what the output is."""
    replay = until_retracted()
    again = next(each for each in node_of(replay).waiting.values() if each.generated_tokens)
    segment, tokens = again.prompt.segments[-1]
    assert tokens == again.generated_tokens
    for name in (str.__str__(segment), again.rid, f"{again.rid}\0output"):
        same = Prompt((*again.prompt.segments[:-1], (name, tokens)))
        assert same.page_keys(1)[:4] == again.prompt.page_keys(1)[:4]
        assert same.page_keys(1)[4] != again.prompt.page_keys(1)[4]
    assert Prompt(again.prompt.segments) == again.prompt
    healthy(replay)


def test_one_that_is_not_alone_waits_for_the_others() -> None:
    """A is the only one that runs, and half-done B holds what it lacks: B will finish and give it back."""
    settings = unified(page_size=1, checkpoint_align=1, chunked_prefill_size=2, pool_tokens=12, mixed_chunk=True,
                       new_token_ratio_percent=1)  # fmt: skip
    replay = run([ask("A", 1, 7), ask("B", 7), Drain()], settings)
    assert [rid for record in replay.outcome.rounds for rid in record.retracted] == ["A"]
    assert healthy(replay).verdict == "ok"
    assert not [pair for record in replay.outcome.rounds for pair in record.aborted]


def test_the_ratio_decays_with_each_decode_round_and_not_with_a_batch() -> None:
    replay = run([ask("A", 4, 9), Round()])
    first = node_of(replay).ratio.current
    replay.apply(Round())
    step = (Fraction(7, 10) - Fraction(98, 1000)) / 600
    assert (first, node_of(replay).ratio.current) == (Fraction(7, 10), Fraction(7, 10) - step)


# --- priority


def test_a_more_important_request_puts_a_running_one_back() -> None:
    settings = unified(schedule_policy="priority", preemption_threshold=0, pool_tokens=64)
    replay = run([ask("A", 16, 30), Round(), Round(), ask("B", 20, 15, priority=1), Round()], settings)
    assert (last(replay).preempted, last(replay).retracted) == (("A",), ())
    assert [d.request for d in last(replay).joined] == ["B"]
    assert node_of(replay).waiting["A"].generated_tokens == 2
    replay.apply(Drain())
    assert healthy(replay).verdict == "ok"


@pytest.mark.parametrize(("threshold", "priority"), [(None, 5), (1, 1), (0, 0), (0, -1)])
def test_nobody_is_put_back_below_the_threshold(threshold: int | None, priority: int) -> None:
    settings = unified(schedule_policy="priority", preemption_threshold=threshold, pool_tokens=64)
    replay = run([ask("A", 20, 30), Round(), Round(), ask("B", 20, 15, priority=priority), Drain()], settings)
    assert not [rid for record in replay.outcome.rounds for rid in record.preempted]
    assert healthy(replay).verdict == "ok"


def test_a_preempted_request_takes_no_token_of_the_batch_with_it() -> None:
    sizes = {"page_size": 1, "checkpoint_align": 1, "chunked_prefill_size": 1, "pool_tokens": 24}
    settings = unified(
        **sizes, schedule_policy="priority", preemption_threshold=0, mixed_chunk=True, new_token_ratio_percent=100
    )
    replay = run([ask("A", 1, 20), Round(), ask("B", 2, 8, priority=1), Round()], settings)
    assert (last(replay).preempted, [d.request for d in last(replay).joined]) == (("A",), ["B"])
    healthy(replay)


@pytest.mark.parametrize("policy", ["lpm", "shortest-prefill-first"])
def test_nobody_waits_for_a_prefix_that_is_kept_for_nobody(policy: str) -> None:
    shared = Prompt([("a", 64)])
    settings = unified(schedule_policy=policy, prefix_cache=False, chunked_prefill_size=64, pool_tokens=512)
    events: list[Event] = [Submit("A", shared), Submit("B", shared), Submit("C", Prompt([("c", 64)])), *[Round()] * 3]
    replay = run(events, settings)
    joined = [[d.request for d in record.joined] for record in healthy(replay).rounds]
    assert joined == [["A"], ["B"], ["C"]]


def test_a_request_slot_is_made_free_too() -> None:
    settings = unified(schedule_policy="priority", preemption_threshold=0, max_running_requests=1)
    replay = run([ask("A", 4, 9), Round(), ask("B", 4, 2, priority=3), Round()], settings)
    assert (last(replay).preempted, [d.request for d in last(replay).joined]) == (("A",), ["B"])
    replay.apply(Drain())
    assert healthy(replay).verdict == "ok"


# --- entry


@pytest.mark.parametrize(
    ("prompt", "output", "fits"), [(10, 4084, False), (10, 4083, True), (4092, 1, True), (4093, 1, False)]
)
def test_what_passes_the_entry_is_admitted_on_an_empty_pool(prompt: int, output: int, fits: bool) -> None:
    """A report's own figures: 10 + 4084 + a page of 2 is the whole pool of 4096."""
    settings = unified(page_size=2, checkpoint_align=2, pool_tokens=4096, chunked_prefill_size=None)
    replay = run([ask("A", prompt, output), Round()], settings)
    assert (not replay.outcome.rejected_at_submit) is fits
    assert len(last(replay).joined) == fits


def test_an_output_beyond_the_clip_is_let_in_for_the_clip_and_comes_back_near_the_limit() -> None:
    """5,000 tokens could never be stored: what is sent back late is still asked for no more than there is."""
    settings = unified(page_size=64, checkpoint_align=64, chunked_prefill_size=4096, pool_tokens=4352)
    replay = run([ask("A", 128, 5000), Round()], settings)
    node = node_of(replay)
    node.running["A"].generated_tokens = 4000
    node._send_back(node.running["A"])
    request = node.waiting["A"]
    need = request.prompt_tokens + min((request.most_new_tokens or 0) - 4000, 4096) + 64
    assert request.most_new_tokens == 4352 - 1 - 64 - 128
    assert need < 4352
    assert len(node.run_round().joined) == 1


@pytest.mark.parametrize("prompt", range(1, 9))
def test_the_simulations_entry_asks_for_what_the_simulation_asks(prompt: int) -> None:
    """Whatever the prompt's last page holds, what is let in is admitted alone."""
    settings = unified(prefix_cache=False, chunked_prefill_size=None)
    most = max(n for n in range(1, 80) if settings.fits_empty_pool(prompt, Output(n, ignore_eos=True)))
    outcome = checked_replay(Trace(settings, "tail-reserved", (ask("A", prompt, most, ignore_eos=True), Drain())))
    assert (outcome.verdict, outcome.rejected_at_submit) == ("ok", [])


# --- without a cache


@pytest.mark.parametrize(("prompt", "align", "fits"), [(129, 4096, False), (128, 4096, True), (129, 128, True)])
def test_a_prompt_that_no_batch_can_hold_is_refused_at_the_entry(prompt: int, align: int, fits: bool) -> None:
    sizes = {"page_size": 1, "checkpoint_align": 1, "chunked_prefill_size": 128, "pool_tokens": 20000}
    rules = AccountingRules(reserve_tail=True, truncation_align=align)
    replay = run([ask("A", prompt, 2), Drain()], unified(**sizes), rules)
    assert bool(replay.outcome.rejected_at_submit) is not fits
    assert healthy(replay).stuck is None


def test_one_that_comes_back_too_long_to_be_cut_is_given_up() -> None:
    sizes = {"page_size": 1, "checkpoint_align": 1, "chunked_prefill_size": 8, "pool_tokens": 30}
    rules = AccountingRules(reserve_tail=True, truncation_align=16)
    asked = [ask("A", 8, 12), ask("B", 8, 12)]
    replay = run([*asked, Drain()], unified(**sizes, new_token_ratio_percent=1), rules)
    given_up = [pair for record in replay.outcome.rounds for pair in record.aborted]
    assert [rid for rid, _ in given_up] == ["B"]
    assert "a cut is a multiple of 16" in given_up[0][1]
    assert healthy(replay).stuck is None


def test_a_share_is_what_is_left_though_the_pool_could_not_hold_it() -> None:
    """4188 tokens of it could be held; the share starts at the clip all the same, and shrinks with the ratio alone."""
    sizes = {"page_size": 1, "checkpoint_align": 1, "pool_tokens": 4200, "chunked_prefill_size": 64}
    replay = run([ask("A", 10, 100_000), Round(), *[Decode()] * 99], unified(**sizes, new_token_ratio_percent=100))
    share = next(entry.tokens for entry in last(replay).promises if entry.kind == "running")
    assert share == math.ceil(4096 * (1 - Fraction(86, 100) * Fraction(98, 600))) == 3521, "shown rounded up"
    healthy(replay)


def test_without_a_cache_nothing_is_kept_and_nothing_found() -> None:
    shared = Prompt([("doc", 16)])
    events: list[Event] = [Cached("device", shared), Submit("A", Prompt([("doc", 16), ("a", 4)])), Round()]
    replay = run(events, unified(prefix_cache=False, chunked_prefill_size=64))
    assert [(d.prefix_tokens, d.tokens) for d in last(replay).decisions] == [(0, 20)]
    assert last(replay).evictable == 16


# --- decode and the tail


def test_decode_yields_to_a_reserved_tail_and_takes_one_that_is_not() -> None:
    settings = unified(page_size=1, checkpoint_align=1, chunked_prefill_size=2, pool_tokens=12, mixed_chunk=True,
                       new_token_ratio_percent=1)  # fmt: skip
    events = (ask("A", 1, 7), ask("B", 7), Drain())
    takes = AccountingRules(reserve_tail=True, decode_yields=False)
    assert checked_replay(Trace(settings, takes, events)).verdict == "tail-spared"
    assert checked_replay(Trace(settings, AccountingRules(spend_gap=True), events)).verdict == "tail-spared"
    outcome = checked_replay(Trace(settings, "tail-reserved", events))
    assert outcome.verdict == "ok"
    assert [rid for record in outcome.rounds for rid in record.retracted] == ["A"]


def test_an_abort_ends_a_running_request() -> None:
    replay = run([ask("A", 7, 9), Round(), Abort("A")])
    assert (node_of(replay).running, node_of(replay).live) == ({}, {})
    healthy(replay)
