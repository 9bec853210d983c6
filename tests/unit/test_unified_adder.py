"""The adder beside decode. Figures of the first part are upstream's own published ones, on pages of one token."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvledger.adder import AddReqResult
from kvledger.rules import AccountingRules
from kvledger.unified_adder import UnifiedAdder
from tests.unit.builders import refusal

CONTINUE, NO_TOKEN, OTHER = AddReqResult.CONTINUE, AddReqResult.NO_TOKEN, AddReqResult.OTHER


@dataclass(eq=False)
class Req:
    rid: str
    max_new_tokens: int
    prompt_tokens: int = 0
    priority: int = 0
    prefix_tokens: int = 0
    host_hit_tokens: int = 0
    generated_tokens: int = 0
    ignore_eos: bool = False


@dataclass
class Batch:
    reqs: list[Req]


@dataclass
class Pool:
    available: int = 0
    evictable: int = 0
    disable: bool = False
    released: list[str] = field(default_factory=list)

    def available_size(self) -> int:
        return self.available

    def full_evictable_size(self) -> int:
        return self.evictable


THREE = [Req("run1", 50, priority=0), Req("run2", 75, priority=1), Req("run3", 100, priority=2)]
FIVE = [*THREE, Req("run4", 125, priority=2), Req("run4", 125, priority=2)]


def adder(pool: Pool, running: list[Req], page: int = 1, ratio: float = 1.0, **options: Any) -> UnifiedAdder:
    return UnifiedAdder(
        page, pool, pool, Batch(running), ratio, options.pop("rem_input_tokens", 10000), **options,
        release=lambda req: pool.released.append(req.rid),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("running", "low_first", "available", "newcomer", "back", "offset"),
    [
        (THREE, False, 225, Req("new", 49, priority=1), ["run1"], 175),
        (THREE, True, 225, Req("new", 49, priority=1), ["run3"], 125),
        (THREE, True, 225, Req("new", 49, priority=2), None, 225),
        (THREE, True, 225, Req("new", 110, priority=1), None, 225),
        (THREE, False, 225, Req("new", 49, priority=0), None, 225),
        (THREE, False, 225, Req("new", 110, priority=-1), None, 225),
        (FIVE, True, 475, Req("new", 75, priority=1), ["run3"], 375),
        (FIVE, True, 475, Req("new", 200, priority=1), ["run3", "run4"], 250),
    ],
)
def test_preemption(
    running: list[Req], low_first: bool, available: int, newcomer: Req, back: list[str] | None, offset: int
) -> None:
    pool = Pool(available)
    on = adder(pool, running, schedule_low_priority_values_first=low_first)
    assert on.rem_total_token_offset == available
    assert on.preempt_to_schedule(newcomer) is (back is not None)
    assert pool.released == [req.rid for req in on.preempt_list] == (back or [])
    assert on.rem_total_token_offset == offset
    on.memory.check()


def test_who_was_preempted_is_not_preempted_again() -> None:
    on = adder(Pool(225), THREE)
    assert on.preempt_to_schedule(Req("first", 49, priority=1))
    assert not on.preempt_to_schedule(Req("second", 76, priority=1))
    assert on.rem_total_token_offset == 175
    assert on.preempt_list == [THREE[0]]


def test_mixed_chunk_budgets() -> None:
    running = [Req(f"decode{number}", 50) for number in range(8)]
    on = adder(Pool(1000), running, rem_input_tokens=200, rem_chunk_tokens=64, num_mixed_decode_tokens=8)
    assert (on.rem_input_tokens, on.rem_chunk_tokens) == (192, 56)
    assert (on.rem_total_token_offset, on.cur_rem_token_offset) == (408, 8)
    assert on.budget_state() is CONTINUE
    assert on.add_one_req(Req("a", 64, prompt_tokens=56)) is OTHER
    assert (on.rem_input_tokens, on.rem_chunk_tokens, len(on.can_run_list)) == (136, 0, 1)

    on = adder(Pool(1000), running[3:], rem_input_tokens=200, rem_chunk_tokens=64, num_mixed_decode_tokens=5)
    assert (on.rem_input_tokens, on.rem_chunk_tokens, on.rem_total_token_offset) == (195, 59, 255)
    assert on.add_one_req(Req("a", 64, prompt_tokens=56)) is CONTINUE
    assert on.rem_chunk_tokens == 3
    assert on.add_one_req(Req("b", 16, prompt_tokens=3)) is OTHER
    assert (on.rem_chunk_tokens, len(on.can_run_list)) == (0, 2)


def mocks(available: int) -> dict[str, Any]:
    """A cache and an allocator that answer every question, as upstream's tests mock them."""
    cache, allocator = MagicMock(disable=False), MagicMock()
    for size in ("full_evictable_size", "evictable_size", "swa_evictable_size"):
        getattr(cache, size).return_value = 0
    for size in ("available_size", "full_available_size", "swa_available_size"):
        getattr(allocator, size).return_value = available
    return {"page_size": 1, "tree_cache": cache, "token_to_kv_pool_allocator": allocator}


