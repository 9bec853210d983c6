"""The time line of a section: two pictures of the pool, the slider that selects a round, and the requests' lanes."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.report.explanation import Explanation
from kvledger.report.lane_picture import axis, lane_picture, lane_words
from kvledger.report.lanes import Lane, lanes_of, with_news
from kvledger.report.markup import Html, Name, element, join
from kvledger.report.pool_picture import bin_size, claims_picture, claims_scale, pool_picture
from kvledger.report.recording import Recording
from kvledger.report.round_panel import live

LANES_OPEN = 12
LANES_A_FOLD = 50
MAX_LANES = 2000

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
    ("transferred", "transferred"),
    ("missing", "tail in no entry"),
)


def overview(recording: Recording, explanation: Explanation, first: int, figures: dict[str, object]) -> Html:
    """All that has a time axis, with the round at `first` selected and `figures` its figures."""
    size = bin_size(len(recording.rounds))
    notes = []
    if size > 1:
        words = (
            f"{len(recording.rounds)} rounds in bars of {size}: a bar shows the tightest round of its {size}, the thin "
            "line in it the range from least to most free + evictable. The slider selects single rounds."
        )
        notes.append(element("p", words, class_="note", data_part="aggregated"))
    rare = [name for name in ("held", "lost") if any(getattr(view.pool, name) for view in recording.rounds)]
    pool = [(name, name, name) for name in ("free", "evictable", *rare, "private", "protected")]
    return element(
        "div",
        *notes,
        _panel("The pool after each round", pool, figures, recording.pool_tokens, pool_picture(recording), "scale"),
        _panel(
            "Promised when decisions ended",
            _CLAIMS,
            figures,
            claims_scale(recording),
            claims_picture(recording),
            "scale headroom",
        ),
        _row("round", axis(recording), "axis-row"),
        _controls(recording, first),
        _lanes(recording, explanation),
        class_="timeline",
    )


def _panel(
    title: str,
    legend: Iterable[tuple[str, str, str]],
    figures: dict[str, object],
    scale: int,
    picture: Html,
    kind: str,
) -> Html:
    keys = [
        element("li", element("i", class_=f"key {key}"), f"{words} ", live(name, figures))
        for key, words, name in legend
    ]
    head = element("div", element("h3", title), element("ul", *keys, class_="legend"), class_="panel-head")
    ends = join([element("span", scale), element("span", "0")])
    return join([head, _row(ends, picture, kind)])


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


def _lanes(recording: Recording, explanation: Explanation) -> Html:
    lanes = lanes_of(recording)
    if len(lanes) <= LANES_OPEN:
        shown, others = lanes, list[Lane]()
    else:
        shown, others = with_news(lanes, explanation.named)
        others = shown[LANES_OPEN:] + others
        shown = shown[:LANES_OPEN]
    keys = [element("li", element("i", class_=f"key {key}"), words) for key, words in _LANE_KEYS]
    parts = [
        element("div", element("h3", "Requests"), element("ul", *keys, class_="legend"), class_="panel-head"),
        element("ul", *(_lane(lane, recording) for lane in shown), class_="lanes"),
    ]
    drawn = others[:MAX_LANES]
    for start in range(0, len(drawn), LANES_A_FOLD):
        fold = drawn[start : start + LANES_A_FOLD]
        title = f"{len(fold)} more: {Name(fold[0].request).short} to {Name(fold[-1].request).short}"
        rows = element("ul", *(_lane(lane, recording) for lane in fold), class_="lanes")
        parts.append(element("details", element("summary", element("bdi", title)), rows, class_="fold"))
    if len(others) > len(drawn):
        parts.append(element("p", f"{len(others) - len(drawn)} more requests are not drawn.", class_="note"))
    return join(parts)


def _lane(lane: Lane, recording: Recording) -> Html:
    words = element("span", lane_words(lane, recording), class_="unseen")
    return element(
        "li",
        element("div", Name(lane.request), class_="label"),
        element("div", lane_picture(lane, recording), words, class_="track"),
        class_="row",
    )
