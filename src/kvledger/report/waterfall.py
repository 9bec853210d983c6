"""A round's arithmetic, bar by bar: baseline, minus each promise, down to both remainders, and what no entry holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvledger.arithmetic import ceil_tokens
from kvledger.evidence import standing
from kvledger.ledger import Due, Promise
from kvledger.record import RoundRecord
from kvledger.report.recording import RoundView

RowKind = Literal["figure", "given", "taken", "now", "later", "missing"]
REQUESTS_SHOWN = 16
"""More requests than that are added up, for each due."""
_KINDS = {"page_overhead": "page", "first_token": "first token"}


@dataclass(frozen=True, slots=True)
class Row:
    """One bar. `tokens` is what it takes away (for a figure: nothing; below zero: it gives), `level` what is left."""

    kind: RowKind
    request: str | None
    words: str
    tokens: int
    level: int

    @property
    def change(self) -> str:
        """What it does to the level, with a sign; empty for a figure."""
        return "" if self.kind == "figure" else f"{-self.tokens:+}" if self.tokens else "0"


@dataclass(frozen=True, slots=True)
class Missing:
    """A cut prompt's tail of which `tokens` (in whole pages) are in no entry of the ledger."""

    request: str
    tail_tokens: int
    tokens: int


def missing_tails(record: RoundRecord, page_size: int) -> list[Missing]:
    """Tails of this round's cut prompts that were promised to nobody, wholly or in part."""
    promised: dict[str, int] = {}
    for promise in record.promises:
        if promise.kind == "tail":
            promised[promise.request] = promised.get(promise.request, 0) + promise.tokens
    found = []
    for decision in standing(record.decisions):
        if decision.kind == "refused" or decision.tail_tokens <= 0:
            continue
        tokens = ceil_tokens(decision.tail_tokens, page_size) - promised.get(decision.request, 0)
        if tokens > 0:
            found.append(Missing(decision.request, decision.tail_tokens, tokens))
    return found


def due_tokens(record: RoundRecord, due: Due) -> int:
    """The sum of a round's promises due then."""
    return sum(promise.tokens for promise in record.promises if promise.due is due)


def rows_of(view: RoundView, page_size: int) -> list[Row]:
    """The whole waterfall. Its figures are the record's own; its bars are the record's entries."""
    record = view.record
    rows = _taken_rows(view)
    rows.append(Row("figure", None, "baseline", 0, record.baseline))
    level = record.baseline
    for due, figure in ((Due.NOW, "cur_rem_tokens"), (Due.LATER, "rem_total_tokens")):
        for request, words, tokens in _by_request(record.promises, due):
            level -= tokens
            rows.append(Row("now" if due is Due.NOW else "later", request, words, tokens, level))
        level = getattr(record, figure)
        rows.append(Row("figure", None, figure, 0, level))
    for missing in missing_tails(record, page_size):
        level -= missing.tokens
        words = f"tail {missing.tail_tokens}"
        if missing.tokens != missing.tail_tokens:
            words += f" ({missing.tokens} in whole pages)"
        rows.append(Row("missing", missing.request, words, missing.tokens, level))
    return rows


def _taken_rows(view: RoundView) -> list[Row]:
    """What preempted requests gave back, and admissions took from free + evictable at once: load-backs and locks."""
    record = view.record
    taken = [
        (decision.request, words, tokens)
        for decision in record.decisions
        if decision.let_in
        for words, tokens in (("lock", decision.newly_locked_tokens), ("load-back", decision.load_back))
        if tokens
    ]
    if view.begins is None or (view.begins == record.baseline and not taken):
        return []
    level = view.begins
    rows = [Row("figure", None, "free + evictable at its start", 0, level)]
    given_tokens = record.baseline + sum(tokens for *_, tokens in taken) - level
    if given_tokens > 0:
        level += given_tokens
        rows.append(_given_row(record.preempted, given_tokens, level))
    for request, words, tokens in taken:
        level -= tokens
        rows.append(Row("taken", request, f"{words} {tokens}", tokens, level))
    if level != record.baseline:
        rows.append(Row("taken", None, "taken by no decision", level - record.baseline, record.baseline))
    return rows


def _given_row(preempted: Sequence[str], tokens: int, level: int) -> Row:
    """What became free or evictable before the decisions ended."""
    if len(preempted) == 1:
        return Row("given", preempted[0], f"preempted, gives back {tokens}", -tokens, level)
    words = f"{len(preempted)} preempted requests give back {tokens}" if preempted else "given back by no decision"
    return Row("given", None, words, -tokens, level)


def _by_request(promises: Sequence[Promise], due: Due) -> list[tuple[str | None, str, int]]:
    """(request, what it is made of, tokens), one for each request; those beyond the limit in one."""
    entries: dict[str, list[Promise]] = {}
    for promise in promises:
        if promise.due is due:
            entries.setdefault(promise.request, []).append(promise)
    shown = [
        (request, " + ".join(f"{_KINDS.get(p.kind, p.kind)} {p.tokens}" for p in found), sum(p.tokens for p in found))
        for request, found in list(entries.items())[:REQUESTS_SHOWN]
    ]
    rest = list(entries.values())[REQUESTS_SHOWN:]
    listed: list[tuple[str | None, str, int]] = [*shown]
    if rest:
        tokens = sum(promise.tokens for found in rest for promise in found)
        listed.append((None, f"{len(rest)} more requests {tokens}", tokens))
    return listed
