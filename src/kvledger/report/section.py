"""One trace's part of the page: how it ended, the pictures, the selected round, the tables, the trace."""

from __future__ import annotations

from kvledger.report.explanation import Explanation, explain
from kvledger.report.lanes import lanes_of
from kvledger.report.markup import Html, element, script_json, sentence
from kvledger.report.overview import close_up, overview, requests
from kvledger.report.plain import counted, plain
from kvledger.report.recording import Recording
from kvledger.report.round_data import FIGURES, Names, round_data
from kvledger.report.round_panel import round_panel
from kvledger.report.rounds import Layout
from kvledger.report.svg import MAX_SPACED_COLUMNS
from kvledger.report.tables import all_rounds, broken_list, facts, trace_text

TITLE_COLUMNS = 300
SOURCE_COLUMNS = 120


def section(recording: Recording, number: int) -> Html:
    """The section of the trace with this number on the page."""
    replayed, outcome = recording.replayed, recording.outcome
    explanation = explain(recording)
    names, layout = Names(), Layout.of(recording.trace)
    rounds = [round_data(view, recording, names, layout) for view in recording.rounds]
    places = {view.record.round: place for place, view in enumerate(recording.rounds)}
    first = _first_shown(recording, explanation, places)
    parts = [
        element("h2", element("bdi", plain(replayed.source, SOURCE_COLUMNS)), id=f"trace-{number}-title"),
        element("p", plain(recording.trace.title, TITLE_COLUMNS), class_="title", dir="auto"),
        _verdict(recording, explanation, places),
    ]
    if rounds:
        figures = dict(zip(FIGURES, rounds[first]["f"], strict=True))
        lanes = lanes_of(recording)
        pictures = overview(recording, first, figures)
        panel = round_panel(rounds[first], rounds[-1]["n"], names.raw, shows_ledger=recording.shows_ledger)
        strips = requests(recording, explanation, lanes)
        if len(rounds) <= MAX_SPACED_COLUMNS:
            parts += [pictures, strips, panel]
        else:
            news = [close_up(recording, explanation, lanes, first)] if outcome.verdict != "ok" else []
            parts += [*news, pictures, panel, strips]
    parts += [
        broken_list(recording, places),
        facts(recording),
        all_rounds(recording),
        trace_text(recording, number),
    ]
    data = script_json({"first": first, "keys": FIGURES, "names": names.listed, "rounds": rounds})
    parts.append(element("script", Html(data), type="application/json", class_="data"))
    good = outcome.verdict == "ok"
    return element(
        "section",
        *parts,
        class_=f"trace {'good' if good else 'bad'}",
        id=f"trace-{number}",
        aria_labelledby=f"trace-{number}-title",
    )


def _first_shown(recording: Recording, explanation: Explanation, places: dict[int, int]) -> int:
    """The round in which the first invariant broke, else that of the promise, else the last one."""
    numbers = [broken.round for broken in recording.outcome.broken]
    if explanation.promise is not None:
        numbers.append(explanation.promise.round)
    return next((places[number] for number in numbers if number in places), max(0, len(places) - 1))


# --- how it ended


def _verdict(recording: Recording, explanation: Explanation, places: dict[int, int]) -> Html:
    replayed = recording.replayed
    verdict = element("b", replayed.outcome.verdict, data_part="verdict")
    parts = [element("p", verdict, *_tags(recording), class_="tags")]
    if explanation.lead is not None:
        parts.append(element("p", sentence(explanation.lead), class_="lead"))
    parts.append(element("p", sentence(explanation.headline), class_="headline"))
    parts += [element("p", sentence(words)) for words in explanation.details]
    jumps = [
        element("button", f"round {number}: {words}", type="button", data_round=places[number])
        for words, number in explanation.moments
        if number in places
    ]
    if jumps:
        parts.append(element("p", *jumps, class_="jumps needs-script"))
    return element("div", *parts, class_="verdict")


def _tags(recording: Recording) -> list[Html]:
    replayed = recording.replayed
    words = [f"rules {replayed.preset or 'of its own'}", counted(len(recording.rounds), "round")]
    if replayed.expected is not None:
        expectation = "as the trace expects" if replayed.passed else f"NOT as expected: {replayed.expected}"
        words.append(expectation)
    return [element("span", word) for word in words]
