"""What stands below the pictures of a section: broken invariants, the experiment, all rounds' figures, the trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvledger.events import Event, Round
from kvledger.invariants import INVARIANTS
from kvledger.replay import Happening
from kvledger.report.experiment import SHARES, Sized, found_at_start, node_words, submitted_later, sum_words, switches
from kvledger.report.markup import Content, Html, Name, element, join, message_words, sentence
from kvledger.report.plain import plain
from kvledger.report.recording import Recording
from kvledger.report.round_data import FIGURES, figures_of
from kvledger.report.round_panel import figure
from kvledger.trace import dumps

NAMES_SHOWN = 5
REJECTIONS_SHOWN = 10
REASON_COLUMNS = 400
_IN_TABLE = tuple(name for name in FIGURES if name not in ("missing", "needed"))


# --- what broke


def broken_list(recording: Recording, places: dict[int, int]) -> Html:
    """Every invariant that broke, in time order, with its reason; a button shows its round."""
    broken = recording.outcome.broken
    if not broken:
        return Html("")
    reasons = {invariant.name: invariant.reason for invariant in INVARIANTS}
    items = []
    for each in broken:
        where: Content = f"round {each.round}"
        if each.round in places:
            where = element("button", where, type="button", data_round=places[each.round])
        name = element("b", each.invariant, title=reasons.get(each.invariant))
        items.append(element("li", where, " ", name, " ", sentence(message_words(each.message, each.request))))
    return join([element("h3", "Broken invariants, in time order"), element("ol", *items, class_="broken")])


# --- the experiment


def facts(recording: Recording) -> Html:
    """Rules, sizes, what is there at the start, what was never admitted, and what could not be asked."""
    replayed = recording.replayed
    listed: list[tuple[str, Content]] = [
        ("rules", f"{replayed.preset or 'own switches'} ({switches(replayed.rules)})"),
        ("node", node_words(recording.trace.node)),
        *_arrivals(recording.trace.events, recording.outcome.happenings),
        ("before the first round", _pool_before(recording)),
        *_rejections(recording.outcome.rejected_at_submit),
    ]
    if recording.shows_ledger and recording.trace.node.mode == "unified":
        listed.append(("promises", SHARES))
    if replayed.skipped:
        listed.append(("not asked", f"{', '.join(replayed.skipped)}: this target cannot show it"))
    rows = [element("div", element("dt", what), element("dd", content)) for what, content in listed]
    return join([element("h3", "The experiment"), element("dl", *rows, class_="facts")])


def _pool_before(recording: Recording) -> str:
    pool = recording.start
    for step in recording.steps:
        if isinstance(step.event, Round):
            break
        pool = step.pool
    return f"free {pool.free}, evictable {pool.evictable}, protected {pool.protected}, held {pool.held}"


def _arrivals(events: Sequence[Event], happenings: Sequence[Happening]) -> list[tuple[str, Content]]:
    found = {f"at the start, {what}": sizes for what, sizes in found_at_start(events, happenings).items()}
    later = submitted_later(events)
    found |= {"submitted later": later} if later else {}
    return [(what, _named_sizes(sizes)) for what, sizes in found.items()]


def _named_sizes(sizes: Sequence[Sized]) -> Html:
    if len(sizes) > NAMES_SHOWN:
        return join([sum_words(sizes)])
    return join((join([Name(each.name), each.words]) for each in sizes), ", ")


def _rejections(rejected: Sequence[tuple[str, str]]) -> Iterable[tuple[str, Content]]:
    for request, reason in rejected[:REJECTIONS_SHOWN]:
        yield "rejected at submit", join([Name(request), ": ", plain(reason, REASON_COLUMNS)])
    if len(rejected) > REJECTIONS_SHOWN:
        yield "rejected at submit", f"{len(rejected) - REJECTIONS_SHOWN} more"


# --- all rounds


def all_rounds(recording: Recording) -> Html:
    """The figures of every round in one table, folded."""
    if not recording.rounds:
        return Html("")
    columns = ("round", *_IN_TABLE, "admitted", "refused")
    head = [element("th", column.replace("_", " "), scope="col") for column in columns]
    rows = []
    for view in recording.rounds:
        figures = dict(zip(FIGURES, figures_of(view, recording.page_size), strict=True))
        cells = [element("td", figure(figures[name])) for name in _IN_TABLE]
        cells += [element("td", len(view.record.joined)), element("td", len(view.record.refused))]
        rows.append(element("tr", element("th", view.record.round, scope="row"), *cells))
    table = element("table", element("thead", element("tr", *head)), element("tbody", *rows), class_="all-rounds")
    return element(
        "details",
        element("summary", f"Figures of all {len(rows)} rounds"),
        element("div", table, class_="scroll", tabindex=0, role="region", aria_label="figures of all rounds"),
    )


# --- the trace


def trace_text(recording: Recording, number: int) -> Html:
    """The trace itself, to copy: ASCII as it would be saved, so nothing in it is invisible."""
    own = recording.trace.accounting_rules == recording.replayed.rules
    note = "" if own else " Its own rules are not those of this replay, which were given on the command line."
    button = element("button", "Copy the trace", type="button", data_copy=f"trace-{number}-text")
    said = element("span", data_part="copied", role="status")
    return element(
        "details",
        element("summary", "The trace"),
        element("p", "Save it to a file and run kvledger replay on it, or edit it and look again.", note),
        element("p", button, " ", said, class_="needs-script"),
        element("pre", dumps(recording.trace), id=f"trace-{number}-text", tabindex=0, class_="scroll"),
    )
