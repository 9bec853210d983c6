"""Branches of a round that only the further causes of a residue lead to."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.adder import AddReqResult
from kvledger.events import Event
from kvledger.evidence import Evidence
from kvledger.record import Decision, RoundRecord

BRANCHES: tuple[str, ...] = (
    "cut short by the continuation limit",
    "admitted behind the continuation limit",
    "cut short by the chunk grid",
    "resumed below a cell of the chunk grid",
    "chunk grid counted from inside a cell",
    "OTHER: no cell of chunk budget",
)


def met(e: Evidence, happened: Decision | RoundRecord | Event) -> Iterable[str]:
    """The branches that this decision took; nothing else takes any."""
    if not isinstance(happened, Decision):
        return
    if happened.reason is AddReqResult.OTHER:
        yield from _refused(e, happened)
    if not happened.joined:
        return
    if happened.kind != "resumed" and any(_limited(e, d) for d in e.earlier):
        yield "admitted behind the continuation limit"
    if happened.tail_tokens:
        yield from _cut(e, happened)


def _refused(e: Evidence, decision: Decision) -> Iterable[str]:
    half_done = any(d.kind != "refused" and d.tail_tokens for d in e.earlier)
    left, unit = decision.rem_chunk_tokens, e.rules.cut_unit
    if unit is not None and left is not None and e.page_size <= left < unit and not half_done:
        yield "OTHER: no cell of chunk budget"


def _cut(e: Evidence, decision: Decision) -> Iterable[str]:
    if _limited(e, decision):
        yield "cut short by the continuation limit"
    cell, left = e.rules.chunk_grid, decision.rem_chunk_tokens
    if cell is None:
        return
    if decision.tokens % cell == 0 and left is not None and e.page_size <= left < cell:
        yield "cut short by the chunk grid"
    if decision.kind == "resumed" and decision.tokens < cell:
        yield "resumed below a cell of the chunk grid"
    if decision.start % cell:
        yield "chunk grid counted from inside a cell"


def _limited(e: Evidence, decision: Decision) -> bool:
    """The half-done request ran what it may, and the batch could have run more of it."""
    at_limit = decision.kind == "resumed" and decision.tokens == e.rules.continuation_limit
    left = decision.rem_chunk_tokens
    return at_limit and decision.tail_tokens > 0 and left is not None and left >= e.page_size
