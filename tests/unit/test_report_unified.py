"""What reports say of a run with decode in it: who took tokens, who went back, who was given up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvledger.diagnose import diagnose
from kvledger.report.explained import explanation_lines
from kvledger.report.html import page
from kvledger.report.lanes import lanes_of
from kvledger.report.perfetto import trace_events
from kvledger.report.recording import Recording, record
from kvledger.report.text import replay_lines
from kvledger.trace import Trace, load, parse

REGRESSIONS = Path(__file__).parents[1] / "regressions"
NODE = {
    "page_size": 1,
    "checkpoint_align": 1,
    "chunked_prefill_size": 4,
    "max_prefill_tokens": None,
    "pool_tokens": 24,
    "host_tokens": 0,
    "mode": "unified",
    "mixed_chunk": True,
    "new_token_ratio_percent": 1,
}


def trace_of(*events: dict[str, object]) -> Trace:
    document = {"format": "kvledger-trace/1", "node": NODE, "rules": "tail-reserved", "events": list(events)}
    return parse(document, "t.json")


def submit(request: str, tokens: int, output: int) -> dict[str, object]:
    return {"event": "submit", "request": request, "prompt": [[request, tokens]], "max_new_tokens": output}


SENT_BACK = trace_of(
    submit("A", 1, 18), submit("C", 1, 18), {"event": "round"}, submit("B", 12, 2), {"event": "decode"},
    {"event": "drain"},
)  # fmt: skip
GIVEN_UP = trace_of(
    submit("A", 1, 18), {"event": "round"}, {"event": "hold", "name": "x", "tokens": 21}, {"event": "drain"}
)
ENDED_EARLY = trace_of(submit("A", 1, 18), {"event": "round"}, {"event": "round"}, {"event": "finish", "request": "A"})


@pytest.fixture(scope="module")
def sent_back() -> Recording:
    return record(SENT_BACK)


def text(trace: Trace) -> str:
    return "\n".join(replay_lines(record(trace).replayed, all_rounds=True))


def test_the_text_tells_who_decoded_who_went_back_and_who_was_done(sent_back: Recording) -> None:
    lines = "\n".join(replay_lines(sent_back.replayed, all_rounds=True))
    assert "decode    decoded A, C" in lines
    assert "sent back C" in lines
    assert "finished A" in lines
    assert "mode unified, mixed chunk true, new token ratio percent 1" in lines.replace("\n       ", " ")
    assert "C  refused    NO_TOKEN  needs 20" in lines, "prompt, output and page"


def test_what_is_left_out_is_counted(sent_back: Recording) -> None:
    lines = " ".join("\n".join(replay_lines(sent_back.replayed)).split())
    assert "tokens decoded, 0 requests sent back" in lines


def test_the_text_says_why_a_request_was_given_up() -> None:
    words = " ".join(text(GIVEN_UP).split())  # on one line, wherever it was wrapped
    assert "gave up A: alone on the node but for x, who holds slots from outside, and the pool has no page" in words


def test_lanes_follow_a_request_back_to_the_queue_and_to_its_end(sent_back: Recording) -> None:
    lanes = {lane.request: lane for lane in lanes_of(sent_back)}
    kinds = [stretch.kind for stretch in lanes["C"].stretches]
    assert kinds[:3] == ["waiting", "decoding", "waiting"]
    assert kinds[-1] == "decoding"
    assert [lane.ended and lane.ended[1] for lane in lanes.values()] == ["finished", "finished", "finished"]
    (given_up,) = lanes_of(record(GIVEN_UP))
    assert given_up.ended is not None
    assert given_up.ended[1] == "aborted"
    (early,) = lanes_of(record(ENDED_EARLY))
    assert early.ended is not None
    assert early.ended[1] == "finished"


def test_the_page_and_the_trace_for_perfetto_are_drawn(sent_back: Recording) -> None:
    html = page([sent_back, record(GIVEN_UP)])
    assert "Sent back: " in html
    assert "Gave up " in html
    events = json.loads("".join(trace_events(sent_back)))["traceEvents"]
    assert {"decoding", "finished"} <= {event["name"] for event in events}


def test_an_explanation_names_decode_and_the_rule_that_helps() -> None:
    (path,) = (p for p in REGRESSIONS.glob("tail-spared-*.json") if '"decode"' not in p.read_text("utf-8"))
    lines = explanation_lines(diagnose(load(path)))
    assert any(line.startswith("spent by") and "decode 1" in line for line in lines)
    assert any(line.startswith("avoided by") and "decode_yields true" in line for line in lines)
