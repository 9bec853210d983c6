from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.ledger import ComputeLedger, Due, MemoryLedger, Promise
from tests.unit.builders import REPEATABLE

PROMISES = st.builds(
    Promise,
    st.sampled_from("abc"),
    st.sampled_from(["chunk", "page_overhead", "first_token", "tail"]),
    st.integers(0, 1000),
    st.sampled_from(Due),
)
SETTLES = st.sampled_from("abcd")


def ledger_with(*promises: Promise, baseline: int = 1000) -> MemoryLedger:
    ledger = MemoryLedger(lambda: baseline)
    for promise in promises:
        ledger.promise(promise.request, promise.kind, promise.tokens, promise.due)
    return ledger


@REPEATABLE
@given(st.lists(PROMISES | SETTLES, max_size=20))
def test_offsets_are_the_sums_of_the_open_entries(steps: list[Promise | str]) -> None:
    ledger = MemoryLedger(lambda: 5000)
    still_open: list[Promise] = []
    for step in steps:
        if isinstance(step, Promise):
            ledger.promise(step.request, step.kind, step.tokens, step.due)
            still_open.append(step)
        else:
            ledger.settle(step)
            still_open = [p for p in still_open if p.request != step or p.due is Due.LATER]
        now = sum(p.tokens for p in still_open if p.due is Due.NOW)
        later = sum(p.tokens for p in still_open if p.due is Due.LATER)
        assert (ledger.cur_rem_token_offset, ledger.rem_total_token_offset) == (now, now + later)
        assert (ledger.cur_rem_tokens, ledger.rem_total_tokens) == (5000 - now, 5000 - now - later)
        assert ledger.cur_rem_tokens >= ledger.rem_total_tokens
        ledger.check()
    in_name_order = sorted(ledger.entries(), key=lambda p: p.request)
    assert in_name_order == sorted(still_open, key=lambda p: p.request)


def test_a_new_ledger_has_promised_nothing() -> None:
    ledger = ledger_with(baseline=34624)
    assert ledger.cur_rem_token_offset == ledger.rem_total_token_offset == 0
    assert ledger.cur_rem_tokens == ledger.rem_total_tokens == ledger.baseline == 34624
    assert list(ledger.entries()) == []


def test_the_baseline_is_read_live() -> None:
    free = [1000]
    ledger = MemoryLedger(lambda: free[0])
    ledger.promise("a", "chunk", 100, Due.NOW)
    free[0] = 400
    assert (ledger.baseline, ledger.cur_rem_tokens, ledger.rem_total_tokens) == (400, 300, 300)


def test_entries_come_in_the_order_of_admission() -> None:
    first, second, third = (
        Promise("b", "chunk", 64, Due.NOW),
        Promise("a", "chunk", 128, Due.NOW),
        Promise("b", "tail", 192, Due.LATER),
    )
    assert list(ledger_with(first, second, third).entries()) == [first, third, second]


def test_settling_takes_what_was_due_now_and_leaves_what_is_due_later() -> None:
    tail = Promise("a", "tail", 192, Due.LATER)
    other = Promise("b", "chunk", 128, Due.NOW)
    ledger = ledger_with(Promise("a", "chunk", 64, Due.NOW), tail, other)
    ledger.settle("a")
    assert list(ledger.entries()) == [tail, other]
    assert (ledger.cur_rem_token_offset, ledger.rem_total_token_offset) == (128, 320)


def test_settling_twice_or_settling_a_stranger_changes_nothing() -> None:
    ledger = ledger_with(Promise("a", "chunk", 64, Due.NOW), Promise("a", "tail", 192, Due.LATER))
    ledger.settle("a")
    ledger.settle("a")
    ledger.settle("nobody")
    assert (ledger.cur_rem_token_offset, ledger.rem_total_token_offset) == (0, 192)
    ledger.check()


@pytest.mark.parametrize("due", Due)
def test_check_names_both_numbers_of_a_total_that_is_not_its_entries_sum(due: Due) -> None:
    ledger = ledger_with(Promise("a", "chunk", 64, due))
    ledger.check()
    ledger._due_tokens[due] += 7
    with pytest.raises(AssertionError, match=rf"due {due}: .* 64 tokens.* 71"):
        ledger.check()


def test_check_sees_an_entry_that_bypassed_the_total() -> None:
    ledger = ledger_with(Promise("a", "chunk", 64, Due.NOW))
    ledger._entries["a"].append(Promise("a", "tail", 5, Due.LATER))
    with pytest.raises(AssertionError, match="5 tokens"):
        ledger.check()


def test_spending_lowers_both_compute_budgets() -> None:
    compute = ComputeLedger(rem_chunk_tokens=4096, rem_input_tokens=16384)
    compute.spend(1088)
    assert (compute.rem_chunk_tokens, compute.rem_input_tokens) == (3008, 15296)


def test_no_limit_is_never_spent() -> None:
    compute = ComputeLedger(rem_chunk_tokens=None, rem_input_tokens=None)
    compute.spend(10**9)
    compute.spend_gap()
    assert (compute.rem_chunk_tokens, compute.rem_input_tokens) == (None, None)
    assert not compute.exhausted


def test_spending_the_gap_takes_the_chunk_budget_alone() -> None:
    compute = ComputeLedger(rem_chunk_tokens=192, rem_input_tokens=500)
    compute.spend_gap()
    assert (compute.rem_chunk_tokens, compute.rem_input_tokens) == (0, 500)


@pytest.mark.parametrize(
    ("rem_chunk_tokens", "rem_input_tokens", "exhausted"),
    [
        (1, 1, False),
        (0, 1, True),
        (1, 0, True),
        (-28, 1, True),
        (1, -28, True),
        (None, 1, False),
        (None, 0, True),
        (1, None, False),
        (0, None, True),
    ],
)
def test_a_budget_is_exhausted_at_zero_and_below(
    rem_chunk_tokens: int | None, rem_input_tokens: int | None, exhausted: bool
) -> None:
    assert ComputeLedger(rem_chunk_tokens, rem_input_tokens).exhausted is exhausted
