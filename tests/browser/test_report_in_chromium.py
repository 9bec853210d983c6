"""The page in a real browser: nothing is fetched, nothing complains, keys reach all of it, the figures are right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvledger.report.html import page
from kvledger.report.recording import record
from kvledger.report.round_data import FIGURES
from kvledger.report.round_panel import figure
from kvledger.rules import PRESETS
from tests.browser.chromium import EXECUTABLE, Chromium
from tests.unit.report_cases import CASES, CRASH, INCIDENT_TRACE, hostile_trace, long_trace

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(EXECUTABLE is None, reason="chromium is not installed"),
]

WIDTHS = (390, 1280)
# everything that Tab must reach: what can be pressed, moved, unfolded or scrolled
CONTROLS = "button, input, summary, a[href], [tabindex='0']"
SHOWN = f"[...document.querySelectorAll({CONTROLS!r})].filter(e => e.checkVisibility())"
# an element and all below it; two drawings may order attributes as they like
SHAPE = """
const shape = node => node.nodeType === 3 ? node.data : [node.localName, [...node.attributes].map(({name, value}) =>
  [name, value]).sort(), [...node.childNodes].map(shape)];
const shaped = root => {
  const round = root.querySelector('.round').cloneNode(true);
  round.normalize();
  return JSON.stringify(shape(round));
};
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Chromium]:
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture
def opened(browser: Chromium, tmp_path):
    """Writes a page and opens it from disk."""

    def open_page(*traces: Any, width: int = 1280, scheme: str = "light", fragment: str = "") -> Chromium:
        path = tmp_path / "report.html"
        path.write_text(page([record(trace) for trace in traces]), "utf-8")
        browser.look(width, 900, scheme)
        browser.open("about:blank")
        browser.open(f"{path.as_uri()}{fragment}")
        return browser

    return open_page


def values(browser: Chromium, name: str) -> list[str]:
    found: list[str] = browser.evaluate(f"[...document.querySelectorAll('[data-f={name}]')].map(e => e.textContent)")
    return found


def selected(browser: Chromium) -> int:
    return int(browser.evaluate("document.querySelector('output[data-part=number]').textContent"))


