"""Multi-head latent attention over a paged pool, absorbed form.

A token's latent is ``rank + rope`` numbers, shared by all heads: a query's score is its dot product with all of them,
the value is the first ``rank``. The caller has absorbed the key projection into ``q`` and will apply the value
projection to the result. A pool is ``pages`` [num_pages, page_size, rank + rope], float32 or bfloat16; pages may lie
further apart than their size (a layer's slice of a page-major pool). Tables are on the host, and are checked there
before each launch.
"""

from __future__ import annotations

from typing import Final

import torch

from kvledger.kernels import mla_torch
from kvledger.kernels.launch import Backend, require_interpretable, resolve_backend, triton_module
from kvledger.kernels.layout import mismatch, output_like, require_tensors, share_memory, units_apart, units_contiguous
from kvledger.kernels.tables import Ints, PrefillPlan, SlotMap, TableError, plan_slots, plan_tables

DTYPES: Final = (torch.float32, torch.bfloat16)

# One product's shape on a CPU: large enough that torch's dispatch is not the cost, small enough for a chunk of a page.
TORCH_BLOCKS: Final = (128, 128)

__all__ = ["PrefillPlan", "SlotMap", "TableError", "latent_store", "mla_prefill", "plan_prefill", "plan_slots"]


def latent_store(
    latents: torch.Tensor, pages: torch.Tensor, slot_map: Ints | SlotMap, *, backend: Backend | None = None
) -> None:
    """Write ``latents`` [T, width] into ``pages`` in place, bit for bit; token t goes to slot ``slot_map[t]``.

    A slot is ``page * page_size + offset``. ``slot_map`` [T] integers on the host, or ``plan_slots`` of it (one plan
    serves all layers). Refused: a slot outside the pool (-1 too: every latent has a place), a slot twice, latents that
    lie in the pool.
    """
    require_tensors(latents=latents)
    _check_pool(pages)
    plan = slot_map if isinstance(slot_map, SlotMap) else plan_slots(slot_map, pages)
    if (plan.num_pages, plan.page_size) != tuple(pages.shape[:2]):
        raise TableError(f"slots planned for {plan.num_pages} x {plan.page_size}, the pool is {list(pages.shape[:2])}")
    expected = (len(plan.slots), pages.shape[2])
    if tuple(latents.shape) != expected or latents.dtype != pages.dtype or latents.device != pages.device:
        raise mismatch("latents", latents, f"{list(expected)} {pages.dtype} on {pages.device}")
    if share_memory(latents.contiguous(), pages):
        raise TableError("latents share memory with pages: a latent could be overwritten before it is read")
    chosen = resolve_backend(backend, pages.device)
    if chosen == "torch":
        mla_torch.store(latents, pages, plan)
    else:
        triton_module("mla_triton", chosen).store_launch(latents.contiguous(), pages, plan).run()


def plan_prefill(
    pages: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens: Ints,
    starts: Ints,
    *,
    backend: Backend | None = None,
    block: tuple[int, int] | None = None,
) -> PrefillPlan:
    """Check a batch's tables against a pool and upload them, once for all layers; see ``mla_prefill``.

    ``block`` (query positions, keys; powers of two from 16 up) is part of the arithmetic: bits are only compared
    between plans with the same blocks.
    """
    _check_pool(pages)
    chosen = resolve_backend(backend, pages.device)
    if block is None and chosen == "torch":
        block = TORCH_BLOCKS
    elif block is None:
        block = triton_module("mla_triton", chosen).prefill_blocks(pages.dtype, interpret=chosen == "interpret")
    if len(block) != 2 or any(type(size) is not int or size < 16 or size & (size - 1) for size in block):
        raise ValueError(f"block: got {block}, expected two powers of two from 16 up")
    return plan_tables(pages, page_table, cu_seqlens, starts, chosen, block)


def mla_prefill(
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor | PrefillPlan,
    cu_seqlens: Ints | None = None,
    starts: Ints | None = None,
    *,
    scale: float,
    rank: int,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return causal attention [T, H, rank] of ``q`` [T, H, rank + rope] over each request's pages.

    Request n has the rows ``cu_seqlens[n] : cu_seqlens[n + 1]``, at positions ``starts[n]`` and on; row at position p
    attends to positions ``0 .. p``, whose latents (the chunk's own too) are in ``page_table[n]``, position p in page
    ``page_table[n, p // page_size]``. Rows past the chunk's end are never loaded; entries past the last page needed are
    not looked at. Tables are on the host, or one ``PrefillPlan`` stands for all three. Lengths of 0 and 1 are welcome.
    """
    _check_pool(pages)
    if isinstance(page_table, PrefillPlan):
        plan = page_table
    elif cu_seqlens is None or starts is None:
        raise TypeError("a page table needs cu_seqlens and starts; only a PrefillPlan holds all three")
    else:
        plan = plan_prefill(pages, page_table, cu_seqlens, starts, backend=backend)
    if (plan.num_pages, plan.page_size) != tuple(pages.shape[:2]):
        raise TableError(f"tables planned for {plan.num_pages} x {plan.page_size}, the pool is {list(pages.shape[:2])}")
    _check_query(q, pages, plan, rank)
    out = output_like(out, (*q.shape[:2], rank), q)
    for name, tensor in (("q", q.contiguous()), ("pages", pages)):
        if share_memory(out, tensor):
            raise TableError(f"out shares memory with {name}")
    if backend not in (None, plan.backend):
        raise ValueError(f"planned for backend {plan.backend!r}, asked to run on {backend!r}")
    chosen = resolve_backend(plan.backend, pages.device)
    if chosen == "torch":
        mla_torch.prefill(q, pages, plan, scale, rank, out)
        return out
    if chosen == "interpret":
        require_interpretable(q.dtype)
    triton_module("mla_triton", chosen).prefill_launch(q.contiguous(), pages, plan, scale, rank, out).run()
    return out


def _check_pool(pages: torch.Tensor) -> None:
    require_tensors(pages=pages)
    if pages.dim() != 3 or pages.dtype not in DTYPES or 0 in pages.shape[1:]:
        raise mismatch("pages", pages, "[num_pages, page_size, width] float32 or bfloat16")
    whole_rows = len(pages) <= 1 or pages.stride(0) % pages.shape[2] == 0
    if not units_contiguous(pages) or not units_apart(pages) or not whole_rows:
        raise mismatch("pages", pages, "each page contiguous, whole rows between pages")


def _check_query(q: torch.Tensor, pages: torch.Tensor, plan: PrefillPlan, rank: int) -> None:
    require_tensors(q=q)
    if q.dim() != 3 or q.dtype != pages.dtype or q.device != pages.device:
        raise mismatch("q", q, f"[T, H, width] {pages.dtype} on {pages.device}")
    if q.shape[0] != plan.tokens or q.shape[1] < 1 or q.shape[2] != pages.shape[2]:
        raise mismatch("q", q, f"[{plan.tokens}, H, {pages.shape[2]}], one row per planned token")
    if not 0 < rank < pages.shape[2]:
        raise ValueError(f"rank {rank}: some of the latent's {pages.shape[2]} numbers, and not all (the rope part)")
