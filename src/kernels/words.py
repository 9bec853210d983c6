"""Pools seen as integer words: what copies and poison work on, so that a NaN keeps its payload."""

from __future__ import annotations

from typing import Final

import torch

from kvledger.kernels.layout import mismatch, units_contiguous

INTEGER: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def element_words(tensor: torch.Tensor) -> torch.Tensor:
    """View each element as the integer of its size; shape and strides stay."""
    return tensor.view(INTEGER[tensor.element_size()])


def as_words(pool: torch.Tensor, *, widest: int = 4) -> torch.Tensor:
    """View ``pool`` [units, ...], each unit contiguous, as integers [units, words].

    Words are as wide as the unit's size, the distance between units and the pool's start in its storage allow.
    """
    if pool.dim() < 2 or not units_contiguous(pool) or pool.is_conj() or pool.is_neg():
        raise mismatch("a pool", pool, "[units, ...], each contiguous and as it lies in memory")
    size = min(pool.element_size(), 8)  # complex128 is two words
    words = pool.flatten(1).view(INTEGER[size])
    distances = (words.shape[1] * size, words.stride(0) * size, words.storage_offset() * size)
    for wide in (4, 2):
        if size < wide <= widest and all(distance % wide == 0 for distance in distances):
            return words.view(INTEGER[wide])
    return words
