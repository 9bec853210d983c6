"""KDA in chunk form on torch, in float32: the executor for CPUs, and what the Triton kernels are compared with bitwise.

For one sub-chunk of 16 tokens, G the inclusive cumulative log decay inside it (per key channel):

    kd = k e^G,  qd = scale q e^G,  ki = k e^-G,  kr = k e^(G_last - G)
    L = strict_tril(beta kd ki^T),  M = tril(qd ki^T),  T = (I + L)^-1
    U = T [beta (v - kd S^T)],  O = qd S^T + M U,  S <- S e^G_last + U^T kr

A dead lane (before the chunk's first token or past its last) has k = q = v = g = beta = 0 and so changes nothing.

What keeps bits equal however a request is cut: every product has the sub-chunk's shape, and only functions are used
whose vectorised body and scalar tail agree. torch's sigmoid, silu and softplus do not (AVX2, 2.13): an element's bits
depend on its place in the tensor. exp, log1p and reciprocal do.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from kvledger.kernels.kda import KdaCall
from kvledger.kernels.state_plan import CHUNK, NO_SLOT, Span

MAX_RATE: Final = 3e38
"""Of a gate: an infinite one times 0 would be NaN."""


class Terms(NamedTuple):
    """What does not depend on the state, for C sub-chunks: T kd above qd, T v, M, kr and e^G_last."""

    readers: torch.Tensor  # [C, H, 32, K]
    values: torch.Tensor  # [C, H, 16, V]
    scores: torch.Tensor  # [C, H, 16, 16]
    writers: torch.Tensor  # [C, H, 16, K]
    decay: torch.Tensor  # [C, H, 1, K]


def run(call: KdaCall) -> None:
    """Execute a checked call: writes `out`, the destination states and the checkpoints."""
    rows, live = lanes(call)
    terms = chunk_terms(call, rows, live)
    results = torch.empty_like(terms.values)
    for span in call.plan.spans:
        carry_state(call, span, terms, results)
    flat = call.out.view(-1, *call.out.shape[2:])
    flat[rows[live]] = results.transpose(1, 2)[live].to(flat.dtype)


def lanes(call: KdaCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Token row of each lane, 0 where it is dead, and which lanes live; both [C, 16]."""
    table = torch.tensor([chunk[:3] for chunk in call.plan.chunks], dtype=torch.int64).reshape(-1, 3)
    lane = torch.arange(CHUNK)
    live = (lane >= table[:, 1:2]) & (lane < table[:, 2:3])
    return torch.where(live, table[:, :1] + lane, 0).to(call.q.device), live.to(call.q.device)


def carry_state(call: KdaCall, span: Span, terms: Terms, results: torch.Tensor) -> None:
    """Walk one sequence's sub-chunks: read the source slot, fill `results`, write checkpoints and destination."""
    heads, k_size, v_size = call.q.shape[2], call.q.shape[3], call.v.shape[3]
    if call.source is not None and span.source != NO_SLOT:
        state = call.source[span.source].to(torch.float32, copy=True)
    else:
        state = torch.zeros(heads, v_size, k_size, device=call.q.device)
    chunks = slice(span.first_chunk, span.first_chunk + span.chunks)
    own = zip(call.plan.chunks[chunks], results[chunks], *(term[chunks] for term in terms), strict=True)
    for chunk, result, readers, values, scores, writers, decay in own:
        read = torch.bmm(readers, state.mT)
        update = values - read[:, :CHUNK]
        torch.baddbmm(read[:, CHUNK:], scores, update, out=result)
        state.mul_(decay).baddbmm_(update.mT, writers)
        save = chunk[3]
        if save != NO_SLOT and call.pool is not None:
            call.pool[save] = state
    if call.destination is not None and span.destination != NO_SLOT:
        call.destination[span.destination] = state


