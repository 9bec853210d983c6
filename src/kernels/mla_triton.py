"""MLA over pages in Triton: latents stored through a slot map, and causal prefill attention in absorbed form.

For Hopper (sm_90) and, in float32 only, for Triton's interpreter. The ``*_launch`` functions are the only way in: what
they build from real tensors is what the ahead-of-time check builds from ``meta`` tensors.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kvledger.kernels.launch import Launch
from kvledger.kernels.tables import PrefillPlan, SlotMap, plan_slots, plan_tables

# A rank padded past this spills: the accumulator alone is block_m * rank floats.
MAX_RANK: Final = 512
MAX_ROPE: Final = 128
STORE_ROWS: Final = 32


@triton.jit(do_not_specialize=["tokens", "page_rows"])
def store_kernel(
    latents,
    pages,
    slots,
    tokens,
    page_rows,
    PAGE_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy rows of ``WORDS`` integers; page p starts ``p * page_rows`` rows into the pool."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    there = token < tokens
    slot = tl.load(slots + token, mask=there, other=0)
    row = slot // PAGE_SIZE * page_rows + slot % PAGE_SIZE
    mask = there[:, None]
    if WORDS % BLOCK_W != 0:
        mask = mask & (column < WORDS)[None, :]
    words = tl.load(latents + token.to(tl.int64)[:, None] * WORDS + column[None, :], mask=mask)
    tl.store(pages + row[:, None] * WORDS + column[None, :], words, mask=mask)


@triton.jit(do_not_specialize=["heads", "table_stride", "page_rows"])
def prefill_kernel(
    q,
    pages,
    table,
    tiles,
    out,
    scale_log2,
    heads,
    table_stride,
    page_rows,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One head of one tile: ``BLOCK_M`` positions of a request against the keys ``[0, last of them]``."""
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 5
    table_row = table + tl.load(tile) * table_stride
    first = tl.load(tile + 1)
    row_of_zero = tl.load(tile + 2)
    start = tl.load(tile + 3)
    end = tl.load(tile + 4)

    tile_row = tl.arange(0, BLOCK_M)
    position = first + tile_row
    key_offset = tl.arange(0, BLOCK_N)
    rank_column = tl.arange(0, BLOCK_R)
    rope_column = tl.arange(0, BLOCK_P)
    here = ((position >= start) & (position < end))[:, None]
    # The first row's place is one 64-bit number, the others' distances from it fit 32 bits: registers are scarce.
    first_row = (row_of_zero + first).to(tl.int64) * heads + head
    row_offset = tile_row * heads
    query = q + first_row * (RANK + ROPE) + row_offset[:, None] * (RANK + ROPE)
    query_rank = tl.load(query + rank_column[None, :], mask=here & (rank_column < RANK)[None, :], other=0.0)
    query_rope = tl.load(query + RANK + rope_column[None, :], mask=here & (rope_column < ROPE)[None, :], other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    stop = tl.minimum(first + BLOCK_M, end)
    # Hoisted, the addresses of 36 pieces of the query in shared memory would fill the registers: 216 B spilled.
    for begin in tl.range(0, stop, BLOCK_N, disable_licm=True):
        key_position = begin + key_offset
        exists = key_position < stop
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table_row + begin // PAGE_SIZE).to(tl.int64)
            key = pages + (page * page_rows + begin % PAGE_SIZE) * (RANK + ROPE) + key_offset[:, None] * (RANK + ROPE)
        else:
            pages_of_keys = tl.load(table_row + key_position // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
            key = pages + (pages_of_keys * page_rows + key_position % PAGE_SIZE)[:, None] * (RANK + ROPE)
        # Masked loads, not only masked scores: rows past `stop` may hold NaN, and 0 * NaN is NaN.
        key_rank = tl.load(key + rank_column[None, :], mask=exists[:, None] & (rank_column < RANK)[None, :], other=0.0)
        key_rope = tl.load(
            key + RANK + rope_column[None, :], mask=exists[:, None] & (rope_column < ROPE)[None, :], other=0.0
        )
        scores = tl.dot(query_rank, tl.trans(key_rank), input_precision=PRECISION)
        scores = tl.dot(query_rope, tl.trans(key_rope), scores, input_precision=PRECISION)
        scores = tl.where(key_position[None, :] <= position[:, None], scores * scale_log2, float("-inf"))
        # Position 0 is in the first block and every row sees it: `new_top` is finite from the first step on.
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        values = tl.dot(weights.to(key_rank.dtype), key_rank, values * fade[:, None], input_precision=PRECISION)
        top = new_top

    result = out + first_row * RANK + row_offset[:, None] * RANK + rank_column[None, :]
    values = values * (1.0 / total)[:, None]
    tl.store(result, values.to(out.dtype.element_ty), mask=here & (rank_column < RANK)[None, :])


def prefill_blocks(dtype: torch.dtype, interpret: bool) -> tuple[int, int]:
    """Return (block_m, block_n): query positions and keys per step."""
    if interpret:
        return 32, 32
    return (64, 32) if dtype == torch.bfloat16 else (16, 16)


def store_launch(latents: torch.Tensor, pages: torch.Tensor, slot_map: SlotMap) -> Launch:
    """Build the launch that writes ``latents`` [T, width] into ``pages`` [num_pages, page_size, width]."""
    latent_words, page_words = _words(latents), _words(pages)
    words = latent_words.shape[1]
    block_w = _column_block(words)
    return Launch(
        store_kernel,
        (triton.cdiv(len(latents), STORE_ROWS), triton.cdiv(words, block_w)),
        {
            "latents": latent_words,
            "pages": page_words,
            "slots": slot_map.slots,
            "tokens": len(latents),
            "page_rows": _page_rows(pages),
            "PAGE_SIZE": slot_map.page_size,
            "WORDS": words,
            "BLOCK_T": STORE_ROWS,
            "BLOCK_W": block_w,
        },
    )


def prefill_launch(
    q: torch.Tensor, pages: torch.Tensor, plan: PrefillPlan, scale: float, rank: int, out: torch.Tensor
) -> Launch:
    """Build the launch of ``mla_prefill``: ``q`` [T, H, width] and ``out`` [T, H, rank], both contiguous."""
    rope = q.shape[2] - rank
    block_r, block_p = (max(16, triton.next_power_of_2(size)) for size in (rank, rope))
    if block_r > MAX_RANK or block_p > MAX_ROPE:
        raise ValueError(f"rank {rank} and rope part {rope}: at most {MAX_RANK} and {MAX_ROPE} fit the registers")
    args: dict[str, Any] = {
        "q": q,
        "pages": pages,
        "table": plan.table,
        "tiles": plan.tiles,
        "out": out,
        "scale_log2": scale * math.log2(math.e),
        "heads": q.shape[1],
        "table_stride": plan.table.shape[1],
        "page_rows": _page_rows(pages),
        "RANK": rank,
        "ROPE": rope,
        "PAGE_SIZE": plan.page_size,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_R": block_r,
        "BLOCK_P": block_p,
        "PRECISION": "ieee",
    }
    warps, stages = (8, 2) if q.dtype == torch.bfloat16 else (8, 1)
    return Launch(prefill_kernel, (q.shape[1], len(plan.tiles)), args, num_warps=warps, num_stages=stages)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """View the last dimension as 32-bit words if it holds whole ones, else as 16-bit words."""
    whole = tensor.shape[-1] * tensor.element_size() % 4 == 0
    return tensor.view(torch.int32 if whole else torch.int16)


def _column_block(words: int) -> int:
    """Return a power of two that divides ``words``, or a padded block where that would be tiny."""
    divisor = min(words & -words, 64)
    return divisor if divisor >= 8 else min(64, triton.next_power_of_2(words))


def _page_rows(pages: torch.Tensor) -> int:
    """Return the distance of two pages in rows; more than page_size where layers lie between them."""
    return pages.stride(0) // pages.shape[2]


def aot_variants() -> list[tuple[str, Launch]]:
    """Return the launches of an executor on Hopper: latents of 512 + 64, pages of 64 tokens and of odd sizes."""
    rank, rope = 512, 64
    variants = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for page_size in (16, 64, 128):
            pages = torch.empty(8, page_size, rank + rope, dtype=dtype, device="meta")
            q = torch.empty(64, 32, rank + rope, dtype=dtype, device="meta")
            out = torch.empty(64, 32, rank, dtype=dtype, device="meta")
            table = torch.arange(64 // page_size + 1)[None]
            plan = plan_tables(pages, table, [0, 64], [0], "triton", prefill_blocks(dtype, interpret=False))
            variants.append((f"mla_prefill-{name}-page{page_size}", prefill_launch(q, pages, plan, 0.1, rank, out)))
            latents = torch.empty(64, rank + rope, dtype=dtype, device="meta")
            variants.append(
                (f"latent_store-{name}-page{page_size}", store_launch(latents, pages, plan_slots(range(64), pages)))
            )
    return variants
