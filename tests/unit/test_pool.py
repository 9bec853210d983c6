from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.pool import OutOfPages, PagePool, PrefillOutOfMemory
from tests.unit.builders import REPEATABLE


def free_pages_of(pool: PagePool) -> list[int]:
    return [*pool.released(), *pool.never_used()]


@REPEATABLE
@given(
    pool_pages=st.integers(0, 8),
    # a positive step allocates as many pages, a negative one frees the n-th page in use
    steps=st.lists(st.integers(0, 9) | st.integers(-9, -1), max_size=30),
)
def test_a_page_has_one_owner_and_none_is_lost(pool_pages: int, steps: list[int]) -> None:
    pool = PagePool(pool_pages, 64)
    in_use: list[int] = []
    for step in steps:
        if step < 0:
            if in_use:
                pool.free([in_use.pop(step % len(in_use))])
        elif step <= pool.free_pages:
            taken = pool.alloc(step)
            assert len(taken) == step
            in_use += taken
        else:
            with pytest.raises(OutOfPages):
                pool.alloc(step)
        assert sorted(in_use + free_pages_of(pool)) == list(range(pool_pages))
        assert pool.free_pages == pool_pages - len(in_use)
        assert pool.available_size() == pool.free_pages * 64


def test_a_refused_allocation_says_both_sides_in_tokens_and_takes_nothing() -> None:
    pool = PagePool(4, 64)
    pool.free(pool.alloc(2)[:1])
    before = free_pages_of(pool)
    with pytest.raises(OutOfPages) as refused:
        pool.alloc(4)
    assert (refused.value.wanted_tokens, refused.value.free_tokens, refused.value.evictable_tokens) == (256, 192, 0)
    assert free_pages_of(pool) == before


def test_the_last_page_can_be_had_and_no_page_can_always_be_had() -> None:
    pool = PagePool(3, 64)
    assert sorted(pool.alloc(3)) == [0, 1, 2]
    assert pool.alloc(0) == []
    with pytest.raises(OutOfPages):
        pool.alloc(1)


def test_pages_never_handed_out_are_told_from_released_ones() -> None:
    pool = PagePool(5, 64)
    first, second = pool.alloc(2)
    pool.free([second])
    assert pool.released() == (second,)
    assert {*pool.never_used()} == {*range(5)} - {first, second}


def test_a_double_free_stays_visible_for_the_invariants_to_find() -> None:
    pool = PagePool(2, 64)
    (page,) = pool.alloc(1)
    pool.free([page])
    pool.free([page])
    assert pool.released() == (page, page)


def test_the_messages_carry_every_number() -> None:
    assert str(OutOfPages(256, 192, 64)) == "out of KV slots: 256 tokens wanted, 192 free + 64 evictable"
    crash = PrefillOutOfMemory("1keim", 2056, 0, 0)
    assert isinstance(crash, OutOfPages)
    assert (crash.request, crash.wanted_tokens) == ("1keim", 2056)
    assert str(crash) == (
        "Prefill out of memory: 1keim tries to allocate 2056 tokens, available 0 (free 0 + evictable 0)"
    )
    assert "available 192 (free 128 + evictable 64)" in str(PrefillOutOfMemory("A", 256, 128, 64))
