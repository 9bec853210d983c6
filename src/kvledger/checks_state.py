"""Checks that follow a round, any event, or the end: what must hold of pages and requests, whoever decided what."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath

from kvledger import checks_pools as pools
from kvledger.arithmetic import ceil_pages
from kvledger.evidence import Evidence, Finding
from kvledger.record import RoundRecord
from kvledger.replay import Stuck

# --- after every round


def admitted_finishes(e: Evidence, record: RoundRecord) -> Finding | None:
    """No allocation of an admitted request fails, and what it has computed is never computed again."""
    if record.failure is not None:
        return Finding(record.failure.named, record.failure.message)
    for rid in record.rolled_back:
        computed = e.computed.get(rid, 0)
        return Finding(rid, f"{rid} was admitted, and its prefill was thrown away after {computed} tokens")
    for decision in record.joined:
        computed = e.computed.get(decision.request, decision.start)
        if decision.start != computed:
            return Finding(
                decision.request, f"{decision.request} had computed {computed} tokens and went on from {decision.start}"
            )
    there = {request.rid for request in e.after.live} | set(record.finished)
    lost = next((rid for rid in e.computed if rid not in there), None)
    return Finding(lost, f"{lost} was admitted and is gone before its prefill was done") if lost else None


def never_raises(_e: Evidence, error: Exception) -> Finding | None:
    """Whatever happens, a scheduler answers. The words are the same each time: no addresses."""
    *_, frame = traceback.extract_tb(error.__traceback__) or [None]
    where = f" in {frame.name} ({PurePath(frame.filename).name})" if frame else ""
    words = re.sub(r"0x[0-9a-f]+", "0x…", str(error).strip().partition("\n")[0])
    return Finding(None, f"{type(error).__name__}{where}: {words[:200]}")


def table_fits(e: Evidence, record: RoundRecord) -> Finding | None:
    """What a request holds is what its computed tokens fill."""
    if record.failure is not None:
        return None
    pages = {request.rid: len(request.pages) for request in e.after.live}
    for d in record.joined:
        if d.request in pages and pages[d.request] != ceil_pages(d.end, e.page_size):
            return Finding(d.request, f"{d.request} has computed {d.end} tokens and holds {pages[d.request]} pages")
    return pools.table_fits(e, record) if e.after.pools else None


# --- after every event


def conserved(e: Evidence) -> Finding | None:
    """Free, cached, private and held pages are disjoint by identity, and together they are the pool."""
    s = e.after
    used = [*s.released, *s.held]
    used += [page for page, _, _, _ in s.cached]
    for request in s.live:
        used += request.private_pages
    distinct = set(used)
    in_use_pages = s.pool_pages - len(s.never_used)
    if e.settings.host_pages is not None and s.host_pages > e.settings.host_pages:
        return Finding(None, f"the host tier has {s.host_pages} pages and room for {e.settings.host_pages}")
    if len(used) == len(distinct) == in_use_pages and (not used or max(used) < in_use_pages):
        return pools.conserved(e) if s.pools else None
    twice = sorted(page for page, times in Counter(used).items() if times > 1)
    missing_pages = in_use_pages - len(distinct)
    words = []
    if missing_pages > 0:
        words.append(f"{missing_pages} of the {in_use_pages} pages in use {_belong(missing_pages)} to nobody")
    if twice:
        of = "" if words else f" of the {in_use_pages} pages in use"
        words.append(f"{len(twice)}{of} {_belong(len(twice))} to two: {twice[:5]}")
    if not words:
        words.append(f"{len(distinct)} pages are somebody's or cached, and {in_use_pages} are in use")
    return Finding(None, " and ".join(words) + (f", after {e.departed}" if e.departed else ""))


def _belong(pages: int) -> str:
    return "belongs" if pages == 1 else "belong"


def no_use_after_free(e: Evidence) -> Finding | None:
    """A live request's cached pages are cached and locked, its private ones are nobody else's and not free."""
    s = e.after
    if not s.live:
        return None
    cached = {page for page, _, _, _ in s.cached}
    locked = cached.difference([page for page, lock_refs, _, _ in s.cached if lock_refs <= 0])
    free = set(s.released)
    owned: set[int] = set(s.held)
    for request in s.live:
        shared, private = set(request.pages[: request.shared_pages]), set(request.private_pages)
        if len(shared) + len(private) != len(request.pages) or not shared.isdisjoint(private):
            return Finding(request.rid, f"{request.rid} has a page twice in its table")
        if not shared <= locked:
            return Finding(
                request.rid, f"{request.rid} uses cached pages that no lock protects: {_few(shared - locked)}"
            )
        if not private.isdisjoint(free) or not private.isdisjoint(owned) or not private.isdisjoint(cached):
            return Finding(
                request.rid, f"{request.rid} uses pages that are not its own: {_few(private & (free | owned | cached))}"
            )
        owned |= private
    return pools.no_use_after_free(e) if s.pools else None


def ended_is_gone(e: Evidence) -> Finding | None:
    """Aborted and transferred requests neither wait nor hold pages."""
    alive = (*e.after.waiting, *(request.rid for request in e.after.live))
    rid = next((rid for rid in alive if rid in e.ended), None)
    return None if rid is None else Finding(rid, f"{rid} has ended, and the node goes on with it")


def kept_until_ended(e: Evidence) -> Finding | None:
    """Who was let in holds its slots until it has ended itself, has gone back, or was given up."""
    here = {request.rid for request in e.after.live}
    rid = next((rid for rid in sorted(e.alive) if rid not in here and rid not in e.ended and rid not in e.left), None)
    return None if rid is None else Finding(rid, f"{rid} has not ended, and the node has let go of its slots")


# --- at rest, and when nothing moves


def everyone_served(e: Evidence) -> Finding | None:
    """Every request that the entry had to accept has finished its prefill, or was given up by its user."""
    rid = min(e.unserved, default=None)
    return None if rid is None else Finding(rid, f"at rest, {rid} has neither finished nor been aborted")


def quiescent(e: Evidence) -> Finding | None:
    """Nothing is locked from inside, leaked, alive or promised."""
    s = e.after
    locked_pages = sum(1 for _, lock_refs, pinned_refs, _ in s.cached if lock_refs != pinned_refs)
    accounted_pages = s.free_pages + len(s.held) + len(s.cached)
    leaked_pages = s.pool_pages - accounted_pages
    if not (locked_pages or leaked_pages or s.live or s.open_promises):
        return pools.quiescent(e) if s.pools else None
    return Finding(
        s.live[0].rid if s.live else None,
        f"at rest {locked_pages} pages are locked, {leaked_pages} leaked, {len(s.live)} requests alive and "
        f"{len(s.open_promises)} promises open",
    )


def progress(e: Evidence, stuck: Stuck) -> Finding | None:
    """Slots that someone outside the trace holds or locks for ever excuse a node: its pool is not empty."""
    for rank in (e.after, *e.after.ranks):
        if rank.held or any(pinned_refs for _, _, pinned_refs, _ in rank.cached):
            return None
    return Finding(stuck.request, f"{stuck.request} fits an empty pool and never finishes: {stuck.message}")


def _few(pages: Iterable[int]) -> str:
    return str(sorted(pages)[:5])
