"""Whole pages copied between pools and tiers, in words; with ``canary_fill`` and ``canary_check``.

A pool is any tensor whose first dimension counts units (pages of latents, state slots, convolution windows) and whose
units are contiguous; units may lie further apart than their size (a layer's slice of a page-major pool).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from kvledger.kernels.canary import POISON, CanaryFault, canary_check, canary_fill
from kvledger.kernels.launch import Backend, compiled_reach, resolve_backend, triton_module
from kvledger.kernels.layout import mismatch, require_tensors, share_memory, units_apart
from kvledger.kernels.tables import Ints, TableError, check_units, upload
from kvledger.kernels.words import as_words

__all__ = ["POISON", "CanaryFault", "Engine", "Ticket", "canary_check", "canary_fill", "page_copy"]

Engine = Literal["kernel", "runs"]


@dataclass(frozen=True)
class Ticket:
    """A copy under way. Without CUDA it is over when handed out."""

    event: Any = None

    def done(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Block the host until the copied words are there."""
        if self.event is not None:
            self.event.synchronize()


def page_copy(
    src_pool: torch.Tensor,
    dst_pool: torch.Tensor,
    src_pages: Ints,
    dst_pages: Ints,
    *,
    backend: Backend | None = None,
    engine: Engine | None = None,
) -> Ticket:
    """Copy ``src_pool[src_pages[i]]`` over ``dst_pool[dst_pages[i]]`` for all i, in words, whatever they mean.

    Lists on the host. Refused: different lengths, a number outside its pool, a destination twice, and, within one pool,
    a page that is both source and destination (the outcome would hang on the order). On CUDA the copy runs on the
    current stream and the host does not wait, if the host pool is pinned: leave both pools alone until the ticket is
    done. ``engine``: "kernel", one for the whole list, or "runs", a memcpy per run of neighbours (the way for unpinned
    memory); None takes the kernel where it can reach both pools.
    """
    require_tensors(src_pool=src_pool, dst_pool=dst_pool)
    if engine not in (None, *get_args(Engine)):
        raise ValueError(f"engine: got {engine!r}, expected {' or '.join(map(repr, get_args(Engine)))}")
    if src_pool.dtype != dst_pool.dtype or src_pool.shape[1:] != dst_pool.shape[1:]:
        raise ValueError(
            f"pages of {src_pool.dtype} {list(src_pool.shape[1:])} to {dst_pool.dtype} {list(dst_pool.shape[1:])}"
        )
    sources = check_units("src_pages", src_pages, len(src_pool), distinct=False)
    targets = check_units("dst_pages", dst_pages, len(dst_pool), distinct=True)
    if len(sources) != len(targets):
        raise TableError(f"{len(sources)} pages to copy onto {len(targets)}")
    _refuse_overlap(src_pool, dst_pool, sources, targets)
    device = dst_pool.device if src_pool.device.type == "cpu" else src_pool.device
    chosen = resolve_backend(backend, device)
    src, dst = _same_words(src_pool, dst_pool)
    if not units_apart(dst_pool):
        raise mismatch("dst_pool", dst_pool, "units that lie apart")
    if (engine or _engine(chosen, src_pool, dst_pool)) == "runs":
        _copy_runs(src, dst, sources.tolist(), targets.tolist())
    elif chosen == "torch":
        dst[targets.to(dst.device)] = src[sources.to(src.device)].to(dst.device)
    else:
        lists = upload(sources, device), upload(targets, device)
        triton_module("pages_triton", chosen).copy_launch(src, dst, *lists).run()
    if device.type != "cuda":
        return Ticket()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Ticket(event)


def _engine(backend: Backend, src_pool: torch.Tensor, dst_pool: torch.Tensor) -> Engine:
    """Return ``kernel`` unless a compiled kernel would have to reach unpinned host memory."""
    if backend != "triton":
        return "kernel"
    return "kernel" if compiled_reach(src_pool) and compiled_reach(dst_pool) else "runs"


def _same_words(src_pool: torch.Tensor, dst_pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    src, dst = as_words(src_pool), as_words(dst_pool)
    if src.element_size() == dst.element_size():
        return src, dst
    narrow = min(src.element_size(), dst.element_size())
    return as_words(src_pool, widest=narrow), as_words(dst_pool, widest=narrow)


def _copy_runs(src: torch.Tensor, dst: torch.Tensor, sources: list[int], targets: list[int]) -> None:
    """Copy each stretch of pages that are neighbours, in order, on both sides, in one piece."""
    begin = 0
    for at in range(1, len(sources) + 1):
        if at < len(sources) and sources[at] == sources[at - 1] + 1 and targets[at] == targets[at - 1] + 1:
            continue
        stretch = slice(targets[begin], targets[begin] + at - begin)
        dst[stretch].copy_(src[sources[begin] : sources[begin] + at - begin], non_blocking=True)
        begin = at


def _refuse_overlap(src: torch.Tensor, dst: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    if src.device != dst.device or not len(src) or not len(dst):
        return
    same_pitch = src.stride(0) == dst.stride(0)
    if same_pitch and src.data_ptr() == dst.data_ptr():
        both = set(sources.tolist()) & set(targets.tolist())
        if both:
            raise TableError(f"page {min(both)} is both copied and overwritten")
        return
    if share_memory(src, dst):
        raise TableError("the two pools overlap in memory")
