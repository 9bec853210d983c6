"""Poison where nobody may read or write: freed pages, a last page's unused rows, state slots without an owner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch

from kvledger.kernels.tables import Ints, check_units
from kvledger.kernels.words import element_words

# Quiet NaNs with a payload. A conversion to bfloat16 writes 0x7FC0 for *any* NaN, so the 16-bit poison is another one:
# 0x7FC0 would hide a copy through float. 0x7FDE is a NaN in bfloat16 and in float16.
POISON: Final = {torch.float32: 0x7FC0DEAD, torch.bfloat16: 0x7FDE, torch.float16: 0x7FDE}

_ELEMENTS_AT_A_TIME: Final = 1 << 22


@dataclass(frozen=True)
class CanaryFault:
    """A unit (page, state slot) or row (token slot) that is not what it should be; ``word`` is its first wrong element.

    ``kind``: ``overwritten`` (poison is gone where nobody may write); ``poison`` or ``nan`` where data should be.
    """

    kind: Literal["overwritten", "poison", "nan"]
    where: Literal["page", "row"]
    number: int
    element: int
    word: int

    def __str__(self) -> str:
        return f"{self.where} {self.number}: {self.kind}, element {self.element} is {self.word:#x}"


def canary_fill(pool: torch.Tensor, *, pages: Ints = (), rows: Ints = ()) -> None:
    """Poison whole units ``pages`` (or state slots) and, of a latent pool, ``rows`` (page * page_size + offset)."""
    poison = _poison_of(pool)
    words = element_words(pool)
    words[check_units("pages", pages, len(pool), distinct=False).to(pool.device)] = poison
    if len(rows):
        page, offset = _split_rows(pool, rows)
        words[page.to(pool.device), offset.to(pool.device)] = poison


def canary_check(
    pool: torch.Tensor,
    *,
    poisoned_pages: Ints = (),
    poisoned_rows: Ints = (),
    live_pages: Ints = (),
    live_rows: Ints = (),
) -> list[CanaryFault]:
    """Return what is wrong: poison not intact to the last bit where it should be, any NaN where real data should be.

    One fault a unit or row, in the order asked. Numbers as in ``canary_fill``. It waits for the device.
    """
    poison = _poison_of(pool)
    faults: list[CanaryFault] = []
    for where, numbers, values in _read(pool, poisoned_pages, poisoned_rows):
        words = element_words(values)
        faults += _faults(where, numbers, words != poison, words, None)
    for where, numbers, values in _read(pool, live_pages, live_rows):
        faults += _faults(where, numbers, values.isnan(), element_words(values), poison)
    return faults


def _poison_of(pool: torch.Tensor) -> int:
    if pool.dtype not in POISON:
        raise ValueError(f"no poison for {pool.dtype}, only for {', '.join(str(dtype) for dtype in POISON)}")
    return POISON[pool.dtype]


def _split_rows(pool: torch.Tensor, rows: Ints) -> tuple[torch.Tensor, torch.Tensor]:
    if pool.dim() != 3:
        raise ValueError(f"rows of a pool {list(pool.shape)}: only [num_pages, page_size, width] has token rows")
    page_size = pool.shape[1]
    numbers = check_units("rows", rows, len(pool) * page_size, distinct=False)
    return numbers // page_size, numbers % page_size


def _read(
    pool: torch.Tensor, pages: Ints, rows: Ints
) -> Iterator[tuple[Literal["page", "row"], list[int], torch.Tensor]]:
    """Yield the units and rows asked for, [n, elements], a bounded number of elements at a time."""
    units = check_units("pages", pages, len(pool), distinct=False)
    for some in units.split(max(1, _ELEMENTS_AT_A_TIME // max(1, pool[:1].numel()))):
        if len(some):
            yield "page", some.tolist(), pool[some.to(pool.device)].flatten(1)
    if not len(rows):
        return
    page, offset = _split_rows(pool, rows)
    at_a_time = max(1, _ELEMENTS_AT_A_TIME // pool.shape[2])
    for some_pages, some_offsets in zip(page.split(at_a_time), offset.split(at_a_time), strict=True):
        numbers = (some_pages * pool.shape[1] + some_offsets).tolist()
        yield "row", numbers, pool[some_pages.to(pool.device), some_offsets.to(pool.device)]


def _faults(
    where: Literal["page", "row"], numbers: list[int], wrong: torch.Tensor, words: torch.Tensor, shown: int | None
) -> list[CanaryFault]:
    """Turn a mask of wrong elements into faults; ``shown`` is poison that must not show, None where it must stay."""
    bad = wrong.any(1).nonzero().flatten().tolist()
    if not bad:
        return []
    mask = (1 << 8 * words.element_size()) - 1
    faults = []
    for unit in bad:
        element = int(wrong[unit].to(torch.uint8).argmax())
        word = int(words[unit, element]) & mask
        kind: Literal["overwritten", "poison", "nan"] = "overwritten"
        if shown is not None:
            kind = "poison" if word == shown else "nan"
        faults.append(CanaryFault(kind, where, numbers[unit], element, word))
    return faults
