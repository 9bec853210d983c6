"""The adder beside decode. Figures of the first part are upstream's own published ones, on pages of one token."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest

from kvledger.adder import AddReqResult
from kvledger.rules import AccountingRules
from kvledger.unified_adder import UnifiedAdder

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


# --- our own


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
