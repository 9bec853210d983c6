"""What a search of pipelines has met: the places where ranks can differ, and the events that reach them apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvledger.adder import AddReqResult
from kvledger.events import Abort, Cached, Event, Hold, Transferred
from kvledger.evidence import Evidence, gate_tokens
from kvledger.record import Decision, RoundRecord

BRANCHES: tuple[str, ...] = (
    "least is another rank's",
    "hit in other tiers on another rank",
    "NO_TOKEN only because of another rank",
    "evicted on another rank alone",
    "copy shared on another rank alone",
    "transfer reached rank 0 first",
    "transfer reached another rank first",
    "abort reached rank 0 first",
    "abort reached another rank first",
    "cached on some ranks",
    "held on some ranks",
)


def met(evidence: Evidence, happened: Decision | RoundRecord | Event) -> Iterable[str]:
    """The branches that this decision, round or event is a case of."""
    if not evidence.settings.ranks:
        return ()
    if isinstance(happened, Decision):
        return _decided(evidence, happened)
    if isinstance(happened, RoundRecord):
        return _ran(happened)
    return _reached(happened)


def _decided(e: Evidence, decision: Decision) -> Iterable[str]:
    if e.after.least_baseline_pages < e.after.baseline_pages:
        yield "least is another rank's"
    if any(prefix_tokens != decision.prefix_tokens for prefix_tokens, _ in decision.rank_hits):
        yield "hit in other tiers on another rank"
    if decision.reason is AddReqResult.NO_TOKEN and decision.rank_hits:
        need, left = _gate_of_rank_0(e, decision)
        if need < left:
            yield "NO_TOKEN only because of another rank"


def _gate_of_rank_0(e: Evidence, decision: Decision) -> tuple[float, float]:
    """As `gate_tokens` would have it without the others; `earlier` holds the decision itself by now."""
    earlier = [each for each in e.earlier if each is not decision]
    need, left = gate_tokens(replace(e, earlier=earlier), replace(decision, rank_hits=()))
    return float(need), float(left)


def _ran(record: RoundRecord) -> Iterable[str]:
    if not record.evicted_pages and any(rank.evicted_pages for rank in record.ranks):
        yield "evicted on another rank alone"
    if not record.shared_pages and any(rank.shared_pages for rank in record.ranks):
        yield "copy shared on another rank alone"


def _reached(event: Event) -> Iterable[str]:
    ranks = getattr(event, "ranks", None)
    if ranks is None:
        return
    first = "rank 0" if 0 in ranks else "another rank"
    match event:
        case Transferred():
            yield f"transfer reached {first} first"
        case Abort():
            yield f"abort reached {first} first"
        case Cached():
            yield "cached on some ranks"
        case Hold():
            yield "held on some ranks"
