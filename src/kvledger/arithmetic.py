"""Page and grid arithmetic. Token counts in, token or page counts out; every division says which way it rounds."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def ceil_pages(tokens: int, page_size: int) -> int:
    """Pages that `tokens` slots occupy, rounded up."""
    return -(-tokens // page_size)


def pages_of_window(tokens: int, page_size: int) -> int:
    """The most pages that `tokens` slots in a row reach into, wherever they begin."""
    return ceil_pages(tokens - 1, page_size) + 1


def ceil_tokens(tokens: int, page_size: int) -> int:
    """`tokens` rounded up to whole pages, in tokens."""
    return -(-tokens // page_size) * page_size


def floor_tokens(tokens: int, unit: int) -> int:
    """`tokens` rounded down to a multiple of `unit` (a page, a checkpoint grid, a split size), in tokens."""
    return tokens // unit * unit


def floor_or_keep(tokens: int, unit: int | None) -> int:
    """`tokens` rounded down to a multiple of `unit`; as it was where there is no unit, or nothing would be left."""
    return tokens if unit is None else floor_tokens(tokens, unit) or tokens


def align_chunk_end(start: int, tokens: int, checkpoint_align: int) -> int:
    """Length in tokens of a non-final chunk [start, start + tokens) once its end is rounded down to the grid.

    Where the rounded end would fall back to `start` or before it, the length stays as it was: a chunk that cannot
    reach the grid must still move.
    """
    end = floor_tokens(start + tokens, checkpoint_align)
    return end - start if end > start else tokens


def whole_number(name: str, value: Any, least: int | None, *, of: object = None) -> int:
    """`value` as it came. ValueError, one line, if it is no whole number or below `least` (None: no limit); `of`: whose
    it is."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise ValueError(f"{_named(name, of)}: {value!r} is not a whole number")
    if least is not None and value < least:
        raise ValueError(f"{_named(name, of)}: {value} is below the minimum {least}")
    return int(value)


def _named(name: str, of: object) -> str:
    return name if of is None else f"{name} of {of!r}"
