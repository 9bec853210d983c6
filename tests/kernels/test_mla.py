"""Attention over pages against float64 and against itself, and latents stored through a slot map."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
if find_spec("triton") is None:  # not importorskip: who imports Triton first says whether it interprets
    pytest.skip("no triton", allow_module_level=True)

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvledger.kernels.launch import Backend, BackendError, Launch
from kvledger.kernels.mla import latent_store, mla_prefill, plan_prefill, plan_slots
from kvledger.kernels.tables import TableError
from tests.kernels.mla_cases import Case, Memory, Style, error_ratios, lay_out, reference, run, same_bits
from tests.kernels.mla_checks import ATTENTION, FP32_RATIO, stores_each_latent_once

pytestmark = pytest.mark.device

BF16_RATIO = 0.006
STYLES: tuple[Style, ...] = ("default", "sharp", "rising", "falling")
CPU_BACKENDS: tuple[Backend, ...] = ("torch", "interpret")


def assert_exact(case: Case, *, backend: Backend = "torch", block: tuple[int, int] | None = None) -> None:
    memory = lay_out(case)
    out = run(case, memory, backend=backend, block=block)
    bound = FP32_RATIO if case.dtype == torch.float32 else BF16_RATIO
    assert out.dtype == case.dtype
    whole, worst = error_ratios(out, reference(case, memory))
    assert whole < bound
    assert worst < bound
    assert same_bits(memory.pages, lay_out(case).pages), "reading changed the pool"


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, backend: Backend) -> None:
    ATTENTION[name](backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_torch_agrees_with_float64(page_size: int, style: Style, dtype: torch.dtype) -> None:
    assert_exact(Case((70, 0, 1, 33), (65, 9, 130, 0), page_size=page_size, style=style, dtype=dtype))


@pytest.mark.parametrize(("rank", "rope"), [(16, 8), (24, 10), (8, 16), (1, 3), (40, 1)])
def test_torch_takes_any_rank(rank: int, rope: int) -> None:
    assert_exact(Case((37, 5), (20, 0), rank=rank, rope=rope, heads=3))


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_torch_around_page_borders(prefix: int, length: int) -> None:
    assert_exact(Case((length,), (prefix,)))
    assert_exact(Case((length,), (prefix,)), block=(16, 16))


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_interpreter_agrees_with_float64_and_torch(page_size: int) -> None:
    case = Case((21, 0, 1), (14, 3, 16), heads=1, page_size=page_size)
    assert_exact(case, backend="interpret")
    memory = lay_out(case)
    whole, worst = error_ratios(run(case, memory, backend="interpret"), run(case, memory).double())
    assert whole < 3e-6
    assert worst < 3e-6


@pytest.mark.parametrize("style", STYLES)
def test_interpreter_keeps_a_running_maximum(style: Style) -> None:
    assert_exact(Case((20,), (30,), heads=1, style=style), backend="interpret", block=(16, 16))


@pytest.mark.parametrize(("rank", "rope"), [(24, 10), (1, 3)])
def test_interpreter_pads_a_rank(rank: int, rope: int) -> None:
    assert_exact(Case((18,), (15,), heads=2, rank=rank, rope=rope), backend="interpret")


def test_interpreter_on_a_page_wider_than_its_block() -> None:
    assert_exact(Case((20,), (60,), heads=1, page_size=64), backend="interpret", block=(16, 32))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_nothing_to_do(backend: Backend) -> None:
    for case in (Case((), ()), Case((0, 0), (5, 0))):
        assert run(case, lay_out(case), backend=backend).shape == (0, case.heads, case.rank)


cases = st.builds(
    lambda requests, **rest: Case(tuple(n for n, _ in requests), tuple(start for _, start in requests), **rest),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 2, 3, 4, 16, 64]),
    heads=st.integers(1, 3),
    rank=st.integers(1, 20),
    rope=st.integers(1, 12),
    style=st.sampled_from(STYLES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layers=st.integers(1, 2),
    seed=st.integers(0, 5),
)
blocks = st.sampled_from([(16, 16), (16, 32), (32, 16), (128, 128)])
small = settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@small
@given(cases, blocks)
def test_any_shape_agrees_with_float64(case: Case, block: tuple[int, int]) -> None:
    assert_exact(case, block=block)


@small
@given(cases, blocks, st.integers(1, 100), st.data())
def test_any_split_in_any_company_at_any_pages_is_the_same_to_the_bit(
    case: Case, block: tuple[int, int], page_seed: int, data: st.DataObject
) -> None:
    """Not only at multiples of a block: tiles lie on absolute positions and products have one shape (`mla_torch`)."""
    whole = run(case, lay_out(case), block=block).split(list(case.lengths))
    n = data.draw(st.integers(0, len(case.lengths) - 1), label="request")
    start, last = case.starts[n], case.ends[n]
    ends = sorted({*data.draw(st.lists(st.integers(start, last), max_size=3), label="splits"), last})
    for end in ends:
        written = [0] * n + [end] + [0] * (len(case.lengths) - n - 1)
        memory = lay_out(case, page_seed=page_seed, ends=written)
        alone = Memory(memory.pages, memory.tables[n : n + 1])
        plan = plan_prefill(alone.pages, alone.page_table, [0, end - start], [start], block=block)
        out = mla_prefill(case.queries[n][start:end], alone.pages, plan, scale=case.scale, rank=case.rank)
        done = start - case.starts[n]
        assert same_bits(out, whole[n][done : done + end - start])
        start = end


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_heads_do_not_see_each_other(backend: Backend) -> None:
    """Heads turned around, to the bit; in torch they are rows of one product, in Triton programs of their own."""
    case = Case((20,), (13,), heads=3)
    memory = lay_out(case)
    out = run(case, memory, backend=backend)
    plan = plan_prefill(memory.pages, memory.page_table, case.cu_seqlens, case.starts, backend=backend)
    turned = mla_prefill(case.q.roll(1, 1), memory.pages, plan, scale=case.scale, rank=case.rank)
    assert same_bits(turned.roll(-1, 1), out)


def test_store_and_prefill_through_the_public_calls() -> None:
    """Two chunks of a request, each stored and then read, as an executor does it, with host lists and no plan."""
    case = Case((40,), (0,))
    empty = lay_out(case, ends=[0])
    slots = torch.tensor([empty.tables[0][p // 16] * 16 + p % 16 for p in range(40)], dtype=torch.int32)
    outs = []
    for start, end in ((0, 23), (23, 40)):
        latent_store(case.latents[0][start:end], empty.pages, slots[start:end])
        outs.append(
            mla_prefill(
                case.queries[0][start:end],
                empty.pages,
                empty.page_table,
                [0, end - start],
                [start],
                scale=case.scale,
                rank=case.rank,
            )
        )
    assert same_bits(torch.cat(outs), run(case, lay_out(case)))


def test_out_is_written_in_place() -> None:
    case = Case((5,), (3,))
    memory = lay_out(case)
    out = torch.full((5, case.heads, case.rank), 7.0)
    tables = (memory.page_table, case.cu_seqlens, case.starts)
    assert mla_prefill(case.q, memory.pages, *tables, scale=0.25, rank=case.rank, out=out) is out
    assert same_bits(out, run(case, memory))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_store(backend: Backend) -> None:
    stores_each_latent_once(backend)


def test_an_empty_slot_map_stores_nothing() -> None:
    for backend in CPU_BACKENDS:
        pages = torch.zeros(2, 4, 6)
        latent_store(torch.ones(0, 6), pages, [], backend=backend)
        assert not pages.any()


# --- what is refused


def small_batch() -> tuple[Case, Memory]:
    case = Case((4,), (2,), page_size=4)
    return case, lay_out(case)


def test_a_plan_fits_one_pool_only() -> None:
    case, memory = small_batch()
    plan = plan_prefill(memory.pages, memory.page_table, case.cu_seqlens, case.starts)
    with pytest.raises(TableError, match="the pool is"):
        mla_prefill(case.q, memory.pages[1:], plan, scale=0.25, rank=case.rank)
    with pytest.raises(TableError, match="the pool is"):
        latent_store(case.latents[0], memory.pages[1:], plan_slots(range(6), memory.pages))


def test_a_plan_fits_one_backend_only() -> None:
    case, memory = small_batch()
    plan = plan_prefill(memory.pages, memory.page_table, case.cu_seqlens, case.starts, backend="torch")
    with pytest.raises(ValueError, match="planned for backend 'torch'"):
        mla_prefill(case.q, memory.pages, plan, scale=0.25, rank=case.rank, backend="interpret")


def test_tables_are_on_the_host() -> None:
    case, memory = small_batch()
    with pytest.raises(TableError, match="pass the host's copy"):
        plan_prefill(memory.pages, memory.page_table.to("meta"), case.cu_seqlens, case.starts)
    with pytest.raises(TableError, match="int32 or int64"):
        plan_prefill(memory.pages, memory.page_table.float(), case.cu_seqlens, case.starts)


def test_the_interpreter_is_kept_from_bfloat16() -> None:
    case = Case((4,), (2,), dtype=torch.bfloat16)
    with pytest.raises(BackendError, match="silently wrong"):
        run(case, lay_out(case), backend="interpret")


def test_triton_needs_cuda() -> None:
    case, memory = small_batch()
    with pytest.raises(BackendError, match="needs CUDA"):
        run(case, memory, backend="triton")


def test_a_rank_that_spills_is_refused() -> None:
    case = Case((4,), (2,), rank=520, heads=1)
    with pytest.raises(ValueError, match="rank 520"):
        run(case, lay_out(case), backend="interpret")


@pytest.mark.parametrize("block", [(8, 16), (16, 24), (16, 0)])
def test_odd_blocks_are_refused(block: tuple[int, int]) -> None:
    case, memory = small_batch()
    with pytest.raises(ValueError, match="powers of two"):
        run(case, memory, block=block)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 24}, "rank 24"),
        ({"rank": 0}, "rank 0"),
        ({"q": torch.zeros(3, 2, 24)}, "one row per planned token"),
        ({"q": torch.zeros(4, 2, 23)}, "one row per planned token"),
        ({"q": torch.zeros(4, 24)}, r"\[T, H, width\]"),
        ({"q": torch.zeros(4, 2, 24, dtype=torch.bfloat16)}, "float32"),
        ({"out": torch.zeros(4, 2, 24)}, "out"),
        ({"out": torch.zeros(4, 16, 2).transpose(1, 2)}, "out"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    case, memory = small_batch()
    plan = plan_prefill(memory.pages, memory.page_table, case.cu_seqlens, case.starts)
    arguments: dict[str, Any] = {
        "q": case.q,
        "pages": memory.pages,
        "page_table": plan,
        "scale": 0.25,
        "rank": case.rank,
    } | wrong
    with pytest.raises(ValueError, match=message):
        mla_prefill(**arguments)


@pytest.mark.parametrize(
    "pages",
    [
        torch.zeros(4, 24),
        torch.zeros(4, 4, 24, dtype=torch.float16),
        torch.zeros(4, 24, 4).transpose(1, 2),
        torch.zeros(4, 4, 48)[:, :, :24],
        torch.zeros(1, 4, 24).expand(4, 4, 24),
    ],
)
def test_pools_that_are_none_are_refused(pages: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="pages"):
        latent_store(torch.zeros(1, 24), pages, [0])


def test_a_pool_of_no_pages() -> None:
    """It has room for nothing, and nothing can be done in it."""
    for backend in CPU_BACKENDS:
        empty = torch.zeros(0, 4, 24)
        latent_store(torch.zeros(0, 24), empty, [], backend=backend)
        q, tables = torch.zeros(0, 2, 24), (torch.zeros(1, 1, dtype=torch.int32), [0, 0], [0])
        assert mla_prefill(q, empty, *tables, scale=1.0, rank=16, backend=backend).shape == (0, 2, 16)
        with pytest.raises(TableError, match=r"outside \[0, 0\)"):
            latent_store(torch.zeros(1, 24), empty, [0], backend=backend)
        with pytest.raises(TableError, match=r"outside \[0, 0\)"):
            mla_prefill(torch.zeros(1, 2, 24), empty, tables[0], [0, 1], [0], scale=1.0, rank=16, backend=backend)


def test_strides_of_dimensions_of_one_say_nothing() -> None:
    for shape, strides in (((1, 4, 24), (7, 24, 1)), ((3, 1, 24), (48, 5, 1)), ((1, 1, 24), (3, 5, 1))):
        pages = torch.zeros(200).as_strided(shape, strides)
        latents = torch.rand(shape[0] * shape[1], 24)
        for backend in CPU_BACKENDS:
            pages.zero_()
            latent_store(latents, pages, range(len(latents)), backend=backend)
            assert same_bits(pages.flatten(0, 1), latents)


SHARED = torch.zeros(6, 4, 24)
MISUSED: dict[str, tuple[Any, str]] = {
    "slots of floats": (
        lambda: latent_store(torch.zeros(1, 24), SHARED, [3.9]),  # type: ignore[list-item]
        "slot_map: got a list of float, expected integers",
    ),
    "a slot of nobody": (lambda: latent_store(torch.zeros(1, 24), SHARED, [-1]), "slot_map names -1"),
    "no slots": (lambda: latent_store(torch.zeros(1, 24), SHARED, None), "slot_map: got NoneType"),  # type: ignore[arg-type]
    "no latents": (lambda: latent_store(None, SHARED, [3]), "latents: got NoneType, expected a tensor"),  # type: ignore[arg-type]
    "no pool": (lambda: latent_store(torch.zeros(1, 24), None, [3]), "pages: got NoneType"),  # type: ignore[arg-type]
    "latents of the pool": (lambda: latent_store(SHARED[0], SHARED, range(4, 8)), "latents share memory with pages"),
    "a width of none": (lambda: latent_store(torch.zeros(1, 0), torch.zeros(6, 4, 0), [3]), "pages: got"),
    "no q": (lambda: prefill(q=None), "q: got NoneType, expected a tensor"),
    "cu_seqlens between tokens": (lambda: prefill(cu_seqlens=[0, 1.5, 2]), "cu_seqlens: got a list of float, int"),
    "starts between tokens": (lambda: prefill(starts=[0.5]), "starts: got a list of float"),
    "out in columns": (
        lambda: prefill(out=torch.zeros(2, 16, 2).transpose(1, 2)),
        r"out: got \[2, 2, 16\] torch.float32, strides \(32, 1, 2\), expected \[2, 2, 16\] .* contiguous",
    ),
    "out in the pool": (lambda: prefill(out=SHARED.view(-1)[:64].view(2, 2, 16)), "out shares memory with pages"),
    "out in q": (lambda: prefill(q=(q := torch.zeros(96)).view(2, 2, 24), out=q[:64].view(2, 2, 16)), "out shares"),
    "a block of floats": (
        lambda: plan_prefill(SHARED, torch.zeros(1, 1, dtype=torch.int32), [0, 2], [0], block=(16.0, 16)),  # type: ignore[arg-type]
        "block: got",
    ),
}


def prefill(**changes: Any) -> torch.Tensor:
    table = torch.zeros(1, 1, dtype=torch.int32)
    given: dict[str, Any] = {"q": torch.zeros(2, 2, 24), "page_table": table, "cu_seqlens": [0, 2], "starts": [0]}
    given |= changes
    out: torch.Tensor = mla_prefill(pages=SHARED, scale=1.0, rank=16, **given)
    return out


@pytest.mark.parametrize("name", MISUSED)
def test_misuse_says_what_came_and_what_was_expected(name: str) -> None:
    misuse, words = MISUSED[name]
    with pytest.raises((ValueError, TypeError), match=words):
        misuse()
    assert not SHARED.any()


def test_tables_of_numpy_integers_and_ranges() -> None:
    case, memory = small_batch()
    expected = run(case, memory)
    for kind in (np.int64, np.int32):
        bounds: Any = np.array(case.cu_seqlens, dtype=kind)
        out = mla_prefill(case.q, memory.pages, memory.page_table, bounds, case.starts, scale=0.25, rank=case.rank)
        assert same_bits(out, expected)


def test_a_table_without_lengths_is_refused() -> None:
    case, memory = small_batch()
    with pytest.raises(TypeError, match="cu_seqlens"):
        mla_prefill(case.q, memory.pages, memory.page_table, scale=0.25, rank=case.rank)


def test_latents_that_do_not_fit_are_refused() -> None:
    pages = torch.zeros(2, 4, 24)
    for latents in (torch.zeros(2, 24), torch.zeros(1, 23), torch.zeros(1, 24, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="latents"):
            latent_store(latents, pages, [3])


def test_a_launch_refuses_a_pointer_that_asks_for_another_variant() -> None:
    odd = torch.zeros(9)[1:]
    with pytest.raises(BackendError, match="not on 16 bytes"):
        Launch(kernel={}, grid=(1,), args={"odd": odd}).run()
    Launch(kernel={}, grid=(1, 0), args={"odd": odd}).run()


def test_scale_and_style_change_the_numbers() -> None:
    """The cases are not blind: each style and scale is another problem."""
    base = Case((20,), (10,))
    outs = [
        run(case, lay_out(case))
        for case in (base, replace(base, scale=0.5), *(replace(base, style=style) for style in STYLES[1:]))
    ]
    for at, out in enumerate(outs):
        assert all(error_ratios(out, other.double())[0] > 0.01 for other in outs[:at])
