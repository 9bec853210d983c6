"""What the invariants ask of second pools: the same as of the KV pool, unit by unit, and each finding names the pool.

Needs are counted from the requests and the settings, afresh; what is there, from the units in the snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvledger.arithmetic import ceil_pages, pages_of_window
from kvledger.evidence import Evidence, Finding
from kvledger.record import Decision, LiveRequest, PoolView, RoundRecord, Snapshot

# --- what admitted requests still need


def needed_units(e: Evidence, view: PoolView, decisions: Iterable[Decision]) -> int:
    """What the live requests must yet be able to take of a pool, `decisions` being this round's so far."""
    ends = {d.request: d.end for d in decisions if d.kind != "refused"}
    if view.name == "state_slots":
        return sum(_slots_of(e, view, request) for request in e.after.live)
    if view.name == "window_pool":
        return sum(_window_pages_of(e, view, request, ends) for request in e.after.live if not request.in_flight)
    cost = dict(view.weights)
    pages = sum(ceil_pages(each.prompt_tokens, e.page_size) - len(each.pages) for each in e.after.live)
    others = [(each, cost[each.name]) for each in e.after.pools if each.name in cost]
    return pages * cost[""] + sum(needed_units(e, each, decisions) * weight for each, weight in others)


def _slots_of(e: Evidence, view: PoolView, request: LiveRequest) -> int:
    """The slots that a request has not got yet, of its own and those to track with."""
    return max(0, 1 + e.settings.tracking_slots - len(dict(view.owned).get(request.rid, ())))


def _window_pages_of(e: Evidence, view: PoolView, request: LiveRequest, ends: dict[str, int]) -> int:
    """Its next chunk's pages, and then a window and a page, less what it has to itself by then."""
    computed = e.computed.get(request.rid, len(request.pages) * e.page_size)
    end = ends.get(request.rid, computed)
    chunk_pages = max(0, ceil_pages(end, e.page_size) - len(request.pages))
    uses = {unit: uses for unit, _, uses in view.attached}
    alone = len(dict(view.owned).get(request.rid, ()))
    alone += sum(1 for unit in dict(view.used).get(request.rid, ()) if uses.get(unit) == 1)
    left = ceil_pages(request.prompt_tokens, e.page_size) - ceil_pages(end, e.page_size)
    most = pages_of_window(e.settings.window_tokens or 1, e.page_size) + 1
    return chunk_pages + min(left, max(0, most - alone - chunk_pages))


def baseline_units(snapshot: Snapshot, view: PoolView) -> int:
    """Free and not needed, counted unit by unit; of a shared pool, from those that are cut from it."""
    if not view.weights:
        return view.baseline_units
    cost = dict(view.weights)
    in_use = (snapshot.pool_pages - snapshot.baseline_pages) * cost[""]
    return (
        view.capacity
        - in_use
        - sum((each.capacity - each.baseline_units) * cost[each.name] for each in snapshot.pools if each.name in cost)
    )


