"""Pages copied word by word, and poison that stays where it is and shows nowhere else."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
if find_spec("triton") is None:  # not importorskip: who imports Triton first says whether it interprets
    pytest.skip("no triton", allow_module_level=True)

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.kernels import canary
from kvledger.kernels.launch import Backend
from kvledger.kernels.pages import POISON, CanaryFault, Engine, Ticket, canary_check, canary_fill, page_copy
from kvledger.kernels.tables import TableError
from kvledger.kernels.words import as_words
from tests.kernels.mla_cases import same_bits, words
from tests.kernels.mla_checks import MEMORY, REFUSED, copied, three_pools

pytestmark = pytest.mark.device

CPU_BACKENDS: tuple[Backend, ...] = ("torch", "interpret")


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", MEMORY)
def test_memory(name: str, backend: Backend) -> None:
    MEMORY[name](backend)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, backend: Backend) -> None:
    with pytest.raises(TableError):
        REFUSED[name](backend)


def test_a_refusal_names_what_is_wrong() -> None:
    pool = torch.zeros(4, 3)
    for sources, targets, message in (
        ([0, 9], [1, 2], r"src_pages names 9, outside \[0, 4\)"),
        ([0, 1], [3, 3], "dst_pages names 3 twice"),
        ([0, 1], [3], "2 pages to copy onto 1"),
        ([0, 1], [2, 1], "page 1 is both copied and overwritten"),
    ):
        with pytest.raises(TableError, match=message):
            page_copy(pool, pool, sources, targets)
    assert not pool.any(), "a refused copy has copied"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), unique_by=lambda pair: pair[1]),
    kind=st.sampled_from([(torch.bfloat16, (3, 7)), (torch.float32, (2, 2)), (torch.uint8, (5,))]),
    engine=st.sampled_from(["kernel", "runs"]),
)
def test_any_copy_is_a_loop_over_pages(
    pairs: list[tuple[int, int]], kind: tuple[torch.dtype, tuple[int, ...]], engine: Engine
) -> None:
    src, dst, _ = three_pools(*kind)
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    expected = copied(src, dst, sources, targets)
    page_copy(
        src, dst, torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int32), engine=engine
    )
    assert same_bits(dst, expected)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_within_one_pool_and_there_and_back(backend: Backend) -> None:
    src, host, _ = three_pools(torch.bfloat16, (4, 6))
    before = src.clone()
    page_copy(src, host, [4, 0], [1, 2], backend=backend)
    page_copy(src, src, [1, 2], [4, 0], backend=backend)
    assert not same_bits(src, before)
    page_copy(host, src, [1, 2], [4, 0], backend=backend)
    assert same_bits(src, before)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_nothing_to_copy(backend: Backend) -> None:
    src, dst, _ = three_pools(torch.float32, (2, 2))
    before = dst.clone()
    assert page_copy(src, dst, [], [], backend=backend).done()
    assert same_bits(dst, before)
    page_copy(torch.zeros(0, 3), torch.zeros(0, 3), [], [], backend=backend)


def test_a_unit_longer_than_a_block_of_the_kernel() -> None:
    for size in (5000, 3 * 4096, 9 * 256, 7):
        src = torch.randn(3, size)
        dst = torch.zeros(3, size)
        page_copy(src, dst, [2, 0], [0, 1], backend="interpret")
        assert same_bits(dst, torch.stack([src[2], src[0], torch.zeros(size)]))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.bool, torch.float64, torch.float8_e4m3fn])
def test_any_dtype_is_words(dtype: torch.dtype, backend: Backend) -> None:
    noise = torch.randint(0, 2, (2, 3 * 5 * dtype.itemsize), dtype=torch.uint8)
    src, dst = (row.view(dtype).view(3, 5) for row in noise)
    page_copy(src, dst, [2, 0], [0, 1], backend=backend)
    bytes_of = [pool.view(torch.uint8) for pool in (src, dst)]
    assert torch.equal(bytes_of[1][:2], bytes_of[0][[2, 0]])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"engine": "memcpy"}, "engine: got 'memcpy', expected 'kernel' or 'runs'"),
        ({"src_pool": None}, "src_pool: got NoneType, expected a tensor"),
        ({"dst_pool": torch.zeros(1, 3).expand(4, 3)}, "dst_pool: got .* expected units that lie apart"),
        ({"dst_pages": [0.5]}, "dst_pages: got a list of float, expected integers"),
        ({"src_pages": [None]}, "src_pages: got a list of NoneType, expected integers"),
        (
            {"src_pool": torch.zeros(4, 3, dtype=torch.complex64).conj(),
             "dst_pool": torch.zeros(4, 3, dtype=torch.complex64)},
            "as it lies in memory",
        ),
    ],
)  # fmt: skip
def test_a_copy_that_is_none_says_what_was_expected(arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "src_pool": torch.ones(4, 3),
        "dst_pool": torch.zeros(4, 3),
        "src_pages": [0],
        "dst_pages": [1],
    }
    with pytest.raises((ValueError, TypeError), match=words):
        page_copy(**given | arguments)


def test_a_source_may_repeat_itself() -> None:
    dst = torch.zeros(4, 3)
    page_copy(torch.ones(1, 3).expand(4, 3), dst, [0, 3], [1, 2])
    assert dst.sum() == 6


def test_pages_that_differ_are_refused() -> None:
    for other in (torch.zeros(4, 2), torch.zeros(4, 3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="pages of"):
            page_copy(torch.zeros(4, 3), other, [0], [0])
    with pytest.raises(ValueError, match="each contiguous"):
        page_copy(torch.zeros(4, 3, 2).transpose(1, 2), torch.zeros(4, 2, 3), [0], [0])


def test_words_are_as_wide_as_everything_allows() -> None:
    for pool, dtype, shape in (
        (torch.zeros(4, 3, 6, dtype=torch.bfloat16), torch.int32, (4, 9)),
        (torch.zeros(4, 3, 5, dtype=torch.bfloat16), torch.int16, (4, 15)),
        (torch.zeros(4, 9, dtype=torch.bfloat16)[:, 1:], torch.int16, (4, 8)),
        (torch.zeros(4, 10, dtype=torch.bfloat16)[:, 2:], torch.int32, (4, 4)),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.int32, (4, 2)),
        (torch.zeros(4, 6, dtype=torch.uint8), torch.int16, (4, 3)),
        (torch.zeros(4, 3, dtype=torch.uint8), torch.uint8, (4, 3)),
        (torch.zeros(4, 3, dtype=torch.float64), torch.int64, (4, 3)),
    ):
        assert as_words(pool).dtype == dtype
        assert as_words(pool).shape == shape
        assert as_words(pool).data_ptr() == pool.data_ptr()


def test_a_ticket_waits_for_its_event() -> None:
    class Event:
        over = False

        def query(self) -> bool:
            return self.over

        def synchronize(self) -> None:
            self.over = True

    ticket = Ticket(Event())
    assert not ticket.done()
    ticket.wait()
    assert ticket.done()
    Ticket().wait()


# --- poison


def test_poison_is_nan_and_no_nan_that_arithmetic_makes() -> None:
    made = torch.tensor(float("inf")) - torch.tensor(float("inf"))
    for dtype, poison in POISON.items():
        words_of = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.tensor(poison, dtype=words_of).view(dtype).isnan()
        assert int(words(made.to(dtype).reshape(1))) & 0xFFFF_FFFF != poison
        assert int(words(torch.tensor([float("nan")]).to(dtype))) != poison
    truncated = torch.tensor(POISON[torch.float32] >> 16, dtype=torch.int16).view(torch.bfloat16)
    assert truncated.isnan(), "cut to its top 16 bits it is no longer NaN"


@pytest.mark.parametrize("dtype", POISON)
def test_state_slots_are_units_like_pages(dtype: torch.dtype) -> None:
    states = torch.ones(5, 2, 3, 4, dtype=dtype)
    canary_fill(states, pages=[1, 4])
    assert states.isnan().flatten(1).all(1).tolist() == [False, True, False, False, True]
    assert not canary_check(states, poisoned_pages=[4, 1], live_pages=[0, 2, 3])
    assert [fault.number for fault in canary_check(states, poisoned_pages=[0, 1], live_pages=[2, 4])] == [0, 4]
    with pytest.raises(ValueError, match="token rows"):
        canary_fill(states, rows=[0])


def test_layers_between_units_keep_their_numbers() -> None:
    whole = torch.ones(4, 3, 2, 6)
    canary_fill(whole[:, 1], pages=[0, 3], rows=[3])
    assert whole.isnan().all(3).flatten(1).nonzero().tolist() == [[0, 2], [0, 3], [1, 3], [3, 2], [3, 3]]
    assert not canary_check(whole[:, 1], poisoned_pages=[0, 3], poisoned_rows=[3], live_pages=[2], live_rows=[2])


def test_a_check_reads_a_bounded_number_of_words_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.zeros(40, 4, 3)
    canary_fill(pool, pages=range(20), rows=range(120, 160))
    words(pool)[[3, 17, 35], 1, 1] = 1
    wanted = [(fault.where, fault.number) for fault in _check_all(pool)]
    assert wanted == [("page", 3), ("page", 17), ("row", 141)]
    monkeypatch.setattr(canary, "_ELEMENTS_AT_A_TIME", 25)
    assert [(fault.where, fault.number) for fault in _check_all(pool)] == wanted


def _check_all(pool: torch.Tensor) -> list[CanaryFault]:
    faults: list[CanaryFault] = canary_check(
        pool,
        poisoned_pages=range(20),
        poisoned_rows=range(120, 160),
        live_pages=range(20, 30),
        live_rows=range(80, 120),
    )
    return faults


def test_a_fault_says_where_and_what() -> None:
    pool = torch.zeros(2, 2, 3)
    fault = canary_check(pool, poisoned_rows=[3])
    assert [str(one) for one in fault] == ["row 3: overwritten, element 0 is 0x0"]
    words(pool)[1, 0, 2] = POISON[torch.float32]
    assert [str(one) for one in canary_check(pool, live_pages=[1])] == ["page 1: poison, element 2 is 0x7fc0dead"]


def test_poison_needs_a_dtype_with_nan() -> None:
    with pytest.raises(ValueError, match="no poison for"):
        canary_fill(torch.zeros(2, 3, dtype=torch.int32), pages=[0])


def test_copied_poison_is_still_poison() -> None:
    for dtype in POISON:
        src, dst = torch.zeros(3, 2, 4, dtype=dtype), torch.zeros(3, 2, 4, dtype=dtype)
        canary_fill(src, pages=[2])
        page_copy(src, dst, [2], [0])
        assert not canary_check(dst, poisoned_pages=[0], live_pages=[1, 2])
