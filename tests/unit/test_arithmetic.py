from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.arithmetic import align_chunk_end, ceil_pages, ceil_tokens, floor_or_keep, floor_tokens, whole_number
from tests.unit.builders import REPEATABLE, refusal

SIZES = st.integers(0, 10**9)
UNITS = st.integers(1, 4096)


@REPEATABLE
@given(tokens=SIZES, page_size=UNITS)
def test_ceil_pages_is_the_fewest_pages_that_hold_the_tokens(tokens: int, page_size: int) -> None:
    pages = ceil_pages(tokens, page_size)
    assert pages * page_size >= tokens
    assert (pages - 1) * page_size < tokens or pages == 0


@REPEATABLE
@given(tokens=SIZES, page_size=UNITS)
def test_ceil_tokens_is_the_least_multiple_not_below(tokens: int, page_size: int) -> None:
    rounded = ceil_tokens(tokens, page_size)
    assert rounded % page_size == 0
    assert tokens <= rounded < tokens + page_size


@REPEATABLE
@given(tokens=SIZES, unit=UNITS)
def test_floor_tokens_is_the_greatest_multiple_not_above(tokens: int, unit: int) -> None:
    rounded = floor_tokens(tokens, unit)
    assert rounded % unit == 0
    assert tokens - unit < rounded <= tokens


@REPEATABLE
@given(pages=st.integers(0, 10**6), page_size=UNITS)
def test_whole_pages_are_rounded_to_themselves(pages: int, page_size: int) -> None:
    tokens = pages * page_size
    assert ceil_pages(tokens, page_size) == pages
    assert ceil_tokens(tokens, page_size) == tokens == floor_tokens(tokens, page_size)


@REPEATABLE
@given(start=st.integers(0, 100), tokens=st.integers(1, 100), grid=st.integers(1, 60))
def test_a_chunk_ends_on_the_last_grid_point_in_reach_or_where_it_would(start: int, tokens: int, grid: int) -> None:
    in_reach = [end for end in range(start + 1, start + tokens + 1) if end % grid == 0]
    end = start + align_chunk_end(start, tokens, grid)
    assert end == (in_reach[-1] if in_reach else start + tokens)


@REPEATABLE
@given(start=SIZES, tokens=SIZES.filter(bool), grid=UNITS)
def test_the_alignment_never_brings_a_chunk_back_to_its_start_nor_lengthens_it(
    start: int, tokens: int, grid: int
) -> None:
    assert 0 < align_chunk_end(start, tokens, grid) <= tokens


@pytest.mark.parametrize(
    ("start", "tokens", "aligned"),
    [
        pytest.param(86784, 2496, 2304, id="incident: 1keim is cut at 89088"),
        pytest.param(89088, 2880, 2816, id="incident: its second chunk ends at 91904"),
        pytest.param(91904, 64, 64, id="incident: one page that would fall back to its start"),
        pytest.param(0, 704, 512, id="from the start"),
        pytest.param(0, 512, 512, id="on the grid already"),
        pytest.param(0, 255, 255, id="one token short of the grid"),
        pytest.param(200, 56, 56, id="off the grid, just reaching it"),
        pytest.param(256, 255, 255, id="on the grid, next point out of reach"),
    ],
)
def test_align_chunk_end_on_a_grid_of_256(start: int, tokens: int, aligned: int) -> None:
    assert align_chunk_end(start, tokens, 256) == aligned


class Index(int):
    """An integer of somebody else's, a NumPy one say."""


@pytest.mark.parametrize("value", [0, 7, 2**70, Index(7)])
def test_a_whole_number_is_taken_as_it_came(value: int) -> None:
    assert whole_number("size", value, 0) == value


@pytest.mark.parametrize(
    ("value", "of", "message"),
    [
        (0, None, "size: 0 is below the minimum 1"),
        (-5, "A", "size of 'A': -5 is below the minimum 1"),
        (None, None, "size: None is not a whole number"),
        (True, None, "size: True is not a whole number"),
        (1.0, 3, "size of 3: 1.0 is not a whole number"),
        ("1", None, "size: '1' is not a whole number"),
    ],
)
def test_what_is_no_whole_number_is_refused_in_a_line(value: object, of: object, message: str) -> None:
    assert refusal(lambda: whole_number("size", value, 1, of=of)) == message


@pytest.mark.parametrize(
    ("tokens", "unit", "left"), [(704, 320, 640), (640, 320, 640), (319, 320, 319), (704, None, 704), (0, 320, 0)]
)
def test_floor_or_keep_never_rounds_to_nothing(tokens: int, unit: int | None, left: int) -> None:
    assert floor_or_keep(tokens, unit) == left
