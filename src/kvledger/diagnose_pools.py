"""Who spent what a request was promised in a second pool: read off the failed round, in that pool's units."""

from __future__ import annotations

from kvledger.arithmetic import ceil_pages
from kvledger.diagnose_history import History
from kvledger.diagnose_promise import Breach, BrokenPromise, Spending, find_breach
from kvledger.record import AllocationFailure, Decision


def breach_of(history: History) -> Breach | None:
    """The promise that broke, of whichever pool: a second one's if its allocation failed."""
    failure = history.outcome.failure
    return find_breach(history) if failure is None or failure.pool is None else _breach_in_pool(history, failure)


def _breach_in_pool(history: History, failure: AllocationFailure) -> Breach:
    """What the pool could not give, and what the rest of the batch takes of it."""
    assert failure.pool is not None, f"{failure.request} found too little in no second pool"
    record = history.outcome.rounds[-1]
    promise = BrokenPromise(failure.request, "share", failure.wanted, record.round, pool=failure.pool)
    spent = [
        Spending(decision.request, "share", units)
        for decision in record.joined
        if decision.request != failure.request and (units := _units_of(history, failure.pool, decision))
    ]
    return Breach(promise, tuple(sorted(spent, key=lambda each: -each.tokens)), None)


def _units_of(history: History, pool: str, decision: Decision) -> int:
    """What an admission or a chunk takes of a pool in its round."""
    node = history.trace.node
    fresh = decision.kind != "resumed"
    pages = ceil_pages(decision.end, node.page_size) - ceil_pages(decision.start, node.page_size)
    loaded = ceil_pages(decision.load_back, node.page_size)
    slots = 1 + node.tracking_slots if fresh else 0
    in_window = min(loaded, node.window_pages)
    if pool == "state_slots":
        return slots
    if pool == "window_pool":
        return pages + in_window
    of_window = (pages + in_window) * (node.window_page_bytes or 0)
    return (pages + loaded) * (node.page_bytes or 0) + slots * (node.state_slot_bytes or 0) + of_window
