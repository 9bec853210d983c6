"""The page: its figures are the outcome's, hostile names are inert in it, it needs nothing else and stays small."""

from __future__ import annotations

import json
import random
import re
import time
import unicodedata
from types import SimpleNamespace
from typing import Any

import pytest

from kvledger.events import Drain, Hold, Round, Submit
from kvledger.ledger import Due
from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode
from kvledger.report.explanation import MAX_ROUNDS_DIAGNOSED, explain
from kvledger.report.html import _asset, page
from kvledger.report.markup import Html, Name, csp_hash, element, message_words, script_json, text
from kvledger.report.pool_picture import MAX_BINS, bins_of
from kvledger.report.recording import record
from kvledger.report.round_data import FIGURES
from kvledger.rules import PRESETS, AccountingRules
from kvledger.trace import Trace, dumps, parse
from tests.oracle.random_traces import random_trace
from tests.unit.builders import node_settings, prompt
from tests.unit.page_tree import Node, parsed
from tests.unit.report_cases import CASES, CRASH, HOSTILE_NAMES, INCIDENT_TRACE, SMALL, hostile_trace, long_trace

OUTCOME_FIGURES = (
    *("baseline", "cur_rem_tokens", "rem_total_tokens", "rem_chunk_tokens", "budget_state", "batch_is_full"),
    *("forced", "free", "evictable", "protected"),
)


def page_of(trace: Trace, rules: AccountingRules | None = None, **options: Any) -> Node:
    return parsed(page([record(trace, rules, **options)]))


def data_of(document: Node) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(document.one("script", class_="data").text)
    return data


@pytest.fixture(scope="module")
def long_crash():
    started = time.process_time()
    recording = record(long_trace("aligned", last=CRASH))
    document = page([recording])
    return SimpleNamespace(recording=recording, document=document, seconds=time.process_time() - started)


# --- the figures


@pytest.mark.parametrize("name", CASES)
def test_figures_are_the_outcome_s(name):
    trace = CASES[name]
    outcome = checked_replay(trace).document()
    document = page_of(trace)
    assert document.one("b", data_part="verdict").text == outcome["verdict"]

    head = [cell.text.replace(" ", "_") for cell in document.one("table", class_="all-rounds").one("thead").all("th")]
    rows = document.one("table", class_="all-rounds").one("tbody").all("tr")
    assert len(rows) == len(outcome["rounds"])
    data = data_of(document)
    assert tuple(data["keys"]) == FIGURES
    for row, embedded, figures in zip(rows, data["rounds"], outcome["rounds"], strict=True):
        shown = dict(zip(head, [cell.text for cell in row.children if isinstance(cell, Node)], strict=True))
        stored = dict(zip(FIGURES, embedded["f"], strict=True))
        assert shown["round"] == str(embedded["n"]) == str(figures["round"])
        for key in OUTCOME_FIGURES:
            assert stored[key] == figures[key]
            assert shown[key] == as_shown(figures[key])
        promised = {due: sum(p["tokens"] for p in figures["promises"] if p["due"] == due) for due in Due}
        assert (stored["promised_now"], stored["promised_later"]) == (promised[Due.NOW], promised[Due.LATER])
        assert (shown["admitted"], shown["refused"]) == (str(len(figures["admitted"])), str(len(figures["refused"])))
        in_pool = sum(stored[key] for key in ("free", "evictable", "protected", "private", "held", "lost"))
        assert in_pool == trace.node.pool_pages * trace.node.page_size

        decided = [row for row in embedded["d"] if row[1] not in ("refused", "deferred")]
        assert [[Name(a["request"]).short, a["kind"], f"{a['start']}..{a['end']} ({a['end'] - a['start']})"]
                for a in figures["admitted"]] == [[data["names"][row[0]][0], *row[1:3]] for row in decided]  # fmt: skip
        refused = [[data["names"][row[0]][0], row[2]] for row in embedded["d"] if row[1] == "refused"]
        assert refused == [[Name(r["request"]).short, r["reason"]] for r in figures["refused"]]

    broken = document.all("ol", class_="broken")
    items = broken[0].all("li") if broken else []
    assert [item.one("b").text for item in items] == [each["invariant"] for each in outcome["broken"]]


def as_shown(value: object) -> str:
    if value is None:
        return "–"
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"