def upstream(rid: str, priority: int, max_new_tokens: int, output_ids: tuple[int, ...] = ()) -> SimpleNamespace:
    """A request that says of its output what upstream's do, where upstream's do."""
    sampling = SimpleNamespace(max_new_tokens=max_new_tokens)
    sizes = {"prompt_tokens": 0, "prefix_tokens": 0, "host_hit_tokens": 0}
    return SimpleNamespace(rid=rid, priority=priority, sampling_params=sampling, output_ids=output_ids, **sizes)


@pytest.mark.parametrize(
    ("low_first", "refused", "newcomer", "back", "offset"),
    [
        (False, [(0, 49), (-1, 110)], (1, 49), 0, 175),
        (True, [(2, 49), (1, 110)], (1, 49), 2, 125),
    ],
)
def test_preemption_by_upstreams_own_names(
    low_first: bool, refused: list[tuple[int, int]], newcomer: tuple[int, int], back: int, offset: int
) -> None:
    running = [upstream("run1", 0, 50), upstream("run2", 1, 75), upstream("run3", 2, 100)]
    release = MagicMock()
    on = UnifiedAdder(
        **mocks(225), running_batch=MagicMock(reqs=running), new_token_ratio=1.0, rem_input_tokens=10000,
        rem_chunk_tokens=None, num_mixed_decode_tokens=0, priority_scheduling_preemption_threshold=0,
        schedule_low_priority_values_first=low_first, release=release,
    )  # fmt: skip
    assert on.rem_total_token_offset == 225
    for number, (priority, most) in enumerate(refused):
        assert not on.preempt_to_schedule(upstream(f"refused{number}", priority, most))
    assert on.preempt_to_schedule(upstream("new", *newcomer))
    assert on.preempt_list == [running[back]]
    assert on.rem_total_token_offset == offset
    release.assert_called_once_with(running[back])


def test_mixed_chunk_budgets_by_upstreams_own_names() -> None:
    running = [upstream(f"decode_{number}", 0, 50) for number in range(8)]
    on = UnifiedAdder(
        **mocks(1000), running_batch=MagicMock(reqs=running), rem_input_tokens=200, rem_chunk_tokens=64,
        num_mixed_decode_tokens=8,
    )  # fmt: skip
    figures = (on.rem_input_tokens, on.rem_chunk_tokens, on.rem_total_token_offset, on.cur_rem_token_offset)
    assert figures == (192, 56, 408, 8)


def test_what_upstreams_requests_have_made_is_subtracted() -> None:
    running = [upstream("r", 0, 50, output_ids=(7,) * 20), upstream("s", 0, 10)]
    running[1].sampling_params.ignore_eos = True
    on = UnifiedAdder(**mocks(1000), running_batch=running, new_token_ratio=0.5)
    assert on.rem_total_token_offset == 30 * Fraction(1, 2) + 10


def test_a_resumed_prompt_that_fits_the_chunk_runs_whole() -> None:
    """Upstream's figures: 200 of 500 in a chunk, 300 slots free, on pages of 16."""
    on = adder(Pool(300), [], page=16, rem_chunk_tokens=500)
    assert on.add_chunked_req(Req("resumed", 128, prompt_tokens=200)) is None
    assert [(chunk.request.rid, chunk.start, chunk.end) for chunk in on.can_run_list] == [("resumed", 0, 200)]


