"""What must hold of latents, attention, page copies and poison, each a function that a mutant can fail.

The tests run them on healthy code over many cases, the mutants on one case each; ``Check`` takes the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from kvledger.kernels.launch import Backend
from kvledger.kernels.mla import latent_store, mla_prefill, plan_prefill, plan_slots
from kvledger.kernels.mla_reference import reference_store
from kvledger.kernels.pages import POISON, canary_check, canary_fill, page_copy
from kvledger.kernels.tables import TableError
from tests.kernels.mla_cases import Case, Memory, error_ratios, lay_out, reference, run, same_bits, words


class NotRefusedError(Exception):
    """A table that must not reach a kernel did."""


Check = Callable[[Backend], None]

FP32_RATIO = 3e-5

RAGGED = Case((19, 0, 1, 33), (13, 3, 16, 0), heads=1)
"""A chunk from inside a page into another, an empty one, one token on a page border, three tiles of 16."""

BLOCK = (16, 16)


@cache
def exact(case: Case) -> torch.Tensor:
    return reference(case, lay_out(case))


def in_one_piece(backend: Backend) -> torch.Tensor:
    return run(RAGGED, lay_out(RAGGED), backend=backend, block=BLOCK)


def agrees_with_float64(backend: Backend) -> None:
    out = in_one_piece(backend)
    assert not out.isnan().any(), "the NaN of an unused row shows"
    whole, worst = error_ratios(out, exact(RAGGED))
    assert whole < FP32_RATIO, f"RMS ratio {whole:.1e}"
    assert worst < FP32_RATIO, f"RMS ratio of a token {worst:.1e}"


def unused_rows_do_not_matter(backend: Backend) -> None:
    out = run(RAGGED, lay_out(RAGGED, garbage=1e4), backend=backend, block=BLOCK)
    assert same_bits(out, in_one_piece(backend)), "finite numbers in unused rows change the result"


def page_numbers_do_not_matter(backend: Backend) -> None:
    out = run(RAGGED, lay_out(RAGGED, page_seed=7), backend=backend, block=BLOCK)
    assert same_bits(out, in_one_piece(backend))


def company_does_not_matter(backend: Backend) -> None:
    """Each request alone, out of the same pool."""
    memory = lay_out(RAGGED)
    outs = [_part(RAGGED, memory, n, RAGGED.starts[n], RAGGED.ends[n], backend) for n in range(len(RAGGED.lengths))]
    assert same_bits(torch.cat(outs), in_one_piece(backend))


def splits_do_not_matter(backend: Backend) -> None:
    """The last request in chunks that end anywhere; what a later chunk will write is NaN until then."""
    outs, start = [], 0
    for end in (5, 16, 17, 33):
        memory = lay_out(RAGGED, ends=[0, 0, 0, end])
        outs.append(_part(RAGGED, memory, 3, start, end, backend))
        start = end
    assert same_bits(torch.cat(outs), in_one_piece(backend)[-33:])


def _part(case: Case, memory: Memory, n: int, start: int, end: int, backend: Backend) -> torch.Tensor:
    plan = plan_prefill(
        memory.pages, memory.page_table[n : n + 1], [0, end - start], [start], backend=backend, block=BLOCK
    )
    q = case.queries[n][start:end]
    out: torch.Tensor = mla_prefill(q, memory.pages, plan, scale=case.scale, rank=case.rank)
    return out


LAYERED = Case((19, 0, 1, 33), (13, 3, 16, 0), heads=1, layers=3)


def layers_between_pages_do_not_matter(backend: Backend) -> None:
    memory = lay_out(LAYERED)
    assert memory.pages.stride(0) == 3 * memory.pages[0].numel()
    assert same_bits(run(LAYERED, memory, backend=backend, block=BLOCK), in_one_piece(backend))
    latent_store(LAYERED.latents[0], memory.pages, _slots(LAYERED, memory, 0), backend=backend)
    assert same_bits(memory.pages, lay_out(LAYERED).pages), "storing what is there already changed the pool"


def _slots(case: Case, memory: Memory, n: int) -> list[int]:
    return [
        memory.tables[n][position // case.page_size] * case.page_size + position % case.page_size
        for position in range(case.ends[n])
    ]


def stores_each_latent_once(backend: Backend) -> None:
    """Against a plain loop, to the bit: rows nobody asked for keep their NaN, and a latent's NaN its payload."""
    for dtype in (torch.float32, torch.bfloat16):
        case = Case((45,), (0,), rank=21, rope=6, page_size=4, dtype=dtype)
        empty = lay_out(case, ends=[0])
        latents, slots = case.latents[0].clone(), _slots(case, empty, 0)
        words(latents)[3, 5] = 0x7FD1
        shuffled = torch.randperm(45, generator=torch.Generator().manual_seed(2))
        pages = empty.pages.clone()
        latent_store(latents[shuffled], pages, torch.tensor(slots)[shuffled].int(), backend=backend)
        assert same_bits(pages, reference_store(latents, empty.pages, slots)), f"{dtype}"


