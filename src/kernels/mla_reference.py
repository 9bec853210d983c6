"""Plain attention in float64, one token, one head, one key at a time: what the kernels are held to.

It shares no code with them, and follows the page table the way a reader would: position by position.
"""

from __future__ import annotations

import numpy as np
import torch


def reference_prefill(
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: list[list[int]],
    lengths: list[int],
    starts: list[int],
    scale: float,
    rank: int,
) -> torch.Tensor:
    """Return attention in float64 [T, H, rank] of ``q`` [T, H, width]; ``lengths[n]`` tokens from ``starts[n]`` on."""
    queries = q.detach().cpu().double().numpy()
    pool = pages.detach().cpu().double().numpy()
    answer = np.zeros((queries.shape[0], queries.shape[1], rank))
    row = 0
    for table, length, start in zip(page_table, lengths, starts, strict=True):
        for position in range(start, start + length):
            seen = np.stack([pool[table[p // pool.shape[1]], p % pool.shape[1]] for p in range(position + 1)])
            for head in range(queries.shape[1]):
                logits = seen @ queries[row, head] * scale
                weights = np.exp(logits - logits.max())
                answer[row, head] = (weights / weights.sum()) @ seen[:, :rank]
            row += 1
    return torch.from_numpy(answer)


def reference_store(latents: torch.Tensor, pages: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Return ``pages`` with each latent written at its slot, one after another."""
    answer = pages.clone()
    for latent, slot in zip(latents, slots, strict=True):
        page, offset = divmod(slot, pages.shape[1])
        answer[page, offset] = latent
    return answer