# --- our own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page": 0}, "page_size: 0 is below the minimum 1"),
        ({"page": 16.0}, "page_size: 16.0 is not a whole number"),
        ({"page": True}, "page_size: True is not a whole number"),
        ({"ratio": -1}, "new_token_ratio: -1 is not a number from 0 to 1"),
        ({"ratio": 1.5}, "new_token_ratio: 1.5 is not a number from 0 to 1"),
        ({"ratio": None}, "new_token_ratio: None is not a number from 0 to 1"),
        ({"ratio": float("nan")}, "new_token_ratio: nan is not a number from 0 to 1"),
        ({"ratio": float("inf")}, "new_token_ratio: inf is not a number from 0 to 1"),
        ({"ratio": "0.7"}, "new_token_ratio: '0.7' is not a number from 0 to 1"),
        ({"rem_input_tokens": -1}, "rem_input_tokens: -1 is below the minimum 0"),
        ({"rem_chunk_tokens": -1}, "rem_chunk_tokens: -1 is below the minimum 0"),
        ({"rem_chunk_tokens": 0.5}, "rem_chunk_tokens: 0.5 is not a whole number"),
        ({"checkpoint_align": 0}, "checkpoint_align: 0 is below the minimum 1"),
        ({"num_mixed_decode_tokens": -1}, "num_mixed_decode_tokens: -1 is below the minimum 0"),
        ({"num_mixed_decode_tokens": None}, "num_mixed_decode_tokens: None is not a whole number"),
        ({"num_mixed_decode_tokens": 4}, "num_mixed_decode_tokens: 4 is more than the 3 running requests"),
        (
            {"priority_scheduling_preemption_threshold": None},
            "priority_scheduling_preemption_threshold: None is not a whole number",
        ),
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_name_and_value(options: dict[str, Any], message: str) -> None:
    assert refusal(lambda: adder(Pool(1000), THREE, **options)) == message


def test_the_ends_of_what_can_be_are_taken() -> None:
    on = adder(Pool(10), THREE, ratio=0, rem_input_tokens=0, rem_chunk_tokens=0, num_mixed_decode_tokens=3)
    assert (on.rem_total_token_offset, on.rem_input_tokens, on.rem_chunk_tokens) == (3, -3, -3)
    assert on.budget_state() is OTHER
    assert adder(Pool(10), [], rem_input_tokens=None, rem_chunk_tokens=None).rem_total_tokens == 10


BAD_OUTPUTS = [
    (Req("x", 50, generated_tokens=-1), "generated_tokens of 'x': -1 is below the minimum 0"),
    (Req("x", 50, generated_tokens=0.5), "generated_tokens of 'x': 0.5 is not a whole number"),  # type: ignore[arg-type]
    (Req("x", -1), "max_new_tokens of 'x': -1 is below the minimum 0"),
    (Req("x", None), "max_new_tokens of 'x': None is not a whole number"),  # type: ignore[arg-type]
    (
        SimpleNamespace(rid="x", prompt_tokens=1, prefix_tokens=0, host_hit_tokens=0),
        "max_new_tokens of 'x': None is not a whole number",
    ),
]


@pytest.mark.parametrize(("bad", "message"), BAD_OUTPUTS)
def test_an_output_that_cannot_be_is_refused_wherever_it_comes_in(bad: Any, message: str) -> None:
    assert refusal(lambda: adder(Pool(1000), [*THREE, bad])) == message
    for way in ("add_one_req", "add_chunked_req", "preempt_to_schedule"):
        on = adder(Pool(1000), THREE)
        assert refusal(lambda on=on, way=way: getattr(on, way)(bad)) == message  # type: ignore[misc]
        assert (on.rem_total_token_offset, on.can_run_list, on.preempt_list) == (225, [], [])


@pytest.mark.parametrize("way", ["add_one_req", "add_chunked_req", "preempt_to_schedule"])
def test_who_runs_does_not_wait_as_well(way: str) -> None:
    on = adder(Pool(1000), THREE)
    again = Req("run2", 5, prompt_tokens=10, priority=9)
    assert refusal(lambda: getattr(on, way)(again)) == "rid: 'run2' is running already"


def test_a_victim_may_ask_again_in_its_round_unless_another_of_its_name_runs() -> None:
    on = adder(Pool(475), FIVE, schedule_low_priority_values_first=True)
    assert on.preempt_to_schedule(Req("new", 200, priority=1))
    assert [each.rid for each in on.preempt_list] == ["run3", "run4"]
    assert on.add_one_req(Req("run3", 100, prompt_tokens=10)) is CONTINUE
    assert refusal(lambda: on.add_one_req(Req("run4", 125))) == "rid: 'run4' is running already"
    assert refusal(lambda: on.add_one_req(Req("run3", 100))) == "rid: 'run3' is in this batch already"


def test_of_two_running_requests_of_one_name_each_gives_back_its_own_share() -> None:
    """Upstream's own figures have two of a name."""
    on = adder(Pool(150), [Req("twin", 100, priority=1), Req("twin", 50)])
    assert on.preempt_to_schedule(Req("new", 49, priority=1))
    assert on.rem_total_token_offset == 100


