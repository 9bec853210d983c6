"""Where a tensor lies in memory, and what is said of one that is not what was asked for: what came, what was expected.

A pool is a tensor whose first dimension counts units, each of them contiguous; units may lie further apart than their
size (a layer's slice of a page-major pool). The stride of a dimension of size 1 says nothing and is not looked at.
"""

from __future__ import annotations

from typing import Any

import torch


def described(value: Any) -> str:
    """Shape, dtype, place where it is not the CPU, and strides where they are not a contiguous tensor's."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    place = "" if value.device.type == "cpu" else f" on {value.device}"
    strides = "" if value.is_contiguous() else f", strides {value.stride()}"
    return f"{[*value.shape]} {value.dtype}{place}{strides}"


def mismatch(name: str, got: Any, expected: str) -> ValueError:
    """Make the error that says what came and what was expected."""
    return ValueError(f"{name}: got {described(got)}, expected {expected}")


def require_tensors(**values: Any) -> None:
    """TypeError for the first that is no tensor."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: got {described(value)}, expected a tensor")


def output_like(out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return `out`, once it is a contiguous tensor of this shape and of `like`'s dtype and place, or a new one."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    require_tensors(out=out)
    fits = tuple(out.shape) == shape and out.dtype == like.dtype and out.device == like.device
    if not fits or not out.is_contiguous():
        raise mismatch("out", out, f"{[*shape]} {like.dtype} on {like.device}, contiguous")
    return out


def unit_elements(pool: torch.Tensor) -> int:
    """Elements of one unit, of an empty pool too."""
    return pool.shape[1:].numel()


def units_contiguous(pool: torch.Tensor) -> bool:
    """Whether each unit is one stretch of memory."""
    return len(pool) == 0 or pool[0].is_contiguous()


def units_apart(pool: torch.Tensor) -> bool:
    """No element of a pool of contiguous units is another unit's too."""
    return len(pool) <= 1 or pool.stride(0) >= unit_elements(pool)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, each of contiguous units, have a byte in common."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (low, high), (other_low, other_high) = _extent(one), _extent(other)
    if high <= other_low or other_high <= low:
        return False
    pitch, other_pitch = (pool.stride(0) * pool.element_size() for pool in (one, other))
    if pitch != other_pitch or min(len(one), len(other)) == 1:
        return True
    # two layers of one page-major pool lie between each other's units without touching
    unit, other_unit = (unit_elements(pool) * pool.element_size() for pool in (one, other))
    apart = (other_low - low) % pitch
    return not (unit <= apart and apart + other_unit <= pitch)


def same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The very same units, so that unit n of one is unit n of the other and no other's."""
    same = one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype
    return same and one.device == other.device and (len(one) <= 1 or one.stride(0) == other.stride(0))


def _extent(pool: torch.Tensor) -> tuple[int, int]:
    span = (len(pool) - 1) * pool.stride(0) + unit_elements(pool)
    return pool.data_ptr(), pool.data_ptr() + span * pool.element_size()
