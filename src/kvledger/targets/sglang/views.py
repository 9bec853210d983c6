"""sglang's own objects as the plain records that the outside may see: every figure and every page is read from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvledger.adder import AddReqResult
from kvledger.arithmetic import ceil_pages
from kvledger.record import AllocationFailure, LiveRequest, Snapshot
from kvledger.targets.sglang.world import World


def result_of(answer: Any) -> AddReqResult:
    """Their answer by our name, which is the same."""
    return AddReqResult(answer.name)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed: sglang says so in words alone."""
    return "out of memory" in str(error).lower()


def snapshot_of(world: World, live: Iterable[tuple[Any, bool]], waiting: Iterable[str]) -> Snapshot:
    """Every page by identity. `live` requests come with whether their prefill is done.

    Who locks a page is read from the owners of locks. Where sglang counts more protected pages than these own, the
    rest is shown as locked from inside too, on pages that nobody named: a lock that was lost is not to be hidden.
    """
    requests = list(live)
    # the tree core hands its pages out in an order that means nothing and differs from time to time
    cached = sorted(world.pages_of(world.engine.cached_slots(world.tree)))
    pins = _locks(world, (node for node, _ in world.pins))
    locks = pins + _locks(world, world.engine.locked_nodes(world.tree, [request for request, _ in requests]))
    unnamed = world.protected_tokens() // world.page_size - sum(1 for page in cached if locks[page])
    rows = []
    for page in cached:
        lock_refs = locks[page]
        if not lock_refs and unnamed > 0:
            lock_refs = 1
            unnamed -= 1
        rows.append((page, lock_refs, pins[page], 0))
    free = world.allocator.get_all_free_pages().tolist()
    return Snapshot(
        page_size=world.page_size,
        pool_pages=world.pool_pages,
        released=tuple(page - 1 for page in free),
        never_used=range(world.pool_pages, world.pool_pages),
        cached=tuple(rows),
        live=tuple(_live(world, request, done) for request, done in requests),
        waiting=tuple(waiting),
        held=tuple(page for held in world.held.values() for slots in held.pages for page in world.pages_of(slots)),
        host_pages=world.host_pages(),
    )


def _locks(world: World, nodes: Iterable[Any]) -> Counter[int]:
    locks: Counter[int] = Counter()
    for node in nodes:
        locks.update(world.pages_of(world.engine.node_slots(world.tree, node)))
    return locks


def _live(world: World, request: Any, done: bool) -> LiveRequest:
    """One that was admitted in this round has no row in the table yet, only the prefix that was found for it."""
    kv = request.kv
    if kv.holds_kv:
        slots = world.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len]
        pages = world.pages_of(slots)
    else:
        pages = (
            world.pages_of(world.engine.prefix_slots(world.tree, request))
            if world.engine.prefix_tokens(request)
            else []
        )
    prompt_tokens = world.engine.fill_tokens(request)
    if done:
        prompt_tokens = max(prompt_tokens, kv.kv_allocated_len) if kv.holds_kv else prompt_tokens
    return LiveRequest(request.rid, prompt_tokens, tuple(pages), kv.cache_protected_len // world.page_size, done)


def failure_of(world: World, batch: Sequence[Any], error: RuntimeError) -> AllocationFailure:
    """sglang allocates a batch in one piece: the first request whose pages no longer fit stands for it."""
    free_tokens, evictable_tokens = world.free_tokens(), world.evictable_tokens()
    left_pages = (free_tokens + evictable_tokens) // world.page_size
    failed = batch[-1]
    engine = world.engine
    for request in batch:
        start, end = engine.prefix_tokens(request), engine.chunk_end(request)
        left_pages -= ceil_pages(end, world.page_size) - ceil_pages(start, world.page_size)
        if left_pages < 0:
            failed = request
            break
    said = str(error).splitlines()[0].split(".")[0]
    wanted = engine.chunk_end(failed) - engine.prefix_tokens(failed)
    message = (
        f"{said}: {failed.rid} tries to allocate {wanted} tokens, available "
        f"{free_tokens + evictable_tokens} (free {free_tokens} + evictable {evictable_tokens})"
    )
    return AllocationFailure(failed.rid, wanted, free_tokens, evictable_tokens, message)
