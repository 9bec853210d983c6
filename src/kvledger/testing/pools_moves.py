"""Second pools in a search: which a node has, and how large, relative to what its requests ask for.

No event is theirs: what other moves bring fills them too. A dimension only draws the pools themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvledger.settings import NodeSettings
from kvledger.testing.dimensions import Dimension, swarm
from kvledger.testing.moves import NODE_SPACE, Domain
from kvledger.testing.reached_pools import BRANCHES

STATES, WINDOW, SHARED = 1, 2, 4
WHICH = (
    *(STATES, STATES, WINDOW, WINDOW, WINDOW, STATES | WINDOW),
    *(STATES | SHARED, WINDOW | SHARED, STATES | WINDOW | SHARED),
)

DOMAINS: Mapping[str, Domain] = {
    "which": (0, len(WHICH) - 1),
    "slots": (0, 7),
    "tracking": (0, 3),
    "copying": (0, 1),
    "window": (0, 5),
    "room": (0, 7),
    "weight": (0, 3),
    "bytes": (0, 5),
}


def extend(
    node: NodeSettings,
    which: int,
    slots: int,
    tracking: int,
    copying: int,
    window: int,
    room: int,
    weight: int,
    bytes: int,
) -> NodeSettings:
    """The node with these pools. What decode would grow is not modelled in a window or in shared bytes, and a pipeline
    has none of them."""
    if node.ranks:
        return node
    chosen = WHICH[which] if node.mode == "prefill" else STATES
    if chosen & STATES:
        node = _with_states(node, slots, (0, 1, 2, 1)[tracking], bool(copying))
    if chosen & WINDOW:
        node = _with_window(node, window, room)
    if chosen & SHARED:
        node = _with_shared(node, weight, bytes)
    return node


def _with_states(node: NodeSettings, slots: int, tracking: int, copying: bool) -> NodeSettings:
    node = replace(node, tracking_slots=tracking, copy_on_write=copying)
    return replace(node, state_slots=node.slots_of_one + (0, 1, 2, 3, 4, 6, 9, 16)[slots])


def _with_window(node: NodeSettings, window: int, room: int) -> NodeSettings:
    size = node.page_size
    tokens = (1, size, size + 1, 2 * size, node.checkpoint_align // 2, node.checkpoint_align)[window]
    node = replace(node, window_tokens=tokens)
    chunk_pages = (node.chunked_prefill_size or node.pool_tokens // 2) // size
    more = (0, 0, 1, node.window_pages, chunk_pages // 2, chunk_pages, 2 * chunk_pages, node.pool_pages)[room]
    return replace(node, window_pool_tokens=(node.window_pages + 1 + more) * size)


def _with_shared(node: NodeSettings, weight: int, part: int) -> NodeSettings:
    page_bytes, unit_bytes = ((4, 2), (4, 1), (1, 3), (2, 2))[weight]
    node = replace(
        node,
        page_bytes=page_bytes,
        state_slot_bytes=None if node.state_slots is None else unit_bytes,
        window_page_bytes=None if node.window_tokens is None else unit_bytes,
    )
    whole = node.pool_pages * page_bytes + ((node.state_slots or 0) + node.window_pool_pages) * unit_bytes
    return replace(node, shared_bytes=max(node.bytes_of_one(1), whole * (4, 3, 2, 5, 6, 7)[part] // 6))


POOLS = Dimension("pools", DOMAINS, extend, BRANCHES, has=lambda node: not node.ranks)

POOLS_SPACE = swarm(NODE_SPACE, [POOLS], name="+ pools", examples=300, always=True)
"""Prefill nodes that all have second pools."""
