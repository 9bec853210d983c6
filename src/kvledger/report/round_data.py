"""Rounds as plain data for the page's script, and the names and figures that go with them.

The page is drawn twice from the same data: its first round here, any other one by the script. So everything that is
said of a round is said here, and the script only puts it into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvledger.record import Decision
from kvledger.replay import Broken
from kvledger.report.explanation import failure_words
from kvledger.report.markup import Name, Words, message_words
from kvledger.report.plain import counted
from kvledger.report.pool_picture import claims_of
from kvledger.report.recording import Recording, RoundView
from kvledger.report.rounds import (
    REQUESTS_LISTED,
    Layout,
    chunk_words,
    moves_of,
    notes_of,
    pool_words,
    told_of_faults,
    told_of_prefills,
    told_of_running,
    unused_words,
)
from kvledger.report.waterfall import rows_of

DECISIONS_SHOWN = 40

FIGURES = (
    *("baseline", "cur_rem_tokens", "rem_total_tokens", "rem_chunk_tokens", "budget_state", "batch_is_full", "forced"),
    *("free", "evictable", "protected", "private", "held", "lost"),
    *("promised_now", "promised_later", "missing", "needed", "slack"),
)
"""The figures of a round: their names in the page, and their order in its data. The first ten are the outcome's."""


class Names:
    """The names in a page's data, each once. `listed` has `[shown, all of it or null]` for each, `raw` the names."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self.listed: list[tuple[str, str | None]] = []
        self.raw: list[str] = []

    def place(self, name: str | None) -> int:
        """-1 for no name."""
        if name is None:
            return -1
        if name not in self._places:
            self._places[name] = len(self.listed)
            self.raw.append(name)
            shown = Name(name)
            self.listed.append((shown.short, None if shown.short == name else shown.full))
        return self._places[name]

    def words(self, words: Words) -> list[str | int]:
        """Words with each name as its place."""
        return [self.place(word) if isinstance(word, Name) else word for word in words]


def figures_of(view: RoundView, page_size: int) -> list[object]:
    """In the order of FIGURES."""
    record, pool, claims = view.record, view.pool, claims_of(view, page_size)
    return [
        *(record.baseline, record.cur_rem_tokens, record.rem_total_tokens, record.rem_chunk_tokens),
        *(str(record.budget_state), record.batch_is_full, record.forced),
        *(pool.free, pool.evictable, pool.protected, pool.private, pool.held, pool.lost),
        *(claims.now, claims.later, claims.missing, view.needed, view.slack),
    ]


def round_data(view: RoundView, recording: Recording, names: Names, layout: Layout) -> dict[str, Any]:
    """`n` number, `f` figures, `m` messages, `d` decisions, `w` waterfall."""
    record, page_size = view.record, recording.page_size
    broken = [each for each in recording.outcome.broken if each.round == record.round]
    return {
        "n": record.round,
        "f": figures_of(view, page_size),
        "m": [[kind, names.words(words)] for kind, words in _messages(view, broken, layout)],
        "d": [
            [names.place(d.request), str(d.kind), chunk_words(d), ", ".join(notes_of(d, layout, record)), *_ledger(d)]
            for d in _decisions_shown(record.decisions)
        ],
        "w": [
            [row.kind, names.place(row.request), row.words, row.tokens, row.level, row.change]
            for row in (rows_of(view, page_size) if recording.shows_ledger else [])
        ],
    }


def _messages(view: RoundView, broken: Sequence[Broken], layout: Layout) -> list[tuple[str, Words]]:
    """What must be seen of a round, and below it what else is to be known."""
    record = view.record
    messages: list[tuple[str, Words]] = []
    if record.failure is not None:
        messages.append(("bad", ["Out of memory: ", *failure_words(record.failure), "."]))
    said_already = any(each.invariant == "promises-covered" for each in broken)
    if view.slack is not None and view.slack < 0 and not said_already:
        words = (
            f"Short of {counted(-view.slack, 'token')}: admitted prompts still need {view.needed}, and free + "
            f"evictable is {record.baseline}."
        )
        messages.append(("bad", [words]))
    for each in broken:
        messages.append(("bad", [f"{each.invariant} broken: ", *message_words(each.message, each.request), "."]))
    said = moves_of(record, layout.host)
    messages += [("note", [f"{words.capitalize()}."]) for words in unused_words(record)]
    prefills = [(f"Prefill {what}", requests) for what, requests in told_of_prefills(record)]
    faults = [(f"struck by {kind}", requests) for kind, requests in told_of_faults(record)]
    if record.paused:
        messages.append(("note", ["Paused: nothing was decided."]))
    for what, requests in (*told_of_running(record), *prefills, *faults):
        messages.append(("note", [f"{what.capitalize()}: ", *_listed(requests), "."]))
    for request, reason in record.aborted:
        messages.append(("note", ["Gave up ", Name(request), f": {reason}."]))
    messages += [("note", [f"{pool_words(pool)}."]) for pool in record.pools]
    messages += [("note", ["Withdrawn before it ran: ", Name(request), "."]) for request in record.withdrawn]
    hidden = len(record.decisions) - len(_decisions_shown(record.decisions))
    if hidden:
        said.append(f"{counted(hidden, 'more request')} admitted whole (kvledger replay --all-rounds lists them)")
    if said:
        messages.append(("note", [f"In this round {', '.join(said)}."]))
    return messages


def _listed(requests: Sequence[str]) -> Words:
    """The first names, and how many there are beyond them."""
    words: list[str | Name] = []
    for request in requests[:REQUESTS_LISTED]:
        words += [", ", Name(request)] if words else [Name(request)]
    hidden = len(requests) - REQUESTS_LISTED
    return [*words, f" and {hidden} more"] if hidden > 0 else words


def _decisions_shown(decisions: Sequence[Decision]) -> list[Decision]:
    """A long batch keeps its ends, and all that is not simply admitted whole."""
    if len(decisions) <= DECISIONS_SHOWN:
        return list(decisions)
    edge = DECISIONS_SHOWN // 2
    ends = {*range(edge), *range(len(decisions) - edge, len(decisions))}
    return [decision for index, decision in enumerate(decisions) if index in ends or decision.kind != "whole"]


def _ledger(decision: Decision) -> list[int | None]:
    return [decision.baseline, decision.cur_rem_tokens, decision.rem_total_tokens, decision.rem_chunk_tokens]
