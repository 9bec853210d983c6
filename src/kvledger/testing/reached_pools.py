"""What a search has met of second pools."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.events import Event
from kvledger.evidence import Evidence
from kvledger.record import Decision, RoundRecord

BRANCHES: tuple[str, ...] = (
    "short of state_slots",
    "short of window_pool",
    "short of shared_bytes",
    "chunk cut by window_pool",
    "resumed beside a full window_pool",
    "hit with a window",
    "load-back into window_pool",
    "slots to track with",
    "checkpoint copied",
    "tombstones",
)


def met(e: Evidence, happened: Decision | RoundRecord | Event) -> Iterable[str]:
    """The branches of second pools that this took."""
    if not e.after.pools:
        return
    if isinstance(happened, Decision):
        yield from _of_decision(e, happened)
    elif isinstance(happened, RoundRecord):
        yield from _of_round(e, happened)


def _of_decision(e: Evidence, decision: Decision) -> Iterable[str]:
    if decision.short_of is not None:
        yield f"short of {decision.short_of}"
    if not decision.joined:
        return
    windowed = e.settings.window_tokens is not None
    budget = decision.rem_chunk_tokens
    pools = {view.name: view for view in e.after.pools}
    if windowed and decision.kind != "resumed":
        yield from ["hit with a window"] if decision.start else []
        yield from ["load-back into window_pool"] if decision.load_back else []
        if decision.tail_tokens and budget is not None and budget >= max(e.page_size, e.grid_tokens):
            yield "chunk cut by window_pool"
    elif windowed and decision.tail_tokens and pools["window_pool"].baseline_units * e.page_size < (budget or 0):
        yield "resumed beside a full window_pool"
    if "state_slots" in pools and dict(pools["state_slots"].used).get(decision.request):
        yield "checkpoint copied"


def _of_round(e: Evidence, record: RoundRecord) -> Iterable[str]:
    joined = {d.request for d in record.joined if d.kind != "resumed"}
    if e.settings.tracking_slots and joined:
        yield "slots to track with"
    window = e.settings.window_tokens
    if window is not None and any(d.end - window >= e.page_size for d in record.joined):
        yield "tombstones"
