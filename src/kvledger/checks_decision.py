"""Checks that follow every decision of a scheduler. Each takes evidence and the decision, and says what is wrong."""

from __future__ import annotations

import math

from kvledger import checks_pools as pools
from kvledger.adder import AddReqResult
from kvledger.arithmetic import ceil_tokens, floor_tokens
from kvledger.evidence import (
    Evidence,
    Finding,
    coming_pages,
    compute_left,
    counted_pages,
    decode_tokens,
    gate_tokens,
    is_simulated,
    needed_pages_of,
    owed_tokens,
    simulation_passes,
    standing,
    was_loading,
)
from kvledger.record import Decision, Snapshot


def promises_covered(e: Evidence, decision: Decision) -> Finding | None:
    """Baseline, and what write-backs will let go of, against what the admitted requests still have to allocate."""
    needed_pages = sum(needed_pages_of(request, e.page_size) for request in e.after.live)
    baseline_pages = coming_pages(e.after)
    if baseline_pages >= needed_pages:
        return pools.promises_covered(e, decision) if e.after.pools else None
    return Finding(
        decision.request,
        f"after {decision.request} was {decision.kind}, admitted prompts still need {needed_pages * e.page_size} "
        f"tokens, and free + evictable is {baseline_pages * e.page_size}",
    )


def order(_: Evidence, decision: Decision) -> Finding | None:
    """`cur_rem_tokens` leaves out what is due later, so it is never the smaller."""
    if decision.cur_rem_tokens >= decision.rem_total_tokens:
        return None
    return Finding(
        decision.request,
        f"cur_rem_tokens {decision.cur_rem_tokens} is below rem_total_tokens {decision.rem_total_tokens}",
    )


def never_forced(e: Evidence, decision: Decision) -> Finding | None:
    """The forced chunk of the shortage rule asks the pool for what the books say is not there.

    One that stays inside a page of its own asks the pool for nothing.
    """
    if not decision.forced or ceil_tokens(decision.end, e.page_size) == ceil_tokens(decision.start, e.page_size):
        return None
    return Finding(
        decision.request, f"nothing remained, and {decision.request} was forced to run {decision.tokens} tokens"
    )


def on_grid(e: Evidence, decision: Decision) -> Finding | None:
    """A chunk begins afresh where a state was saved, ends where one will be, and runs a token in between."""
    if not decision.joined:
        return None
    if decision.tokens <= 0:
        return Finding(decision.request, f"chunk [{decision.start}, {decision.end}) runs no token")
    if decision.kind != "resumed" and decision.start % e.grid_tokens:
        return Finding(
            decision.request, f"starts at {decision.start}, where the grid of {e.grid_tokens} saved no state"
        )
    if decision.kind != "resumed" and e.before.pools:
        without = pools.hit_is_whole(e, decision)
        if without is not None:
            return without
    if decision.tail_tokens <= 0:
        return None
    grid_end = floor_tokens(decision.end, e.grid_tokens)
    if decision.end != grid_end and grid_end > decision.start:
        return Finding(
            decision.request,
            f"chunk [{decision.start}, {decision.end}) ends off the grid of {e.grid_tokens}, {grid_end} was in reach",
        )
    return _on_chunk_grid(e, decision)


def _on_chunk_grid(e: Evidence, decision: Decision) -> Finding | None:
    """A cut is as long as whole cells of the kernel's grid are, or as far as the checkpoint grid let that come."""
    cell = e.rules.chunk_grid if decision.kind == "resumed" else e.rules.cut_unit
    if cell is not None and decision.tokens < cell and e.after.pools:
        cell = e.rules.chunk_grid  # a second pool may never hold what both grids ask for
    if cell is None or decision.tokens % cell == 0:
        return None
    if decision.tokens < cell and (decision.kind == "resumed" or e.after.pools):
        return None  # what is half done must go on, and a second pool may not hold a whole cell either
    whole_end = decision.start + ceil_tokens(decision.tokens, cell)
    if floor_tokens(whole_end, e.grid_tokens) == decision.end:
        return None
    return Finding(
        decision.request,
        f"chunk [{decision.start}, {decision.end}) of {decision.tokens} tokens is off the grid of cuts, {cell}",
    )


def one_half_done(e: Evidence, decision: Decision) -> Finding | None:
    """Cut requests of this round, the deferred one included."""
    cut = {d.request for d in (*e.earlier, decision) if d.kind == "deferred" or (d.joined and d.tail_tokens > 0)}
    if len(cut) <= 1:
        return None
    return Finding(decision.request, f"{len(cut)} requests are half done: {', '.join(sorted(cut))}")


def refusal_is_free(e: Evidence, decision: Decision) -> Finding | None:
    """Every figure and every page after a refusal is what it was before.

    Where a fault struck meanwhile it took pages from a cache, or brought some: then no lock and no promise is left,
    nobody else's memory has changed, and there is as much to be had as before.
    """
    if decision.kind != "refused" or e.before == e.after:
        return None
    if decision.faults and _all_but_unlocked(e.before) == _all_but_unlocked(e.after):
        return None
    changed = [name for name in Snapshot.__slots__ if getattr(e.before, name) != getattr(e.after, name)]
    return Finding(decision.request, f"refusing {decision.request} changed {', '.join(changed)}")


