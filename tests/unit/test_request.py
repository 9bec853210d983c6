from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.request import Prompt, Request, RequestState
from tests.unit.builders import REPEATABLE, prompt

Token = tuple[str, int]

RUNS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 7)), max_size=5)
PAGE_SIZES = st.integers(1, 5)


@st.composite
def related_prompts(draw: st.DrawFn) -> tuple[Prompt, Prompt]:
    """Two prompts that begin alike, then differ: in a run's length, in a run's name, or wholly."""
    common = draw(RUNS)
    return Prompt(common + draw(RUNS)), Prompt(common + draw(RUNS))


def token_list(of: Prompt) -> list[Token]:
    """What a prompt is: every token's segment and its position in that run."""
    return [(segment, position) for segment, tokens in of.segments for position in range(tokens)]


def pages(of: Prompt, page_size: int) -> list[list[Token]]:
    tokens = token_list(of)
    return [tokens[end - page_size : end] for end in range(page_size, len(tokens) + 1, page_size)]


def agreement(left: Sequence[object], right: Sequence[object]) -> int:
    """How many leading items agree."""
    unlike = (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(unlike, min(len(left), len(right)))


@REPEATABLE
@given(RUNS, PAGE_SIZES)
def test_there_is_one_key_for_each_full_page(runs: list[Token], page_size: int) -> None:
    of = Prompt(runs)
    assert of.tokens == len(token_list(of))
    assert len(of.page_keys(page_size)) == of.tokens // page_size


@REPEATABLE
@given(related_prompts(), PAGE_SIZES)
def test_keys_agree_exactly_as_far_as_the_tokens_do_in_full_pages(pair: tuple[Prompt, Prompt], page_size: int) -> None:
    left, right = pair
    agreeing_tokens = agreement(token_list(left), token_list(right))
    agreeing_keys = agreement(left.page_keys(page_size), right.page_keys(page_size))
    assert agreeing_keys == agreeing_tokens // page_size


@REPEATABLE
@given(related_prompts(), PAGE_SIZES)
def test_two_pages_have_the_same_key_exactly_if_they_hold_the_same_tokens(
    pair: tuple[Prompt, Prompt], page_size: int
) -> None:
    left, right = pair
    for key, tokens in zip(left.page_keys(page_size), pages(left, page_size), strict=True):
        for other_key, other_tokens in zip(right.page_keys(page_size), pages(right, page_size), strict=True):
            assert (key == other_key) is (tokens == other_tokens)
            assert key != other_key or hash(key) == hash(other_key)


@REPEATABLE
@given(RUNS, st.lists(st.integers(0, 5)), PAGE_SIZES)
def test_runs_of_no_tokens_change_no_key(runs: list[Token], places: list[int], page_size: int) -> None:
    padded = list(runs)
    for place in places:
        padded.insert(place, ("empty", 0))
    assert Prompt(padded).page_keys(page_size) == Prompt(runs).page_keys(page_size)


def test_one_run_is_not_the_same_as_two_runs_of_its_name() -> None:
    one, two = prompt(("a", 8)), prompt(("a", 4), ("a", 4))
    assert one.tokens == two.tokens == 8
    assert agreement(one.page_keys(4), two.page_keys(4)) == 1


def test_a_shorter_run_is_a_prefix_of_a_longer_one() -> None:
    doc, question = prompt(("doc", 6000)), prompt(("doc", 6144), ("c", 128))
    assert agreement(doc.page_keys(64), question.page_keys(64)) == 6000 // 64


def test_keys_are_computed_once_a_page_size() -> None:
    of = prompt(("a", 100))
    assert of.page_keys(10) is of.page_keys(10)
    assert (len(of.page_keys(10)), len(of.page_keys(25)), len(of.page_keys(10))) == (10, 4, 10)


def test_prompts_are_equal_by_their_runs_whatever_was_asked_of_them() -> None:
    asked, fresh = prompt(("a", 100), ("b", 0)), prompt(("a", 100), ("b", 0))
    asked.page_keys(10)
    assert asked == fresh
    assert hash(asked) == hash(fresh)
    assert asked != prompt(("a", 100))


def test_a_prompt_can_be_made_of_an_iterator() -> None:
    made = Prompt(iter([("a", 3), ("b", 4)]))
    assert made.segments == (("a", 3), ("b", 4))
    assert made.tokens == 7


def test_a_new_request_waits_and_owns_nothing() -> None:
    request = Request("A", prompt(("a", 100)))
    assert request.state is RequestState.WAITING
    assert (request.prompt_tokens, request.prefix_tokens, request.host_hit_tokens) == (100, 0, 0)
    assert (request.pages, request.locked, request.shared_pages) == ([], [], 0)


@pytest.mark.parametrize("attribute", ["pages", "locked", "device_hit", "host_hit"])
def test_two_requests_share_no_list(attribute: str) -> None:
    same = prompt(("a", 100))
    assert getattr(Request("A", same), attribute) is not getattr(Request("B", same), attribute)
