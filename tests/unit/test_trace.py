"""Traces: there and back again, and every bad document refused in one line that names the place."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvledger.trace
from kvledger.events import (
    Abort,
    Cached,
    Decode,
    Drain,
    Event,
    Finish,
    Hold,
    Release,
    Round,
    Submit,
    Transferred,
)
from kvledger.request import Output, Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.trace import (
    FIRST_SWITCHES,
    MAX_FILE_BYTES,
    Trace,
    TraceError,
    dumps,
    load,
    loads,
    parse,
    to_document,
    write,
)

REPEATABLE = settings(derandomize=True, deadline=None, database=None)
CASES = sorted(
    path
    for path in Path(__file__).parents[1].rglob("*.json")
    if b'"format": "kvledger-trace/1"' in path.read_bytes()[:40]
)
PINNED = {"worked-example", "device-hit-lock", "incident-2026-11-02"}

EXAMPLE = """\
{
  "format": "kvledger-trace/1",
  "title": "a truncated tail spent by a load-back",
  "node": {"page_size": 64, "checkpoint_align": 256, "chunked_prefill_size": 4096, "max_prefill_tokens": 16384,
           "pool_tokens": 12032, "host_tokens": null},
  "rules": "aligned",
  "events": [
    {"event": "cached", "tier": "host", "prompt": [["doc", 6144]]},
    {"event": "cached", "tier": "device", "prompt": [["own", 64]], "locked": true},
    {"event": "submit", "request": "A", "prompt": [["doc", 6144], ["a", 128]]},
    {"event": "hold", "name": "h", "tokens": 192},
    {"event": "round"},
    {"event": "release", "name": "h", "tokens": 64},
    {"event": "release", "name": "h"},
    {"event": "transferred", "request": "A"},
    {"event": "abort", "request": "A"},
    {"event": "drain"}
  ],
  "expect": {"upstream": "ok", "aligned": "oom"}
}
"""
EXAMPLE_TRACE = Trace(
    node=NodeSettings(
        page_size=64,
        checkpoint_align=256,
        chunked_prefill_size=4096,
        max_prefill_tokens=16384,
        pool_tokens=12032,
        host_tokens=None,
    ),
    rules="aligned",
    events=(
        Cached("host", Prompt((("doc", 6144),))),
        Cached("device", Prompt((("own", 64),)), locked=True),
        Submit("A", Prompt((("doc", 6144), ("a", 128)))),
        Hold("h", 192),
        Round(),
        Release("h", 64),
        Release("h"),
        Transferred("A"),
        Abort("A"),
        Drain(),
    ),
    title="a truncated tail spent by a load-back",
    expect={"upstream": "ok", "aligned": "oom"},
)
SWITCHES = {
    "checkpoint_align": 128,
    "reserve_tail": True,
    "spend_gap": True,
    "truncation_align": 64,
    "continuation_limit": 128,
    "chunk_grid": 192,
    "on_shortage": "defer",
}


def assert_one_line(text: str) -> None:
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 400


def refusal(document: object, source: str = "t.json") -> str:
    with pytest.raises(TraceError) as caught:
        parse(document, source)
    assert_one_line(str(caught.value))
    return str(caught.value)


def refusal_of_bytes(data: bytes) -> str:
    with pytest.raises(TraceError) as caught:
        loads(data, "t.json")
    assert_one_line(str(caught.value))
    return str(caught.value)


def says(text: str, message: str) -> bool:
    """Whether `text` is `message`, told of t.json; an ellipsis in `message` stands for any further words."""
    head, ellipsis, _ = message.partition("…")
    return text.startswith(f"t.json: {head}") if ellipsis else text == f"t.json: {message}"


def changed(*place: Any, to: Any) -> dict[str, Any]:
    """The example with the value at `place` set, or left out where `to` is ABSENT."""
    document: Any = json.loads(EXAMPLE)
    inner = document
    for step in place[:-1]:
        inner = inner[step]
    if to is ABSENT:
        del inner[place[-1]]
    else:
        inner[place[-1]] = to
    return document  # type: ignore[no-any-return]


ABSENT = object()


# --- there and back again ---


def test_example_is_read_and_written_as_it_stands():
    trace = loads(EXAMPLE.encode(), "t.json")
    assert trace == EXAMPLE_TRACE
    assert dumps(trace) == EXAMPLE
    assert to_document(trace) == json.loads(EXAMPLE)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case_file_is_a_trace(path):
    trace = load(path)
    assert loads(dumps(trace).encode(), "t.json") == trace
    # a fixture may be edited by hand; the pinned ones are as the program writes them
    assert dumps(trace) == path.read_text("utf-8") or path.stem not in PINNED


def test_pinned_cases_are_among_the_case_files():
    assert {path.stem for path in CASES} >= PINNED


TOKENS = st.integers(1, 300) | st.sampled_from([6144, 2**20])
TEXTS = st.text(max_size=6)
NAMES = st.text(min_size=1, max_size=6)
PROMPTS = (
    st.lists(st.tuples(TEXTS, st.just(0) | TOKENS), min_size=1, max_size=3)
    .filter(lambda segments: any(tokens for _, tokens in segments))
    .map(lambda segments: Prompt(tuple(segments)))
)
VERDICTS = st.sampled_from(["ok", "oom", "stuck", "promises-covered", "data-is-right"])


@st.composite
def nodes(draw: st.DrawFn) -> NodeSettings:
    page_size = draw(st.sampled_from([1, 16, 64, 2**28]))
    at_least_a_page = st.integers(page_size, 2**28)
    return NodeSettings(
        page_size=page_size,
        checkpoint_align=page_size * draw(st.integers(1, 4)) if page_size < 2**28 else page_size,
        chunked_prefill_size=draw(st.none() | at_least_a_page),
        max_prefill_tokens=draw(st.none() | st.integers(1, 2**28)),
        pool_tokens=draw(at_least_a_page),
        host_tokens=draw(st.none() | st.integers(0, 2**28)),
    )


def switches(page_size: int) -> st.SearchStrategy[AccountingRules]:
    pages = st.integers(1, 2**28 // page_size).map(lambda count: count * page_size)
    return st.builds(
        AccountingRules,
        checkpoint_align=st.sampled_from(["node", "page_size"]) | pages,
        reserve_tail=st.booleans(),
        spend_gap=st.booleans(),
        truncation_align=st.none() | pages,
        continuation_limit=st.none() | pages,
        chunk_grid=st.none() | pages,
        on_shortage=st.sampled_from(["force", "defer"]),
    )


@st.composite
def event_lists(draw: st.DrawFn) -> tuple[Event, ...]:
    """Events that are valid after one another."""
    events: list[Event] = []
    submitted: list[str] = []
    held: dict[str, int] = {}
    for _ in range(draw(st.integers(0, 8))):
        choices = ["cached", "submit", "time", "hold"]
        choices += ["end"] if submitted else []
        choices += ["release"] if any(held.values()) else []
        match draw(st.sampled_from(choices)):
            case "cached":
                events.append(draw(st.builds(Cached, st.sampled_from(["host", "device"]), PROMPTS, st.booleans())))
            case "submit":
                submitted.append(draw(NAMES.filter(lambda name: name not in submitted)))
                events.append(Submit(submitted[-1], draw(PROMPTS)))
            case "time":
                events.append(draw(st.builds(Round) | st.builds(Drain)))
            case "hold":
                name, tokens = draw(NAMES), draw(TOKENS)
                held[name] = held.get(name, 0) + tokens
                events.append(Hold(name, tokens))
            case "end":
                request = st.sampled_from(submitted)
                events.append(draw(st.builds(Transferred, request) | st.builds(Abort, request)))
            case "release":
                name = draw(st.sampled_from([name for name in held if held[name]]))
                part = draw(st.none() | st.integers(1, held[name]))
                held[name] -= held[name] if part is None else part
                events.append(Release(name, part))
    return tuple(events)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    node = draw(nodes())
    return Trace(
        node=node,
        rules=draw(st.sampled_from(list(PRESETS)) | switches(node.page_size)),
        events=draw(event_lists()),
        title=draw(TEXTS),
        expect=draw(st.dictionaries(st.sampled_from(list(PRESETS)), VERDICTS)),
    )


@given(traces())
@settings(REPEATABLE, max_examples=150)
def test_trace_comes_back_from_its_document_and_its_text(trace):
    text = dumps(trace)
    assert parse(to_document(trace), "t.json") == trace
    assert loads(text.encode(), "t.json") == trace
    assert json.loads(text) == to_document(trace)


@given(traces())
@settings(REPEATABLE, max_examples=50)
def test_text_is_plain_stable_and_has_one_event_a_line(trace):
    text = dumps(trace)
    assert text.isascii()
    assert text == dumps(loads(text.encode(), "t.json")) == dumps(copy.deepcopy(trace))
    assert text.endswith("}\n")
    event_lines = [line for line in text.splitlines() if line.startswith('    {"event": ')]
    assert [json.loads(line.rstrip(",")) for line in event_lines] == to_document(trace)["events"]


def test_keys_may_come_in_any_order_and_absent_ones_have_defaults():
    document = json.loads(EXAMPLE)
    for key in ("title", "expect"):
        del document[key]
    document["rules"] = {"spend_gap": True}
    document["events"][1]["locked"] = False
    backwards = dict(reversed(document.items()))
    trace = parse(backwards, "t.json")
    assert (trace.title, trace.expect) == ("", {})
    assert trace.rules == trace.accounting_rules == AccountingRules(spend_gap=True)
    assert trace.events[1] == Cached("device", Prompt((("own", 64),)), locked=False)


def test_rules_of_a_trace():
    assert EXAMPLE_TRACE.accounting_rules == PRESETS["aligned"]
    fixed = EXAMPLE_TRACE.with_rules("tail-reserved")
    assert fixed.accounting_rules.reserve_tail
    assert (fixed.rules, fixed.events, fixed.expect) == ("tail-reserved", EXAMPLE_TRACE.events, EXAMPLE_TRACE.expect)
    own = AccountingRules(checkpoint_align=128)
    assert EXAMPLE_TRACE.with_rules(own).accounting_rules is own


def test_trace_and_error_can_be_hashed_copied_and_sent_to_another_process():
    assert pickle.loads(pickle.dumps(EXAMPLE_TRACE)) == copy.deepcopy(EXAMPLE_TRACE) == EXAMPLE_TRACE
    assert hash(loads(EXAMPLE.encode(), "t.json")) == hash(EXAMPLE_TRACE)
    error = pickle.loads(pickle.dumps(TraceError("t.json: no")))
    assert isinstance(error, TraceError)
    assert str(error) == "t.json: no"


# --- documents that are refused, and where ---

SIZE = "268435456"
MALFORMED: list[tuple[object, str]] = [
    # the top level
    ([], "top level: a list of 0 is not an object"),
    (None, "top level: null is not an object"),
    ("kvledger-trace/1", 'top level: "kvledger-trace/1" is not an object'),
    ({}, 'top level: "format" is missing'),
    (changed("node", to=ABSENT), 'top level: "node" is missing'),
    (changed("rules", to=ABSENT), 'top level: "rules" is missing'),
    (changed("events", to=ABSENT), 'top level: "events" is missing'),
    (changed("evnts", to=[]), 'top level: "evnts" is not a known key'),
    (changed(7, to=[]), "top level: 7 is not a known key"),
    (changed("format", to="kvledger-trace/2"), 'format: "kvledger-trace/2" is not kvledger-trace/1'),
    (changed("format", to=1), "format: 1 is not kvledger-trace/1"),
    (changed("title", to=None), "title: null is not a string"),
    (changed("title", to="\ud800"), 'title: "\\ud800" is not text: it has half a surrogate pair'),
    # node
    (changed("node", to=[]), "node: a list of 0 is not an object"),
    (changed("node", "host_tokens", to=ABSENT), 'node: "host_tokens" is missing'),
    (changed("node", "chunked_prefill_size", to=ABSENT), 'node: "chunked_prefill_size" is missing'),
    (changed("node", "pagesize", to=64), 'node: "pagesize" is not a known key'),
    (changed("node", "page_size", to=0), "node.page_size: 0 is below the minimum 1"),
    (changed("node", "page_size", to=2**28 + 1), f"node.page_size: 268435457 is above the maximum {SIZE}"),
    (changed("node", "page_size", to=64.0), "node.page_size: 64.0 is not an integer (write 64)"),
    (changed("node", "page_size", to=63.5), "node.page_size: 63.5 is not an integer"),
    (changed("node", "page_size", to=1e300), "node.page_size: 1e+300 is not an integer"),
    (changed("node", "page_size", to=True), "node.page_size: true is not an integer"),
    (changed("node", "page_size", to=None), "node.page_size: null is not an integer"),
    (changed("node", "page_size", to="64"), 'node.page_size: "64" is not an integer'),
    (changed("node", "page_size", to=float("nan")), "node.page_size: NaN is not an integer"),
    (changed("node", "page_size", to=96), "node.page_size: 96 does not divide checkpoint_align 256"),
    (changed("node", "checkpoint_align", to=32), "node.page_size: 64 does not divide checkpoint_align 32"),
    (changed("node", "checkpoint_align", to=0), "node.checkpoint_align: 0 is below the minimum 1"),
    (
        changed("node", "chunked_prefill_size", to=63),
        "node.chunked_prefill_size: 63 is below page_size 64: no chunk could ever run",
    ),
    (changed("node", "chunked_prefill_size", to=False), "node.chunked_prefill_size: false is not an integer or null"),
    (changed("node", "max_prefill_tokens", to=0), "node.max_prefill_tokens: 0 is below the minimum 1"),
    (changed("node", "pool_tokens", to=None), "node.pool_tokens: null is not an integer"),
    (
        changed("node", "pool_tokens", to=63),
        "node.pool_tokens: 63 is below page_size 64: the pool would not have one page",
    ),
    (changed("node", "host_tokens", to=-1), "node.host_tokens: -1 is below the minimum 0"),
    (changed("node", "host_tokens", to=10**30), f"node.host_tokens: 1{'0' * 30} is above the maximum {SIZE}"),
    # rules
    (changed("rules", to="alinged"), 'rules: "alinged" is none of upstream, aligned, tail-reserved'),
    (changed("rules", to=None), "rules: null is not a string or an object"),
    (changed("rules", to={"reserve": True}), 'rules: "reserve" is not a known key'),
    (changed("rules", to={"reserve_tail": 1}), "rules.reserve_tail: 1 is not true or false"),
    (changed("rules", to={"spend_gap": None}), "rules.spend_gap: null is not true or false"),
    (changed("rules", to={"on_shortage": "wait"}), 'rules.on_shortage: "wait" is none of force, defer'),
    (changed("rules", to={"checkpoint_align": "page"}), 'rules.checkpoint_align: "page" is none of node, page_size'),
    (changed("rules", to={"checkpoint_align": None}), "rules.checkpoint_align: null is not an integer or a string"),
    (changed("rules", to={"checkpoint_align": 0}), "rules.checkpoint_align: 0 is below the minimum 1"),
    (
        changed("rules", to={"checkpoint_align": 96}),
        "rules.checkpoint_align: 96 is not a multiple of page_size 64",
    ),
    (changed("rules", to={"continuation_limit": 0}), "rules.continuation_limit: 0 is below the minimum 1"),
    (
        changed("rules", to={**SWITCHES, "chunk_grid": 32}),
        "rules.chunk_grid: 32 is not a multiple of page_size 64",
    ),
    (changed("rules", to={"truncation_align": 0}), "rules.truncation_align: 0 is below the minimum 1"),
    (
        changed("rules", to={**SWITCHES, "truncation_align": 32}),
        "rules.truncation_align: 32 is not a multiple of page_size 64",
    ),
    # events: their shape
    (changed("events", to={}), "events: an object of 0 is not a list"),
    (
        changed("events", to=[{"event": "round"}] * 1_000_001),
        "events: a list of 1000001 is longer than the maximum of entries, 1000000",
    ),
    (changed("events", 4, to="round"), 'events[4]: "round" is not an object'),
    (changed("events", 4, to={}), 'events[4]: "event" is missing'),
    (changed("events", 4, "round", to=1), 'events[4]: "round" is not a known key'),
    (changed("events", 9, "tokens", to=1), 'events[9]: "tokens" is not a known key'),
    (
        changed("events", 4, "event", to="Round"),
        'events[4].event: "Round" is none of '
        "cached, submit, round, decode, drain, transferred, finish, abort, hold, release, …",
    ),
    (changed("events", 4, "event", to=None), "events[4].event: null is none of cached, submit, …"),
    (changed("events", 0, "tier", to=ABSENT), 'events[0]: "tier" is missing'),
    (changed("events", 0, "tier", to="disk"), 'events[0].tier: "disk" is none of host, device'),
    (changed("events", 0, "tokens", to=3), 'events[0]: "tokens" is not a known key'),
    (changed("events", 1, "locked", to=1), "events[1].locked: 1 is not true or false"),
    (changed("events", 2, "prompt", to=ABSENT), 'events[2]: "prompt" is missing'),
    (changed("events", 2, "locked", to=True), 'events[2]: "locked" is not a known key'),
    (changed("events", 2, "request", to=""), 'events[2].request: "" is shorter than the minimum of characters, 1'),
    (changed("events", 2, "request", to=5), "events[2].request: 5 is not a string"),
    (
        changed("events", 2, "request", to="x" * 65_537),
        f'events[2].request: "{"x" * 55}..." (65537 characters) is longer than the maximum of characters, 65536',
    ),
    (changed("events", 3, "tokens", to=ABSENT), 'events[3]: "tokens" is missing'),
    (changed("events", 3, "tokens", to=-5), "events[3].tokens: -5 is below the minimum 1"),
    (changed("events", 3, "tokens", to=0), "events[3].tokens: 0 is below the minimum 1"),
    (changed("events", 3, "name", to=""), 'events[3].name: "" is shorter than the minimum of characters, 1'),
    (changed("events", 3, "request", to="A"), 'events[3]: "request" is not a known key'),
    (changed("events", 5, "name", to=ABSENT), 'events[5]: "name" is missing'),
    (changed("events", 5, "tokens", to=None), "events[5].tokens: null is not an integer"),
    (changed("events", 5, "tokens", to=0), "events[5].tokens: 0 is below the minimum 1"),
    (changed("events", 7, "request", to=ABSENT), 'events[7]: "request" is missing'),
    (changed("events", 8, "name", to="A"), 'events[8]: "name" is not a known key'),
    # prompts
    (changed("events", 2, "prompt", to=[]), "events[2].prompt: a list of 0 is shorter than the minimum of entries, 1"),
    (changed("events", 2, "prompt", to="doc"), 'events[2].prompt: "doc" is not a list'),
    (
        changed("events", 2, "prompt", to=[["a", 1]] * 65_537),
        "events[2].prompt: a list of 65537 is longer than the maximum of entries, 65536",
    ),
    (changed("events", 2, "prompt", 1, to={}), "events[2].prompt[1]: an object of 0 is not a list"),
    (changed("events", 2, "prompt", 1, to=("a", 1)), "events[2].prompt[1]: a Python tuple is not a list"),
    (
        changed("events", 2, "prompt", 1, to=["a"]),
        "events[2].prompt[1]: a list of 1 is shorter than the minimum of entries, 2",
    ),
    (
        changed("events", 2, "prompt", 1, to=["a", 1, 1]),
        "events[2].prompt[1]: a list of 3 is longer than the maximum of entries, 2",
    ),
    (changed("events", 2, "prompt", 1, 0, to=7), "events[2].prompt[1][0]: 7 is not a string"),
    (changed("events", 2, "prompt", 1, 1, to="7"), 'events[2].prompt[1][1]: "7" is not an integer'),
    (changed("events", 2, "prompt", 1, 1, to=-1), "events[2].prompt[1][1]: -1 is below the minimum 0"),
    (changed("events", 0, "prompt", 0, 1, to=2**28 + 1), "events[0].prompt[0][1]: 268435457 is above the maximum …"),
    (
        changed("events", 2, "prompt", to=[["a", 0], ["b", 0]]),
        f"events[2].prompt: a prompt of 0 tokens, not of 1 to {SIZE}",
    ),
    (
        changed("events", 2, "prompt", to=[["a", 2**28], ["b", 1]]),
        f"events[2].prompt: a prompt of 268435457 tokens, not of 1 to {SIZE}",
    ),
    (changed("events", 0, "prompt", 0, 0, to="a\udfff"), 'events[0].prompt[0][0]: "a\\udfff" is not text: …'),
    # events: what they say of earlier ones
    (
        changed("events", 9, to={"event": "submit", "request": "A", "prompt": [["a", 1]]}),
        'events[9].request: "A" was submitted before, by events[2]',
    ),
    (changed("events", 7, "request", to="B"), 'events[7].request: "B" is not submitted by any earlier event'),
    (changed("events", 8, "request", to="\n"), 'events[8].request: "\\n" is not submitted by any earlier event'),
    (
        changed("events", 0, to={"event": "abort", "request": "A"}),
        'events[0].request: "A" is not submitted by any earlier event',
    ),
    (changed("events", 5, "name", to="H"), 'events[5].name: "H" holds nothing here'),
    (changed("events", 3, to={"event": "round"}), 'events[5].name: "h" holds nothing here'),
    (changed("events", 5, "tokens", to=193), 'events[5].tokens: 193 is more than the 192 that "h" still holds'),
    (changed("events", 6, "tokens", to=129), 'events[6].tokens: 129 is more than the 128 that "h" still holds'),
    (changed("events", 5, "tokens", to=192), 'events[6].name: "h" holds nothing here'),
    (changed("events", 9, to={"event": "release", "name": "h"}), 'events[9].name: "h" holds nothing here'),
    (changed("events", 3, "name", to="\udc00"), 'events[3].name: "\\udc00" is not text: …'),
    (changed("events", 2, "request", to="\ud83d"), 'events[2].request: "\\ud83d" is not text: …'),
    # expect
    (changed("expect", to="ok"), 'expect: "ok" is not an object'),
    (changed("expect", to={"latest": "ok"}), 'expect: "latest" is not a known key'),
    (changed("expect", "aligned", to="crash"), 'expect.aligned: "crash" is none of ok, oom, stuck, …'),
    (changed("expect", "aligned", to=None), "expect.aligned: null is none of ok, oom, stuck, …"),
]


@pytest.mark.parametrize(("document", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_document_is_refused_at_its_place(document, message):
    assert says(refusal(document), message)


def test_first_of_several_faults_is_reported():
    document = changed("node", "page_size", to=0)
    document["events"][3]["tokens"] = -5
    assert refusal(document) == "t.json: node.page_size: 0 is below the minimum 1"
    assert refusal({**document, "format": "kvledger-trace/2", "new": 1}).startswith("t.json: format: ")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("node", "page_size"), 1),
        (("node", "page_size"), 256),
        (("node", "chunked_prefill_size"), 64),
        (("node", "chunked_prefill_size"), 65),
        (("node", "chunked_prefill_size"), None),
        (("node", "max_prefill_tokens"), 1),
        (("node", "pool_tokens"), 64),
        (("node", "pool_tokens"), 65),
        (("node", "pool_tokens"), 2**28),
        (("node", "host_tokens"), 1),
        (("rules",), {}),
        (("rules",), SWITCHES),
        (("rules",), {"checkpoint_align": 64, "truncation_align": None}),
        (("events",), []),
        (("events", 3, "tokens"), 2**28),
        (("events", 3, "name"), "h" * 65_536),
        (("events", 5, "tokens"), 191),
        (("events", 2, "prompt"), [["", 0], ["", 2**28]]),
        (("events", 2, "prompt"), [["a", 1]] * 65_536),
        (("title",), "x" * 65_536),
        (("expect",), {}),
    ],
)
def test_value_at_a_limit_is_accepted(place, value):
    document = changed(*place, to=value)
    if place[-1] == "name":
        document["events"][5]["name"] = document["events"][6]["name"] = value
    again = to_document(parse(document, "t.json"))
    assert parse(again, "t.json") == parse(document, "t.json")


def test_prompt_pages_of_the_whole_trace_have_a_limit():
    document = changed("node", "page_size", to=1)
    document["events"] = [
        {"event": "cached", "tier": "host", "prompt": [["a", 2**22]]},
        {"event": "submit", "request": "A", "prompt": [["a", 2**22]]},
    ]
    assert len(parse(document, "t.json").events) == 2
    document["events"].append({"event": "submit", "request": "B", "prompt": [["a", 1]]})
    message = "the prompts up to here have 8388609 pages, more than 8388608 in all"
    assert refusal(document) == f"t.json: events[2].prompt: {message}"
    # pages, not tokens, and a part of a page is one
    document["node"]["page_size"] = 2
    assert len(parse(document, "t.json").events) == 3
    for event in document["events"][:2]:
        event["prompt"] = [["a", 2**23]]
    assert refusal(document) == f"t.json: events[2].prompt: {message}"


def test_holds_of_one_name_add_up_and_names_are_apart():
    document = changed("events", to=[{"event": "hold", "name": name, "tokens": 2} for name in "aab"])
    document["events"] += [{"event": "release", "name": "a", "tokens": 3}, {"event": "release", "name": "a"}]
    assert parse(document, "t.json").events[3:] == (Release("a", 3), Release("a"))
    document["events"][4]["tokens"] = 2
    assert refusal(document) == 't.json: events[4].tokens: 2 is more than the 1 that "a" still holds'


def test_request_may_end_in_any_state_and_any_number_of_times():
    document = changed("events", 9, to={"event": "transferred", "request": "A"})
    assert parse(document, "t.json").events[7:] == (Transferred("A"), Abort("A"), Transferred("A"))


# --- files ---


def file_refusal(path: str | Path) -> str:
    with pytest.raises(TraceError) as caught:
        load(path)
    assert_one_line(str(caught.value))
    return str(caught.value)


def test_file_is_loaded_and_named_in_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("incident.json").write_text(EXAMPLE)
    assert load("incident.json") == load(tmp_path / "incident.json") == EXAMPLE_TRACE
    Path("incident.json").write_text(EXAMPLE.replace('"tokens": 192', '"tokens": -5'))
    assert file_refusal("incident.json") == "incident.json: events[3].tokens: -5 is below the minimum 1"


def test_file_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("file").write_text(EXAMPLE)
    assert file_refusal("gone.json") == "gone.json: No such file or directory"
    assert file_refusal(".") == ".: Is a directory"
    assert file_refusal("file/x") == "file/x: Not a directory"
    assert file_refusal("loop").startswith("loop: Too many levels")
    assert file_refusal("a\0b") == "a\\u0000b: not a file name"
    assert file_refusal("\ud800") == "\\ud800: not a file name"
    long = file_refusal("d/" + "x\n\u202e" * 3_000)
    assert long.startswith("...")
    assert long.endswith("x\\n\\u202e: File name too long")


def test_file_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert file_refusal("secret.json") == "secret.json: Permission denied"


def test_file_may_not_be_endless(tmp_path, monkeypatch):
    assert MAX_FILE_BYTES == 2**28
    monkeypatch.setattr(kvledger.trace, "MAX_FILE_BYTES", len(EXAMPLE))
    path = tmp_path / "t.json"
    path.write_text(EXAMPLE)
    assert load(path) == EXAMPLE_TRACE
    path.write_text(EXAMPLE + " ")
    assert file_refusal(path).endswith(f"t.json: longer than {len(EXAMPLE)} bytes")
    assert file_refusal("/dev/zero") == f"/dev/zero: longer than {len(EXAMPLE)} bytes"


def with_text(old: str, new: str) -> bytes:
    assert EXAMPLE.count(old) == 1
    return EXAMPLE.replace(old, new).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\xef\xbb\xbf \n\t", "the file is empty"),
        (b"\x00\x01\x02", "line 1 column 1: not JSON: Expecting value"),
        (b"\x89PNG\r\n", "byte 0: not UTF-8 text"),
        (b'{"title": "\xff"}', "byte 11: not UTF-8 text"),
        (EXAMPLE.encode("utf-16"), "byte 0: not UTF-8 text"),
        (b"not a trace", "line 1 column 1: not JSON: Expecting value"),
        (b"[]", "top level: a list of 0 is not an object"),
        (b"{} {}", "line 1 column 4: not JSON: Extra data"),
        (EXAMPLE.encode()[:300], "line 8 column 6: not JSON: Unterminated string starting at"),
        (with_text('"A", "prompt"', '"A\n", "prompt"'), "line 10 column 38: not JSON: Invalid control character at"),
        (
            with_text('"rules"', "'rules'"),
            "line 6 column 3: not JSON: Expecting property name enclosed in double quotes",
        ),
        (
            with_text('"host_tokens": null', '"host_tokens": null, "page_size": 64'),
            'node: the key "page_size" is there twice',
        ),
        (
            with_text('"rules": "aligned"', '"rules": 1, "rules": "aligned"'),
            'top level: the key "rules" is there twice',
        ),
        (with_text("192}", '192, "na\\u006de": "h"}'), 'events[3]: the key "name" is there twice'),
        (with_text("192", "NaN"), "events[3].tokens: NaN is not an integer"),
        (with_text("192", "-Infinity"), "events[3].tokens: -Infinity is not an integer"),
        (with_text("192", "1e999"), "events[3].tokens: Infinity is not an integer"),
        (with_text("192", "192.0"), "events[3].tokens: 192.0 is not an integer (write 192)"),
        (with_text("192", "1.92e2"), "events[3].tokens: 192.0 is not an integer (write 192)"),
        (with_text("192", "9" * 5_000), "events[3].tokens: an integer of 5000 digits is not a size"),
        (with_text("192", "-" + "9" * 5_000), "events[3].tokens: an integer of 5000 digits is not a size"),
        (
            with_text("192", "9" * 640),
            "events[3].tokens: an integer of about 641 digits is above the maximum 268435456",
        ),
        (with_text("192", "0192"), "line 11 column 47: not JSON: Expecting ',' delimiter"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * 500 + b"]" * 500, "top level: a list of 1 is not an object"),
        (with_text("192", "[" * 500 + "]" * 500), "events[3].tokens: a list of 1 is not an integer"),
    ],
    ids=range(28),
)
def test_text_that_is_no_trace(data, message):
    assert says(refusal_of_bytes(data), message)


def test_byte_order_mark_is_no_fault():
    assert loads(b"\xef\xbb\xbf" + EXAMPLE.encode(), "t.json") == EXAMPLE_TRACE


def test_file_cut_short_is_refused_wherever_it_is_cut():
    whole = EXAMPLE.rstrip().encode()
    for length in range(1, len(whole)):
        assert refusal_of_bytes(whole[:length]).startswith("t.json: line ")


@given(st.binary(max_size=40), st.integers(0, len(EXAMPLE)), st.integers(0, 40))
@settings(REPEATABLE, max_examples=500)
def test_damaged_text_is_a_trace_or_one_line(junk, position, overwritten):
    data = EXAMPLE.encode()
    try:
        loads(data[:position] + junk + data[position + overwritten :], "t.json")
    except TraceError as error:
        assert_one_line(str(error))


# --- hostile names and values never break the line ---

NASTY = [
    "\n",
    "\r\n\x1b[31m",
    "\u202etxt.",
    "\ud800",
    "\u2028",
    "\x7f",
    '"',
    "\\",
    "x" * 10_000,
    "\U0001f600" * 99,
    "\0",
]
HOSTILE = st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=()), min_size=1, max_size=90)


def hostile_documents(text: str) -> list[object]:
    """The example, wrong in each of many ways, `text` being what is wrong with it or close by."""
    submit = {"event": "submit", "request": text, "prompt": [[text, 1]]}
    zero = {**submit, "prompt": [[text, 0]]}
    one = {"event": "hold", "name": text, "tokens": 1}
    return [
        text,
        {text: text},
        changed(f"{text} ", to=text),
        changed("format", to=text),
        changed("node", to=text),
        changed("node", f"{text} ", to=1),
        changed("node", "page_size", to=text),
        changed("rules", to=f"{text} "),
        changed("rules", to={f"{text} ": text}),
        changed("rules", to={"checkpoint_align": f"{text} "}),
        changed("events", to=text),
        changed("events", 3, to=text),
        changed("events", 3, f"{text} ", to=text),
        changed("events", 3, "event", to=f"{text} "),
        changed("events", 3, "tokens", to=text),
        changed("events", 3, "name", to=[text]),
        changed("events", 0, "tier", to=f"{text} "),
        changed("events", 0, "prompt", to=text),
        changed("events", 0, "prompt", to=[text]),
        changed("events", 0, "prompt", to=[[text, text]]),
        changed("events", to=[submit, submit]),
        changed("events", to=[zero]),
        changed("events", to=[{"event": "abort", "request": text}]),
        changed("events", to=[{"event": "release", "name": text}]),
        changed("events", to=[one, {"event": "release", "name": text, "tokens": 2}]),
        changed("expect", to={f"{text} ": "ok"}),
        changed("expect", to={"aligned": f"{text} "}),
    ]


@given(HOSTILE, HOSTILE)
@settings(REPEATABLE, max_examples=150)
def test_hostile_text_anywhere_is_refused_in_one_line(text, source):
    for document in hostile_documents(text):
        refusal(document, source)


@given(HOSTILE)
@settings(REPEATABLE, max_examples=150)
def test_hostile_name_that_is_text_comes_back_as_it_was(name):
    submit = {"event": "submit", "request": name, "prompt": [[name, 1]]}
    holds = [{"event": "hold", "name": name, "tokens": 1}, {"event": "release", "name": name}]
    document = {**changed("events", to=[submit, *holds, {"event": "abort", "request": name}]), "title": name}
    try:
        name.encode()
    except UnicodeEncodeError:
        assert refusal(document).endswith("is not text: it has half a surrogate pair")
    else:
        trace = parse(document, "t.json")
        assert to_document(trace) == document
        assert loads(dumps(trace).encode("ascii"), "t.json") == trace


def test_long_name_is_cut_and_its_length_told():
    message = refusal(changed("events", 7, "request", to="r" * 10_000), "d/" * 200 + "t.json")
    shown = f'"{"r" * 55}..." (10000 characters)'
    assert message == f"...{'/d' * 45}/t.json: events[7].request: {shown} is not submitted by any earlier event"


# --- writing ---


def test_written_file_is_whole_and_alone(tmp_path):
    path = tmp_path / "fixture.json"
    write(EXAMPLE_TRACE, path)
    assert path.read_bytes() == EXAMPLE.encode()
    write(EXAMPLE_TRACE.with_rules("upstream"), str(path))
    assert load(path).rules == "upstream"
    assert os.listdir(tmp_path) == ["fixture.json"]
    (tmp_path / "other").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "fixture.json"
    write(EXAMPLE_TRACE, path)

    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        write(EXAMPLE_TRACE.with_rules("upstream"), path)
    assert path.read_bytes() == EXAMPLE.encode()
    assert os.listdir(tmp_path) == ["fixture.json"]


def test_file_is_never_seen_half_written(tmp_path, monkeypatch):
    """Until the rename the old file is there, and what is renamed is complete and in the same folder."""
    path = tmp_path / "fixture.json"
    write(EXAMPLE_TRACE, path)
    newer = EXAMPLE_TRACE.with_rules("upstream")
    rename = os.replace
    seen = []

    def watch(source: Path, target: Path) -> None:
        seen.append((path.read_text(), Path(source).read_text(), Path(source).parent))
        rename(source, target)

    monkeypatch.setattr(os, "replace", watch)
    write(newer, path)
    assert seen == [(EXAMPLE, dumps(newer), tmp_path)]


def test_write_into_a_missing_folder_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write(EXAMPLE_TRACE, tmp_path / "gone" / "t.json")


# --- decode beside prefill


def unified(**node: Any) -> dict[str, Any]:
    """The example on a node that decodes, with outputs on its first request."""
    document: Any = json.loads(EXAMPLE)
    document["node"] |= {"mode": "unified"} | node
    document["events"] += [{"event": "decode"}, {"event": "finish", "request": "A"}]
    document["events"][2] |= {"max_new_tokens": 16, "ignore_eos": True}
    return document  # type: ignore[no-any-return]


def test_unified_trace_is_read_and_written_as_it_was():
    trace = parse(unified(schedule_policy="priority", mixed_chunk=True), "t.json")
    assert trace.node.mode == "unified"
    assert (trace.node.schedule_policy, trace.node.mixed_chunk) == ("priority", True)
    assert isinstance(trace.events[2], Submit)
    assert trace.events[2].output == Output(max_new_tokens=16, ignore_eos=True)
    assert trace.events[-2:] == (Decode(), Finish("A"))
    assert loads(dumps(trace).encode(), "t.json") == trace


def test_what_is_as_usual_is_not_written():
    document = to_document(parse(json.loads(EXAMPLE), "t.json"))
    assert not {"mode", "schedule_policy", "mixed_chunk", "state_slots"} & document["node"].keys()
    assert all(
        event.keys() <= {"event", "request", "prompt"} for event in document["events"] if event["event"] == "submit"
    )


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (changed("node", "mode", to="decode"), 'node.mode: "decode" is none of prefill, unified'),
        (changed("node", "schedule_policy", to="lifo"), 'node.schedule_policy: "lifo" is none of …'),
        (changed("node", "mixed_chunk", to=True), "node.mixed_chunk: a prefill node decodes nothing …"),
        (changed("events", 4, to={"event": "decode"}), 'events[4].event: "decode" needs "mode": "unified": …'),
        (changed("events", 7, "event", to="finish"), 'events[7].event: "finish" needs "mode": "unified": …'),
        (changed("events", 2, "max_new_tokens", to=2), 'events[2].max_new_tokens: 2 needs "mode": "unified": …'),
        (changed("events", 2, "max_new_tokens", to=0), "events[2].max_new_tokens: 0 is below the minimum 1"),
        (changed("events", 2, "ignore_eos", to=True), 'events[2].ignore_eos: true needs "mode": "unified": …'),
        (changed("events", 2, "priority", to=3), 'events[2].priority: 3 orders nothing under schedule_policy "fcfs"'),
    ],
)
def test_what_only_decode_brings_needs_a_node_that_decodes(document, message):
    assert says(refusal(document), message)


SLOTS = {"max_running_requests": 8, "pp_size": 2}


def test_a_decoding_nodes_own_settings_are_read_and_written_as_they_were():
    own = {"preemption_threshold": 0, "new_token_ratio_percent": 30, "prefix_cache": False, **SLOTS}
    trace = parse(unified(schedule_policy="priority", **own), "t.json")
    assert {name: getattr(trace.node, name) for name in own} == own
    assert trace.node.request_slots == 4
    assert loads(dumps(trace).encode(), "t.json") == trace


@pytest.mark.parametrize(("slots", "stages", "share"), [(8, 2, 4), (5, 3, 1), (2, 4, 1), (1, 1, 1), (None, 1, None)])
def test_a_stages_share_of_the_request_slots_is_rounded_down_but_at_least_one(slots, stages, share):
    """As the schema says: a share of none would never run."""
    trace = parse(unified(max_running_requests=slots, pp_size=stages), "t.json")
    assert trace.node.request_slots == share


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (changed("node", "pp_size", to=2), "node.pp_size: 2 stages share nothing without max_running_requests"),
        (changed("node", "pp_size", to=0), "node.pp_size: 0 is below the minimum 1"),
        (unified(preemption_threshold=0), 'node.preemption_threshold: 0 needs "mode": "unified" and …'),
        (unified(new_token_ratio_percent=101), "node.new_token_ratio_percent: 101 is above the maximum 100"),
        (unified(new_token_ratio_percent=0.7), "node.new_token_ratio_percent: 0.7 is not an integer"),
        (changed("node", "new_token_ratio_percent", to=30), 'node.new_token_ratio_percent: 30 needs "mode": …'),
        (unified(prefix_cache=0), "node.prefix_cache: 0 is not true or false"),
    ],
)
def test_a_setting_that_would_say_nothing_is_refused(document, message):
    assert says(refusal(document), message)


def test_a_trace_older_than_a_switch_keeps_its_text() -> None:
    plain = EXAMPLE_TRACE.with_rules(AccountingRules(reserve_tail=True))
    assert set(to_document(plain)["rules"]) == FIRST_SWITCHES
    limited = plain.with_rules(AccountingRules(continuation_limit=64))
    assert set(to_document(limited)["rules"]) == FIRST_SWITCHES | {"continuation_limit"}
    assert parse(to_document(limited), "t.json") == limited
