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

MAX_BLOCK: Final = 4096
MIN_BLOCK: Final = 256

# One layer's units that an executor on Hopper moves: latents of 512 + 64, a state slot, a convolution window.
_UNITS: Final = {
    "latents-bf16-page16": ((16, 576), torch.bfloat16),
    "latents-bf16-page64": ((64, 576), torch.bfloat16),
    "latents-fp32-page64": ((64, 576), torch.float32),
    "latents-bf16-page128": ((128, 576), torch.bfloat16),
    "state-kimi-linear": ((32, 128, 128), torch.float32),
    "window-kimi-linear": ((3, 3 * 32 * 128), torch.bfloat16),
    "state-kimi-k3-of-8": ((12, 128, 128), torch.float32),
    "window-kimi-k3-of-8": ((3, 3 * 12 * 128), torch.bfloat16),
}


@triton.jit(do_not_specialize=["words", "src_pitch", "dst_pitch"])
def copy_kernel(
    src,
    dst,
    src_units,
    dst_units,
    words,
    src_pitch,
    dst_pitch,
    QUANTUM: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Copy one block of one unit's ``words`` words; units lie ``pitch * QUANTUM`` words apart, so they stay aligned."""
    pair = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = src + tl.load(src_units + pair) * src_pitch * QUANTUM + column
    target = dst + tl.load(dst_units + pair) * dst_pitch * QUANTUM + column
    if WHOLE:
        tl.store(target, tl.load(source))
    else:
        tl.store(target, tl.load(source, mask=column < words), mask=column < words)


def copy_launch(src: torch.Tensor, dst: torch.Tensor, src_units: torch.Tensor, dst_units: torch.Tensor) -> Launch:
    """Build the launch that copies ``src[src_units[i]]`` to ``dst[dst_units[i]]``.

    ``src`` and ``dst`` are [units, words] of one integer type (``words.as_words``); the lists int64, on the device.
    """
    words = src.shape[1]
    quantum = 16 // src.element_size()
    if src.stride(0) % quantum or dst.stride(0) % quantum:
        quantum = 1
    block = min(words & -words, MAX_BLOCK)
    if block < MIN_BLOCK:
        block = min(triton.next_power_of_2(words), MAX_BLOCK)
    args: dict[str, Any] = {
        "src": src,
        "dst": dst,
        "src_units": src_units,
        "dst_units": dst_units,
        "words": words,
        "src_pitch": src.stride(0) // quantum,
        "dst_pitch": dst.stride(0) // quantum,
        "QUANTUM": quantum,
        "BLOCK": block,
        "WHOLE": words % block == 0,
    }
    return Launch(copy_kernel, (len(src_units), triton.cdiv(words, block)), args)


def aot_variants() -> list[tuple[str, Launch]]:
    """Return the copies of an executor on Hopper."""
    units = torch.empty(4, dtype=torch.int64, device="meta")
    variants = []
    for name, (shape, dtype) in _UNITS.items():
        pool = as_words(torch.empty(8, *shape, dtype=dtype, device="meta"))
        variants.append((f"page_copy-{name}", copy_launch(pool, pool, units, units)))
    return variants
