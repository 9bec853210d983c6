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
from kvledger.kernels.words import element_words


@triton.jit
def outputs_kernel(
    x, weight, bias, out, windows, chunks, sequences, window_stride,
    C: tl.constexpr, BC: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """One sub-chunk of 16 tokens and a block of channels; taps before the span's first token come from its window."""
    chunk = chunks + tl.program_id(0) * 8
    base, low, high = tl.load(chunk), tl.load(chunk + 1).to(tl.int32), tl.load(chunk + 2).to(tl.int32)
    sequence = sequences + tl.load(chunk + 4) * 8
    source, first_token = tl.load(sequence + 2), tl.load(sequence + 4)
    # tokens of the span before lane 0, as far as they count; negative where lane 0 is dead
    before = tl.minimum(base - first_token, WIDTH).to(tl.int32)
    windowed = (source >= 0) & (before < WIDTH - 1)
    rows = tl.arange(0, CHUNK)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    live = ((rows >= low) & (rows < high))[:, None] & (cols < C)[None, :]
    tile = rows[:, None] * C + cols[None, :]
    window = windows + source * window_stride + before * C
    total = tl.zeros([CHUNK, BC], tl.float32)
    for tap in tl.static_range(WIDTH):
        new = live & (rows >= (WIDTH - 1 - tap) - before)[:, None]
        value = tl.load(x + (base - (WIDTH - 1 - tap)) * C + tile, mask=new, other=0.0).to(tl.float32)
        if windowed:
            old = live & (rows < (WIDTH - 1 - tap) - before)[:, None]
            value += tl.load(window + tap * C + tile, mask=old, other=0.0).to(tl.float32)
        factor = tl.load(weight + cols * WIDTH + tap, mask=cols < C, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    if BIAS:
        total += tl.load(bias + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + base * C + tile, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def window_row(
    x, windows, source, first_token, offset, cols, window_stride, C: tl.constexpr, BC: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The input `offset` tokens after the span's first one; from the source window where that is negative."""
    value = tl.zeros([BC], x.dtype.element_ty)
    if offset >= 0:
        value = tl.load(x + (first_token + offset) * C + cols, mask=cols < C)
    elif source >= 0:
        value = tl.load(windows + source * window_stride + (offset + (WIDTH - 1)) * C + cols, mask=cols < C)
    return value


@triton.jit
def windows_kernel(
    x, windows, sequences, saves, window_stride, C: tl.constexpr, BC: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """All checkpoints of one sequence, then its destination, for a block of channels; x and windows as integer words.

    A thread owns its channels in all three rows and loads them before it stores one: the destination may be the source.
    """
    sequence = sequences + tl.program_id(0) * 8
    source, first_token = tl.load(sequence + 2), tl.load(sequence + 4)
    first_save, count = tl.load(sequence + 6), tl.load(sequence + 7).to(tl.int32)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    for index in range(count):
        save = saves + (first_save + index) * 8
        tokens, slot = tl.load(save), tl.load(save + 1)
        if slot >= 0:
            oldest = window_row(x, windows, source, first_token, tokens - 3, cols, window_stride, C, BC, WIDTH)
            middle = window_row(x, windows, source, first_token, tokens - 2, cols, window_stride, C, BC, WIDTH)
            newest = window_row(x, windows, source, first_token, tokens - 1, cols, window_stride, C, BC, WIDTH)
            row = windows + slot * window_stride + cols
            tl.store(row, oldest, mask=cols < C)
            tl.store(row + C, middle, mask=cols < C)
            tl.store(row + 2 * C, newest, mask=cols < C)


def outputs_launch(call: ConvCall) -> Launch:
    """Build the launch that writes `out`: one program per sub-chunk and block of channels."""
    channels = call.x.shape[2]
    chunks, spans, _ = call.plan.tables(call.x.device)
    args: dict[str, Any] = {"x": call.x, "weight": call.weight, "out": call.out, "chunks": chunks, "sequences": spans}
    args |= {
        # stand-ins where there is no bias and no window: nothing is read through them
        "bias": call.weight if call.bias is None else call.bias,
        "windows": call.x if call.windows is None else call.windows,
        "window_stride": 0 if call.windows is None else call.windows.stride(0),
        "C": channels,
        "BC": block_c(channels),
        "CHUNK": CHUNK,
        "WIDTH": WIDTH,
        "BIAS": call.bias is not None,
        "SILU": call.silu,
    }
    return Launch(outputs_kernel, (len(call.plan.chunks), triton.cdiv(channels, block_c(channels))), args)


def windows_launch(call: ConvCall) -> Launch:
    """Build the launch that writes the windows: one program per sequence and block of channels."""
    assert call.windows is not None, "no windows to write"
    channels = call.x.shape[2]
    _, spans, saves = call.plan.tables(call.x.device)
    args: dict[str, Any] = {"x": element_words(call.x), "windows": element_words(call.windows), "sequences": spans}
    args |= {"saves": saves, "window_stride": call.windows.stride(0), "C": channels, "BC": block_c(channels)}
    args["WIDTH"] = WIDTH
    return Launch(windows_kernel, (len(call.plan.spans), triton.cdiv(channels, block_c(channels))), args)


def block_c(channels: int) -> int:
    """Channels per program; one block in the interpreter, where a program costs the same whatever its size."""
    block: int = triton.next_power_of_2(channels)
    return block if interprets() else min(128, block)


def run(call: ConvCall) -> None:
    """Execute a checked call: outputs first, while the windows are as they were."""
    outputs_launch(call).run()
    if call.windows is not None:
        windows_launch(call).run()


def aot_variants() -> list[tuple[str, Launch]]:
    """Return what the executor launches on Hopper: q, k and v of 32 heads of 128 in one tensor."""
    variants = []
    plan = plan_chunks((64,), StateSlots((0,), (0,), (0,)))
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        x = torch.empty(1, 64, 3 * 32 * 128, dtype=dtype, device="meta")
        weight = torch.empty(x.shape[2], WIDTH, dtype=dtype, device="meta")
        windows = torch.empty(8, WIDTH - 1, x.shape[2], dtype=dtype, device="meta")
        call = ConvCall(x, weight, None, x, True, windows, plan)
        variants.append((f"conv_outputs-{name}", outputs_launch(call)))
        variants.append((f"conv_windows-{name}", windows_launch(call)))
    return variants
