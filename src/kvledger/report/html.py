"""The report: one HTML page that needs nothing but itself.

Every name in it comes from a trace and is hostile until shown otherwise. `markup` escapes all text, and the page's
policy lets in no style and no script but its own two, by their hashes, and nothing from anywhere else: what escaped
the escaping could still not run, and could not be heard.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

from kvledger import __version__
from kvledger.report.markup import Html, csp_hash, element, join
from kvledger.report.plain import plain
from kvledger.report.recording import Recording
from kvledger.report.section import SOURCE_COLUMNS, section


def page(recordings: Sequence[Recording]) -> str:
    """The whole document, a section for each recording."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src {csp_hash(style)}; script-src {csp_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    sources = [plain(recording.replayed.source, SOURCE_COLUMNS) for recording in recordings]
    title = f"kvledger: {sources[0]}" if len(sources) == 1 else f"kvledger: {len(sources)} traces"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        # without an icon of its own a page that is served asks the server for one
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Html(style)),
    )
    theme = element("button", "dark / light", type="button", data_part="theme", class_="needs-script")
    body = element(
        "body",
        _hatches(),
        element("header", element("h1", "kvledger report"), theme),
        _contents(recordings, sources),
        element("main", *(section(recording, number) for number, recording in enumerate(recordings, 1))),
        element("footer", f"kvledger {__version__}. Figures are tokens, as in the outcome of kvledger replay --json."),
        element("script", Html(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _hatches() -> Html:
    """Patterns that the style sheet fills with: what is not in the ledger, and what of that is missing."""
    plain_hatch = _hatch("hatch")
    bad_hatch = _hatch("hatch-bad", element("rect", class_="hatch-bad-ground", width=6, height=6))
    return element(
        "svg", element("defs", plain_hatch, bad_hatch), width=0, height=0, class_="unseen", aria_hidden="true"
    )


def _hatch(name: str, *ground: Html) -> Html:
    line = element("line", class_=f"{name}-line", x1=1, x2=1, y1=0, y2=6)
    turned = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    return element("pattern", *ground, line, id=name, width=6, height=6, **turned)


def _contents(recordings: Sequence[Recording], sources: Sequence[str]) -> Html:
    if len(recordings) == 1:
        return Html("")
    items = []
    for number, (recording, source) in enumerate(zip(recordings, sources, strict=True), 1):
        link = element("a", element("bdi", source), href=f"#trace-{number}")
        verdict = recording.outcome.verdict
        note = "" if recording.replayed.passed else ", not as it should be"
        items.append(element("li", link, " ", element("b", verdict, class_="good" if verdict == "ok" else "bad"), note))
    return element("nav", element("h2", "Traces"), element("ol", *items), aria_label="traces")


@cache
def _asset(name: str) -> str:
    content = resources.files("kvledger.report").joinpath(name).read_text("utf-8")
    assert "</" not in content, f"{name} could end its own element"
    return join([Html(content)])