def spare_pages_beside(e: Evidence) -> int:
    """KV pages that the pools which they share with others leave, between rounds, to somebody without a promise.

    What is attached to cached pages is not counted on: it stays while the pages are locked to be extended.
    """
    spare = [e.after.pool_pages]
    for view in e.after.pools:
        if view.weights:
            cost = dict(view.weights)
            units = baseline_units(e.after, view) - needed_units(e, view, ())
            units -= sum(each.evictable_units * cost[each.name] for each in e.after.pools if each.name in cost)
            spare.append(units // cost[""])
    return max(0, min(spare))


# --- after a decision


def promises_covered(e: Evidence, decision: Decision) -> Finding | None:
    """Each pool can still give what was admitted."""
    for view in e.after.pools:
        needed = needed_units(e, view, (*e.earlier, decision))
        # what only a write-back locks comes back, and so do its bytes
        there = baseline_units(e.after, view) + len(e.after.written_back) * dict(view.weights).get("", 0)
        if there < needed:
            return Finding(
                decision.request,
                f"{view.name}: after {decision.request} was {decision.kind}, admitted prompts still need {needed} "
                f"{view.unit}s, and free + evictable is {there}",
            )
    return None


def hit_is_whole(e: Evidence, decision: Decision) -> Finding | None:
    """What is computed begins at a hit that each pool had its part of: the state at its end, the pages of its window.

    Of a load-back only the device's part is looked at: a snapshot does not list what the host has.
    """
    request = next((each for each in e.after.live if each.rid == decision.request), None)
    hit_pages = decision.start // e.page_size
    if request is None or not hit_pages:
        return None
    device_pages = decision.prefix_tokens // e.page_size
    for view in e.before.pools:
        there = {page for _, page, _ in view.attached}
        first = hit_pages - 1
        if view.name == "window_pool":
            first = max(0, decision.start - (e.settings.window_tokens or 1)) // e.page_size
        missing = [] if view.weights else [page for page in request.pages[first:device_pages] if page not in there]
        if missing:
            return Finding(
                decision.request,
                f"{view.name}: {decision.request} goes on from {decision.start}, and nothing was kept there for "
                f"{len(missing)} of the pages it needs",
            )
    return None


def refusal_is_minimal(e: Evidence, decision: Decision) -> Finding | None:
    """A pool that refuses must not hold, free and promised to nobody, the most that one request can ask of it."""
    view = next((view for view in e.before.pools if view.name == decision.short_of), None)
    if view is None:
        return None
    owed = needed_units(e, view, e.earlier)
    most = _most_asked(e, view, decision)
    free = view.free_units if not view.weights else view.capacity - _used(e.before, view)
    if free - owed < most:
        return None
    return Finding(
        decision.request,
        f"{view.name} refused {decision.request}, and of its {free} free {view.unit}s {owed} are promised: it asks for "
        f"no more than {most}",
    )


def _most_asked(e: Evidence, view: PoolView, decision: Decision) -> int:
    prompt_pages = ceil_pages(decision.prompt_tokens, e.page_size)
    if view.name == "state_slots":
        return e.settings.slots_of_one
    if view.name == "window_pool":
        half_done = any((d.joined and d.tail_tokens) or d.kind == "deferred" for d in e.earlier)
        whole = half_done or e.settings.chunked_prefill_size is None
        return prompt_pages if whole else min(prompt_pages, e.settings.window_pages + 1) + e.settings.window_pages
    cost = dict(view.weights)
    others = [each for each in e.before.pools if each.name in cost]
    # pages that it locks are evictable no longer, with what is attached to them
    return prompt_pages * cost[""] + sum((_most_asked(e, each, decision) + prompt_pages) * cost[each.name]
                                         for each in others)  # fmt: skip


def _used(snapshot: Snapshot, view: PoolView) -> int:
    """What is in use of a pool that others are cut from."""
    cost = dict(view.weights)
    used = (snapshot.pool_pages - snapshot.free_pages) * cost[""]
    return used + sum(each.taken_units * cost[each.name] for each in snapshot.pools if each.name in cost)


# --- after every event


def conserved(e: Evidence) -> Finding | None:
    """In each pool, free, owned and attached units are disjoint, and together they are the pool."""
    for view in e.after.pools:
        finding = _overdrawn(e.after, view) if view.weights else _unit_lost(e, view)
        if finding is not None:
            return finding
    return None


def _overdrawn(snapshot: Snapshot, view: PoolView) -> Finding | None:
    used = _used(snapshot, view)
    if used <= view.capacity:
        return None
    return Finding(None, f"{view.name}: {used} {view.unit}s are in use, and there are {view.capacity}")


def _unit_lost(e: Evidence, view: PoolView) -> Finding | None:
    units = [*view.released, *(unit for unit, _, _ in view.attached), *(u for _, own in view.owned for u in own)]
    in_use = view.capacity - len(view.never_used)
    distinct = set(units)
    if len(units) == len(distinct) == in_use and (not units or max(units) < in_use):
        return None
    twice = sorted(unit for unit, times in Counter(units).items() if times > 1)
    words = f"{view.name}: of {in_use} {view.unit}s in use {in_use - len(distinct)} belong to nobody"
    words += f" and {len(twice)} to two: {twice[:5]}" if twice else ""
    return Finding(None, words + (f", after {e.departed}" if e.departed else ""))


def no_use_after_free(e: Evidence) -> Finding | None:
    """What a live request needs of a pool is there: its own units are nobody else's, cached ones are held for it."""
    cached = {page for page, _, _, _ in e.after.cached}
    for view in e.after.pools:
        held = {unit for unit, _, uses in view.attached if uses > 0}
        adrift = next((unit for unit, page, _ in view.attached if page not in cached), None)
        if adrift is not None:
            return Finding(None, f"{view.name}: {view.unit} {adrift} is attached to a page that is not cached")
        free = {*view.released, *(unit for unit, _, _ in view.attached)}
        for rid, units in view.owned:
            if not free.isdisjoint(units):
                return Finding(rid, f"{view.name}: {rid} uses {view.unit}s that are not its own: "
                                    f"{sorted(free.intersection(units))[:5]}")  # fmt: skip
        for rid, used in view.used:
            if not held.issuperset(used):
                return Finding(rid, f"{view.name}: {rid} uses cached {view.unit}s that nothing keeps for it")
    return None


# --- after a round, and at rest


def table_fits(e: Evidence, record: RoundRecord) -> Finding | None:
    """What a request holds of each pool is what it has computed needs: its slots, and the pages of its window."""
    for view in e.after.pools:
        owned, used = dict(view.owned), dict(view.used)
        live = {request.rid: request for request in e.after.live}
        for d in record.joined:
            if d.request not in live or view.weights:
                continue
            holds = len(owned.get(d.request, ()))
            holds += len(used.get(d.request, ())) if view.name == "window_pool" else 0
            wanted = _units_after(e, view, d.end)
            if holds != wanted:
                return Finding(
                    d.request,
                    f"{view.name}: {d.request} has computed {d.end} tokens and has {holds} {view.unit}s, not {wanted}",
                )
    return None


def _units_after(e: Evidence, view: PoolView, end: int) -> int:
    if view.name == "state_slots":
        return 1 + e.settings.tracking_slots
    first = max(0, end - (e.settings.window_tokens or 0)) // e.page_size
    return ceil_pages(end, e.page_size) - first


def quiescent(e: Evidence) -> Finding | None:
    """Nothing is owned, kept for somebody, or promised."""
    for view in e.after.pools:
        owned = sum(len(units) for _, units in view.owned)
        kept = sum(1 for _, _, uses in view.attached if uses)
        if owned or kept or view.promised:
            rid = next(_names(view), None)
            return Finding(
                rid,
                f"{view.name}: at rest {owned} {view.unit}s are somebody's, {kept} are kept for somebody and "
                f"{len(view.promised)} promises open",
            )
    return None


def _names(view: PoolView) -> Iterator[str]:
    yield from (rid for rid, units in (*view.owned, *view.used) if units)
    yield from view.promised
