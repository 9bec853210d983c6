"""FlashKDA's entry point: `from kvledger.kernels import flash_kda` in place of `import flash_kda`.

An installed FlashKDA runs what it can run; the rest, and everything without it, runs here. Nobody has to guess which:
`chosen` answers before the call, and `logging.getLogger("kvledger.kernels.flash_kda")` says so at INFO for each call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from kvledger.kernels.kda import kda_chunk_fwd

logger = logging.getLogger(__name__)

MIN_CAPABILITY = 9


class Choice(NamedTuple):
    """Which implementation runs a call, and why."""

    implementation: str  # "flash_kda" or "kvledger"
    reason: str


def installed() -> ModuleType | None:
    """FlashKDA's module, or None if it or its extension does not import."""
    try:
        return import_module("flash_kda")
    except (ImportError, OSError):
        return None


def chosen(q: torch.Tensor, v: torch.Tensor, lower_bound: float | None) -> Choice:
    """Which implementation `fwd` takes for such tensors in this process."""
    if q.device.type != "cuda":
        return Choice("kvledger", f"tensors on {q.device}")
    if q.dtype != torch.bfloat16:
        return Choice("kvledger", f"{q.dtype}, FlashKDA takes bfloat16")
    if (q.shape[-1], v.shape[-1]) != (128, 128):
        return Choice("kvledger", f"K = {q.shape[-1]}, V = {v.shape[-1]}, FlashKDA takes 128 and 128")
    if lower_bound is None:
        return Choice("kvledger", "unbounded gate")
    if torch.cuda.get_device_capability(q.device)[0] < MIN_CAPABILITY:
        return Choice("kvledger", "FlashKDA takes SM90 and later")
    if installed() is None:
        return Choice("kvledger", "flash_kda does not import")
    return Choice("flash_kda", "installed, bfloat16, K = V = 128, bounded gate")


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
) -> None:
    """Write `out` and `final_state`; parameters as FlashKDA's, shapes and dtypes as in `kda_chunk_fwd`."""
    choice = chosen(q, v, lower_bound)
    logger.info("fwd -> %s (%s)", *choice)
    if choice.implementation == "flash_kda":
        if cu_seqlens is not None:
            cu_seqlens = torch.as_tensor(cu_seqlens, dtype=torch.int64, device=q.device)
        flash = import_module("flash_kda")
        flash.fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)
        return
    kda_chunk_fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)
