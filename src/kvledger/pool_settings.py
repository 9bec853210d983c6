"""What a node's settings must be for its second pools to say something, and to be able to serve anybody."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from kvledger.settings import NodeSettings


class Misfit(NamedTuple):
    """The key that cannot stay as it is, and why, in words."""

    key: str
    message: str


def misfit_of_pools(node: NodeSettings) -> Misfit | None:
    """The first thing wrong with the second pools of a node's settings, or None."""
    return next(chain(_of_state_slots(node), _of_window(node), _of_shared(node)), None)


def _of_state_slots(node: NodeSettings) -> Iterator[Misfit]:
    if node.state_slots is None:
        if node.tracking_slots:
            yield Misfit("tracking_slots", f"{node.tracking_slots} slots for each request need state_slots")
        if node.copy_on_write:
            yield Misfit("copy_on_write", "true needs state_slots")
    elif node.state_slots < node.slots_of_one:
        yield Misfit(
            "state_slots", f"{node.state_slots} is below the {node.slots_of_one} that one request needs: none could run"
        )


def _of_window(node: NodeSettings) -> Iterator[Misfit]:
    if node.window_tokens is None:
        if node.window_pool_tokens is not None:
            yield Misfit("window_pool_tokens", f"{node.window_pool_tokens} needs window_tokens")
        return
    if node.mode != "prefill":
        yield Misfit(
            "window_tokens", f'{node.window_tokens} needs "mode": "prefill": the window of decode is not modelled'
        )
    if node.window_pool_tokens is None:
        yield Misfit("window_pool_tokens", "a sliding window needs a pool")
    elif node.window_pool_pages < node.window_pages + 1:
        yield Misfit(
            "window_pool_tokens",
            f"{node.window_pool_tokens} is {node.window_pool_pages} of the {node.window_pages + 1} pages that a window "
            f"of {node.window_tokens} tokens and a page to go on take",
        )


def _of_shared(node: NodeSettings) -> Iterator[Misfit]:
    parts = ("page_bytes", "state_slot_bytes", "window_page_bytes")
    if node.shared_bytes is None:
        yield from (Misfit(key, f"{getattr(node, key)} needs shared_bytes") for key in parts if getattr(node, key))
        return
    if node.mode != "prefill":
        yield Misfit(
            "shared_bytes", f'{node.shared_bytes} needs "mode": "prefill": what decode grows is not counted in it'
        )
    if node.page_bytes is None:
        yield Misfit("page_bytes", "what the KV pool takes of shared_bytes is not said")
    if node.state_slot_bytes is None and node.window_page_bytes is None:
        yield Misfit("shared_bytes", f"{node.shared_bytes} is shared with nothing: neither slots nor window pages")
    if node.state_slot_bytes is not None and node.state_slots is None:
        yield Misfit("state_slot_bytes", f"{node.state_slot_bytes} needs state_slots")
    if node.window_page_bytes is not None and node.window_tokens is None:
        yield Misfit("window_page_bytes", f"{node.window_page_bytes} needs window_tokens")
    if node.shared_bytes < node.bytes_of_one(1):
        yield Misfit(
            "shared_bytes",
            f"{node.shared_bytes} is below the {node.bytes_of_one(1)} that a request of one page needs: none could run",
        )
