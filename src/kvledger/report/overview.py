"""All that has rounds for columns: two pictures of the pool, the slider that selects a round, the requests' lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvledger.report.explanation import Explanation
from kvledger.report.lane_picture import axis, lane_picture, lane_words
from kvledger.report.lanes import Lane, with_news
from kvledger.report.markup import Html, Name, element, join
from kvledger.report.pool_picture import bin_size, claims_picture, claims_scale, pool_picture
from kvledger.report.recording import Recording
from kvledger.report.round_panel import live
from kvledger.report.svg import MAX_LABELLED_ROUNDS, Columns

LANES_OPEN = 12
LANES_A_FOLD = 50
MAX_LANES = 2000
CLOSE_UP_BEFORE = 3

_CLAIMS = (
    ("baseline", "baseline", "baseline"),
    ("now", "promised now", "promised_now"),
    ("later", "promised later", "promised_later"),
    ("missing", "tails in no entry", "missing"),
    ("needed", "admitted prompts still need", "needed"),
)
_LANE_KEYS = (
    *(("waiting", "waiting"), ("whole", "chunk"), ("truncated", "cut chunk"), ("load-back", "load-back")),
    *(("refused", "refused"), ("forced", "forced"), ("failed", "out of memory"), ("in-flight", "in flight")),
    *(("decoding", "decoding"), ("transferred", "transferred"), ("finished", "output done")),
    *(("setback", "preempted or sent back"), ("given-up", "given up")),
    ("missing", "tail in no entry"),
)


def overview(recording: Recording, first: int, figures: dict[str, object]) -> Html:
    """All rounds, with the one at `first` selected and `figures` its figures."""
    size = bin_size(len(recording.rounds))
    parts: list[Html] = []
    if size > 1:
        words = (
            f"{len(recording.rounds)} rounds in bars of {size}: a bar shows the tightest round of its {size}, the thin "
            "line in it the range from least to most free + evictable. The slider selects single rounds."
        )
        parts.append(element("p", words, class_="note", data_part="aggregated"))
    columns = Columns(len(recording.rounds))
    return _timeline(columns, *parts, *_pictures(recording, columns, figures), _controls(recording, first))


def close_up(recording: Recording, explanation: Explanation, lanes: Sequence[Lane], first: int) -> Html:
    """The rounds around the one at `first` and the requests that play a part, where all rounds would be too narrow."""
    count = min(MAX_LABELLED_ROUNDS, len(recording.rounds))
    start = min(max(0, first - CLOSE_UP_BEFORE), len(recording.rounds) - count)
    columns = Columns(count, start)
    news, others = with_news(lanes, explanation.named)
    busy = [lane for lane in others if any(start <= answer.round_index < start + count for answer in lane.answers)]
    shown = sorted((news + busy)[:LANES_OPEN], key=lambda lane: lane.submitted)
    numbers = [recording.rounds[index].record.round for index in (start, start + count - 1)]
    title = element("h3", f"Rounds {numbers[0]} to {numbers[1]}, close up")
    return _timeline(
        columns,
        title,
        *_pictures(recording, columns, None),
        element("ul", *_lanes(shown, recording, columns), class_="lanes"),
    )


def _timeline(columns: Columns, *parts: Html) -> Html:
    return element("div", *parts, class_="timeline", data_first=columns.first, data_count=columns.count)


def _pictures(recording: Recording, columns: Columns, figures: dict[str, object] | None) -> list[Html]:
    """Both pictures above their axis; `figures` are put into the legends."""
    views = recording.rounds[columns.first : columns.end]
    rare = [name for name in ("held", "lost") if any(getattr(view.pool, name) for view in recording.rounds)]
    pool = [(name, name, name) for name in ("free", "evictable", *rare, "private", "protected")]
    claims = claims_picture(recording, views), claims_scale(recording, views)
    return [
        _panel_head("The pool after each round", pool, figures),
        _scaled(pool_picture(recording, views), recording.pool_tokens, "scale"),
        _panel_head("Promised when decisions ended", _CLAIMS, figures),
        _scaled(*claims, "scale headroom"),
        _row("round", axis(recording, columns), "axis-row"),
    ]


def _panel_head(title: str, legend: Iterable[tuple[str, str, str]], figures: dict[str, object] | None) -> Html:
    keys = [
        element("li", element("i", class_=f"key {key}"), words, *([" ", live(name, figures)] if figures else []))
        for key, words, name in legend
        if figures or key != "needed"
    ]
    return element("div", element("h3", title), element("ul", *keys, class_="legend"), class_="panel-head")


def _scaled(picture: Html, top: int, kind: str) -> Html:
    return _row(join([element("span", top), element("span", "0")]), picture, kind)


def _row(label: Html | str, picture: Html, kind: str) -> Html:
    return element(
        "div", element("div", label, class_="label"), element("div", picture, class_="track"), class_=f"row {kind}"
    )


def _controls(recording: Recording, first: int) -> Html:
    last = len(recording.rounds) - 1
    slider = element(
        "input", type="range", min=0, max=last, value=first, step=1, aria_label="selected round", data_part="slider"
    )
    back = element("button", "<", type="button", data_go=-1, aria_label="previous round")
    forth = element("button", ">", type="button", data_go=1, aria_label="next round")
    number = element("output", recording.rounds[first].record.round, data_part="number")
    label = join([back, number, forth])
    return element(
        "div",
        element("div", label, class_="label"),
        element("div", slider, class_="track-input"),
        class_="row controls needs-script",
    )


# --- the lanes


def requests(recording: Recording, explanation: Explanation, lanes: Sequence[Lane]) -> Html:
    """Every request's lane over all rounds: a few, or those that play a part, and the others folded."""
    shown, others = list(lanes), list[Lane]()
    if len(shown) > LANES_OPEN:
        news, others = with_news(lanes, explanation.named)
        shown, others = news[:LANES_OPEN], news[LANES_OPEN:] + others
    columns = Columns(len(recording.rounds))
    keys = [element("li", element("i", class_=f"key {key}"), words) for key, words in _LANE_KEYS]
    parts = [
        element("div", element("h3", "Requests"), element("ul", *keys, class_="legend"), class_="panel-head"),
        element("ul", *_lanes(shown, recording, columns), class_="lanes"),
    ]
    drawn = others[:MAX_LANES]
    for start in range(0, len(drawn), LANES_A_FOLD):
        fold = drawn[start : start + LANES_A_FOLD]
        last = [" to ", Name(fold[-1].request)] if len(fold) > 1 else []
        title = element("summary", f"{len(fold)} more: ", Name(fold[0].request), *last)
        parts.append(
            element("details", title, element("ul", *_lanes(fold, recording, columns), class_="lanes"), class_="fold")
        )
    if len(others) > len(drawn):
        parts.append(element("p", f"{len(others) - len(drawn)} more requests are not drawn.", class_="note"))
    return _timeline(columns, *parts)


def _lanes(lanes: Iterable[Lane], recording: Recording, columns: Columns) -> list[Html]:
    return [
        element(
            "li",
            element("div", Name(lane.request), class_="label"),
            element(
                "div",
                lane_picture(lane, recording, columns),
                element("span", lane_words(lane, recording), class_="unseen"),
                class_="track",
            ),
            class_="row",
        )
        for lane in lanes
    ]
