"""The causal convolution in Triton: one launch for the outputs, a second one for the windows.

Two launches because windows are updated in place: a program that writes a slot must not meet one that still reads it.
Within the second, one program owns all slots of a sequence and reads its source before it writes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvledger.kernels.conv import WIDTH, ConvCall
from kvledger.kernels.launch import Launch, interprets
from kvledger.kernels.state_plan import CHUNK, StateSlots, plan_chunks


@triton.jit
def outputs_kernel(
    x, weight, bias, out, windows, chunks, sequences, window_stride,
    C: tl.constexpr, BC: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """One sub-chunk of 16 tokens and a block of channels; taps before the span's first token come from its window."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 8
    base, low, high = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    sequence = sequences + tl.load(chunk + 4) * 8
    source, first_token = tl.load(sequence + 2), tl.load(sequence + 4)
    rows = tl.arange(0, CHUNK)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    live = ((rows >= low) & (rows < high))[:, None] & (cols < C)[None, :]
    total = tl.zeros([CHUNK, BC], tl.float32)
    for tap in tl.static_range(WIDTH):
        token = base + rows - (WIDTH - 1 - tap)
        inside = (token >= first_token)[:, None]
        value = tl.load(x + token[:, None] * C + cols[None, :], mask=live & inside, other=0.0).to(tl.float32)
        if source >= 0:
            row = windows + source * window_stride + (token - first_token + (WIDTH - 1))[:, None] * C + cols[None, :]
            value += tl.load(row, mask=live & (token < first_token)[:, None], other=0.0).to(tl.float32)
        factor = tl.load(weight + cols * WIDTH + tap, mask=cols < C, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    if BIAS:
        total += tl.load(bias + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + (base + rows)[:, None] * C + cols[None, :], total.to(out.dtype.element_ty), mask=live)


@triton.jit
def windows_kernel(
    x, windows, sequences, saves, window_stride, C: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """All checkpoints of one sequence, then its destination, for a block of channels; BW >= 3 rows, the rest masked."""
    sequence = sequences + tl.program_id(0).to(tl.int64) * 8
    source, first_token = tl.load(sequence + 2), tl.load(sequence + 4)
    first_save, count = tl.load(sequence + 6), tl.load(sequence + 7).to(tl.int32)
    rows = tl.arange(0, BW)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (rows < WIDTH - 1)[:, None] & (cols < C)[None, :]
    # the last save is the only one that may fall on the source, so earlier ones cannot spoil what it reads
    for index in range(0, count):
        save = saves + (first_save + index) * 8
        tokens, slot = tl.load(save), tl.load(save + 1)
        if slot >= 0:
            offset = tokens - (WIDTH - 1) + rows  # before the span where negative
            new = inside & (offset >= 0)[:, None]
            value = tl.load(x + (first_token + offset)[:, None] * C + cols[None, :], mask=new, other=0.0)
            if source >= 0:
                row = windows + source * window_stride + (tokens + rows)[:, None] * C + cols[None, :]
                value += tl.load(row, mask=inside & (offset < 0)[:, None], other=0.0)
            tl.debug_barrier()
            tl.store(windows + slot * window_stride + rows[:, None] * C + cols[None, :], value, mask=inside)
