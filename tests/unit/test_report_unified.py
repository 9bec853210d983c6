"""What reports say of a run with decode in it: who took tokens, who went back, who was given up."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest

from kvledger.diagnose import diagnose
from kvledger.events import Decode
from kvledger.ledger import Due, Promise
from kvledger.report.explained import explanation_lines, round_notes
from kvledger.report.html import page
from kvledger.report.lanes import lanes_of
from kvledger.report.painted import ASCII, plain_text
from kvledger.report.perfetto import trace_events
from kvledger.report.plain import COLUMNS, width
from kvledger.report.recording import Recording, record
from kvledger.report.side_by_side import Side, beside_lines, first_difference, side_by_side_lines
from kvledger.report.text import heading_lines, replay_lines
from kvledger.report.waterfall import rows_of
from kvledger.report.waterfall_text import waterfall_lines
from kvledger.rules import PRESETS
from kvledger.trace import Trace, load, parse
from kvledger.views import in_whole_tokens

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


PRIORITY = {
    "schedule_policy": "priority",
    "max_running_requests": 1,
    "preemption_threshold": 0,
    "mixed_chunk": False,
    "chunked_prefill_size": 32,
    "pool_tokens": 40,
    "new_token_ratio_percent": 5,
}


def trace_of(
    *events: Mapping[str, object], node: Mapping[str, object] | None = None, rules: str = "tail-reserved"
) -> Trace:
    sizes = {**NODE, **(node or {})}
    return parse({"format": "kvledger-trace/1", "node": sizes, "rules": rules, "events": list(events)}, "t.json")


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


@pytest.fixture(scope="module")
def preempting() -> Recording:
    first, later = submit("LO", 10, 20), submit("HI", 10, 5) | {"priority": 5, "ignore_eos": True}
    return record(
        trace_of(first, {"event": "round"}, {"event": "round"}, later, {"event": "round"}, node=dict(PRIORITY))
    )


def waterfall(recording: Recording, *, all_rounds: bool = True) -> str:
    return plain_text(waterfall_lines(recording, ASCII, (), all_rounds=all_rounds))


def against(trace: Trace, ours: str, theirs: str) -> list[str]:
    runs = [record(trace, PRESETS[name]).replayed for name in (ours, theirs)]
    return plain_text(side_by_side_lines(runs[0], runs[1], ASCII, all_rounds=True)).splitlines()


def text(trace: Trace) -> str:
    return "\n".join(replay_lines(record(trace).replayed, all_rounds=True))


def test_the_text_tells_who_decoded_who_went_back_and_who_was_done(sent_back: Recording) -> None:
    lines = "\n".join(replay_lines(sent_back.replayed, all_rounds=True))
    assert "running   decoded A, C" in lines
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
    assert given_up.ended[1] == "given up"
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


# --- sums


def random_trace(rng: random.Random) -> Trace:
    """A small node that is often short: requests come, decode, are ended, make way and are sent back."""
    page_size = rng.choice([1, 2, 4])
    node: dict[str, object] = {
        "page_size": page_size,
        "checkpoint_align": page_size,
        "chunked_prefill_size": rng.choice([8, 16, None]),
        "pool_tokens": rng.choice([32, 48]),
        "mixed_chunk": rng.random() < 0.5,
        "new_token_ratio_percent": rng.choice([1, 7, 33, 70]),
        "prefix_cache": rng.random() < 0.8,
        **rng.choice([{}, {"schedule_policy": "priority", "preemption_threshold": 0, "max_running_requests": 2}]),
    }
    events: list[dict[str, object]] = []
    for number in range(rng.randint(2, 6)):
        one = submit(f"r{number}", rng.randint(1, 12), rng.randint(1, 12))
        ranked = {"priority": rng.randint(0, 3)} if "preemption_threshold" in node else {}
        events.append(one | ranked | {"ignore_eos": rng.random() < 0.3})
        events += [{"event": rng.choice(["round", "round", "decode"])}] * rng.randint(0, 3)
        if rng.random() < 0.2:
            events.append({"event": rng.choice(["finish", "abort"]), "request": f"r{rng.randint(0, number)}"})
    return trace_of(*events, {"event": "drain"}, node=node, rules=rng.choice(["tail-reserved", "aligned"]))


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    rng = random.Random(20261130)
    kept = [record(load(path)) for path in sorted(REGRESSIONS.glob("*.json"))]
    return [*kept, *(record(random_trace(rng)) for _ in range(80))]


def test_promises_are_whole_tokens_and_add_up_to_what_the_ledger_says(recordings: list[Recording]) -> None:
    fractions = 0
    for each in recordings:
        for told in each.outcome.document()["rounds"]:
            tokens = [promise["tokens"] for promise in told["promises"]]
            now = sum(promise["tokens"] for promise in told["promises"] if promise["due"] == "now")
            assert all(type(count) is int and count >= 0 for count in tokens)
            assert told["baseline"] - now == told["cur_rem_tokens"]
            assert told["baseline"] - sum(tokens) == told["rem_total_tokens"]
            fractions += sum(promise["kind"] == "running" for promise in told["promises"]) > 1
    assert fractions > 50, "rounds in which several fractions were to be added up"


def test_every_row_of_a_waterfall_takes_what_it_says(recordings: list[Recording]) -> None:
    gave = 0
    for each in recordings:
        for view in each.rounds:
            first, *rows = rows_of(view, each.page_size)
            level = first.level
            for row in rows:
                level -= row.tokens
                assert row.level == level, f"{row} in {view.record}"
                assert (row.tokens < 0) == (row.kind == "given"), row
                assert row.kind != "given" or view.record.preempted, row
                gave += row.kind == "given"
    assert gave > 3, "rounds in which somebody gave slots back"


@pytest.mark.parametrize(
    ("shares", "whole"),
    [
        (["8/100"] * 3, [1, 0, 0]),
        (["7/10", "6/10", "7/10"], [1, 0, 1]),
        (["1/3", "1/2", "2/3"], [0, 1, 1]),
        (["5/2", "3", "1/100"], [3, 3, 0]),
        (["4", "2"], [4, 2]),
        ([], []),
    ],
)
def test_the_largest_fractions_are_rounded_up(shares: list[str], whole: list[int]) -> None:
    promises = [Promise(str(at), "running", cast(int, Fraction(share)), Due.LATER) for at, share in enumerate(shares)]
    there = in_whole_tokens([Promise("a", "chunk", 5, Due.NOW), *promises])
    assert [each.tokens for each in there] == [5, *whole]
    assert [each.request for each in there[1:]] == [each.request for each in promises]


def test_a_share_of_less_than_a_token_is_still_told() -> None:
    lines = text(trace_of(submit("A", 1, 9), submit("B", 1, 9), {"event": "round"}, {"event": "decode"}))
    assert "promised  A 1 later; B 0 later" in lines
    assert "exact fractions" in lines


def test_who_gives_back_stands_in_the_waterfall(preempting: Recording) -> None:
    shown = waterfall(preempting)
    assert re.search(r"LO: preempted, gives back 11 +\+11 +40", shown)
    assert "taken by no decision" not in shown
    assert not re.search(r" --\d", shown)
    html = page([preempting])
    assert '"preempted, gives back 11",-11,40,"+11"' in html
    node = PRIORITY | {"max_running_requests": None, "pool_tokens": 32}
    crowd = [submit(name, 4, 9) | {"ignore_eos": True} for name in "AB"]
    important = submit("HI", 16, 4) | {"priority": 1}
    two = trace_of(*crowd, {"event": "round"}, important, {"event": "round"}, node=node)
    assert "2 preempted requests give back" in waterfall(record(two))


# --- too late


TOO_LATE_NODE = {"chunked_prefill_size": 2, "pool_tokens": 16, "new_token_ratio_percent": 10}
TOO_LATE = trace_of(submit("A", 2, 10), submit("B", 9, 1), {"event": "drain"}, node=TOO_LATE_NODE, rules="aligned")


def test_beside_decode_nothing_is_called_too_late_and_the_reports_say_why() -> None:
    found = diagnose(TOO_LATE)
    assert (found.verdict, found.broken_promise and found.broken_promise.request) == ("oom", "B")
    assert found.document()["point_of_no_return"] is None
    assert found.searched.continuations == 0
    words = " ".join(" ".join(explanation_lines(found)).split())
    assert "too late not said: beside decode a running request may still be sent back" in words
    assert not [note for _, note in round_notes(found) if "no return" in note]
    html = page([record(TOO_LATE)])
    assert "Since when it was too late is not said: beside decode a running request" in html
    assert "too late from here" not in html


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_what_is_not_called_too_late_could_be_saved(end: str) -> None:
    """Refusing everybody would not help any more, and the end of a running request does."""
    rounds = [{"event": "round"}] * 7
    saved = trace_of(
        submit("A", 2, 10), submit("B", 9, 1), *rounds, {"event": end, "request": "A"}, {"event": "drain"},
        node=TOO_LATE_NODE, rules="aligned",
    )  # fmt: skip
    assert record(saved).outcome.failure is None


def test_a_unified_node_on_which_nobody_decodes_is_searched() -> None:
    worked = load(REGRESSIONS / "worked-example.json")
    unified = replace(worked, node=replace(worked.node, mode="unified"), rules="aligned")
    found, before = diagnose(unified), diagnose(worked)
    assert (found.unsearched, before.unsearched) == (None, None)
    assert min(found.searched.continuations, before.searched.continuations) > 0
    with_decode = replace(unified, events=(*unified.events, Decode()))
    assert diagnose(with_decode).unsearched is not None


# --- who


def test_an_explanation_tells_what_became_of_running_requests(sent_back: Recording, preempting: Recording) -> None:
    for each, words in ((sent_back, ("decoded A, C", "sent back C", "finished A")), (preempting, ("preempted LO",))):
        shown = waterfall(each)
        assert [said for said in words if said not in shown] == []
    given_up = " ".join(waterfall(record(GIVEN_UP)).split())
    assert "gave up A: alone on the node but for x, who holds slots from outside, and the pool has no page" in given_up


def test_preempted_alone_is_not_called_decode(preempting: Recording) -> None:
    lines = "\n".join(replay_lines(preempting.replayed, all_rounds=True))
    assert "  running   preempted LO\n" in lines
    assert "decode  " not in lines


def test_a_round_without_a_batch_says_what_its_tokens_now_were_for(sent_back: Recording) -> None:
    note = "due now only if there had been a batch"
    lines, shown = "\n".join(replay_lines(sent_back.replayed, all_rounds=True)), waterfall(sent_back)
    told = [view.record for view in sent_back.rounds if any(p.kind == "decode" for p in view.record.promises)]
    idle = sum(not each.joined for each in told)
    assert 0 < idle < len(told)
    assert lines.count(note) == shown.count(note) == idle
    assert note.capitalize() in page([sent_back])


def test_against_other_rules_marks_the_first_difference_though_it_is_no_decision() -> None:
    lines = against(TOO_LATE, "aligned", "tail-reserved")
    marked = [" ".join(line.split()) for line in lines if line.startswith(">>")]
    assert marked == [">>decoded A | >>sent back A", ">> the first that differs, in round 7: decoded: A against nobody"]
    assert max(map(width, lines)) <= COLUMNS
    other = record(TOO_LATE, PRESETS["tail-reserved"])
    rounds = zip(record(TOO_LATE).rounds, other.rounds, strict=False)
    first = next(number for number, pair in enumerate(rounds, 1) if len({view.record.decoded for view in pair}) > 1)
    assert first == 7
    later = next(n for n, pair in enumerate(zip(record(TOO_LATE).rounds, other.rounds, strict=False), 1)
                 if len({view.record.joined and view.record.joined[0].end for view in pair}) > 1)  # fmt: skip
    assert later > first, "the first decision that differs comes after it"


def test_against_other_rules_marks_the_round_that_fails_on_one_side_alone() -> None:
    node = {"chunked_prefill_size": 2, "pool_tokens": 12, "new_token_ratio_percent": 1}
    trace = trace_of(submit("A", 1, 7), submit("B", 7, 1), {"event": "drain"}, node=node)
    runs = record(trace, replace(PRESETS["aligned"], decode_yields=False)), record(trace)
    lines = plain_text(side_by_side_lines(runs[0].replayed, runs[1].replayed, ASCII, all_rounds=True)).splitlines()
    assert len([line for line in lines if line.startswith(">>")]) == 2


def test_a_round_that_only_one_of_two_runs_is_marked_where_nothing_was_decided() -> None:
    longer = record(ENDED_EARLY).outcome.rounds
    assert not longer[1].decisions
    shorter = longer[:1]
    lines = plain_text(
        beside_lines(Side("longer", longer), Side("shorter", shorter), first_difference(longer, shorter), ASCII)
    )
    assert [line.split()[0] for line in lines.splitlines() if line.startswith(">>")] == [">>decoded"]


def test_who_only_one_of_two_lets_in_is_said() -> None:
    node = {"chunked_prefill_size": 8, "mixed_chunk": False}
    trace = trace_of(submit("A", 12, 2), {"event": "drain"}, node=node)
    runs = record(trace), record(trace, replace(PRESETS["tail-reserved"], truncation_align=16))
    lines = plain_text(side_by_side_lines(runs[0].replayed, runs[1].replayed, ASCII, all_rounds=True)).splitlines()
    assert "A is rejected at submit under own switches alone" in lines


def test_retracted_are_those_that_decode_had_no_pages_for(recordings: list[Recording], preempting: Recording) -> None:
    (told,) = (each for each in preempting.outcome.document()["rounds"] if "preempted" in each)
    assert told["preempted"] == ["LO"]
    assert "retracted" not in told
    both = [(set(r.preempted), set(r.retracted)) for each in recordings for r in each.outcome.rounds]
    assert all(preempted.isdisjoint(retracted) for preempted, retracted in both)
    assert any(preempted for preempted, _ in both)
    assert any(retracted for _, retracted in both)


# --- what was asked for


def test_the_experiment_says_what_node_and_requests_are_like(preempting: Recording) -> None:
    html = page([preempting])
    for said in (
        "mode unified, schedule policy priority",
        "max running requests 1, preemption threshold 0, new token ratio percent 5",
        "10 (max_new_tokens 20)",
        "10 (max_new_tokens 5, ignore_eos, priority 5)",
    ):
        assert said in html
    lines = "\n".join(replay_lines(preempting.replayed))
    assert "submitted: LO 10 (max_new_tokens 20)" in lines
    assert "meanwhile: submitted HI 10 (max_new_tokens 5, ignore_eos, priority 5)" in lines
    assert "submitted: LO 10 (max_new_tokens 20)" in "\n".join(heading_lines(preempting.replayed))


def test_many_requests_are_summed_up_with_what_they_ask_for() -> None:
    many = [submit(f"r{number}", 2, number + 1) | {"priority": number % 2} for number in range(6)]
    lines = text(trace_of(*many, node={"schedule_policy": "priority"}))
    assert "6 of them, 12 tokens in all, max_new_tokens 21 in all, 3 with a priority" in lines


def test_perfetto_marks_who_lost_its_slots_and_why(sent_back: Recording, preempting: Recording) -> None:
    def marks(recording: Recording, name: str) -> list[dict[str, Any]]:
        events = json.loads("".join(trace_events(recording)))["traceEvents"]
        return [event for event in events if event["name"] == name and event["ph"] == "i"]

    assert [each["args"]["request"] for each in marks(sent_back, "sent back")] == [
        rid for r in sent_back.outcome.rounds for rid in r.retracted
    ]
    (preempted,) = marks(preempting, "preempted")
    assert (preempted["args"], preempted["ts"]) == ({"request": "LO", "round": 3}, 2100)
    (given_up,) = marks(record(GIVEN_UP), "given up")
    assert given_up["args"]["reason"].startswith("alone on the node but for x")
    asked = marks(preempting, "submitted")[1]["args"]
    assert (asked["max_new_tokens"], asked["ignore_eos"], asked["priority"]) == (5, True, 5)


def test_lanes_show_setbacks(preempting: Recording) -> None:
    html = page([preempting, record(GIVEN_UP)])
    assert "preempted in round 3" in html
    assert "given up in round " in html


# --- why


def test_a_simulated_refusal_is_not_explained_by_a_need() -> None:
    ends = {"ignore_eos": True}
    trace = trace_of(
        submit("A", 5, 20) | ends, {"event": "round"}, submit("B", 5, 20) | ends, {"event": "round"},
        node={"prefix_cache": False, "pool_tokens": 40, "chunked_prefill_size": 32},
    )  # fmt: skip
    why = "not all could come to their ends"
    lines = text(trace)
    assert f"B  refused    NO_TOKEN  {why}" in lines
    assert "needs" not in lines
    assert f"refused: B, NO_TOKEN, {why}" in waterfall(record(trace))
    assert why in page([record(trace)])


def test_a_chunk_that_was_kept_short_says_for_whom() -> None:
    recording = record(load(REGRESSIONS / "shortest-prefill-first-without-alignment.json"))
    why = "at most 1216, for shorter prompts wait"
    assert "\n".join(replay_lines(recording.replayed)).count(why) == 1
    assert waterfall(recording).count(f"cut: B, {why}") == 1
    assert page([recording]).count(why) >= 1


@pytest.mark.parametrize(("host_tokens", "dropped"), [(0, 0), (2, 1)])
def test_only_a_host_drops_pages(host_tokens: int, dropped: int) -> None:
    node = {"host_tokens": host_tokens, "pool_tokens": 16, "chunked_prefill_size": 16}
    events = [each for name in "ABCD" for each in (submit(name, 8, 1), {"event": "round"})]
    recording = record(trace_of(*events, node=node))
    assert any(r.dropped_pages for r in recording.outcome.rounds)
    for shown in ("\n".join(replay_lines(recording.replayed)), page([recording])):
        assert ("dropped by the host" in shown) == bool(dropped)
        assert "pages evicted" in shown


def test_one_of_anything_is_not_many(recordings: list[Recording]) -> None:
    for each in recordings:
        shown = "\n".join((*replay_lines(each.replayed), waterfall(each, all_rounds=False)))
        report = re.sub(r"broken invariants.*|BROKEN.*", "", shown, flags=re.DOTALL)
        assert not re.search(r"\b1 (pages|rounds|requests|admissions|refusals|tokens|continuations)\b", report), report


def test_who_is_sent_back_is_recounted_from_what_the_batch_left() -> None:
    """In round 7 the batch takes the last page, so that A goes back for want of one: that is no second fault."""
    outcome = record(load(REGRESSIONS / "tail-spared-223dcc92.json")).outcome
    assert outcome.rounds[6].retracted == ("A",)
    assert "retraction-exact" not in [each.invariant for each in outcome.broken]


def test_several_who_decode_are_named() -> None:
    found = diagnose(load(REGRESSIONS / "tail-spared-0645eb81.json"))
    assert "spent by    running requests (A, C): decode 8" in explanation_lines(found)
    html = page([record(load(REGRESSIONS / "tail-spared-0645eb81.json"))])
    assert "running requests (" in html
    assert "someone outside" not in html
