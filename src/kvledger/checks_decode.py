"""Checks of what only a unified node has: request slots, retraction, and what decode may take.

All are asked on a prefill node too, where there is nothing for most of them to find.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvledger.adder import AddReqResult
from kvledger.arithmetic import ceil_pages
from kvledger.evidence import Evidence, Finding, coming_pages, most_live, needed_pages_of
from kvledger.record import Decision, LiveRequest, RoundRecord, Snapshot

# --- after every decision


def comes_back_whole(e: Evidence, decision: Decision) -> Finding | None:
    """What is computed for a request is its prompt and all that it has generated."""
    rid = decision.request
    if rid not in e.prompts or e.settings.mode == "prefill":
        return None
    wanted = e.prompts[rid] + e.generated.get(rid, 0)
    if decision.prompt_tokens == wanted:
        return None
    return Finding(rid, f"{rid} computes {decision.prompt_tokens} tokens, and its prompt and output come to {wanted}")


# --- after every round


def tail_spared(e: Evidence, record: RoundRecord) -> Finding | None:
    """When the round is over, and decode has taken its pages, the unfinished prefills can still be given theirs."""
    if record.failure is not None or not record.decoded:
        return None
    needed_pages = sum(needed_pages_of(request, e.page_size) for request in e.after.live)
    if coming_pages(e.after) >= needed_pages:
        return None
    unfinished = next((request.rid for request in e.after.live if not request.in_flight), None)
    return Finding(
        unfinished,
        f"after the round, admitted prompts still need {needed_pages * e.page_size} tokens, and free + evictable is "
        f"{coming_pages(e.after) * e.page_size}",
    )


def slots_kept(e: Evidence, _: RoundRecord) -> Finding | None:
    """Never more requests on the node than the stage has request slots."""
    slots = e.settings.request_slots
    if slots is None or len(e.after.live) <= slots:
        return None
    return Finding(e.after.live[-1].rid, f"{len(e.after.live)} requests are on a node with {slots} request slots")


def full_is_true(e: Evidence, record: RoundRecord) -> Finding | None:
    """A full batch lacks memory for somebody, or a request slot; and one that lacks either is called full."""
    if record.failure is not None:
        return None
    new = [decision for decision in record.decisions if decision.from_queue]
    no_memory = record.budget_state is AddReqResult.NO_TOKEN
    refused = any(decision.reason is AddReqResult.NO_TOKEN for decision in new)
    slots = e.settings.request_slots
    # who was withdrawn after the decisions had a slot while they were taken
    no_slot = slots is not None and most_live(e, e.decided or e.after) + len(record.withdrawn) >= slots
    if record.batch_is_full:
        if no_memory or refused or no_slot:
            return None
        return Finding(None, "the batch is called full, and neither memory nor a request slot is what it lacks")
    waits = len(e.queue) > len(new) and record.budget_state is AddReqResult.CONTINUE and not record.refused
    joined = any(decision.kind != "refused" for decision in new)
    if refused or (no_memory and joined) or (no_slot and waits and record.decisions):
        return Finding(None, "the batch lacks memory or a request slot for the next one, and is not called full")
    return None


def each_decodes_once(e: Evidence, record: RoundRecord) -> Finding | None:
    """Without a batch, or in a mixed one, each running request takes a token, is sent back or aborted; nobody twice,
    and nobody beside a batch that is not mixed."""
    if e.settings.mode == "prefill" or record.failure is not None or e.paused:
        return None
    gone = {*record.went_back, *(rid for rid, _ in record.aborted)}
    for rid in record.decoded:
        if rid in gone or record.decoded.count(rid) > 1:
            return Finding(rid, f"{rid} took a token in a round in which it had taken one, or gone")
    if record.joined and not e.settings.mixed_chunk:
        return Finding(record.decoded[0], f"{record.decoded[0]} decoded beside a batch") if record.decoded else None
    running = _running(e, record)
    idle = next((each.rid for each in running if each.rid not in gone and each.rid not in record.decoded), None)
    return None if idle is None else Finding(idle, f"{idle} was running, and the round passed it over")


def output_exact(e: Evidence, record: RoundRecord) -> Finding | None:
    """An output ends with its last token, not before and not after; `generated` counts this round in."""
    for rid in record.finished:
        if rid in e.outputs and e.generated.get(rid, 0) != e.outputs[rid].max_new_tokens:
            return Finding(rid, f"{rid} ended with {e.generated.get(rid, 0)} of {e.outputs[rid].max_new_tokens} tokens")
    for each in e.after.live:
        if each.decoding and each.rid in e.outputs and each.rid not in record.finished:
            most = e.outputs[each.rid].max_new_tokens
            if e.generated.get(each.rid, 0) >= most:
                return Finding(each.rid, f"{each.rid} has its {most} tokens and goes on")
            held = ceil_pages(e.prompts[each.rid] + e.generated.get(each.rid, 0) - 1, e.page_size)
            if len(each.pages) != held:
                return Finding(each.rid, f"{each.rid} holds {len(each.pages)} pages, and its tokens fill {held}")
    return None


def retraction_exact(e: Evidence, record: RoundRecord) -> Finding | None:
    """Who went back, recounted: the fewest tokens first, as many as the round's pages ask for, and no more."""
    if e.settings.mode == "prefill" or record.failure is not None or e.decided is None or e.paused:
        return None
    went = [*record.retracted]
    went += [rid for rid, _ in record.aborted if rid not in record.went_back]
    decodes = not record.joined or e.settings.mixed_chunk
    expected = list(_must_go(e, e.decided, _running(e, record))) if decodes else []
    if sorted(went) == sorted(expected):
        return None
    return Finding(
        (went or expected)[0],
        f"sent back or aborted: {', '.join(went) or 'nobody'}; the pages asked for {', '.join(expected) or 'nobody'}",
    )


