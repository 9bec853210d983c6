"""One round in full: messages, figures, waterfall, decisions. `page.js` draws the same from the same data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvledger.report.markup import Html, Name, element, join
from kvledger.report.round_data import FIGURES
from kvledger.report.svg import frame, percent

BAR_HEIGHT = 14
DASH = "–"  # a figure that there is none of
DECISION_COLUMNS = ("request", "decision", "chunk", "", "baseline", "cur_rem", "rem_total", "rem_chunk")

_LEDGER = FIGURES[:7]
_AFTER = ("free", "evictable", "protected", "private", "held", "lost")


def figure(value: object) -> str:
    """A figure as the page shows it; None is a dash, as in "no limit" or "not known"."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def live(name: str, figures: dict[str, object], tag: str = "b") -> Html:
    """A figure of the selected round: the script keeps it up to date."""
    return element(tag, figure(figures[name]), data_f=name)


def round_panel(data: dict[str, Any], last_number: int, names: Sequence[str], *, shows_ledger: bool) -> Html:
    """The panel of the round that is shown first."""
    figures = dict(zip(FIGURES, data["f"], strict=True))
    title = element("h3", "Round ", element("span", data["n"], data_part="number"), f" of {last_number}")
    messages = [element("li", _words(words, names), class_=kind) for kind, words in data["m"]]
    return element(
        "div",
        title,
        element("ul", *messages, class_="messages", data_part="messages", aria_live="polite"),
        element("h4", "Baseline, minus each promise"),
        _waterfall(data["w"], names) if shows_ledger else element("p", "This target keeps no ledger that it shows."),
        element("h4", "Decisions, and the ledger's figures right after each"),
        _decisions(data["d"], names),
        element("h4", "Figures: the ledger's when the decisions ended, the pool's after the round"),
        element("dl", *_figure_list(figures, _LEDGER), *_figure_list(figures, _AFTER), class_="figures"),
        class_="round",
    )


def _figure_list(figures: dict[str, object], names: Iterable[str]) -> list[Html]:
    return [element("div", element("dt", name), live(name, figures, "dd")) for name in names]


def _words(words: Sequence[str | int], names: Sequence[str]) -> Html:
    return join(Name(names[word]) if isinstance(word, int) else word for word in words)


# --- the waterfall


def _waterfall(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> Html:
    head = element(
        "tr",
        *(element("th", text, scope="col") for text in ("what", "")),
        *(element("th", text, scope="col", class_="n") for text in ("takes", "leaves")),
    )
    low = min([0, *(level for *_, level, _ in rows)])
    high = max([1, *(level + max(tokens, 0) for *_, tokens, level, _ in rows)])
    body = [_waterfall_row(row, names, low, high) for row in rows]
    return element("table", element("thead", head), element("tbody", *body, data_part="waterfall"), class_="waterfall")


def _waterfall_row(row: Sequence[Any], names: Sequence[str], low: int, high: int) -> Html:
    kind, place, words, tokens, level, change = row
    label = join([Name(names[place]), " ", words]) if place >= 0 else words
    if kind == "missing":
        label = join([label, " ", element("strong", "in no entry")])
    start = 0 if kind == "figure" else level + tokens
    return element(
        "tr",
        element("th", label, scope="row"),
        element("td", frame(BAR_HEIGHT, None, _bar(kind, start, level, low, high)), class_="bar"),
        element("td", change, class_="n"),
        element("td", level, class_="n"),
        class_=kind,
    )


def _bar(kind: str, start: int, end: int, low: int, high: int) -> list[Html]:
    """From the lower to the upper of two levels; what is below zero is a bar of its own, and zero a line."""
    first, last = min(start, end), max(start, end)

    def x(tokens: int) -> str:
        return percent(100 * (tokens - low) / (high - low))

    def part(name: str, lower: int, upper: int) -> list[Html]:
        if upper <= lower:
            return []
        width = percent(100 * (upper - lower) / (high - low))
        return [element("rect", class_=name, x=x(lower), width=width, y=1, height=BAR_HEIGHT - 2)]

    zero = element("line", class_="zero", x1=x(0), x2=x(0), y1=-6, y2=BAR_HEIGHT + 6)
    return [*part(kind, max(0, first), last), *part("below", first, min(0, last)), zero]


# --- the decisions


def _decisions(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> Html:
    head = [element("th", text, scope="col", class_="n" if i > 3 else None) for i, text in enumerate(DECISION_COLUMNS)]  # noqa: PLR2004
    body = [
        element(
            "tr",
            element("th", Name(names[place]), scope="row"),
            *(element("td", text) for text in (kind, what, notes)),
            *(element("td", figure(value), class_="n") for value in ledger),
            class_=kind,
        )
        for place, kind, what, notes, *ledger in rows
    ]
    table = element(
        "table",
        element("thead", element("tr", *head)),
        element("tbody", *body, data_part="decisions"),
        class_="decisions",
    )
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label="decisions of the round")
