"""MLA over pages in torch: the executor for a CPU, in float32 whatever the pool's dtype.

One row's bits must not depend on what else runs, and a matrix product's may depend on its *shape*. So every product
here has one of two shapes, fixed by the plan's blocks and the model: short tiles and key blocks are padded with zeros.
"""

from __future__ import annotations

import math

import torch

from kvledger.kernels.tables import PlannedChunk, PrefillPlan, SlotMap
from kvledger.kernels.words import element_words


def store(latents: torch.Tensor, pages: torch.Tensor, slot_map: SlotMap) -> None:
    """Write ``latents`` [T, width] into ``pages`` [num_pages, page_size, width] at the slots, bit for bit."""
    page = slot_map.slots // slot_map.page_size
    element_words(pages)[page, slot_map.slots % slot_map.page_size] = element_words(latents)


def prefill(
    q: torch.Tensor, pages: torch.Tensor, plan: PrefillPlan, scale: float, rank: int, out: torch.Tensor
) -> None:
    """Causal attention of ``q`` [T, H, width] over each request's latents, into ``out`` [T, H, rank]."""
    for chunk in plan.sequences:
        if chunk.end == chunk.start:
            continue
        keys = _gather(pages, chunk, plan)
        first_tile = chunk.start // plan.block_m * plan.block_m
        for first in range(first_tile, chunk.end, plan.block_m):
            _tile(q, keys, plan, (chunk, first), (scale, rank), out)


def _gather(pages: torch.Tensor, chunk: PlannedChunk, plan: PrefillPlan) -> torch.Tensor:
    """Return the latents of positions ``[0, end)``, float32, zeros up to a multiple of ``block_n``.

    Rows of the last page past ``end`` are left behind here: they may hold NaN, and 0 * NaN is NaN.
    """
    width = pages.shape[-1]
    padded = -(-chunk.end // plan.block_n) * plan.block_n
    keys = torch.zeros(padded, width, device=pages.device)
    keys[: chunk.end] = pages[chunk.pages.to(pages.device)].reshape(-1, width)[: chunk.end].float()
    return keys


def _tile(
    q: torch.Tensor,
    keys: torch.Tensor,
    plan: PrefillPlan,
    place: tuple[PlannedChunk, int],
    numbers: tuple[float, int],
    out: torch.Tensor,
) -> None:
    """One tile of ``block_m`` positions, all heads: softmax kept as a running maximum and sum over key blocks."""
    chunk, first = place
    scale, rank = numbers
    heads, width = q.shape[1:]
    low, high = max(first, chunk.start), min(first + plan.block_m, chunk.end)
    rows = slice(chunk.row + low - chunk.start, chunk.row + high - chunk.start)
    query = torch.zeros(plan.block_m, heads, width, device=q.device)
    query[low - first : high - first] = q[rows]
    query = query.reshape(-1, width) * (scale * math.log2(math.e))
    positions = torch.arange(first, first + plan.block_m, device=q.device).repeat_interleave(heads)[:, None]
    top = torch.full((plan.block_m * heads, 1), -math.inf, device=q.device)
    total = torch.zeros_like(top)
    values = torch.zeros(plan.block_m * heads, rank, device=q.device)
    for begin in range(0, high, plan.block_n):
        block = keys[begin : begin + plan.block_n]
        scores = query @ block.T
        if begin + plan.block_n > first + 1:
            later = torch.arange(begin, begin + plan.block_n, device=q.device) > positions
            scores.masked_fill_(later, -math.inf)
        # Position 0 is in the first block and every row sees it: `new_top` is finite from the first step on.
        new_top = torch.maximum(top, scores.amax(1, keepdim=True))
        weights = torch.exp2(scores - new_top)
        fade = torch.exp2(top - new_top)
        total = total * fade + weights.sum(1, keepdim=True)
        values = values * fade + weights @ block[:, :rank]
        top = new_top
    tile = (values / total).reshape(plan.block_m, heads, rank)
    out[rows] = tile[low - first : high - first].to(out.dtype)
