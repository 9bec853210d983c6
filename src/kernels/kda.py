"""Kimi Delta Attention over state slots: FlashKDA's forward contract, and what a pool of states needs on top.

Per head, with the state S [V, K] and one decay a_t per key channel:

    S <- S diag(a_t);  S <- S + beta_t (v_t - S k_t) k_t^T;  o_t = scale S q_t

q and k are L2-normalised here, x rsqrt(sum x^2 + 1e-6) (so a vector of zeros stays one), beta is sigmoid of a logit,
the log decay is ``lower_bound sigmoid(exp(A_log) x)`` or, with ``lower_bound`` None, ``-exp(A_log) softplus(x)``, where
x = g + dt_bias, finite or infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import ModuleType
from typing import Final

import torch

from kvledger.kernels.launch import Backend, require_interpretable, resolve_backend, triton_module
from kvledger.kernels.layout import (
    mismatch,
    output_like,
    require_tensors,
    same_place,
    share_memory,
    units_apart,
    units_contiguous,
)
from kvledger.kernels.state_plan import NO_SLOT, ChunkPlan, StateSlots, plan_chunks, sequence_lengths
from kvledger.kernels.tables import TableError

DTYPES: Final = (torch.float32, torch.bfloat16)
LOWEST_BOUND: Final = -5.0
"""16 tokens at this gate decay by e^-80; its inverse still is a float32."""


@dataclass(frozen=True)
class KdaCall:
    """A checked call, as the executors see it: token rows contiguous, slots in range, nothing written twice.

    `source`, `destination` and `pool` (checkpoints) are [slots, H, V, K], each slot contiguous, or None where the
    plan names no slot of them; all three are one tensor when states live in a pool.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float
    out: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None
    source: torch.Tensor | None
    destination: torch.Tensor | None
    pool: torch.Tensor | None
    plan: ChunkPlan