def test_a_running_request_without_a_priority_has_none_of_it() -> None:
    running = [SimpleNamespace(rid="r", max_new_tokens=50)]
    on = adder(Pool(50), running)  # type: ignore[arg-type]
    assert on.preempt_to_schedule(Req("new", 49, priority=1))
    assert on.preempt_list == running


@pytest.mark.parametrize(
    ("available", "chunk", "answer"),
    [(147, None, NO_TOKEN), (200, 112, OTHER), (200, 64, OTHER), (1000, None, CONTINUE)],
)
def test_the_answer_is_about_the_next_one_and_the_batch_says_who_was_admitted(
    available: int, chunk: int | None, answer: AddReqResult
) -> None:
    """100 + 30 and a page fit 147; then nothing is left to promise, and the answer for an admitted one is NO_TOKEN."""
    on = adder(Pool(available), [], page=16, rem_chunk_tokens=chunk)
    request = Req("a", 30, prompt_tokens=100)
    assert on.add_one_req(request) is answer
    assert [chunk.request for chunk in on.can_run_list] == [request]


def test_running_requests_are_reserved_a_fraction_of_what_is_left() -> None:
    on = adder(Pool(1000), [Req("a", 75), Req("b", 101, generated_tokens=100), Req("c", 9, ignore_eos=True)], ratio=0.7)
    assert on.rem_total_token_offset == Fraction(525, 10) + Fraction(7, 10) + 9
    assert on.cur_rem_token_offset == 0


def test_the_gate_asks_for_prompt_output_and_a_page() -> None:
    for available, admitted in ((100 + 30 + 16 + 1, 1), (100 + 30 + 16, 0)):
        on = adder(Pool(available), [], page=16)
        on.add_one_req(Req("a", 30, prompt_tokens=100))
        assert len(on.can_run_list) == admitted


def test_a_fraction_decides_at_the_gate() -> None:
    """60.5 remain: a need of 60 passes, one of 61 does not."""
    for output, admitted in ((49, 0), (48, 1)):
        on = adder(Pool(62), [Req("r", 2)], ratio=0.75)
        assert on.rem_total_tokens == Fraction(121, 2)
        on.add_one_req(Req("a", output, prompt_tokens=11))
        assert len(on.can_run_list) == admitted


def test_a_retracted_request_is_asked_for_its_output_once() -> None:
    """What it generated counts as prompt, and no longer as output."""
    on = adder(Pool(1000), [])
    on.add_one_req(Req("a", 30, prompt_tokens=100 + 12, generated_tokens=12))
    assert on.rem_total_token_offset == 112 + 1 + 18


def test_a_cut_promises_its_tail_and_its_output() -> None:
    on = adder(Pool(1000), [], page=16, rem_chunk_tokens=64)
    assert on.add_one_req(Req("a", 30, prompt_tokens=100)) is OTHER
    assert {entry.kind: entry.tokens for entry in on.memory.entries()} == {
        "chunk": 64, "page_overhead": 16, "tail": 48, "output": 30,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "chunk"),
    [
        (AccountingRules(reserve_tail=True), 64),
        (AccountingRules(reserve_tail=True, decode_yields=False), 10),
        (AccountingRules(), 10),
    ],
)
def test_running_requests_do_not_shorten_a_chunk_that_comes_first(rules: AccountingRules, chunk: int) -> None:
    """100 slots, 89.5 of them expected to go to running requests: 10 is 10.5 rounded down, inside a page."""
    on = adder(Pool(100), [Req("r", 179)], page=16, ratio=0.5, rem_chunk_tokens=64, rules=rules)
    on.add_chunked_req(Req("a", 1, prompt_tokens=96))
    assert (on.can_run_list[0].tokens, on.forced) == (chunk, False)


def test_without_compute_left_the_half_done_one_waits_and_nothing_is_forced() -> None:
    running = [Req(f"r{number}", 2) for number in range(64)]
    on = adder(Pool(1000), running, page=16, rem_chunk_tokens=64, num_mixed_decode_tokens=64)
    half_done = Req("a", 1, prompt_tokens=96)
    assert on.add_chunked_req(half_done) is half_done
    assert (on.deferred, on.forced, on.can_run_list) == (True, False, [])
    assert {e.kind for e in on.memory.entries() if e.request == "a"} == {"tail", "output"}


@pytest.mark.parametrize(("disable", "ignore_eos", "answer"), [(True, True, CONTINUE), (False, True, NO_TOKEN),
                                                               (True, False, NO_TOKEN)])  # fmt: skip