def step_to(index: int) -> str:
    """Moves the slider, as a reader would."""
    return (
        f"(s => {{ s.value = {index}; s.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
        "(document.querySelector('input[type=range]'))"
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", CASES)
def test_loads_from_disk_without_a_complaint_or_a_request(name, scheme, width, opened):
    browser = opened(CASES[name], width=width, scheme=scheme)
    assert browser.complaints() == []
    (asked,) = browser.requests()
    assert asked.startswith("file://")
    assert browser.evaluate("document.documentElement.scrollWidth") == width, "the page must not scroll sideways"
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark is (scheme == "dark")


@pytest.mark.parametrize("name", CASES)
def test_figures_of_every_round_are_the_outcome_s(name, opened):
    recording = record(CASES[name])
    browser = opened(CASES[name])
    for index, round_figures in enumerate(recording.outcome.document()["rounds"]):
        browser.evaluate(step_to(index))
        assert selected(browser) == round_figures["round"]
        for key in (*FIGURES[:7], "free", "evictable", "protected"):
            assert set(values(browser, key)) == {figure(round_figures[key])}
        rows = browser.evaluate(
            "[...document.querySelectorAll('[data-part=waterfall] tr.figure')].map(r => r.innerText.split(/\\s+/))"
        )
        levels = {row[0]: row[-1] for row in rows}
        for key in ("baseline", "cur_rem_tokens", "rem_total_tokens"):
            assert levels[key] == str(round_figures[key])
    assert browser.complaints() == []


@pytest.mark.parametrize("name", CASES)
def test_script_draws_a_round_as_it_was_drawn_before(name, opened):
    """The first round stands in the document; going away and back, the script draws it again."""
    browser = opened(CASES[name])
    document = json.dumps(page([record(CASES[name])]))
    first, rounds = browser.evaluate(
        "(d => [d.first, d.rounds.length])(JSON.parse(document.querySelector('script.data').textContent))"
    )
    assert rounds > 1
    browser.evaluate(step_to(0 if first else 1))
    browser.evaluate(step_to(first))
    drawn, again = browser.evaluate(
        f"(() => {{ {SHAPE} const still = new DOMParser().parseFromString({document}, 'text/html');"
        "return [shaped(still), shaped(document)]; })()"
    )
    assert again == drawn


def test_keys_reach_every_control(opened):
    browser = opened(INCIDENT_TRACE)
    expected = browser.evaluate(f"{SHOWN}.length")
    browser.evaluate(f"{SHOWN}.forEach((e, i) => e.dataset.place = i)")
    reached = []
    for _ in range(expected):
        browser.press("Tab")
        reached.append(browser.evaluate("document.activeElement.dataset.place"))
        outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "the focused control must be seen"
    assert reached == [str(place) for place in range(expected)]
    browser.press("Tab", shift=True)
    assert browser.evaluate("document.activeElement.dataset.place") == str(expected - 2)


def test_arrow_keys_select_a_round(opened):
    browser = opened(INCIDENT_TRACE)
    browser.evaluate("document.querySelector('input[type=range]').focus()")
    seen = [selected(browser)]
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft", "Home"):
        browser.press(key)
        seen.append(selected(browser))
    assert seen == [1, 2, 3, 4, 3, 1]
    assert browser.evaluate("document.activeElement.getAttribute('aria-valuetext')") == "round 1 of 4"
    assert browser.evaluate("location.hash") == "#trace-1-round-1"


def test_buttons_and_pictures_select_a_round(opened):
    browser = opened(INCIDENT_TRACE)
    browser.evaluate("document.querySelectorAll('.jumps button')[1].click()")
    assert selected(browser) == 4
    assert "Out of memory" in browser.evaluate("document.querySelector('.messages').innerText")
    browser.evaluate("document.querySelector('[data-go=\"-1\"]').click()")
    assert selected(browser) == 3
    place = browser.evaluate(
        "(b => ({x: b.left + b.width * 0.3, y: b.top + 20}))(document.querySelector('.track').getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)
    assert selected(browser) == 2


def test_address_selects_a_round(opened):
    browser = opened(INCIDENT_TRACE, INCIDENT_TRACE.with_rules("upstream"), fragment="#trace-2-round-3")
    assert (
        browser.evaluate("[...document.querySelectorAll('output[data-part=number]')].map(e => e.textContent)")[1] == "3"
    )
    opened(INCIDENT_TRACE, fragment="#trace-9-round-999")
    assert selected(browser) == 1
    assert browser.complaints() == []


def test_theme_is_chosen_by_hand(opened):
    browser = opened(INCIDENT_TRACE)
    colour = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(colour)
    browser.evaluate("document.querySelector('[data-part=theme]').click()")
    assert browser.evaluate(colour) != light
    browser.evaluate("document.querySelector('[data-part=theme]').click()")
    assert browser.evaluate(colour) == light


def test_trace_is_copied(opened):
    browser = opened(hostile_trace())
    browser.evaluate(
        "window.copied = null; navigator.clipboard.writeText = async t => { window.copied = t; };"
        "document.querySelector('[data-copy]').click()"
    )
    assert browser.evaluate("document.querySelector('[data-part=copied]').textContent") == "copied"
    assert browser.evaluate("JSON.parse(window.copied).events.length") == len(hostile_trace().events)
    browser.evaluate(
        "navigator.clipboard.writeText = async () => { throw 0; };"
        "document.querySelector('details:has(pre)').open = true; document.querySelector('[data-copy]').click()"
    )
    assert browser.evaluate("getSelection().toString().startsWith('{')")


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_names_are_inert(width, opened):
    browser = opened(hostile_trace(), width=width)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    rounds = browser.evaluate("JSON.parse(document.querySelector('script.data').textContent).rounds.length")
    for index in range(rounds):
        browser.evaluate(step_to(index))
    assert browser.evaluate("typeof window.pwned") == "undefined"
    assert browser.evaluate("document.querySelectorAll('img, iframe, section script:not(.data)').length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.complaints() == []
    assert len(browser.requests()) == 1


def test_policy_stops_what_should_ever_get_through(opened):
    """The second wall: a script, a handler, a style or a picture that was put into the page does nothing."""
    browser = opened(INCIDENT_TRACE)
    browser.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x onerror=window.pwned=1>');"
        "const s = document.createElement('script'); s.textContent = 'window.pwned = 2'; document.body.append(s);"
        "fetch('http://127.0.0.1:9/').catch(() => 0)"
    )
    assert browser.evaluate("new Promise(done => setTimeout(() => done(typeof window.pwned), 200))") == "undefined"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())


def test_what_is_folded_is_opened_for_print(opened):
    many = long_trace(rounds=30, requests=30)
    browser = opened(many, width=1280)
    assert browser.evaluate("[...document.querySelectorAll('details.fold')].every(d => !d.open)")
    printed = browser.send("Page.printToPDF", printBackground=True)["data"]
    assert len(printed) > 10_000
    assert browser.evaluate("[...document.querySelectorAll('details.fold')].every(d => d.open)")
    browser.look(1280, 900, "dark", media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not browser.evaluate("document.querySelector('.controls').checkVisibility()")


def test_long_trace_stays_usable(opened):
    browser = opened(long_trace("aligned", last=CRASH))
    assert browser.complaints() == []
    assert browser.evaluate("document.querySelectorAll('*').length") < 120_000
    milliseconds = browser.evaluate(
        f"(() => {{ const t = performance.now(); for (let i = 0; i < 100; i++) {{ {step_to(7)}; {step_to(1900)}; }}"
        "document.body.offsetHeight; return (performance.now() - t) / 200; })()"
    )
    assert milliseconds < 100, "a round must be selected at once"
    browser.evaluate("document.querySelectorAll('.jumps button')[0].click()")
    assert selected(browser) == 2001
    browser.evaluate("document.querySelector('input[type=range]').focus()")
    browser.press("ArrowLeft")
    assert selected(browser) == 2000


def test_fixed_rules_are_shown_as_good(opened):
    browser = opened(INCIDENT_TRACE.with_rules(PRESETS["tail-reserved"]))
    assert browser.evaluate("document.querySelector('.verdict [data-part=verdict]').textContent") == "ok"
    assert browser.evaluate("document.querySelectorAll('rect.short, .messages .bad').length") == 0
