"""What a search has met of faults: which struck, and what became of those whom they struck."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.events import Event, Pause, Pin, Unpin
from kvledger.evidence import Evidence
from kvledger.faults import FAULT_KINDS
from kvledger.record import Decision, RoundRecord

# "refused after a load fell short" is counted too, and too rare to be asked of every search
BRANCHES: tuple[str, ...] = (
    *(f"struck: {kind}" for kind in FAULT_KINDS),
    "loading promised again",
    "loaded one runs whole",
    "loaded one is cut",
    "loaded one waits for a place in the batch",
    "promised page only pinned",
    "pinned",
    "unpinned",
    "paused round",
)


def met(e: Evidence, happened: Decision | RoundRecord | Event) -> Iterable[str]:
    """The branches that this decision, round or event is."""
    match happened:
        case Decision():
            yield from _decided(e, happened)
        case RoundRecord():
            yield from (f"struck: {kind}" for kind, _ in happened.struck)
            if e.paused:
                yield "paused round"
            yield from _waited(e, happened)
        case Pin():
            yield "pinned"
            needed = sum(
                len(range(0, r.prompt_tokens, e.page_size)) - len(r.pages) for r in e.after.live if not r.in_flight
            )
            if e.after.baseline_pages < needed:
                yield "promised page only pinned"
        case Unpin():
            yield "unpinned"
        case Pause() | _:
            return


def _decided(e: Evidence, decision: Decision) -> Iterable[str]:
    if decision.kind == "refused" and "load-short" in decision.faults:
        yield "refused after a load fell short"
    if decision.kind == "loading" and not decision.load_back:
        yield "loading promised again"
    if decision.kind == "resumed" and any(d.kind == "loading" and d.request == decision.request for d in e.earlier):
        yield "loaded one is cut" if decision.tail_tokens else "loaded one runs whole"


def _waited(e: Evidence, record: RoundRecord) -> Iterable[str]:
    there = [d.request for d in record.decisions if d.kind == "loading" and e.arrives.get(d.request, 0) <= record.round]
    ran = {d.request for d in record.decisions if d.joined}
    if any(rid not in ran for rid in there):
        yield "loaded one waits for a place in the batch"