def test_first_round_is_drawn_from_the_data_that_the_script_has():
    document = page_of(INCIDENT_TRACE)
    data = data_of(document)
    figures = dict(zip(FIGURES, data["rounds"][data["first"]]["f"], strict=True))
    live = document.all(data_f="free") + document.all(data_f="rem_total_tokens") + document.all(data_f="slack")
    assert {node.attributes["data-f"]: node.text for node in live} == {"free": "2880", "rem_total_tokens": "2686"}
    assert figures["slack"] == -2112
    rows = [[cell.text for cell in row.children] for row in document.one("tbody", data_part="waterfall").all("tr")]  # type: ignore[union-attr]
    assert rows == [
        ["free + evictable at its start", "", "", "34624"],
        ["xpkq load-back 15360", "", "-15360", "19264"],
        ["baseline", "", "", "19264"],
        ["v9uj chunk 13888 + page 64", "", "-13952", "5312"],
        ["1keim chunk 2304 + page 64", "", "-2368", "2944"],
        ["xpkq chunk 192 + page 64", "", "-256", "2688"],
        ["cur_rem_tokens", "", "", "2688"],
        ["v9uj first token 1", "", "-1", "2687"],
        ["xpkq first token 1", "", "-1", "2686"],
        ["rem_total_tokens", "", "", "2686"],
        ["1keim tail 4936 (4992 in whole pages) in no entry", "", "-4992", "-2306"],
    ]


# --- the words


def test_incident_is_explained():
    document = page_of(INCIDENT_TRACE)
    lead = (
        "1keim's tail of 4936 tokens, promised in round 1, was spent by xpkq: a load-back of 15360 and a chunk of 192."
    )
    assert document.one("p", class_="lead").text == lead
    verdict = document.one("div", class_="verdict").text
    for words in (
        "Out of memory in round 4: 1keim wanted 2056 tokens; free 0, evictable 0.",
        "No entry of round 1's ledger holds that tail (4992 tokens in whole pages).",
        "Too late from round 1 on: after xpkq was admitted whole, no fair continuation",
        "The same trace ends ok with reserve_tail = true.",
        "as the trace expects",
    ):
        assert words in verdict
    assert [button.attributes["data-round"] for button in document.one("p", class_="jumps").all("button")] == ["0", "3"]
    assert data_of(document)["first"] == 0


def test_nothing_is_explained_where_nothing_broke():
    document = page_of(INCIDENT_TRACE, PRESETS["tail-reserved"])
    assert document.one("div", class_="verdict").all("p")[1].text.startswith("Nothing was violated in ")
    assert (
        not document.all("p", class_="lead") + document.all("ol", class_="broken") + document.all("p", class_="jumps")
    )
    assert "not those of this replay" in document.text


def test_expectation_that_is_not_met_is_said():
    document = page_of(Trace(SMALL.node, "upstream", SMALL.events, expect={"upstream": "stuck"}))
    assert "NOT as expected: stuck" in document.one("div", class_="verdict").text


def test_stuck_is_explained():
    events = (Hold("h", 448), Submit("a", prompt(("a", 300))), Drain())
    document = page_of(Trace(node_settings(), "aligned", events))
    assert "Stuck in round 1: a still has 300 tokens to compute" in document.one("p", class_="headline").text


def test_long_trace_is_explained_as_far_as_can_be_done_at_once(long_crash):
    explanation = explain(long_crash.recording)
    assert explanation.lead is not None
    assert "".join(explanation.lead).startswith("B's tail of 5184 tokens, promised in round 2001, was spent by C: ")
    assert len(long_crash.recording.rounds) > MAX_ROUNDS_DIAGNOSED
    assert "Not searched here" in "".join(explanation.details[-1])


# --- hostile names


