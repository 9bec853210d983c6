"""The waterfall on a terminal of 100 columns: a round's baseline, minus each promise, down to both remainders.

round 1                                             tokens     left
  baseline                                                    19264  ████████████████████████
  v9uj: chunk 13888 + page 64                       -13952     5312  ███████░░░░░░░░░░░░░░░░░
  cur_rem_tokens                                               5312  ███████
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvledger.record import RoundRecord
from kvledger.report.painted import Bars, Line, Span, short_name
from kvledger.report.plain import padded, plain, width, wrapped
from kvledger.report.recording import Recording, RoundView
from kvledger.report.rounds import (
    Gap,
    Layout,
    arrived,
    failure_words,
    gap_lines,
    limit_words,
    notes_of,
    pool_words,
    prefill_words,
    rounds_to_show,
    running_words,
    struck_words,
    unused_words,
)
from kvledger.report.waterfall import Row, rows_of

LABEL_COLUMNS = 46
FIGURE_COLUMNS = 9
BAR_COLUMNS = 34
NAME_COLUMNS = 8
"""What is left to a name at least, however long the words beside it are."""
REFUSALS_SHOWN = 3

_STYLES = {"figure": "bold", "given": "green", "taken": "yellow", "now": "cyan", "later": "blue", "missing": "bold red"}


def waterfall_lines(
    recording: Recording, bars: Bars, notes: Sequence[tuple[int, str]], *, all_rounds: bool
) -> list[Line]:
    """The rounds that matter, one waterfall each, on one scale. `notes` are words below a round."""
    shown = recording.outcome.rounds if all_rounds else rounds_to_show(recording.outcome)
    views = {view.record.round: view for view in recording.rounds}
    falls = {each.round: rows_of(views[each.round], recording.page_size) for each in shown if not isinstance(each, Gap)}
    full_tokens = max((row.level for rows in falls.values() for row in rows), default=0)
    layout = Layout.of(recording.trace)
    legend = f"{bars.left} is left, {bars.taken} is taken by that row, {bars.beyond} is more than there is"
    lines: list[Line] = [[(f"{legend}; all in tokens", "dim")]]
    for each in shown:
        lines.append([])
        if isinstance(each, Gap):
            lines += [[(line, "dim")] for line in gap_lines(each)]
        else:
            said = [words for number, words in notes if number == each.round]
            lines += _round_lines(views[each.round], falls[each.round], full_tokens, bars, layout, said)
    return lines


def _round_lines(
    view: RoundView, rows: Sequence[Row], full_tokens: int, bars: Bars, layout: Layout, notes: Iterable[str]
) -> Iterator[Line]:
    head = f"round {view.record.round}"
    yield [(padded(head, LABEL_COLUMNS) + f"{'tokens':>{FIGURE_COLUMNS}}{'left':>{FIGURE_COLUMNS}}", "bold")]
    missing = False
    for row in rows:
        if row.kind == "missing" and not missing:
            missing = True
            yield [("  owed, and in no entry of the ledger:", _STYLES["missing"])]
        yield _row_line(row, full_tokens, bars)
    yield from ([(f"  {line}", style)] for line, style in _ends(view.record, layout))
    yield from ([(f"  <- {note}", "bold")] for note in notes)


def _row_line(row: Row, full_tokens: int, bars: Bars) -> Line:
    style = _STYLES[row.kind]
    text = padded(_label(row), LABEL_COLUMNS) + f"{row.change:>{FIGURE_COLUMNS}}{row.level:>{FIGURE_COLUMNS}}  "
    return [(text, style), *_bar(row, full_tokens, bars)]


def _label(row: Row) -> str:
    room = LABEL_COLUMNS - len("  ")
    if row.request is None:
        return f"  {plain(row.words, room)}"
    words = plain(row.words, room - NAME_COLUMNS - len(": "))
    return f"  {short_name(row.request, room - width(words) - len(': '))}: {words}"


def _bar(row: Row, full_tokens: int, bars: Bars) -> list[Span]:
    """What is left after the row, what the row took of what was there, and what is not there at all."""
    before = row.level + row.tokens
    left_columns = bar_columns(row.level, full_tokens, BAR_COLUMNS)
    taken_columns = max(0, bar_columns(before, full_tokens, BAR_COLUMNS) - left_columns) if row.tokens else 0
    room = BAR_COLUMNS - left_columns - taken_columns
    beyond_columns = min(room, bar_columns(-row.level, full_tokens, BAR_COLUMNS))
    return [
        (bars.left * left_columns, "green"),
        (bars.taken * taken_columns, _STYLES[row.kind]),
        (bars.beyond * beyond_columns, "bold red"),
    ]


def bar_columns(tokens: int, full_tokens: int, columns: int) -> int:
    """Columns of a bar, rounded to the nearest, but never none for something, nor more than there are."""
    if tokens <= 0 or full_tokens <= 0:
        return 0
    return min(columns, max(1, (2 * tokens * columns + full_tokens) // (2 * full_tokens)))


def _ends(record: RoundRecord, layout: Layout) -> Iterator[Span]:
    """Who was refused or put off, what became of running requests, and whether the round failed."""
    for decision in record.refused[:REFUSALS_SHOWN]:
        why = ", ".join([str(decision.reason), *notes_of(decision, layout, record)])
        yield f"refused: {short_name(decision.request, LABEL_COLUMNS)}, {why}", ""
    for decision in record.decisions:
        if decision.kind == "deferred":
            yield f"deferred: {short_name(decision.request, LABEL_COLUMNS)}, nothing remains for it", ""
        if decision.kind == "resumed" and decision.chunk_limit and decision.tail_tokens:
            yield f"cut: {short_name(decision.request, LABEL_COLUMNS)}, {limit_words(decision.chunk_limit)}", ""
        if decision.kind == "loading":
            what = "its load is here" if arrived(decision, record) else "admitted, and its load goes on"
            yield f"loading: {short_name(decision.request, LABEL_COLUMNS)}, {what}", ""
        if decision.forced:
            yield f"forced: {short_name(decision.request, LABEL_COLUMNS)}, though nothing remains", "red"
    if record.paused:
        yield "paused", ""
    for request in record.withdrawn:
        yield f"withdrawn: {short_name(request, LABEL_COLUMNS)}, after its chunk was decided and before it ran", ""
    prefills = [f"prefill {each}" for each in prefill_words(record)]
    faults = [f"struck by {each}" for each in struck_words(record)]
    for told in (unused_words(record), running_words(record), prefills, faults):
        yield from ((line[2:], "") for line in wrapped(f"  {'; '.join(told)}", 4) if told)
    for pool in record.pools:
        yield pool_words(pool), ""
    if record.failure is not None:
        yield plain(f"OUT OF MEMORY: {failure_words(record.failure)}", 2 * LABEL_COLUMNS), "bold red"
