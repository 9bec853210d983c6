"""Page tables and slot maps, validated on the host, once per batch, before anything is launched.

Neither the compiled kernels nor Triton's interpreter check a bound: a page number past the pool reads a neighbour's
memory. So kernels take no tables, only these plans, and a plan can only be made from tables that hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any

import torch

from kvledger.kernels.launch import Backend

Ints = Sequence[int] | torch.Tensor


class TableError(ValueError):
    """A page table, slot map or list of pages that must not reach a kernel."""


@dataclass(frozen=True)
class SlotMap:
    """Where each token's latent goes: ``slots`` is int64 [T] on the pool's device, page * page_size + offset."""

    slots: torch.Tensor
    num_pages: int
    page_size: int


@dataclass(frozen=True)
class PlannedChunk:
    """One request's part of a batch; positions and rows are token counts, pages are on the host.

    ``[start, end)`` are the absolute positions of its chunk, ``row`` the batch row of position ``start``, and ``pages``
    int64 the pages of positions ``[0, end)``. An empty chunk has no pages.
    """

    start: int
    end: int
    row: int
    pages: torch.Tensor


@dataclass(frozen=True)
class PrefillPlan:
    """A batch's page tables, in range for a pool of ``num_pages`` pages, cut into tiles of ``block_m`` positions.

    Tiles lie on multiples of ``block_m`` in *absolute* positions, not in the chunk: the same token is always the same
    row of the same tile, so its bits depend neither on where chunks were cut nor on who shares the batch.
    ``tiles`` int32 [num_tiles, 5] holds (sequence, first position, row of position 0, start, end); longest first.
    """

    sequences: tuple[PlannedChunk, ...]
    backend: Backend
    tokens: int
    num_pages: int
    page_size: int
    block_m: int
    block_n: int
    table: torch.Tensor
    tiles: torch.Tensor


def host_ints(name: str, values: Ints) -> torch.Tensor:
    """Return ``values`` as an int64 tensor on the host; a tensor elsewhere is refused, as reading it would wait."""
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise TableError(f"{name} is on {values.device}: pass the host's copy, it is checked before each launch")
        if values.dtype not in (torch.int32, torch.int64):
            raise TableError(f"{name}: got {values.dtype}, expected int32 or int64")
        return values.to(torch.int64)
    return torch.tensor(whole_numbers(name, values), dtype=torch.int64)


def whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    """Return `values` as Python integers; TableError for what is no integer: 1.7 is not slot 1."""
    try:
        return tuple(map(index, values))
    except TypeError:
        got = type(values).__name__
        if isinstance(values, Iterable):
            got = f"a list of {', '.join(sorted({type(value).__name__ for value in values}))}"
        raise TableError(f"{name}: got {got}, expected integers") from None


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor to ``device`` without waiting for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def check_units(name: str, units: Ints, count: int, *, distinct: bool) -> torch.Tensor:
    """Return ``units`` (numbers of pages, slots or rows) on the host: each in ``[0, count)``, none twice if asked."""
    numbers = host_ints(name, units)
    if numbers.dim() != 1:
        raise TableError(f"{name} has {numbers.dim()} dimensions: 1")
    outside = numbers[(numbers < 0) | (numbers >= count)]
    if outside.numel():
        raise TableError(f"{name} names {int(outside[0])}, outside [0, {count})")
    if distinct and numbers.unique().numel() != numbers.numel():
        ordered = numbers.sort().values
        raise TableError(f"{name} names {int(ordered[1:][ordered[1:] == ordered[:-1]][0])} twice")
    return numbers


def plan_slots(slot_map: Ints, pages: torch.Tensor) -> SlotMap:
    """Check a slot map, [T] integers on the host, against a pool [num_pages, page_size, width].

    Refused: a slot outside the pool, a slot twice, and -1 too: every token's latent has a place.
    """
    num_pages, page_size, _ = pages.shape
    slots = check_units("slot_map", slot_map, num_pages * page_size, distinct=True)
    return SlotMap(upload(slots, pages.device), num_pages, page_size)


def plan_tables(
    pages: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens: Ints,
    starts: Ints,
    backend: Backend,
    block: tuple[int, int],
) -> PrefillPlan:
    """Check a batch's tables against a pool [num_pages, page_size, width] and cut it into tiles.

    ``page_table`` [N, max_pages], ``cu_seqlens`` [N + 1] and ``starts`` [N] are on the host; see ``mla_prefill``.
    """
    num_pages, page_size, _ = pages.shape
    table = host_ints("page_table", page_table)
    bounds = host_ints("cu_seqlens", cu_seqlens).tolist()
    firsts = host_ints("starts", starts).tolist()
    if table.dim() != 2 or len(bounds) != len(table) + 1 or len(firsts) != len(table):
        raise TableError(
            f"page_table {list(table.shape)}, cu_seqlens [{len(bounds)}], starts [{len(firsts)}]: [N, P], [N + 1], [N]"
        )
    if bounds[0] != 0 or any(low > high for low, high in pairwise(bounds)):
        raise TableError(f"cu_seqlens {bounds} does not start at 0 or falls")
    sequences = tuple(
        _sequence(n, table[n], start, bounds[n], bounds[n + 1], (num_pages, page_size))
        for n, start in enumerate(firsts)
    )
    block_m, block_n = block
    tiles = sorted(
        (
            (n, first, seq.row - seq.start, seq.start, seq.end)
            for n, seq in enumerate(sequences)
            for first in range(seq.start // block_m * block_m, seq.end if seq.end > seq.start else 0, block_m)
        ),
        key=lambda tile: -tile[1],
    )
    used = torch.zeros(len(sequences), max([1, *(len(seq.pages) for seq in sequences)]), dtype=torch.int32)
    for n, seq in enumerate(sequences):
        used[n, : len(seq.pages)] = seq.pages
    tile_words = torch.tensor(tiles, dtype=torch.int32).reshape(len(tiles), 5)
    return PrefillPlan(
        sequences=sequences,
        backend=backend,
        tokens=bounds[-1],
        num_pages=num_pages,
        page_size=page_size,
        block_m=block_m,
        block_n=block_n,
        table=upload(used, pages.device),
        tiles=upload(tile_words, pages.device),
    )


def _sequence(n: int, row: torch.Tensor, start: int, low: int, high: int, pool: tuple[int, int]) -> PlannedChunk:
    num_pages, page_size = pool
    if start < 0:
        raise TableError(f"request {n} starts at position {start}")
    end = start + high - low
    if high == low:
        return PlannedChunk(start, end, low, row[:0])
    count = -(-end // page_size)
    if count > len(row):
        raise TableError(f"request {n} needs {count} pages of {page_size} for {end} tokens, its table has {len(row)}")
    return PlannedChunk(
        start, end, low, check_units(f"request {n}'s page table", row[:count], num_pages, distinct=True).clone()
    )