def poison_stays_and_never_shows(backend: Backend) -> None:
    """Freed pages and unused rows are poisoned by ``canary_fill``, checked after each step, and so is what is live."""
    case = Case((7, 10), (0, 0), heads=1, page_size=4)
    memory = lay_out(case, garbage=0.5)
    live = sorted(slot for n in range(2) for slot in _slots(case, memory, n))
    used = {slot // 4 for slot in live}
    free = [page for page in range(len(memory.pages)) if page not in used]
    loose = [page * 4 + offset for page in used for offset in range(4) if page * 4 + offset not in live]
    canary_fill(memory.pages, pages=free, rows=loose)

    def check(when: str) -> None:
        faults = canary_check(memory.pages, poisoned_pages=free, poisoned_rows=loose, live_pages=[], live_rows=live)
        assert not faults, f"{when}: {'; '.join(map(str, faults))}"

    check("filled")
    assert int(memory.pages.isnan().sum()) == (len(free) * 4 + len(loose)) * case.width, "poison in other places"
    for n in range(2):
        latent_store(case.latents[n], memory.pages, _slots(case, memory, n), backend=backend)
    check("stored")
    assert not run(case, memory, backend=backend, block=BLOCK).isnan().any(), "poison shows in the result"
    check("read")


def canary_sees_each_fault(_: Backend) -> None:
    for dtype, other_nan in ((torch.float32, 0x7FC00000), (torch.bfloat16, 0x7FC0)):
        pool = torch.zeros(6, 4, 3, dtype=dtype)
        canary_fill(pool, pages=[1, 2], rows=[12, 13])
        assert not canary_check(
            pool, poisoned_pages=[1, 2], poisoned_rows=[12, 13], live_pages=[0, 4], live_rows=[14, 20]
        )
        bits = words(pool)
        bits[1, 3, 2] = other_nan
        bits[3, 1, 1] = 0
        bits[4, 0, 1] = POISON[dtype]
        bits[5, 0, 2] = other_nan
        faults = canary_check(
            pool, poisoned_pages=[2, 1], poisoned_rows=[12, 13], live_pages=[0, 4], live_rows=[14, 20]
        )
        found = [(fault.kind, fault.where, fault.number, fault.element, fault.word) for fault in faults]
        assert found == [
            ("overwritten", "page", 1, 11, other_nan),
            ("overwritten", "row", 13, 1, 0),
            ("poison", "page", 4, 1, POISON[dtype]),
            ("nan", "row", 20, 2, other_nan),
        ]


UNITS: list[tuple[torch.dtype, tuple[int, ...]]] = [
    (torch.float32, (4, 6)),
    (torch.bfloat16, (4, 5)),
    (torch.bfloat16, (3, 1)),
    (torch.uint8, (7,)),
    (torch.int64, (2, 3)),
]


def three_pools(dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Pools of 5 units, random to the last bit; unit 3 of the first is signalling NaN where there is such a thing."""
    size = 5 * torch.empty(shape, dtype=dtype).nbytes
    noise = torch.randint(0, 256, (3, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pools = [row.clone().view(dtype).view(5, *shape) for row in noise]
    if dtype.is_floating_point:
        words(pools[0])[3].fill_(0x7FA1 if dtype == torch.bfloat16 else 0x7F80DEAD)
    return pools


def copied(src: torch.Tensor, dst: torch.Tensor, sources: list[int], targets: list[int]) -> torch.Tensor:
    expected = dst.clone()
    for source, target in zip(sources, targets, strict=True):
        words(expected)[target] = words(src)[source]
    return expected


def copies_words(backend: Backend) -> None:
    """Against a plain loop, to the bit, whatever the dtype; also into units with others between them."""
    lists = [3, 0, 3, 1], [0, 4, 2, 1]
    for dtype, shape in UNITS:
        src, before, between = three_pools(dtype, shape)
        expected = copied(src, before, *lists)
        dst = before.clone()
        assert page_copy(src, dst, *lists, backend=backend).done()
        assert same_bits(dst, expected), f"{dtype} {shape}"
        layers = torch.stack([between, src, before], 1)
        page_copy(layers[:, 1], layers[:, 2], *lists, backend=backend)
        assert same_bits(layers, torch.stack([between, src, expected], 1)), f"{dtype} {shape} between layers"


def copies_runs(backend: Backend) -> None:
    """The same by one memcpy per run: runs on both sides, on one side only, on none."""
    for sources, targets in (([3, 0, 3, 1], [0, 4, 2, 1]), ([1, 2, 3, 4], [0, 1, 3, 4]), ([0, 2, 3], [2, 3, 4])):
        for dtype, shape in UNITS:
            src, dst, _ = three_pools(dtype, shape)
            expected = copied(src, dst, sources, targets)
            page_copy(src, dst, sources, targets, backend=backend, engine="runs")
            assert same_bits(dst, expected), f"{dtype} {shape}"


PAGES = torch.zeros(4, 2, 24)
TABLE = [[0, 1, 2], [3, 2, 1]]


def _plan(backend: Backend, table: list[list[int]], cu_seqlens: list[int], starts: list[int]) -> None:
    plan_prefill(PAGES, torch.tensor(table), cu_seqlens, starts, backend=backend, block=BLOCK)


def _copy(backend: Backend, sources: list[int], targets: list[int]) -> None:
    page_copy(PAGES, PAGES.clone(), sources, targets, backend=backend)


REFUSED: dict[str, Check] = {
    "page past the pool": lambda backend: _plan(backend, [[0, 4, 2], [3, 2, 1]], [0, 3, 6], [2, 0]),
    "negative page": lambda backend: _plan(backend, [[0, -1, 2], [3, 2, 1]], [0, 3, 6], [2, 0]),
    "a page twice": lambda backend: _plan(backend, [[0, 1, 0], [3, 2, 1]], [0, 3, 6], [2, 0]),
    "short table": lambda backend: _plan(backend, TABLE, [0, 5, 6], [2, 0]),
    "falling cu_seqlens": lambda backend: _plan(backend, TABLE, [0, 4, 3], [0, 0]),
    "cu_seqlens from 1": lambda backend: _plan(backend, TABLE, [1, 3, 6], [2, 0]),
    "short cu_seqlens": lambda backend: _plan(backend, TABLE, [0, 3], [2, 0]),
    "negative start": lambda backend: _plan(backend, TABLE, [0, 3, 6], [-1, 0]),
    "slot past the pool": lambda _: void(plan_slots([0, 8], PAGES)),
    "negative slot": lambda _: void(plan_slots([0, -1], PAGES)),
    "a slot twice": lambda _: void(plan_slots([5, 2, 5], PAGES)),
    "source past the pool": lambda backend: _copy(backend, [0, 4], [0, 1]),
    "target past the pool": lambda backend: _copy(backend, [0, 1], [4, 0]),
    "a target twice": lambda backend: _copy(backend, [0, 1], [2, 2]),
    "more sources": lambda backend: _copy(backend, [0, 1], [2]),
    "source and target": lambda backend: void(page_copy(PAGES, PAGES, [0, 1], [1, 2], backend=backend)),
    "shifted pools": lambda backend: void(page_copy(PAGES[:3], PAGES[1:], [0, 1], [0, 1], backend=backend)),
    "poison past the pool": lambda _: canary_fill(PAGES, pages=[4]),
    "rows past the pool": lambda _: void(canary_check(PAGES, live_rows=[8])),
}


def void(_: object) -> None:
    return None


def bad_tables_are_refused(backend: Backend) -> None:
    _plan(backend, TABLE, [0, 3, 6], [2, 0])
    for name, broken in REFUSED.items():
        try:
            broken(backend)
        except TableError:
            continue
        raise NotRefusedError(name)


ATTENTION: dict[str, Check] = {
    check.__name__: check
    for check in (
        agrees_with_float64,
        unused_rows_do_not_matter,
        page_numbers_do_not_matter,
        company_does_not_matter,
        splits_do_not_matter,
        layers_between_pages_do_not_matter,
    )
}
MEMORY: dict[str, Check] = {
    check.__name__: check
    for check in (
        stores_each_latent_once,
        poison_stays_and_never_shows,
        canary_sees_each_fault,
        copies_words,
        copies_runs,
        bad_tables_are_refused,
    )
}
CHECKS = ATTENTION | MEMORY
