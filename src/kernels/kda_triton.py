"""KDA in Triton: a parallel pass over sub-chunks, then the serial recurrence.

`terms_kernel` runs one program per (sub-chunk, head) and writes what does not depend on the state into a workspace;
`recurrence_kernel` runs one per (sequence, head, block of V) and walks the sequence's sub-chunks, state in registers.
For sm_90 and, in float32 only, for Triton's interpreter.
Mathematics and names: kda_torch, after FlashKDA's deep dive.

Chosen from builds for sm_90 and from a float64 study of rounding; no run on a GPU stands behind it yet:

- V-blocks of 64 on 4 warps: every product with the state is a wgmma whose A operand (S, W or U) stays in registers.
- With bf16 inputs, T, M, W and U are tf32 and U enters the state as two bf16 halves: RMS 0.003 with slow gates and
  correlated keys. With them in bf16: 0.008. With T by FlashKDA's series in tf32: 0.09; by blocks as here: 0.003.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvledger.kernels.kda import KdaCall
from kvledger.kernels.launch import Launch, interprets
from kvledger.kernels.state_plan import CHUNK, StateSlots, plan_chunks


@triton.jit
def pair_products(
    q, k, g, dt_bias, corner, head, live, rate,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums over K of k_i k_j e^(G_i - G_j) and of q_i k_j e^(G_i - G_j), q and k as they are in memory.

    No factor e^-G on its own: an unbounded gate can pass e^88 inside one chunk, or be infinite. G_i - G_j is the sum of
    what lies between, never a difference of sums: after a token that forgets everything its digits would be lost.
    """
    rows = tl.arange(0, CHUNK)
    kk = tl.zeros([CHUNK, CHUNK], tl.float32)
    qk = tl.zeros([CHUNK, CHUNK], tl.float32)
    for j in range(0, BK, BJ):
        cols = j + tl.arange(0, BJ)
        offset = rows[:, None] * (H * K) + cols[None, :]
        mask = live[:, None] & (cols < K)[None, :]
        query = tl.load(q + corner + offset, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(k + corner + offset, mask=mask, other=0.0).to(tl.float32)
        raw = tl.load(g + corner + offset, mask=mask, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias + head * K + cols, mask=cols < K, other=0.0)[None, :]
        drive = raw + bias
        log_decay = -rate * (tl.maximum(drive, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(drive))))
        log_decay = tl.where(mask, log_decay, 0.0)
        later = (rows[:, None] > rows[None, :])[:, :, None]
        between = tl.cumsum(tl.where(later, log_decay[:, None, :], 0.0), 0)
        decayed = key[None, :, :] * tl.exp(between)
        kk += tl.sum(key[:, None, :] * decayed, 2)
        qk += tl.sum(query[:, None, :] * decayed, 2)
    return kk, qk