def kda_chunk_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None,
    out: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    *,
    state_pool: torch.Tensor | None = None,
    slots: StateSlots | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Run KDA over the chunks of N sequences; writes `out`, states and checkpoints in place and returns `out`.

    q, k, g [B, T, H, K], v and out [B, T, H, V], beta logits [B, T, H]: all float32 or all bfloat16. A_log [H] and
    dt_bias [H, K] float32. `cu_seqlens` int32 or int64 [N + 1] (or a list) with B = 1; without it N = B. `scale` None
    means K^-0.5, `out` None a new tensor.

    States: either `initial_state` and `final_state` [N, H, V, K], or `state_pool` [slots, H, V, K] with `slots`, which
    also tells where in its request each sequence starts; float32 or bfloat16. Slots not named are not touched.
    `initial_state` and `final_state` may be one tensor, updated in place; memory is not shared in any other way.

    Sub-chunks of 16 tokens lie at multiples of 16 of the request. With float32 states, cutting a request at such a
    multiple, renumbering slots or changing the batch's company changes no bit; neither does a checkpoint differ from
    the final state of its prefix.
    """
    _check_tokens(q, k, v, g, beta, A_log, dt_bias)
    if lower_bound is not None and not LOWEST_BOUND <= lower_bound < 0:
        raise ValueError(f"lower_bound {lower_bound} outside [{LOWEST_BOUND}, 0)")
    batch, tokens, heads, k_size = q.shape
    v_size = v.shape[3]
    out = output_like(out, tuple(v.shape), v)
    lengths = sequence_lengths(batch, tokens, cu_seqlens)
    for name, states in (("initial_state", initial_state), ("final_state", final_state), ("state_pool", state_pool)):
        _check_states(name, states, None if name == "state_pool" else len(lengths), (heads, v_size, k_size), q.device)
    if slots is None:
        if state_pool is not None:
            raise TableError("a state_pool without slots: which of its states are meant?")
        slots = StateSlots.none(len(lengths))
    slots.check(lengths, None if state_pool is None else state_pool.shape[0])
    _check_memory(v.contiguous(), out, initial_state, final_state, state_pool)
    plan, source, destination = _place_states(lengths, slots, initial_state, final_state, state_pool)
    call = KdaCall(
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=g.contiguous(),
        beta=beta.contiguous(),
        scale=k_size**-0.5 if scale is None else float(scale),
        out=out,
        a_log=A_log.contiguous(),
        dt_bias=dt_bias.contiguous(),
        lower_bound=None if lower_bound is None else float(lower_bound),
        source=source,
        destination=destination,
        pool=state_pool,
        plan=plan,
    )
    chosen = resolve_backend(backend, q.device)
    if chosen == "interpret":
        for tensor in (q, source, destination, state_pool):
            require_interpretable(torch.float32 if tensor is None else tensor.dtype)
    executor(chosen).run(call)
    return out


def executor(backend: Backend) -> ModuleType:
    """Return the module whose `run(call)` computes on `backend`."""
    if backend == "torch":
        from kvledger.kernels import kda_torch

        return kda_torch
    return triton_module("kda_triton", backend)


def _place_states(
    lengths: tuple[int, ...],
    slots: StateSlots,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    state_pool: torch.Tensor | None,
) -> tuple[ChunkPlan, torch.Tensor | None, torch.Tensor | None]:
    """Plan, source and destination: FlashKDA's per-sequence states are pools whose slot is the sequence's number."""
    rows = tuple(range(len(lengths)))
    source, destination = state_pool, state_pool
    if initial_state is not None:
        if any(slot != NO_SLOT for slot in slots.sources):
            raise TableError("a source slot and an initial_state: one of the two")
        slots, source = replace(slots, sources=rows), initial_state
    if final_state is not None:
        if any(slot != NO_SLOT for slot in slots.destinations):
            raise TableError("a destination slot and a final_state: one of the two")
        slots, destination = replace(slots, destinations=rows), final_state
    return plan_chunks(lengths, slots), source, destination


def _check_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    a_log: torch.Tensor, dt_bias: torch.Tensor,
) -> None:  # fmt: skip
    require_tensors(q=q, k=k, v=v, g=g, beta=beta, A_log=a_log, dt_bias=dt_bias)
    for name, tensor, last in (("q", q, "K"), ("v", v, "V")):
        if tensor.dim() != 4 or q.dtype not in DTYPES:
            raise mismatch(name, tensor, f"[B, T, H, {last}] float32 or bfloat16")
    heads, k_size = q.shape[2:]
    if 0 in (heads, k_size, v.shape[3]):
        raise ValueError(f"q {[*q.shape]}, v {[*v.shape]}: no heads or no channels")
    expected = {
        "k": (k, q.shape, q.dtype),
        "g": (g, q.shape, q.dtype),
        "v": (v, (*q.shape[:3], v.shape[3]), q.dtype),
        "beta": (beta, q.shape[:3], q.dtype),
        "A_log": (a_log, (heads,), torch.float32),
        "dt_bias": (dt_bias, (heads, k_size), torch.float32),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.device != q.device:
            raise mismatch(name, tensor, f"{[*shape]} {dtype} on {q.device}")


def _check_states(
    name: str, states: torch.Tensor | None, rows: int | None, inner: tuple[int, int, int], device: torch.device
) -> None:
    if states is None:
        return
    require_tensors(**{name: states})
    first = "slots" if rows is None else rows
    shape_fits = states.dim() == 4 and tuple(states.shape[1:]) == inner and rows in (None, states.shape[0])
    if not shape_fits or states.dtype not in DTYPES or states.device != device:
        expected = f"[{first}, {', '.join(map(str, inner))}] (its dimensions: N, H, V, K) float32 or bfloat16"
        raise mismatch(name, states, f"{expected} on {device}")
    if not units_contiguous(states) or not units_apart(states):
        raise mismatch(name, states, "each slot contiguous, slots apart")


def _check_memory(
    v: torch.Tensor,
    out: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    state_pool: torch.Tensor | None,
) -> None:
    """TableError where one program of a launch would read what another one has written."""
    given = {"initial_state": initial_state, "final_state": final_state, "state_pool": state_pool}
    states = {name: tensor for name, tensor in given.items() if tensor is not None}
    for one, other in combinations(states, 2):
        in_place = other == "final_state" and same_place(states[one], states[other])
        if not in_place and share_memory(states[one], states[other]):
            way = "name its slots" if other == "state_pool" else "only the very same tensor is updated in place"
            raise TableError(f"{one} shares memory with {other}: {way}")
    for name, tensor in {"v": v, **states}.items():
        if share_memory(out, tensor) and not (name == "v" and same_place(out, v)):
            raise TableError(f"out shares memory with {name}")