def chunk_terms(call: KdaCall, rows: torch.Tensor, live: torch.Tensor) -> Terms:
    """Everything of the sub-chunks that does not need the state, all at once."""
    q, k, v, g = (gather_lanes(tensor, rows, live) for tensor in (call.q, call.k, call.v, call.g))
    beta = gather_lanes(call.beta.unsqueeze(-1), rows, live).neg_().exp_().add_(1).reciprocal_()
    beta.masked_fill_(~live[:, None, :, None], 0)
    q, k = normalise(q) * call.scale, normalise(k)
    rate = call.a_log.exp().clamp(max=MAX_RATE)[:, None, None]
    log_decay = gate(g + call.dt_bias[:, None, :], rate, call.lower_bound)
    log_decay.masked_fill_(~live[:, None, :, None], 0)
    total = log_decay.cumsum(2)
    decay, last = total.exp(), total[:, :, -1:]
    kd, qd = k * decay, q * decay
    if call.lower_bound is None:
        key_pairs, query_pairs, kr = pair_products(q, k, log_decay)
    else:
        ki = k * total.neg().exp()
        key_pairs, query_pairs, kr = kd @ ki.mT, qd @ ki.mT, k * (last - total).exp()
    inverse = invert(beta * key_pairs.tril(-1)) * beta.mT
    return Terms(
        readers=torch.cat((inverse @ kd, qd), 2),
        values=inverse @ v,
        scores=query_pairs.tril(),
        writers=kr,
        decay=last.exp(),
    )


def gather_lanes(tensor: torch.Tensor, rows: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] to float32 [C, H, 16, D]; dead lanes are 0 whatever lies in memory (0 x NaN would be NaN)."""
    taken = tensor.view(-1, *tensor.shape[2:])[rows].to(torch.float32)
    return taken.masked_fill_(~live[:, :, None, None], 0).transpose(1, 2).contiguous()


def normalise(x: torch.Tensor) -> torch.Tensor:
    """L2-normalise the last dimension, as FlashKDA does."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gate(x: torch.Tensor, rate: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """Log decay: lower_bound * sigmoid(rate x), or -rate * softplus(x) without a bound."""
    if lower_bound is None:
        return -rate * (x.clamp(min=0) + x.abs().neg().exp().log1p())
    return lower_bound * (-rate * x).exp().add(1).reciprocal()


def pair_products(
    q: torch.Tensor, k: torch.Tensor, log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over K of k_i k_j e^(G_i - G_j) and of q_i k_j e^(G_i - G_j) for j <= i; and kr, for any log decay <= 0.

    [C, H, 16, 16] each, anything above the diagonal. Column by column, without a factor e^-G on its own: an unbounded
    gate can pass e^88 inside one sub-chunk, or be infinite. And G_i - G_j is the sum of what lies between, never a
    difference of sums: after a token that forgets everything both are large and what they differ in is lost.
    """
    key_pairs, query_pairs, writers = [], [], []
    row = torch.arange(CHUNK, device=k.device)[:, None]
    for j in range(CHUNK):
        key = k[:, :, j : j + 1]
        between = log_decay.masked_fill(row <= j, 0).cumsum(2).exp()
        decayed = key * between
        key_pairs.append((k * decayed).sum(-1))
        query_pairs.append((q * decayed).sum(-1))
        writers.append(decayed[:, :, -1])
    return torch.stack(key_pairs, -1), torch.stack(query_pairs, -1), torch.stack(writers, 2)


def invert(lower: torch.Tensor) -> torch.Tensor:
    """(I + L)^-1 for strictly lower triangular L [.., 16, 16].

    Blocks of 4 by their series (I - D)(I + D^2), then pairs of blocks: (I + D + N)^-1 = X - X N X, X = (I + D)^-1. Six
    products, as many as FlashKDA's (I - L)(I + L^2)(I + L^4)(I + L^8), without its cancellation: for equal keys L^8 has
    entries in the thousands, and the outputs an error of 7e-5 instead of 1e-6.
    """
    diagonal = lower * same_block(4, lower)
    inverse = torch.eye(CHUNK, device=lower.device) - diagonal
    inverse = inverse + inverse @ (diagonal @ diagonal)
    for size in (4, 8):
        below = lower * (same_block(2 * size, lower) & ~same_block(size, lower))
        inverse = inverse - inverse @ below @ inverse
    return inverse


def same_block(size: int, like: torch.Tensor) -> torch.Tensor:
    """Which entries of a [16, 16] matrix lie in its diagonal blocks of `size`."""
    block = torch.arange(CHUNK, device=like.device) // size
    return block[:, None] == block
