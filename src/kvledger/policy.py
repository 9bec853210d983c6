"""The order of the waiting queue. Pure functions over requests; what is cached of each comes in as a number.

Nothing here touches a lock, a page or a recency: a policy may look at everybody and admit nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal

from kvledger.arithmetic import ceil_tokens, floor_tokens
from kvledger.request import Request

SchedulePolicy = Literal["fcfs", "lpm", "shortest-prefill-first", "priority"]

SHARED_TOKENS = 32
"""A cached prefix up to this long counts as none, and one at least this long that somebody else fills is waited for."""
LONGEST_MATCHED_QUEUE = 128
"""Beyond this, matching everybody would cost more than a good order brings: `lpm` becomes first come first served."""

Matched = Callable[[Request], int]
"""Tokens of a waiting request that are cached, on the device or the host."""


def ordered(
    policy: SchedulePolicy, waiting: Iterable[Request], matched: Matched, page_size: int, *, caches: bool = True
) -> Iterable[Request]:
    """The queue in the order of a policy; a stable one, so that equals stay in order of arrival.

    Where nothing is kept for others (`caches` false) nobody waits for what another computes.
    """
    if policy == "fcfs":
        return waiting
    queue = list(waiting)
    if policy == "priority":
        return sorted(queue, key=lambda request: (-request.priority, request.arrival))
    if policy == "lpm" and len(queue) > LONGEST_MATCHED_QUEUE:
        return queue
    hits = {request.rid: matched(request) for request in queue}
    later = about_to_be_cached(queue, hits, page_size) if caches else set()
    if policy == "lpm":
        return sorted(queue, key=lambda request: (request.rid in later, -hits[request.rid]))
    return sorted(queue, key=lambda request: (request.rid in later, prefill_work(request, hits[request.rid])))


def prefill_work(request: Any, matched_tokens: int) -> int:
    """Tokens that a waiting request would have to compute."""
    left_tokens: int = request.prompt_tokens - matched_tokens
    return max(1, left_tokens)


def about_to_be_cached(queue: Iterable[Request], hits: dict[str, int], page_size: int) -> set[str]:
    """Requests with next to nothing cached whose prefix an earlier one in the queue is about to fill.

    They had better wait for it: only the first of them computes it then.
    """
    filling: dict[Hashable, Any] = {}
    later: set[str] = set()
    for request in queue:
        if hits[request.rid] > SHARED_TOKENS:
            continue
        keys = request.prompt.page_keys(page_size)
        here, depth = filling, 0
        for key in keys:
            if key not in here:
                break
            here, depth = here[key], depth + 1
        if depth * page_size >= SHARED_TOKENS:
            later.add(request.rid)
            continue
        for key in keys[depth:]:
            here = here.setdefault(key, {})
    return later


def continuation_limit(
    work_tokens: Iterable[int], left_tokens: int, budget_tokens: int | None, page_size: int
) -> int | None:
    """How much of the chunk budget a half-done prompt may use when the shortest go first; None: all of it.

    `work_tokens` are those of the waiting ones, in order. The rest is for those that are shorter than its own
    `left_tokens` and fit beside at least a page of it. It is compute that is kept for them, not memory.
    """
    if budget_tokens is None or budget_tokens < 2 * page_size:
        return None
    kept = 0
    for work in work_tokens:
        charge = ceil_tokens(work, page_size)
        if work >= left_tokens or kept + charge > budget_tokens - page_size:
            break
        kept += charge
    return floor_tokens(budget_tokens - kept, page_size) if kept else None


def victims(running: Sequence[Any], priority: int, threshold: int, *, low_values_first: bool = False) -> list[Any]:
    """Whom a newcomer of this priority may put back, first choice first: the least important, then the latest.

    Only those whose priority is below its own by more than `threshold`.
    """
    sign = -1 if low_values_first else 1
    below = [each for each in running if (priority - _priority(each)) * sign > threshold]
    return sorted(below, key=lambda each: (_priority(each) * sign, -getattr(each, "arrival", 0)))


def _priority(request: Any) -> int:
    """0 where it has none, or says None."""
    return getattr(request, "priority", 0) or 0