def test_hostile_names_are_inert():
    recording = record(hostile_trace(), source="<b>\u202e\n.json")
    text_of_page = page([recording])
    assert not [c for c in set(text_of_page) - {"\n"} if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    document = parsed(text_of_page)
    assert {node.tag for node in document.all()} <= {
        *("html", "head", "meta", "link", "title", "style", "body", "svg", "defs", "pattern", "rect", "line", "g"),
        *("text", "header", "h1", "h2", "h3", "h4", "button", "main", "section", "p", "b", "strong", "span", "div"),
        *("ul", "ol", "li", "i", "bdi", "input", "output", "details", "summary", "table", "thead", "tbody", "tr", "th"),
        *("td", "dl", "dt", "dd", "pre", "script", "footer"),
    }
    keys = {key for node in document.all() for key in node.attributes}
    assert not [key for key in keys if key.startswith("on") or key in ("style", "src", "srcset")]
    assert len(document.all("script")) == 2
    links = [node.attributes["href"] for node in document.all() if "href" in node.attributes]
    assert links == ["data:,"]


def test_hostile_names_are_shortened_with_all_of_them_in_a_title():
    document = page_of(hostile_trace())
    labels = [node for row in document.all("ul", class_="lanes") for node in row.all("bdi")]
    assert sorted(label.text for label in labels) == sorted(
        Name(name).short for name in (*HOSTILE_NAMES, "<i>too long</i>\u202e")
    )
    titles = {label.attributes.get("title") for label in labels}
    assert "x" * 10_000 in titles
    assert "<b>" * 3_334 in titles
    assert "\\u202eright-to-left\\u202c \\u2066isolate\\u2069 \\u200f\\u200b\\ufeff" in titles
    assert "שלום עולם" in {label.text.strip('"') for label in labels}
    assert all(len(label.text) <= 40 for label in labels)
    assert {name for name, _ in data_of(document)["names"]} <= {label.text for label in labels}


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_every_hostile_name_may_break_a_promise(name):
    events = tuple(
        Submit(name, each.prompt) if isinstance(each, Submit) and each.request == "1keim" else each
        for each in INCIDENT_TRACE.events
    )
    document = page_of(Trace(INCIDENT_TRACE.node, "aligned", events))
    assert document.one("p", class_="lead").all("bdi")[0].text == Name(name).short


def test_trace_is_there_to_copy():
    document = page_of(hostile_trace())
    (button,) = document.all("button", data_copy="trace-1-text")
    copied = document.one("pre", id=button.attributes["data-copy"] or "").text
    assert copied == dumps(hostile_trace())


def test_text_is_escaped_unless_it_is_markup():
    assert text("<&>") == "&lt;&amp;&gt;"
    assert text(Html("<b>")) == "<b>"
    assert element("p", "a<", element("b", 1), None, title='"<', hidden=True, lang=None) == (
        '<p title="&quot;&lt;" hidden>a&lt;<b>1</b></p>'
    )
    assert text(Name("plain")) == '<bdi class="name">plain</bdi>'
    assert text(Name("a\u202eb")) == '<bdi class="name" title="a\\u202eb">"a\\u202eb"</bdi>'
    assert script_json({"a": "</script><!--\u2028&"}) == '{"a":"\\u003c/script\\u003e\\u003c!--\\u2028\\u0026"}'
    with pytest.raises(AssertionError, match="no content"):
        element("line", "text")


def test_a_name_within_a_message_is_marked_where_it_could_do_harm():
    assert message_words("after a was cut", "a") == ["after a was cut"]
    long = "x" * 100
    assert message_words(f"{long} was {long}", long) == [long, " was ", long]
    assert [type(word) for word in message_words(f"{long} was", long)] == [Name, str]
    assert message_words("after \u202e\n", None) == ["after \\u202e\\n"]


# --- nothing but itself


@pytest.mark.parametrize("name", ["incident", "hostile"])
def test_page_asks_nobody_for_anything(name):
    document = page_of(CASES[name])
    policy = document.one("meta", http_equiv="Content-Security-Policy").attributes["content"] or ""
    assert policy.startswith("default-src 'none'; ")
    style, script = document.one("style").text, document.all("script")[-1].text
    assert f"style-src {csp_hash(style)};" in policy
    assert f"script-src {csp_hash(script)};" in policy
    assert "unsafe" not in policy
    assert "http:" not in style + policy
    assert re.findall(r"url\(.*?\)", style) == re.findall(r"url\(#[a-z-]+\)", style)
    assert re.findall(r"https?://\S+", script) == ['http://www.w3.org/2000/svg";']


def test_several_traces_have_contents():
    recordings = [record(CASES[name], source=f"{name}.json") for name in ("incident", "incident fixed", "hostile")]
    document = parsed(page(recordings))
    links = document.one("nav").all("a")
    assert [(link.attributes["href"], link.text) for link in links] == [
        ("#trace-1", "incident.json"),
        ("#trace-2", "incident fixed.json"),
        ("#trace-3", "hostile.json"),
    ]
    ids = [node.attributes["id"] for node in document.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    assert {"trace-1", "trace-2", "trace-3"} <= set(ids)
    assert not page_of(INCIDENT_TRACE).all("nav")


def test_text_has_enough_contrast():
    """WCAG 2.2 AA: 4.5 to 1 for text, in both themes."""
    colours = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\);", _asset("page.css"))
    table = {name: pair for name, *pair in colours}
    for ink, paper in (
        *(("ink", "paper"), ("ink", "panel"), ("ink", "bad-paper"), ("faint", "paper"), ("faint", "panel")),
        *(("faint", "bad-paper"), ("bad", "paper"), ("bad", "bad-paper"), ("good", "panel"), ("link", "paper")),
        ("on-bad", "bad"),
    ):
        for theme in (0, 1):
            assert contrast(table[ink][theme], table[paper][theme]) >= 4.5, (ink, paper, theme)
    for paper in ("protected", "private"):
        assert min(contrast("#fff", table[paper][theme]) for theme in (0, 1)) >= 4.5
    assert min(contrast("#16191c", table["now"][theme]) for theme in (0, 1)) >= 4.5


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    shares = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


# --- many rounds, none, and targets that show less


def test_long_trace_is_small_quick_and_says_that_it_aggregates(long_crash):
    assert len(long_crash.document.encode()) < 5_000_000
    assert long_crash.seconds < 20, "5 seconds where nothing else runs; a test must not depend on that"
    document = parsed(long_crash.document)
    assert "2004 rounds in bars of 9: a bar shows the tightest" in document.one("p", data_part="aggregated").text
    bins = bins_of(long_crash.recording.rounds)
    assert len(bins) <= MAX_BINS
    assert sum(len(each.views) for each in bins) == 2004
    whole = [node for node in document.all("div", class_="timeline") if node.attributes["data-count"] == "2004"]
    bars = whole[0].one(
        "svg", aria_label="The pool of 65536 tokens after each round; the table of all rounds has the figures"
    )
    first = [view.pool.free for view in bins[0].views]
    assert f"free {min(first)} to {max(first)}" in bars.all("g")[0].one("title").text
    close = [node for node in document.all("div", class_="timeline") if node.attributes["data-count"] == "12"]
    assert [node.attributes["data-first"] for node in close] == ["1992"]
    assert len(document.all("details", class_="fold")) == 11
    assert len(document.all("tbody", data_part="waterfall")) == 1


def test_short_trace_does_not_aggregate():
    assert not page_of(INCIDENT_TRACE).all("p", data_part="aggregated")


def test_trace_without_rounds():
    document = page_of(Trace(node_settings(), "aligned", (Submit("a", prompt(("a", 64))),)))
    assert "Nothing was violated in 0 rounds." in document.text
    assert not document.all("svg", role="img")


def test_long_batch_keeps_its_ends_and_adds_the_rest_up():
    arrivals = [Submit(f"r{number}", prompt((f"r{number}", 64))) for number in range(60)]
    document = page_of(Trace(node_settings(pool_tokens=64 * 200), "aligned", (*arrivals, Round())))
    decisions = document.one("tbody", data_part="decisions").all("tr")
    assert [row.one("bdi").text for row in decisions] == [f"r{n}" for n in (*range(20), *range(40, 60))]
    assert "20 more requests admitted whole" in document.one("ul", class_="messages").text
    rows = [row.one("th").text for row in document.one("tbody", data_part="waterfall").all("tr")]
    assert "44 more requests 5632" in rows
    assert "44 more requests 44" in rows


@pytest.mark.parametrize("seed", range(20))
def test_any_trace_gives_a_page(seed):
    trace = parse(random_trace(random.Random(seed)), "t")
    document = page_of(trace)
    assert document.one("b", data_part="verdict").text == checked_replay(trace).verdict
    assert document.one("pre").text == dumps(trace)


def test_round_without_decisions():
    document = page_of(Trace(node_settings(), "aligned", (Round(),)))
    assert document.one("tbody", data_part="decisions").text == ""


def test_target_that_shows_no_ledger():
    class Opaque(PrefillNode):
        capabilities = frozenset({"pages"})

    recording = record(INCIDENT_TRACE, target=Opaque)
    assert {view.needed for view in recording.rounds} == {None}
    document = parsed(page([recording]))
    assert "keeps no ledger that it shows" in document.text
    assert "not asked" in document.one("dl", class_="facts").text
    assert not document.all("tbody", data_part="waterfall")
