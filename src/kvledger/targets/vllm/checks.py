"""What must hold of vLLM's own books, whatever it decides: its free list, its reference counts, queues and hashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvledger.evidence import Evidence, Finding
from kvledger.invariants import Invariant
from kvledger.targets.vllm.package import get_block_hash, get_group_id

if TYPE_CHECKING:
    from kvledger.targets.vllm.target import VllmTarget


def free_list(target: VllmTarget, _: Evidence) -> Finding | None:
    """Free and distinct held blocks are the pool without the null block, by identity and by vLLM's own count."""
    pool = target.pool
    free = pool.free_block_queue.get_all_free_blocks()
    identities = {block.block_id for block in free}
    usable = pool.num_gpu_blocks - 1
    in_use = [block for block in pool.blocks if block.ref_cnt > 0 and not block.is_null]
    if (
        len(identities) == len(free) == pool.get_num_free_blocks() == usable - len(in_use)
        and identities.isdisjoint(block.block_id for block in in_use)
        and not any(block.is_null for block in free)
    ):
        return None
    return Finding(
        None,
        f"{len(identities)} different blocks are in the free list, {pool.get_num_free_blocks()} by its count, and "
        f"{len(in_use)} of {usable} are in use",
    )


def references(target: VllmTarget, _: Evidence) -> Finding | None:
    """A block's reference count is the number of tables, holds and locks that it is in."""
    holders = target.pins()
    for _request, blocks in target.requests():
        holders.update(block.block_id for block in blocks)
    for blocks in target.held.values():
        holders.update(block.block_id for block in blocks)
    for block in target.pool.blocks:
        if not block.is_null and block.ref_cnt != holders[block.block_id]:
            return Finding(
                None, f"block {block.block_id} has {holders[block.block_id]} holders and counts {block.ref_cnt}"
            )
    return None


def queues_disjoint(target: VllmTarget, _: Evidence) -> Finding | None:
    """A request that is not done is in exactly one queue, and a done one in none."""
    queues = target.version.queues(target.scheduler)
    places = Counter(request.request_id for queue in queues.values() for request in queue)
    expected = {rid for rid, request in target.scheduler.requests.items() if not request.is_finished()}
    wrong = sorted({rid for rid, times in places.items() if times > 1} | (places.keys() ^ expected))
    if not wrong:
        return None
    rid = wrong[0]
    there = [name for name, queue in queues.items() for request in queue if request.request_id == rid]
    return Finding(rid, f"{rid} is in {len(there)} queues: {', '.join(there) or 'none'}")


def hashes_true(target: VllmTarget, _: Evidence) -> Finding | None:
    """What the prefix cache finds under a hash is a block that carries it."""
    found = target.pool.cached_block_hash_to_block
    cached = 0
    for block in target.pool.blocks:
        if block.block_hash is None:
            continue
        cached += 1
        if not found.contain(block.block_hash, block.block_id):
            return Finding(None, f"block {block.block_id} carries a hash under which nobody would find it")
    if cached >= len(found):
        return None
    return Finding(None, f"{len(found)} hashes can be found, and {cached} blocks carry one")


def computed(target: VllmTarget, _: Evidence) -> Finding | None:
    """What counts as computed of a request is in its blocks: computed, loaded, or found, and not lost since."""
    loading = target.connector.loading if target.connector is not None else {}
    for rid, request in target.scheduler.requests.items():
        if rid in loading or not request.num_computed_tokens:
            continue
        blocks = target.manager.get_blocks(rid).blocks[0]
        page = target.contents.first_missing(request, blocks, request.num_computed_tokens)
        if page is not None:
            return Finding(
                rid,
                f"{request.num_computed_tokens} tokens of {rid} count as computed, and what is in its block {page} is "
                "not: the next chunk reads what nobody wrote there",
            )
    return None


def published(target: VllmTarget, _: Evidence) -> Finding | None:
    """A block that can be found by its hash holds the whole page that the hash stands for."""
    for block in target.pool.blocks:
        if block.block_hash is None or get_group_id(block.block_hash):
            continue
        if not target.contents.holds(block, get_block_hash(block.block_hash)):
            return Finding(None, f"block {block.block_id} carries the hash of a page that is not all in it")
    return None


Check = Callable[["VllmTarget", Evidence], Finding | None]
_CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("vllm-free-list", "a block that is free and in use is given to a second owner", free_list),
    ("vllm-references", "a count that is not the holders' frees a block in use, or never", references),
    ("vllm-queues", "a request in two queues runs twice, in none never", queues_disjoint),
    ("vllm-hashes", "a hash that outlives its block serves somebody else's tokens", hashes_true),
    ("vllm-computed", "a chunk over tokens that are not there attends to somebody else's", computed),
    ("vllm-published", "who finds a page before it is written reads what was there before", published),
)


def invariants_of(target: VllmTarget) -> tuple[Invariant, ...]:
    """The checks above as invariants, bound to one world."""
    return tuple(Invariant(name, reason, "event", partial(check, target)) for name, reason, check in _CHECKS)
