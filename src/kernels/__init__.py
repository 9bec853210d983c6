"""KDA and MLA kernels over a paged pool, the pool, and the executor; importable as kvledger.kernels.

Nothing is imported before it is asked for: `import kvledger.kernels` needs no torch, and Triton decides when it is
imported whether a process compiles or interprets. `kvledger.kernels.flash_kda` stands in for FlashKDA.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvledger.kernels.canary import POISON, CanaryFault, canary_check, canary_fill
    from kvledger.kernels.conv import causal_conv_fwd
    from kvledger.kernels.device_pool import DevicePool
    from kvledger.kernels.executor import Executor
    from kvledger.kernels.kda import kda_chunk_fwd
    from kvledger.kernels.mla import latent_store, mla_prefill, plan_prefill, plan_slots
    from kvledger.kernels.pages import Ticket, page_copy
    from kvledger.kernels.reference import kda_recurrence
    from kvledger.kernels.state_plan import NO_SLOT, StateSlots
    from kvledger.kernels.tables import TableError

_HOMES = {
    "NO_SLOT": "state_plan",
    "POISON": "canary",
    "CanaryFault": "canary",
    "DevicePool": "device_pool",
    "Executor": "executor",
    "StateSlots": "state_plan",
    "TableError": "tables",
    "Ticket": "pages",
    "canary_check": "canary",
    "canary_fill": "canary",
    "causal_conv_fwd": "conv",
    "kda_chunk_fwd": "kda",
    "kda_recurrence": "reference",
    "latent_store": "mla",
    "mla_prefill": "mla",
    "page_copy": "pages",
    "plan_prefill": "mla",
    "plan_slots": "mla",
}

__all__ = [
    "NO_SLOT",
    "POISON",
    "CanaryFault",
    "DevicePool",
    "Executor",
    "StateSlots",
    "TableError",
    "Ticket",
    "canary_check",
    "canary_fill",
    "causal_conv_fwd",
    "kda_chunk_fwd",
    "kda_recurrence",
    "latent_store",
    "mla_prefill",
    "page_copy",
    "plan_prefill",
    "plan_slots",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