def test_where_everybody_can_end_more_is_let_in(disable: bool, ignore_eos: bool, answer: AddReqResult) -> None:
    """R ends after 10 more tokens and gives back 500: room for all of A, which the plain gate does not see."""
    pool = Pool(200, disable=disable)
    on = adder(pool, [Req("r", 10, prompt_tokens=500, ignore_eos=True)])
    got = on.add_one_req(Req("a", 300, prompt_tokens=20, ignore_eos=ignore_eos))
    assert len(on.can_run_list) == (answer is CONTINUE)
    assert got is (NO_TOKEN if answer is NO_TOKEN else on.budget_state())


def test_a_promised_tail_is_no_room_for_outputs() -> None:
    def admitted(rules: AccountingRules) -> bool:
        on = adder(Pool(60, disable=True), [], rem_chunk_tokens=30, rules=rules, checkpoint_align=16)
        on.add_one_req(Req("a", 1, prompt_tokens=40))  # cut at 16
        return on.add_one_req(Req("b", 25, prompt_tokens=2, ignore_eos=True)) is not NO_TOKEN

    assert not admitted(AccountingRules(reserve_tail=True))
    assert admitted(AccountingRules())


def test_a_victims_share_counts_in_whole_pages_and_comes_back_to_the_last_fraction() -> None:
    running = [Req("r", 100)]  # a share of 75
    on = adder(Pool(75), running, page=64, ratio=0.75)
    assert not on.preempt_to_schedule(Req("new", 1, priority=1)), "65 are needed, and a page of 64 comes back"
    on = adder(Pool(76), running, page=64, ratio=0.75)
    assert on.preempt_to_schedule(Req("new", 1, priority=1))
    assert on.rem_total_token_offset == 0


def test_a_refusal_of_nonsense_leaves_no_lock() -> None:
    arguments = mocks(1000)
    cache = arguments["tree_cache"]
    on = UnifiedAdder(**arguments)
    refusal(lambda: on.add_one_req(Req("x", 5, prompt_tokens=9, generated_tokens=-1)))
    assert cache.inc_lock_ref.call_count == cache.dec_lock_ref.call_count == 1
    assert list(on.memory.entries()) == []


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Req("a", 3, prompt_tokens=9, generated_tokens=4), "generated_tokens of 'a': 4 is above its max_new_tokens, 3"),
        (Req("a", 3, prompt_tokens=9, priority="x"), "priority of 'a': 'x' is not a whole number"),  # type: ignore[arg-type]
        (Req("a", 3, prompt_tokens=9, priority=0.5), "priority of 'a': 0.5 is not a whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_a_request_says_of_itself_and_cannot_be(request_: Req, says: str) -> None:
    """Of a candidate, whichever way it comes, and of a running one; nothing is promised or locked."""
    for ask in ("add_one_req", "add_chunked_req", "preempt_to_schedule"):
        on = adder(Pool(225), THREE)
        assert refusal(lambda: getattr(on, ask)(request_)) == says  # noqa: B023 - called at once
        assert on.rem_total_token_offset == 225 and not on.can_run_list
    assert refusal(lambda: adder(Pool(225), [request_])) == says


@pytest.mark.parametrize("lacking", ["rid", "prompt_tokens", "prefix_tokens", "host_hit_tokens"])
@pytest.mark.parametrize("ask", ["add_one_req", "add_chunked_req", "preempt_to_schedule"])
def test_a_request_without_what_each_has(lacking: str, ask: str) -> None:
    whole = {"rid": "a", "prompt_tokens": 4, "prefix_tokens": 0, "host_hit_tokens": 0, "max_new_tokens": 1}
    request = SimpleNamespace(**{key: value for key, value in whole.items() if key != lacking})
    text = refusal(lambda: getattr(adder(Pool(225), THREE), ask)(request))
    assert text.startswith(f"{lacking} of ") and text.endswith(": it has none, and each request needs one")


@pytest.mark.parametrize("release", [None, 5, "free"])
def test_a_release_that_cannot_be_called(release: Any) -> None:
    pool = Pool(225)
    text = refusal(lambda: UnifiedAdder(1, pool, pool, THREE, release=release))
    assert text == f"release: {release!r} cannot be called with a request"


def test_a_priority_that_nobody_has_set_is_zero() -> None:
    running = [Req("run1", 50, priority=None)]  # type: ignore[arg-type]
    on = adder(Pool(50), running)
    assert on.preempt_to_schedule(Req("new", 49, priority=1))
    assert not adder(Pool(50), running).preempt_to_schedule(Req("new", 49))
