"""A node's own objects as the plain records that the outside may see."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

from kvledger.adder import AddReqResult, PrefillAdder
from kvledger.ledger import Due, Promise
from kvledger.occupancy import Occupancy
from kvledger.pool import PrefillOutOfMemory
from kvledger.record import AllocationFailure, Decision, DecisionKind, LiveRequest, PoolView, Snapshot
from kvledger.request import CachedPage, Request, RequestState


def decision_of(
    adder: PrefillAdder,
    request: Request,
    kind: DecisionKind,
    *,
    reason: AddReqResult | None = None,
    newly_locked_tokens: int = 0,
    loads: int = 0,
    faults: tuple[str, ...] = (),
    short_units: tuple[int, int] | None = None,
) -> Decision:
    """The adder's last answer, about `request`, with the ledger's figures as they stand now. `loads`: tokens that it
    begins to load, and has not got yet."""
    chunk = adder.can_run_list[-1] if kind not in ("refused", "deferred", "loading") else None
    load_back = chunk.load_back if chunk else loads
    return Decision(
        request=request.rid,
        kind=kind,
        prompt_tokens=request.prompt_tokens,
        prefix_tokens=request.prefix_tokens - load_back,
        start=chunk.start if chunk else request.prefix_tokens,
        end=chunk.end if chunk else request.prefix_tokens,
        load_back=load_back,
        newly_locked_tokens=newly_locked_tokens,
        reason=reason,
        forced=adder.forced and kind == "resumed",
        short_of=adder.short_of if kind == "refused" else None,
        short_units=short_units,
        chunk_limit=adder.chunked_req_limit if kind in ("resumed", "deferred") else None,
        faults=faults,
        output_tokens=adder.output_tokens(request),
        baseline=adder.memory.baseline,
        rem_total_tokens=math.floor(adder.rem_total_tokens),
        cur_rem_tokens=math.floor(adder.cur_rem_tokens),
        rem_chunk_tokens=adder.rem_chunk_tokens,
        rem_input_tokens=adder.rem_input_tokens,
    )


def ledger_facts(adder: PrefillAdder) -> dict[str, Any]:
    """A round's figures as its decisions leave them. Whole tokens: what remains is rounded down, and the promises add
    up to what is taken from it."""
    return {
        "baseline": adder.memory.baseline,
        "rem_total_tokens": math.floor(adder.rem_total_tokens),
        "cur_rem_tokens": math.floor(adder.cur_rem_tokens),
        "rem_chunk_tokens": adder.rem_chunk_tokens,
        "budget_state": adder.budget_state(),
        "promises": in_whole_tokens(adder.memory.entries()),
    }


def in_whole_tokens(promises: Iterable[Promise]) -> tuple[Promise, ...]:
    """The promises in whole tokens: each exact fraction is rounded up or down, so that all of one due come to their
    sum rounded up. Those with the largest fractions are rounded up, of equal ones the first."""
    entries = list(promises)
    if all(type(each.tokens) is int for each in entries):
        return tuple(entries)
    for due in Due:
        fractions = {at: each for at, each in enumerate(entries) if each.due is due and each.tokens.denominator > 1}
        whole = math.lcm(*(each.tokens.denominator for each in fractions.values()))  # a token, in equal parts
        parts = {
            at: each.tokens.numerator * (whole // each.tokens.denominator) % whole for at, each in fractions.items()
        }
        tokens_up = -(-sum(parts.values()) // whole)  # rounded up, and no more than there are fractions
        rounded_up = set(sorted(parts, key=lambda at: -parts[at])[:tokens_up])
        for at, each in fractions.items():
            entries[at] = Promise(each.request, each.kind, math.floor(each.tokens) + (at in rounded_up), due)
    return tuple(entries)


def snapshot_of(
    memory: Occupancy,
    live: Iterable[Request],
    waiting: Iterable[str],
    adder: PrefillAdder | None,
    pools: tuple[PoolView, ...] = (),
) -> Snapshot:
    """Every page and every live request; `adder` is the last round's, for promises that nothing settled."""
    # a running request's token is due in each round anew: no allocation has to settle it
    promises = [each for each in adder.memory.entries() if each.kind != "decode"] if adder is not None else ()
    # one plain list: this is most of what a search costs; what is among the device pages has a number
    rows = [(page.page, page.lock_refs, page.pinned_refs, page.last_used) for page in memory.tree.device_pages()]
    return Snapshot(
        page_size=memory.page_size,
        pool_pages=memory.pool.pool_pages,
        released=memory.pool.released(),
        never_used=memory.pool.never_used(),
        cached=tuple(cast("list[tuple[int, int, int, int]]", rows)),
        live=tuple(_live_view(request) for request in live),
        waiting=tuple(waiting),
        held=tuple(page for held in memory.held.values() for page in held.pages),
        host_pages=memory.tree.host_pages,
        clock=memory.tree.clock,
        written_back=memory.written_back(),
        open_promises=in_whole_tokens(promise for promise in promises if promise.due is Due.NOW),
        pools=pools,
    )


def device_page(cached: CachedPage) -> int:
    """The device page number of a cached page that must have one."""
    assert cached.page is not None, f"cached page {cached.serial} is not on the device"
    return cached.page


def failure_of(error: PrefillOutOfMemory) -> AllocationFailure:
    """A failed allocation as a value."""
    figures = (error.wanted_tokens, error.free_tokens, error.evictable_tokens)
    return AllocationFailure(error.request, *figures, str(error), pool=error.pool)


def _live_view(request: Request) -> LiveRequest:
    decoding = request.state is RequestState.RUNNING
    return LiveRequest(
        request.rid,
        request.prompt_tokens,
        tuple(request.pages),
        request.shared_pages,
        decoding or request.state is RequestState.IN_FLIGHT,
        decoding,
    )