def _all_but_unlocked(s: Snapshot) -> tuple[object, ...]:
    """What a refusal must leave alone even where a fault moved cached pages that nobody locks."""
    locked = {page: (lock_refs, pinned_refs) for page, lock_refs, pinned_refs, _ in s.cached if lock_refs}
    return locked, s.baseline_pages, s.live, s.waiting, s.held, s.open_promises


def ledger_exact(e: Evidence, decision: Decision) -> Finding | None:
    """Both offsets and the baseline, counted afresh from the batch and the pages."""
    baseline = counted_pages(e, e.after) * e.page_size
    now, later = decode_tokens(e, e.after)
    for d in standing((*e.earlier, decision)):
        d_now, d_later = owed_tokens(e, d)
        now += d_now
        later += d_later
    expected = (baseline, baseline - now, math.floor(baseline - now - later))
    stated = (decision.baseline, decision.cur_rem_tokens, decision.rem_total_tokens)
    if stated == expected:
        return None
    return Finding(
        decision.request,
        f"(baseline, cur_rem_tokens, rem_total_tokens) is {stated}, the batch and the pages come to {expected}",
    )


def gate_covers_charge(e: Evidence, decision: Decision) -> Finding | None:
    """An admission must hold against the books counted afresh, as a refusal for memory must."""
    if decision.kind == "refused" or not decision.from_queue:
        return None
    if is_simulated(e, decision):
        if simulation_passes(e, decision):
            return None
        return Finding(decision.request, f"{decision.request} was admitted, and not everybody can come to an end")
    need, left = gate_tokens(e, decision)
    if need < left:
        return None
    return Finding(
        decision.request, f"{decision.request} was admitted, but its {need} tokens are not below the {left} left"
    )


def batch_in_budget(e: Evidence, decision: Decision) -> Finding | None:
    """Compute budgets, counted from the batch: nobody joins once one is spent, no chunk exceeds what is left."""
    refused = next((d.request for d in e.earlier if d.kind == "refused"), None)
    if refused is not None:
        return Finding(decision.request, f"was looked at after {refused} was refused")
    if not decision.joined:
        return None
    batch = any(d.joined for d in e.earlier)
    chunk_left, input_left = compute_left(e)
    limit = e.rules.continuation_limit
    if decision.kind == "resumed" and limit is not None and decision.tokens > limit and not was_loading(e, decision):
        return Finding(decision.request, f"went on for {decision.tokens} tokens, and a round's limit is {limit}")
    # a whole prompt must fit with its last page; a resumed chunk may end inside the page that the budget ends in
    tokens = ceil_tokens(decision.tokens, e.page_size) if decision.kind == "whole" else decision.tokens
    if chunk_left is not None and (tokens > chunk_left or (batch and chunk_left <= 0)):
        return Finding(decision.request, f"{tokens} tokens joined with {chunk_left} of the chunk budget left")
    most_tokens = input_left if chunk_left is not None else None if input_left is None else input_left - tokens
    if most_tokens is not None and batch and most_tokens <= 0:
        return Finding(decision.request, f"{tokens} tokens joined a batch with {input_left} of max_prefill_tokens left")
    return None


def other_is_minimal(e: Evidence, decision: Decision) -> Finding | None:
    """An OTHER must hold against the batch: no page of chunk budget, a half-done request, or too long to join it."""
    if decision.reason is not AddReqResult.OTHER:
        return None
    chunk_left, input_left = compute_left(e)
    # a host hit would shorten it, and a refusal does not say
    most_tokens = ceil_tokens(decision.prompt_tokens - decision.prefix_tokens, e.page_size)
    if chunk_left is None:
        needed = any(d.joined for d in e.earlier) and input_left is not None and most_tokens >= input_left
    else:
        half_done = any(d.kind not in ("refused", "loading") and d.tail_tokens > 0 for d in e.earlier)
        unit = math.lcm(e.page_size, e.rules.truncation_align or 1, e.rules.chunk_grid or 1)
        cut_tokens = floor_tokens(chunk_left, unit)
        needed = most_tokens > chunk_left and (half_done or cut_tokens <= 0)
    if needed:
        return None
    return Finding(decision.request, f"refused with OTHER, with {chunk_left} of the chunk budget and {input_left} of "
                                     f"max_prefill_tokens left for at most {most_tokens} tokens")  # fmt: skip


def fix_is_minimal(e: Evidence, decision: Decision) -> Finding | None:
    """A NO_TOKEN must hold against the books counted afresh: tail and newcomer together do not fit."""
    if decision.reason is not AddReqResult.NO_TOKEN:
        return None
    if decision.short_of is not None:
        return pools.refusal_is_minimal(e, decision)
    if is_simulated(e, decision):
        if not simulation_passes(e, decision):
            return None
        return Finding(decision.request, "refused with NO_TOKEN, but everybody could come to an end")
    need, left = gate_tokens(e, decision)
    if not need < left:
        return None
    return Finding(decision.request, f"refused with NO_TOKEN, but its {need} tokens are below the {left} that remain")


def loaded_before_used(e: Evidence, decision: Decision) -> Finding | None:
    """No chunk goes on from what a load has yet to bring; the fault says when that is there."""
    rid = decision.request
    if not decision.joined:
        return None
    if decision.load_back and rid in e.late and "load-short" not in decision.faults:
        return Finding(
            rid, f"{rid} runs at once on {decision.load_back} tokens that arrive {e.late[rid][0]} rounds later"
        )
    if e.round >= e.arrives.get(rid, 0):
        return None
    return Finding(rid, f"{rid} runs in round {e.round}, and its load arrives in round {e.arrives[rid]}")
