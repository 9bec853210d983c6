"""Checks of the waiting queue: whose turn it is, what is kept for the next, who makes way, and where they wait then.

The order is worked out afresh from what was submitted; only how much of a prompt is cached is taken from the target.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvledger.arithmetic import ceil_tokens, floor_tokens
from kvledger.evidence import Evidence, Finding, PutBack, asked_prompt, decode_tokens, gate_tokens, was_loading
from kvledger.policy import LONGEST_MATCHED_QUEUE, SHARED_TOKENS
from kvledger.record import Decision, RoundRecord
from kvledger.request import USUAL_OUTPUT

# --- after every decision


def in_order(e: Evidence, decision: Decision) -> Finding | None:
    """Candidates are looked at in the order of the policy, and a half-done request leaves the next their share."""
    if not decision.from_queue:
        return _leaves_their_share(e, decision)
    place = sum(1 for d in e.earlier if d.from_queue)
    queue = expected_order(e)
    if queue is None or place >= len(queue) or queue[place] == decision.request:
        return None
    return Finding(decision.request, f"{decision.request} was looked at before {queue[place]}, whose turn it was")


def expected_order(e: Evidence) -> list[str] | None:
    """The queue of this round by the policy; None where that needs matches that the target does not tell."""
    policy = e.settings.schedule_policy
    queue = [rid for rid in e.queue if rid in e.prompts]
    if policy == "fcfs" or (policy == "lpm" and len(queue) > LONGEST_MATCHED_QUEUE):
        return queue
    if policy == "priority":
        arrival = {rid: number for number, rid in enumerate(e.prompts)}
        return sorted(queue, key=lambda rid: (-e.outputs[rid].priority, arrival[rid]))
    if any(rid not in e.matched for rid in queue):
        return None
    later = _shared_with_an_earlier(e, queue)
    if policy == "lpm":
        return sorted(queue, key=lambda rid: (rid in later, -e.matched[rid]))
    return sorted(queue, key=lambda rid: (rid in later, _work_tokens(e, rid)))


def _work_tokens(e: Evidence, rid: str) -> int:
    return max(1, e.prompts[rid] + e.generated.get(rid, 0) - e.matched[rid])


def _shared_with_an_earlier(e: Evidence, queue: Sequence[str]) -> set[str]:
    """Those with next to nothing cached that share a prefix with an earlier one that computes it: pair by pair."""
    computing: list[tuple[Hashable, ...]] = []
    later = set()
    for rid in queue:
        if e.matched[rid] > SHARED_TOKENS or not e.settings.prefix_cache:
            continue
        keys = asked_prompt(e, rid).page_keys(e.page_size)
        if max((_common(keys, other) for other in computing), default=0) * e.page_size >= SHARED_TOKENS:
            later.add(rid)
        else:
            computing.append(keys)
    return later


def _common(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _leaves_their_share(e: Evidence, decision: Decision) -> Finding | None:
    """Where the shortest go first, what those who are shorter will compute of the chunk budget is kept for them.

    One whose load was late is no half-done prompt: it was first in its turn, and takes what it would have taken.
    """
    budget = e.settings.chunked_prefill_size
    if was_loading(e, decision):
        return None
    queue = expected_order(e) if e.settings.schedule_policy == "shortest-prefill-first" else None
    if queue is None or budget is None or decision.kind != "resumed":
        return None
    budget -= e.mixed_tokens
    left = decision.prompt_tokens - decision.start
    kept = 0
    for rid in queue:
        charge = ceil_tokens(_work_tokens(e, rid), e.page_size)
        if _work_tokens(e, rid) >= left or kept + charge > budget - e.page_size:
            break
        kept += charge
    most = floor_tokens(budget - kept, e.page_size)
    if budget < 2 * e.page_size or not kept or decision.tokens <= most:
        return None
    return Finding(
        decision.request, f"{decision.request} ran {decision.tokens} tokens, and shorter ones leave it {most}"
    )


def preemption_fair(e: Evidence, decision: Decision) -> Finding | None:
    """Only less important ones make way, the least important and latest first, and no more of them than it takes."""
    for put_back in e.put_back:
        finding = _unfair(e, decision, put_back)
        if finding is not None:
            return finding
    return None


def _unfair(e: Evidence, decision: Decision, put_back: PutBack) -> Finding | None:
    newcomer = e.outputs.get(decision.request, USUAL_OUTPUT).priority
    arrival = {rid: number for number, rid in enumerate(e.prompts)}

    def importance(rid: str) -> tuple[int, int]:
        return e.outputs[rid].priority, -arrival[rid]

    running = [each.rid for each in put_back.before.live if each.decoding and each.rid in e.outputs]
    went = sorted((rid for rid in put_back.went if rid in e.outputs), key=importance)
    stayed = [rid for rid in running if rid not in put_back.went]
    threshold = e.settings.preemption_threshold
    for rid in went:
        if threshold is None or newcomer - e.outputs[rid].priority <= threshold:
            return Finding(rid, f"{rid} made way for {decision.request}, which is not more important by enough")
    spared = min(stayed, key=importance, default=None)
    if went and spared is not None and importance(spared) < importance(went[-1]):
        return Finding(went[-1], f"{went[-1]} made way for {decision.request}, and {spared} is less important")
    if len(went) > 1 and not _lacks(e, decision, put_back, went[:-1]):
        return Finding(went[-1], f"{went[-1]} made way for {decision.request}, and {', '.join(went[:-1])} would do")
    return None


def _lacks(e: Evidence, decision: Decision, put_back: PutBack, went: Sequence[str]) -> bool:
    """Whether the candidate still lacks tokens when these have made way, each for its share in whole pages."""
    there = e.before, e.mixed_tokens
    e.before, e.mixed_tokens = put_back.before, put_back.mixed_tokens
    need, left = gate_tokens(e, decision)
    left += decision.newly_locked_tokens  # it was not looked at yet, so that nothing is locked for it
    for rid in went:
        _, share = decode_tokens(e, e.before, only=rid)
        left += floor_tokens(int(share), e.page_size)
    e.before, e.mixed_tokens = there
    return need > left


# --- after every round


def queue_kept(e: Evidence, record: RoundRecord) -> Finding | None:
    """Who waits goes on waiting in its place, and who was sent back waits behind them."""
    if record.failure is not None:
        return None
    gone = {rid for rid, _ in record.aborted}
    admitted = {d.request for d in record.decisions if d.kind != "refused"}
    waits = [rid for rid in e.queue if rid not in admitted]
    waits += [rid for rid in record.went_back if rid not in gone]
    if list(e.after.waiting) == waits:
        return None
    place = next((at for at, pair in enumerate(zip(e.after.waiting, waits, strict=False)) if len(set(pair)) > 1), None)
    rid = None if place is None else e.after.waiting[place]
    return Finding(rid, f"the queue is {_names(e.after.waiting)} after the round, and should be {_names(waits)}")


def _names(rids: Sequence[str]) -> str:
    return ", ".join(rids) or "empty"
