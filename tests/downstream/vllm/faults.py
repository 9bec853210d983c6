"""Faults in vllm's own scheduler, block manager and queues, put in place for a test and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake somebody could make there, and the invariant that must notice it; `target` is where it can show."""

    name: str
    invariant: str
    patch: Patch
    target: str = "VllmTarget"


@contextmanager
def in_place(fault: Fault) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fault.patch(patch)
        yield


def _pool() -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool


def _queue() -> Any:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    return FreeKVCacheBlockQueue


def _scheduler() -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def _counts_one_too_many(patch: pytest.MonkeyPatch) -> None:
    queue = _queue()
    append = queue.append_n

    def append_n(self: Any, blocks: list[Any]) -> None:
        append(self, blocks)
        self.num_free_blocks += bool(blocks)

    patch.setattr(queue, "append_n", append_n)


def _takes_one_more(patch: pytest.MonkeyPatch) -> None:
    pool = _pool()
    get = pool.get_new_blocks

    def get_new_blocks(self: Any, num_blocks: int) -> list[Any]:
        blocks: list[Any] = get(self, num_blocks)
        if num_blocks and self.get_num_free_blocks():
            get(self, 1)
        return blocks

    patch.setattr(pool, "get_new_blocks", get_new_blocks)


def _a_hit_counts_twice(patch: pytest.MonkeyPatch) -> None:
    pool = _pool()
    touch = pool.touch

    def touched(self: Any, blocks: Any) -> None:
        touch(self, blocks)
        touch(self, blocks)

    patch.setattr(pool, "touch", touched)


def _the_first_to_leave_frees(patch: pytest.MonkeyPatch) -> None:
    pool = _pool()
    free = pool.free_blocks

    def free_blocks(self: Any, ordered_blocks: Any) -> None:
        blocks = list(ordered_blocks)
        for block in blocks:
            block.ref_cnt = min(block.ref_cnt, 1)
        free(self, blocks)

    patch.setattr(pool, "free_blocks", free_blocks)


def _queued_twice(patch: pytest.MonkeyPatch) -> None:
    scheduler = _scheduler()
    enqueue = scheduler._enqueue_waiting_request

    def twice(self: Any, request: Any) -> None:
        enqueue(self, request)
        enqueue(self, request)

    patch.setattr(scheduler, "_enqueue_waiting_request", twice)


def _never_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_scheduler(), "_enqueue_waiting_request", lambda self, request: None)


def _evicted_but_found(patch: pytest.MonkeyPatch) -> None:
    def evict(self: Any, block: Any) -> bool:
        hashed = block.block_hash is not None
        block.reset_hash()
        return hashed

    patch.setattr(_pool(), "_maybe_evict_cached_block", evict)


def _a_load_is_never_taken_up(patch: pytest.MonkeyPatch) -> None:
    scheduler = _scheduler()
    update = scheduler._update_from_kv_xfer_finished

    def deaf(self: Any, output: Any) -> None:
        output.finished_recving = set()
        update(self, output)

    patch.setattr(scheduler, "_update_from_kv_xfer_finished", deaf)


def _sent_but_not_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_scheduler(), "_update_from_kv_xfer_finished", lambda self, output: None)


def _a_block_ahead(patch: pytest.MonkeyPatch) -> None:
    scheduler = _scheduler()
    init = scheduler.__init__

    def greedy(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.num_lookahead_tokens = 2 * self.block_size

    patch.setattr(scheduler, "__init__", greedy)


def _an_abort_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_scheduler(), "finish_requests", lambda self, request_ids, finished_status: [])


def _a_preempted_one_keeps_its_count(patch: pytest.MonkeyPatch) -> None:
    scheduler = _scheduler()
    preempt = scheduler._preempt_request

    def forgetful(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        computed = request.num_computed_tokens
        preempt(self, request, *args, **kwargs)
        request.num_computed_tokens = computed

    patch.setattr(scheduler, "_preempt_request", forgetful)


def _found_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    cache = KVCacheCoordinator.cache_blocks

    def cache_blocks(self: Any, request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> None:
        block = self.single_type_managers[0].block_size
        held = len(self.get_blocks(request.request_id)[0])
        whole = min(held, request.num_tokens // block) * block
        cache(self, request, max(num_computed_tokens, min(num_computed_tokens + block, whole)), *args, **kwargs)

    patch.setattr(KVCacheCoordinator, "cache_blocks", cache_blocks)


def _found_while_it_loads(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    allocate = KVCacheManager.allocate_slots

    def allocate_slots(self: Any, *args: Any, **kwargs: Any) -> Any:
        return allocate(self, *args, **kwargs | {"delay_cache_blocks": False})

    patch.setattr(KVCacheManager, "allocate_slots", allocate_slots)


def _raises_when_full(patch: pytest.MonkeyPatch) -> None:
    pool = _pool()
    get = pool.get_new_blocks

    def get_new_blocks(self: Any, num_blocks: int) -> list[Any]:
        if num_blocks >= self.get_num_free_blocks():
            raise ValueError("not one block would be left")
        blocks: list[Any] = get(self, num_blocks)
        return blocks

    patch.setattr(pool, "get_new_blocks", get_new_blocks)


def _nothing(patch: pytest.MonkeyPatch) -> None:
    """The real thing, held to what it does not promise."""


FAULTS = (
    Fault("the free list counts one block too many", "vllm-free-list", _counts_one_too_many),
    Fault("an allocation takes a block more than it gives", "conserved", _takes_one_more),
    Fault("a hit counts twice", "vllm-references", _a_hit_counts_twice),
    Fault("the first of two holders frees", "no-use-after-free", _the_first_to_leave_frees),
    Fault("a request is queued twice", "vllm-queues", _queued_twice),
    Fault("a request is never queued", "everyone-served", _never_queued),
    Fault("an evicted block is still found", "vllm-hashes", _evicted_but_found),
    Fault("a finished load is never taken up", "progress", _a_load_is_never_taken_up),
    Fault("blocks that were sent are not freed", "quiescent", _sent_but_not_freed),
    Fault("a chunk takes blocks for what is not scheduled", "table-fits", _a_block_ahead),
    Fault("a preempted request keeps its count", "vllm-computed", _a_preempted_one_keeps_its_count),
    Fault("a block is found before it is full", "vllm-published", _found_before_it_is_full),
    Fault("a block is found while it loads", "vllm-published", _found_while_it_loads),
    Fault("an abort does not arrive", "ended-is-gone", _an_abort_is_lost),
    Fault("the last block is not given but raised about", "never-raises", _raises_when_full),
    Fault("none, held to the strict property", "admitted-finishes", _nothing, "VllmStrictTarget"),
)