@triton.jit(do_not_specialize=["lower_bound"])
def terms_kernel(
    q, k, g, beta, a_log, dt_bias, chunks, ws_kd, ws_qd, ws_kr, ws_t, ws_m, ws_decay, scale, lower_bound,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, CHUNK: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write kd, qd, kr [16, K], T diag(beta), M [16, 16] and e^G_last [K] of one chunk and head."""
    cell = tl.program_id(0)
    head = cell % H
    chunk = chunks + (cell // H) * 8
    base, low, high = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, BK)
    live = (rows >= low) & (rows < high)
    mask = live[:, None] & (cols < K)[None, :]
    corner = base * (H * K) + head * K  # int64; offsets inside a tile stay int32
    offset = rows[:, None] * (H * K) + cols[None, :]
    rate = tl.minimum(tl.exp(tl.load(a_log + head)), 3e38)  # kda_torch.MAX_RATE
    bias = tl.load(dt_bias + head * K + cols, mask=cols < K, other=0.0)[None, :]
    raw = tl.load(g + corner + offset, mask=mask, other=0.0).to(tl.float32)
    drive = raw + bias
    if BOUNDED:
        log_decay = lower_bound / (1.0 + tl.exp(-rate * drive))
    else:
        log_decay = -rate * (tl.maximum(drive, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(drive))))
    total = tl.cumsum(tl.where(mask, log_decay, 0.0), 0)
    last = tl.sum(tl.where((rows == CHUNK - 1)[:, None], total, 0.0), 0)

    key = tl.load(k + corner + offset, mask=mask, other=0.0).to(tl.float32)
    query = tl.load(q + corner + offset, mask=mask, other=0.0).to(tl.float32)
    key_norm = tl.rsqrt(tl.sum(key * key, 1) + 1e-6)
    query_norm = tl.rsqrt(tl.sum(query * query, 1) + 1e-6) * scale
    key = key * key_norm[:, None]
    query = query * query_norm[:, None]
    decay = tl.exp(total)
    kd = key * decay
    qd = query * decay
    if BOUNDED:
        ki = key * tl.exp(-total)
        kk = tl.dot(kd, tl.trans(ki), input_precision=PRECISION)
        qk = tl.dot(qd, tl.trans(ki), input_precision=PRECISION)
        kr = ki * tl.exp(last)[None, :]
    else:
        kk, qk = pair_products(q, k, g, dt_bias, corner, head, live, rate, H, K, BK, BJ, CHUNK)
        kk = kk * key_norm[:, None] * key_norm[None, :]
        qk = qk * query_norm[:, None] * key_norm[None, :]
        # the sum of what comes later, not a difference (see pair_products): gates of the rows one further down
        later = (rows + 1 >= low) & (rows + 1 < high)
        after = later[:, None] & (cols < K)[None, :]
        drive = tl.load(g + corner + H * K + offset, mask=after, other=0.0).to(tl.float32) + bias
        log_decay = -rate * (tl.maximum(drive, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(drive))))
        kr = key * tl.exp(tl.cumsum(tl.where(after, log_decay, 0.0), 0, reverse=True))

    strength = tl.load(beta + (base * H + head) + rows * H, mask=live, other=0.0).to(tl.float32)
    strength = tl.where(live, 1.0 / (1.0 + tl.exp(-strength)), 0.0)
    below = rows[:, None] > rows[None, :]
    lower = tl.where(below, kk * strength[:, None], 0.0)
    diagonal = tl.where((rows // 4)[:, None] == (rows // 4)[None, :], lower, 0.0)
    inverse = tl.where(rows[:, None] == rows[None, :], 1.0, -diagonal)
    square = tl.dot(diagonal, diagonal, input_precision=PRECISION)
    inverse = inverse + tl.dot(inverse, square, input_precision=PRECISION)
    for size in tl.static_range(2, 4):  # blocks of 4, then of 8
        apart = (rows >> size)[:, None] != (rows >> size)[None, :]
        together = (rows >> (size + 1))[:, None] == (rows >> (size + 1))[None, :]
        left = tl.dot(inverse, tl.where(apart & together, lower, 0.0), input_precision=PRECISION)
        inverse = inverse - tl.dot(left, inverse, input_precision=PRECISION)

    wide = rows[:, None] * K + cols[None, :]
    cell = cell.to(tl.int64)
    columns = (cols < K)[None, :]
    tl.store(ws_kd + cell * (CHUNK * K) + wide, kd.to(ws_kd.dtype.element_ty), mask=columns)
    tl.store(ws_qd + cell * (CHUNK * K) + wide, qd.to(ws_qd.dtype.element_ty), mask=columns)
    tl.store(ws_kr + cell * (CHUNK * K) + wide, kr.to(ws_kr.dtype.element_ty), mask=columns)
    square = rows[:, None] * CHUNK + rows[None, :]
    tl.store(ws_t + cell * (CHUNK * CHUNK) + square, inverse * strength[None, :])
    tl.store(ws_m + cell * (CHUNK * CHUNK) + square, tl.where(below | (rows[:, None] == rows[None, :]), qk, 0.0))
    tl.store(ws_decay + cell * K + cols, tl.exp(last), mask=cols < K)


@triton.jit
def recurrence_kernel(
    v, out, source, destination, pool, chunks, sequences, ws_kd, ws_qd, ws_kr, ws_t, ws_m, ws_decay,
    source_stride, destination_stride, pool_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk one sequence's chunks for one head and V-block; rows of every tile are V channels, so S is [BV, BK].

    The state is read before anything is written, so a destination may be its own source.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    head = program // blocks % H
    sequence = sequences + (program // blocks // H) * 8
    first, count = tl.load(sequence), tl.load(sequence + 1).to(tl.int32)
    source_slot, destination_slot = tl.load(sequence + 2), tl.load(sequence + 3)
    cols = tl.arange(0, BK)
    rows = tl.arange(0, CHUNK)
    channels = program % blocks * BV + tl.arange(0, BV)
    in_state = (channels < V)[:, None] & (cols < K)[None, :]
    offset = (head * V + channels)[:, None] * K + cols[None, :]
    wide = rows[:, None] * K + cols[None, :]
    across = rows[None, :] * (H * V) + channels[:, None]
    square = rows[:, None] * CHUNK + rows[None, :]
    state = tl.zeros([BV, BK], tl.float32)
    if source_slot >= 0:
        state = tl.load(source + source_slot * source_stride + offset, mask=in_state, other=0.0).to(tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = chunks + (first + step) * 8
        base, low, high, save = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
        cell = (first + step) * H + head
        if K == BK:
            kd = tl.load(ws_kd + cell * (CHUNK * K) + wide)
            qd = tl.load(ws_qd + cell * (CHUNK * K) + wide)
            kr = tl.load(ws_kr + cell * (CHUNK * K) + wide)
            decay = tl.load(ws_decay + cell * K + cols)
        else:
            kd = tl.load(ws_kd + cell * (CHUNK * K) + wide, mask=(cols < K)[None, :], other=0.0)
            qd = tl.load(ws_qd + cell * (CHUNK * K) + wide, mask=(cols < K)[None, :], other=0.0)
            kr = tl.load(ws_kr + cell * (CHUNK * K) + wide, mask=(cols < K)[None, :], other=0.0)
            decay = tl.load(ws_decay + cell * K + cols, mask=cols < K, other=0.0)
        inverse = tl.load(ws_t + cell * (CHUNK * CHUNK) + square)
        scores = tl.load(ws_m + cell * (CHUNK * CHUNK) + square)
        live = (rows >= low) & (rows < high)
        tokens = base * (H * V) + head * V
        in_chunk = (channels < V)[:, None] & live[None, :]
        value = tl.load(v + tokens + across, mask=in_chunk, other=0.0).to(tl.float32)

        operand = state.to(kd.dtype)
        wanted = value - tl.dot(operand, tl.trans(kd), input_precision=PRECISION)
        update = tl.dot(wanted, tl.trans(inverse), input_precision=PRECISION)
        result = tl.dot(operand, tl.trans(qd), input_precision=PRECISION)
        result = tl.dot(update, tl.trans(scores), acc=result, input_precision=PRECISION)
        state = state * decay[None, :]
        if SPLIT:
            coarse = update.to(kr.dtype)
            state = tl.dot(coarse, kr, acc=state)
            state = tl.dot((update - coarse.to(tl.float32)).to(kr.dtype), kr, acc=state)
        else:
            state = tl.dot(update, kr, acc=state, input_precision=PRECISION)
        tl.store(out + tokens + across, result.to(out.dtype.element_ty), mask=in_chunk)
        if save >= 0:
            tl.store(pool + save * pool_stride + offset, state.to(pool.dtype.element_ty), mask=in_state)
    if destination_slot >= 0:
        where = destination + destination_slot * destination_stride + offset
        tl.store(where, state.to(destination.dtype.element_ty), mask=in_state)


def low_precision(call: KdaCall) -> bool:
    """Whether products with the state may be rounded to bf16: whenever the inputs are."""
    return call.q.dtype == torch.bfloat16


def terms_launch(call: KdaCall, workspace: dict[str, torch.Tensor]) -> Launch:
    """Build the launch that fills `workspace`, one program per sub-chunk and head."""
    heads, k_size = call.q.shape[2:]
    block_k = max(16, triton.next_power_of_2(k_size))
    inputs = {name: getattr(call, name) for name in ("q", "k", "g", "beta", "a_log", "dt_bias")}
    chunks, _, _ = call.plan.tables(call.q.device)
    args: dict[str, Any] = {**inputs, "chunks": chunks, **workspace, "scale": call.scale, "H": heads, "K": k_size}
    args |= {
        "lower_bound": call.lower_bound or 0.0,
        "BK": block_k,
        "BJ": min(block_k, 32 if interprets() else 16),
        "CHUNK": CHUNK,
        "BOUNDED": call.lower_bound is not None,
        "PRECISION": "tf32" if low_precision(call) else "ieee",
    }
    return Launch(terms_kernel, (len(call.plan.chunks) * heads,), args, num_warps=4)


def recurrence_launch(call: KdaCall, workspace: dict[str, torch.Tensor]) -> Launch:
    """Build the launch that carries the states through `workspace`, one program per sequence, head and V-block."""
    heads, k_size, v_size = call.q.shape[2], call.q.shape[3], call.v.shape[3]
    low = low_precision(call)
    padded_v = max(16, triton.next_power_of_2(v_size))
    block_v, warps, stages = (min(64, padded_v), 4, 3) if low else (16, 8, 2)
    if interprets():
        block_v, stages = padded_v, 1  # a program costs the same whatever its size
    chunks, spans, _ = call.plan.tables(call.q.device)
    args: dict[str, Any] = {"v": call.v, "out": call.out, "chunks": chunks, "sequences": spans, **workspace}
    for name in ("source", "destination", "pool"):
        states = getattr(call, name)
        # without a tensor no span names a slot of it, and the pointer is only there to have a type
        args[name] = workspace["ws_decay"] if states is None else states
        args[f"{name}_stride"] = 0 if states is None else states.stride(0)
    args |= {"H": heads, "K": k_size, "V": v_size, "BK": max(16, triton.next_power_of_2(k_size)), "BV": block_v}
    args |= {"CHUNK": CHUNK, "SPLIT": low, "PRECISION": "tf32" if low else "ieee", "STAGES": stages}
    grid = (len(call.plan.spans) * heads * triton.cdiv(v_size, block_v),)
    return Launch(recurrence_kernel, grid, args, num_warps=warps, num_stages=stages)


def make_workspace(call: KdaCall) -> dict[str, torch.Tensor]:
    """Room for the terms of every sub-chunk; with bf16, K = V = 128: 14.8 KB per sub-chunk and head."""
    heads, k_size = call.q.shape[2:]
    cells = len(call.plan.chunks) * heads
    shapes = {"ws_kd": (CHUNK, k_size), "ws_qd": (CHUNK, k_size), "ws_kr": (CHUNK, k_size)}
    narrow = {
        name: torch.empty(cells, *shape, dtype=call.q.dtype, device=call.q.device) for name, shape in shapes.items()
    }
    exact = {"ws_t": (CHUNK, CHUNK), "ws_m": (CHUNK, CHUNK), "ws_decay": (k_size,)}
    wide = {
        name: torch.empty(cells, *shape, dtype=torch.float32, device=call.q.device) for name, shape in exact.items()
    }
    return narrow | wide


def run(call: KdaCall) -> None:
    """Execute a checked call: writes `out`, the destination states and the checkpoints."""
    workspace = make_workspace(call)
    terms_launch(call, workspace).run()
    recurrence_launch(call, workspace).run()


def aot_variants() -> list[tuple[str, Launch]]:
    """Return what the executor launches on Hopper: 128 x 128 heads, both gates, both precisions, fp32 state pools."""
    variants = []
    plan = plan_chunks((64,), StateSlots((0,), (0,), (0,)))
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for lower_bound, gate in ((-5.0, "bounded"), (None, "unbounded")):
            wide = torch.empty(1, 64, 32, 128, dtype=dtype, device="meta")
            pool = torch.empty(8, 32, 128, 128, dtype=torch.float32, device="meta")
            beta = torch.empty(1, 64, 32, dtype=dtype, device="meta")
            a_log, dt_bias = (torch.empty(*shape, device="meta") for shape in ((32,), (32, 128)))
            call = KdaCall(
                wide, wide, wide, wide, beta, 0.1, wide, a_log, dt_bias, lower_bound, pool, pool, pool, plan
            )  # fmt: skip
            workspace = make_workspace(call)
            variants.append((f"kda_terms-{name}-{gate}", terms_launch(call, workspace)))
        variants.append((f"kda_recurrence-{name}", recurrence_launch(call, workspace)))
    return variants
