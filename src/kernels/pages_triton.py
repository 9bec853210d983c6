"""Copying pages in Triton: one launch for a whole list, on a device or across to pinned host memory and back.

Pinned host memory has a device address, so the same kernel that gathers on the device also writes to the host tier: no
staging buffer, no launch per page, and the copy stays on the stream it was put on.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from kvledger.kernels.launch import Launch
from kvledger.kernels.words import as_words

COPY_WORDS: Final = 4096


@triton.jit(do_not_specialize=["src_pitch", "dst_pitch"])
def copy_kernel(
    src,
    dst,
    src_units,
    dst_units,
    src_pitch,
    dst_pitch,
    WORDS: tl.constexpr,
    QUANTUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a block of one unit's ``WORDS`` words; units lie ``pitch * QUANTUM`` words apart, which keeps them aligned."""
    pair = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = src + tl.load(src_units + pair) * src_pitch * QUANTUM + column
    target = dst + tl.load(dst_units + pair) * dst_pitch * QUANTUM + column
    if WORDS % BLOCK == 0:
        tl.store(target, tl.load(source))
    else:
        tl.store(target, tl.load(source, mask=column < WORDS), mask=column < WORDS)


def copy_launch(src: torch.Tensor, dst: torch.Tensor, src_units: torch.Tensor, dst_units: torch.Tensor) -> Launch:
    """Build the launch that copies ``src[src_units[i]]`` to ``dst[dst_units[i]]``.

    ``src`` and ``dst`` are [units, words] of the same integer type (``pages.as_words``); the lists int64, on the device.
    """
    words = src.shape[1]
    quantum = max(1, 16 // src.element_size())
    if src.stride(0) % quantum or dst.stride(0) % quantum:
        quantum = 1
    block = min(COPY_WORDS, triton.next_power_of_2(words))
    args: dict[str, Any] = {
        "src": src,
        "dst": dst,
        "src_units": src_units,
        "dst_units": dst_units,
        "src_pitch": src.stride(0) // quantum,
        "dst_pitch": dst.stride(0) // quantum,
        "WORDS": words,
        "QUANTUM": quantum,
        "BLOCK": block,
    }
    return Launch(copy_kernel, (len(src_units), triton.cdiv(words, block)), args)


def aot_variants() -> list[tuple[str, Launch]]:
    """Return the copies of an executor on Hopper: one layer's latent page of 64 tokens, 512 + 64 wide."""
    variants = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        pool = as_words(torch.empty(8, 64, 576, dtype=dtype, device="meta"))
        units = torch.empty(4, dtype=torch.int64, device="meta")
        variants.append((f"page_copy-latents-{name}-page64", copy_launch(pool, pool, units, units)))
    return variants