def abort_is_last(e: Evidence, record: RoundRecord) -> Finding | None:
    """A request is only given up if nobody else holds anything, or if it has outgrown pool or chunk."""
    for rid, _ in record.aborted:
        tokens = e.prompts.get(rid, 0) + e.generated.get(rid, 0)
        outgrown = tokens + e.page_size >= e.settings.pool_pages * e.page_size
        outgrown = outgrown or not e.settings.some_batch_holds(tokens, e.rules)
        if e.after.live and not outgrown:
            return Finding(rid, f"{rid} was given up while {e.after.live[0].rid} could still have made room")
    return None


def paused_is_still(e: Evidence, record: RoundRecord) -> Finding | None:
    """In a round that is paused nothing is decided, and nobody takes a token."""
    told = [*(decision.request for decision in record.decisions), *record.decoded, *record.retracted]
    if not e.paused or not told:
        return None
    return Finding(told[0], f"the node is paused, and in round {record.round} it went on with {told[0]}")


def _must_go(e: Evidence, s: Snapshot, staying: list[LiveRequest]) -> Iterator[str]:
    """Walks the running ones in their order of going, and gives back page by page what each held alone."""
    page_size = e.page_size
    kept_pages = 0
    if e.rules.tail_first:
        kept_pages = sum(needed_pages_of(each, page_size) for each in s.live if not each.in_flight)
    spare_pages = s.baseline_pages - kept_pages
    locks = {page: lock_refs for page, lock_refs, _, _ in s.cached}
    before = {each.rid: e.generated.get(each.rid, 0) - e.taken.get(each.rid, 0) for each in staying}
    latest_first = sorted(staying, key=lambda each: -e.joins.get(each.rid, 0))  # of equals, who joined last
    order = sorted(latest_first, key=lambda each: (before[each.rid], -e.prompts.get(each.rid, 0)))
    for victim in order:
        wanted = sum((e.prompts.get(each.rid, 0) + before[each.rid] - 1) % page_size == 0 for each in staying)
        if wanted <= spare_pages:
            return
        yield victim.rid
        staying = [each for each in staying if each is not victim]
        spare_pages += len(victim.private_pages)
        for page in victim.pages[: victim.shared_pages]:
            locks[page] -= 1
            spare_pages += not locks[page]


def _running(e: Evidence, record: RoundRecord) -> list[LiveRequest]:
    """Who was decoding before this round's batch."""
    new = {decision.request for decision in record.joined}
    return [] if e.decided is None else [each for each in e.decided.live if each.decoding and each.rid not in new]
