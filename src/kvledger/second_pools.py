"""Which second pools a node has, by its settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvledger.pools import SecondPool
from kvledger.radix import PrefixTree
from kvledger.request import Request
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.shared import SharedBytes
from kvledger.slots import StateSlots
from kvledger.window import WindowPool


class Memory(Protocol):
    """What of a node its pools may see."""

    slots: StateSlots | None
    tree: PrefixTree
    live: dict[str, Request]


def open_pools(settings: NodeSettings, rules: AccountingRules, node: Memory) -> list[SecondPool]:
    """The node's second pools, in the order in which the adder asks them; none, if it has none."""
    pools: list[SecondPool] = []
    if settings.window_tokens is not None:
        pools.append(WindowPool(settings.window_pool_pages, settings.page_size, settings.window_tokens))
    if node.slots is not None:
        pools.append(node.slots)
    if settings.shared_bytes is not None:
        assert settings.page_bytes is not None, "shared bytes without a page's"
        costs = {"state_slots": settings.state_slot_bytes, "window_pool": settings.window_page_bytes}
        # slots first: a chunk can be cut to the window pages that they leave
        parts = [(pool, cost) for pool in reversed(pools) if (cost := costs[pool.name]) is not None]
        pools.append(SharedBytes(settings.shared_bytes, node.tree, settings.page_bytes, parts, node.live))
    for pool in pools:
        pool.promises = rules.promise_pools
    return pools


def opened_books(pools: Sequence[SecondPool]) -> Sequence[SecondPool]:
    """The pools, each with a fresh ledger for a new round."""
    for pool in pools:
        pool.open_books()
    return pools
