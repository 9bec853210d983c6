"""Faults in sglang's own tables and queues, put in place for a test and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake somebody could make there, and the invariant that must notice it."""

    name: str
    invariant: str
    patch: Patch


@contextmanager
def in_place(fault: Fault) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fault.patch(patch)
        yield


def _a_row_is_never_freed(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    def forgets(self: Any, request: Any) -> None:
        request.kv.req_pool_idx = None

    patch.setattr(ReqToTokenPool, "free", forgets)


def _the_host_never_frees(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    patch.setattr(HostKVCache, "free", lambda self, indices: len(indices))


def _the_host_pool_is_not_told(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    patch.setattr(UnifiedRadixCache, "_drain_host_frees", lambda self, host_frees: host_frees.clear())


def _raises_when_it_loads(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder

    select = PrefillAdder._select_prefill_admission

    def selects(self: Any, req: Any, **named: Any) -> Any:
        if named.get("host_hit_length"):
            raise RuntimeError("nothing is on the host")
        return select(self, req, **named)

    patch.setattr(PrefillAdder, "_select_prefill_admission", selects)


FAULTS = (
    Fault("a row is never freed", "sglang-rows", _a_row_is_never_freed),
    Fault("the host frees nothing", "sglang-host-slots", _the_host_never_frees),
    Fault("the host is not told what was evicted", "sglang-host-slots", _the_host_pool_is_not_told),
    Fault("a hit on the host raises", "never-raises", _raises_when_it_loads),
)
