"""What must hold of sglang's own tables beside the pool: rows of requests, and slots of the host tier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvledger.evidence import Evidence, Finding
from kvledger.invariants import Invariant

if TYPE_CHECKING:
    from kvledger.targets.sglang.target import SglangTarget


def rows(target: SglangTarget, _: Evidence) -> Finding | None:
    """A row of the request table is in use for each request that holds slots, a different one for each."""
    world = target.world
    owned = [int(request.kv.req_pool_idx) for request in target.live.values() if request.kv.holds_kv]
    in_use = world.row_count - int(world.rows.available_size())
    if in_use == len(owned) == len(set(owned)):
        return None
    return Finding(None, f"{in_use} rows are in use, and {len(owned)} requests hold {len(set(owned))} different ones")


def host_slots(target: SglangTarget, _: Evidence) -> Finding | None:
    """What the prefix cache says that it let go of on the host is free there: nobody else tells its slots apart."""
    lost_tokens = target.world.host_lost_tokens
    if not lost_tokens:
        return None
    return Finding(None, f"{lost_tokens} slots of the host are in nobody's prefix any more, and not free")


Check = Callable[["SglangTarget", Evidence], Finding | None]
_CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("sglang-rows", "a row that is never freed is missed by every later request", rows),
    ("sglang-host-slots", "a slot of the host that is never freed caches nothing any more", host_slots),
)


def invariants_of(target: SglangTarget) -> tuple[Invariant, ...]:
    """The checks above as invariants, bound to one world."""
    return tuple(Invariant(name, reason, "event", partial(check, target)) for name, reason, check in _CHECKS)
