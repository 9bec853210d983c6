"""What the outside sees of a vLLM world: its blocks by identity, without the null block, and who holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvledger.record import LiveRequest, Snapshot

if TYPE_CHECKING:
    from kvledger.targets.vllm.target import VllmTarget


def page_of(block: Any) -> int:
    """A block's page number: block 0 is the null block, which is nobody's."""
    number: int = block.block_id - 1
    return number


def snapshot_of(target: VllmTarget) -> Snapshot:
    """Free blocks are those in vLLM's own free queue; a block with a hash is a cached page."""
    live: list[LiveRequest] = []
    waiting: list[str] = []
    held = [page_of(block) for blocks in target.held.values() for block in blocks]
    pins = target.pins()
    in_flight = target.in_flight()
    loading = target.connector.loading if target.connector is not None else {}
    for request, blocks in target.requests():
        rid = request.request_id
        if request.is_finished() and rid in loading:
            # aborted while a load writes to its blocks: nobody's, until the load is done
            held += [page_of(block) for block in blocks if block.block_hash is None]
            pins.update(block.block_id for block in blocks if block.block_hash is not None)
        elif blocks:
            shared = [page_of(block) for block in blocks if block.block_hash is not None]
            private = [page_of(block) for block in blocks if block.block_hash is None]
            live.append(LiveRequest(rid, target.prompt_tokens[rid], (*shared, *private), len(shared), rid in in_flight))
        else:
            waiting.append(rid)
    free = target.pool.free_block_queue.get_all_free_blocks()
    return Snapshot(
        page_size=target.settings.page_size,
        pool_pages=target.settings.pool_pages,
        released=tuple(page_of(block) for block in free if block.block_hash is None),
        never_used=range(target.settings.pool_pages, target.settings.pool_pages),
        cached=tuple(
            (page_of(block), block.ref_cnt, pins[block.block_id], 0)
            for block in target.pool.blocks
            if block.block_hash is not None
        ),
        live=tuple(live),
        waiting=tuple(waiting),
        held=tuple(held),
        host_pages=len(target.connector.host) if target.connector is not None else 0,
    )
