"""Causal depthwise convolution of width 4 before KDA, over window slots: the other half of a layer's state.

A window is the last 3 inputs of a request, oldest first. It is a copy of inputs, never rounded, and a snapshot of a
prefix is its recurrent state *and* its window: restoring one without the other is wrong for the next 3 tokens, and
through the state for all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvledger.kernels.launch import Backend, require_interpretable, resolve_backend, triton_module
from kvledger.kernels.layout import mismatch, output_like, require_tensors, share_memory, units_apart, units_contiguous
from kvledger.kernels.state_plan import NO_SLOT, ChunkPlan, Span, StateSlots, plan_chunks, sequence_lengths
from kvledger.kernels.tables import TableError

DTYPES: Final = (torch.float32, torch.bfloat16)
WIDTH: Final = 4
WINDOW: Final = WIDTH - 1
"""Tokens of a window."""


@dataclass(frozen=True)
class ConvCall:
    """A checked call: x and out [B, T, C] contiguous, weight [C, 4], windows [slots, 3, C] or None without slots."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    silu: bool
    windows: torch.Tensor | None
    plan: ChunkPlan


def causal_conv_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    *,
    silu: bool = True,
    window_pool: torch.Tensor | None = None,
    slots: StateSlots | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Convolve N sequences over time, each after its window; writes `out` and windows in place and returns `out`.

    x, out [B, T, C] float32 or bfloat16; weight [C, 4] and bias [C] of any of the two, the last tap is the token
    itself; `cu_seqlens` as in kda_chunk_fwd. `window_pool` [slots, 3, C], of x's dtype, goes with `slots`, the very
    object that kda_chunk_fwd takes: window and state then are of the same token. x, weight and bias are used in
    float32, SiLU is applied unless `silu` is False.
    """
    require_tensors(x=x, weight=weight)
    if x.dim() != 3 or x.dtype not in DTYPES or x.shape[2] == 0:
        raise mismatch("x", x, "[B, T, C] float32 or bfloat16, C > 0")
    batch, tokens, channels = x.shape
    expected = {"weight": (weight, (channels, WIDTH)), "bias": (bias, (channels,))}
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        require_tensors(**{name: tensor})
        if tuple(tensor.shape) != shape or tensor.dtype not in DTYPES or tensor.device != x.device:
            raise mismatch(name, tensor, f"{[*shape]} float32 or bfloat16 on {x.device}")
    out = output_like(out, tuple(x.shape), x)
    if share_memory(out, x.contiguous()):
        raise TableError("out shares memory with x: a token's input is needed by the next three")
    _check_windows(window_pool, x, out)
    lengths = sequence_lengths(batch, tokens, cu_seqlens)
    if slots is None:
        if window_pool is not None:
            raise TableError("a window_pool without slots: which of its windows are meant?")
        slots = StateSlots.none(len(lengths))
    slots.check(lengths, None if window_pool is None else window_pool.shape[0])
    bias = None if bias is None else bias.contiguous()
    call = ConvCall(x.contiguous(), weight.contiguous(), bias, out, silu, window_pool, plan_chunks(lengths, slots))
    chosen = resolve_backend(backend, x.device)
    if chosen == "torch":
        run_torch(call)
        return out
    if chosen == "interpret":
        for tensor in (x, weight, bias):
            require_interpretable(torch.float32 if tensor is None else tensor.dtype)
    triton_module("conv_triton", chosen).run(call)
    return out


def _check_windows(pool: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor) -> None:
    if pool is None:
        return
    require_tensors(window_pool=pool)
    channels = x.shape[2]
    shape_fits = pool.dim() == 3 and tuple(pool.shape[1:]) == (WINDOW, channels)
    if not shape_fits or pool.dtype != x.dtype or pool.device != x.device:
        raise mismatch("window_pool", pool, f"[slots, {WINDOW}, {channels}] {x.dtype} on {x.device}")
    if not units_contiguous(pool) or not units_apart(pool):
        raise mismatch("window_pool", pool, "each slot contiguous, slots apart")
    for name, tensor in (("x", x.contiguous()), ("out", out)):
        if share_memory(pool, tensor):
            raise TableError(f"{name} shares memory with window_pool")


def run_torch(call: ConvCall) -> None:
    """Execute a checked call on torch."""
    inputs, outputs = (tensor.view(-1, tensor.shape[2]) for tensor in (call.x, call.out))
    for span in call.plan.spans:
        rows = slice(span.first_token, span.first_token + span.tokens)
        history = torch.cat((source_window(call, span), inputs[rows]))
        if span.tokens:
            outputs[rows] = convolve(call, history).to(outputs.dtype)
        save_windows(call, span, history)


def source_window(call: ConvCall, span: Span) -> torch.Tensor:
    """The 3 inputs before the span's first token; zeros for a fresh request."""
    if call.windows is None or span.source == NO_SLOT:
        return call.x.new_zeros(WINDOW, call.x.shape[2])
    return call.windows[span.source]


def save_windows(call: ConvCall, span: Span, history: torch.Tensor) -> None:
    """Write checkpoint windows, then the destination's; `history` is a copy, so a slot may be its own source."""
    if call.windows is None:
        return
    for tokens, slot in (*span.saves, (span.tokens, span.destination)):
        if slot != NO_SLOT:
            call.windows[slot] = history[tokens : tokens + WINDOW]


def convolve(call: ConvCall, history: torch.Tensor) -> torch.Tensor:
    """Float32 outputs [T, C] of `history` [3 + T, C]: tap by tap, so that a token's bits depend on its inputs only."""
    taps = call.weight.to(torch.float32).unbind(1)
    tokens = len(history) - WINDOW
    total = taps[0] * history[:tokens]
    for lag in range(1, WIDTH):
        total += taps[lag] * history[lag : lag + tokens]
    if call.bias is not None:
        total += call.bias
    # not torch's silu: its bits depend on an element's place in the tensor (see kda_torch)
    return total / (-total).exp().add_(1) if call.silu else total
