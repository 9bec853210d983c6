"""The text of a replay: what a reader is shown, what is left out, and hostile text made harmless."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.adder import AddReqResult
from kvledger.events import (
    Abort,
    Cached,
    Event,
    Hold,
    Round,
    Submit,
)
from kvledger.ledger import Due, Promise
from kvledger.monitor import checked_replay
from kvledger.record import AllocationFailure, Decision, RoundRecord
from kvledger.replay import Broken, Outcome, Stuck
from kvledger.report import Replayed
from kvledger.report.plain import named, padded, plain, width, wrapped
from kvledger.report.rounds import Gap, Layout, round_lines, rounds_to_show
from kvledger.report.text import ending_lines, heading_lines, replay_lines, summary_line
from kvledger.rules import PRESETS, AccountingRules
from kvledger.trace import Trace
from tests.unit.builders import INCIDENT, INCIDENT_NODE, REPEATABLE, node_settings, prompt

INCIDENT_TEXT = """\
=== incident.json ===
1keim's tail is spent
rules  aligned (checkpoint_align node, reserve_tail false)
node   page 64, grid 256, chunk 16384, max prefill 16384, pool 121408, host unlimited
start  cached on the device, locked: keim 86784
       cached on the host: xpkq 15360
       submitted: v9uj 13888, 1keim 94024, xpkq 15545
Figures are tokens: the ledger's baseline, cur_rem_tokens, rem_total_tokens and rem_chunk_tokens
as they stood right after each decision.

round 1                                                     baseline   cur_rem  rem_total  rem_chunk
  v9uj   whole      0..13888 (13888)                           34624     20672      20671       2496
  1keim  truncated  86784..89088 (2304)  tail 4936             34624     18304      18303        192
  xpkq   whole      15360..15545 (185)  load-back 15360        19264      2688       2686          0
  promised  v9uj 13952 now + 1 later; 1keim 2368 now (NOT its tail of 4936); xpkq 256 now + 1 later
  after     free 2880, evictable 0, protected 118464; budget_state OTHER
  BROKEN    promises-covered

round 2                                                     baseline   cur_rem  rem_total  rem_chunk
  1keim  resumed    89088..91904 (2816)  tail 2120              2880         0          0      13568
  promised  1keim 2880 now (NOT its tail of 2120)
  after     free 64, evictable 0, protected 121280; budget_state NO_TOKEN

round 3                                                     baseline   cur_rem  rem_total  rem_chunk
  1keim  resumed    91904..91968 (64)  tail 2056                  64       -64        -64      16320
  promised  1keim 128 now (NOT its tail of 2056)
  after     free 0, evictable 0, protected 121344; budget_state NO_TOKEN

round 4                                                     baseline   cur_rem  rem_total  rem_chunk
  1keim  resumed    91968..94024 (2056)  FORCED                    0     -2176      -2177      14272
  promised  1keim 2176 now + 1 later
  OUT OF MEMORY: 1keim wanted 2056 tokens; free 0, evictable 0
  after     free 0, evictable 0, protected 121344; budget_state NO_TOKEN
  BROKEN    never-forced, admitted-finishes

broken invariants, in time order
"""
INCIDENT_VERDICT = "verdict  oom in round 4: 1keim wanted 2056 tokens; free 0, evictable 0"


def replayed_of(trace: Trace, rules: AccountingRules | None = None) -> Replayed:
    return Replayed("t.json", trace, rules or trace.accounting_rules, checked_replay(trace, rules))


def incident(rules: str = "aligned", **changes: Any) -> Replayed:
    trace = Trace(INCIDENT_NODE, rules, INCIDENT, "1keim's tail is spent")
    return replace(replayed_of(trace), source="incident.json", **changes)


def decision(request: str = "a", kind: Any = "whole", **changes: Any) -> Decision:
    facts: dict[str, Any] = {
        "prompt_tokens": 100,
        "prefix_tokens": 0,
        "start": 0,
        "end": 100,
        "baseline": 640,
        "cur_rem_tokens": 448,
        "rem_total_tokens": 447,
        "rem_chunk_tokens": 3968,
        "rem_input_tokens": None,
    }
    return Decision(request=request, kind=kind, **(facts | changes))


def record(number: int = 1, *decisions: Decision, **changes: Any) -> RoundRecord:
    facts: dict[str, Any] = {
        "baseline": 640,
        "rem_total_tokens": 640,
        "cur_rem_tokens": 640,
        "rem_chunk_tokens": 4096,
        "budget_state": AddReqResult.CONTINUE,
        "batch_is_full": False,
        "promises": (),
        "free": 640,
        "evictable": 0,
        "protected": 0,
    }
    return RoundRecord(round=number, decisions=decisions, **(facts | changes))


def refusal(request: str = "a", **changes: Any) -> Decision:
    return decision(request, "refused", **({"end": 0, "reason": AddReqResult.NO_TOKEN} | changes))


def lines_of(*decisions: Decision, everything: bool = False, **changes: Any) -> list[str]:
    """A round's lines below its heading, without spaces at their ends."""
    layout = Layout(page_size=64, name_columns=1, everything=everything)
    return [line.rstrip() for line in round_lines(record(1, *decisions, **changes), (), layout)[1:]]


# --- a whole report


def test_incident():
    lines = [line.rstrip() for line in replay_lines(incident())]
    assert "\n".join(lines).startswith(INCIDENT_TEXT)
    ending = " ".join(line.strip() for line in lines[len(INCIDENT_TEXT.splitlines()) :])
    for words in ("round 1 promises-covered: ", "round 4 never-forced: ", "round 4 admitted-finishes: "):
        assert words in ending.replace("  ", " ")
    assert lines[-1] == INCIDENT_VERDICT
    assert max(map(len, lines)) <= 100


def test_incident_after_the_fix():
    lines = [line.rstrip() for line in replay_lines(incident("tail-reserved"))]
    first = lines.index("", 5)
    assert lines[first + 2 : first + 7] == [
        "  v9uj   whole      0..13888 (13888)                           34624     20672      20671       2496",
        "  1keim  truncated  86784..89088 (2304)  tail 4936             34624     18304      13310        192",
        "  xpkq   refused    NO_TOKEN  needs 15610                      34624     18304      13310        192",
        "  promised  v9uj 13952 now + 1 later; 1keim 2368 now + 4993 later",
        "  after     free 18432, evictable 0, protected 102976; budget_state CONTINUE, batch_is_full",
    ]
    assert lines[-1] == "verdict  ok"
    assert not [line for line in lines if "BROKEN" in line or "broken" in line or "NOT" in line]


# --- heading


def test_heading_tells_sizes_and_switches_that_are_not_usual():
    node = node_settings(chunked_prefill_size=None, host_tokens=0)
    rules = AccountingRules(checkpoint_align=128, spend_gap=True, truncation_align=64, on_shortage="defer")
    lines = " ".join(heading_lines(Replayed("t.json", Trace(node, rules, ()), rules, Outcome())))
    assert (
        "rules  own switches (checkpoint_align 128, reserve_tail false, spend_gap true, truncation_align 64," in lines
    )
    assert "on_shortage defer)" in lines
    assert "chunk off, max prefill unlimited, pool 640, host 0" in lines
    assert "start" not in lines


def test_start_is_what_happens_before_the_first_round():
    many = tuple(Submit(f"r{number}", prompt(("r", 10))) for number in range(6))
    events: tuple[Event, ...] = (
        Hold("h", 64),
        Cached("host", prompt(("sys", 64), ("doc", 100))),
        *many,
        Abort("r1"),
        Round(),
        Hold("late", 64),
    )
    lines = heading_lines(Replayed("t.json", Trace(node_settings(), "aligned", events), PRESETS["aligned"], Outcome()))
    start = next(index for index, line in enumerate(lines) if line.startswith("start"))
    assert lines[start : start + 3] == [
        "start  held: h 64",
        "       cached on the host: doc 164",
        "       submitted: 6 of them, 60 tokens in all",
    ]
    assert not [line for line in lines if "late" in line]


# --- decisions


def test_notes_of_a_decision():
    cut = decision(kind="truncated", prompt_tokens=900, start=256, end=512, load_back=256, newly_locked_tokens=128)
    assert lines_of(cut)[:2] == [
        "  a  truncated  256..512 (256)  tail 388  load-back 256          640       448        447       3968",
        "      locks 128",
    ]
    deferred = decision(kind="deferred", start=64, end=64, rem_chunk_tokens=None)
    assert lines_of(deferred)[0].split() == ["a", "deferred", "at", "64", "tail", "36", "640", "448", "447", "-"]
    assert "FORCED" in lines_of(decision(kind="resumed", forced=True))[0]


def test_refusal_for_memory_tells_what_it_needs_and_would_lock():
    locking = refusal(prompt_tokens=400, prefix_tokens=256, start=256, end=256, newly_locked_tokens=192)
    assert "refused    NO_TOKEN  needs 209  would lock 192 " in lines_of(locking)[0]
    assert "would lock" not in lines_of(refusal())[0]
    assert lines_of(refusal(reason=AddReqResult.OTHER))[0].split()[:4] == ["a", "refused", "OTHER", "640"]


def test_round_without_decisions():
    assert lines_of() == [
        "  nothing to decide",
        "  after     free 640, evictable 0, protected 0; budget_state CONTINUE",
    ]


def test_pages_that_moved():
    lines = lines_of(evicted_pages=2, dropped_pages=1, shared_pages=3, batch_is_full=True)[1:]
    after = " ".join(line.strip() for line in lines)
    assert after.endswith("CONTINUE, batch_is_full; 2 pages evicted; 1 page dropped by the host; 3 pages shared")


def test_long_batch_keeps_its_ends_and_whoever_is_not_whole():
    batch = [decision(f"r{number}") for number in range(50)]
    batch[25] = decision("r25", "truncated", prompt_tokens=900)
    lines = lines_of(*batch)
    assert [line.split()[0] for line in lines[:23]] == [
        *(f"r{number}" for number in range(10)),
        "...",
        "r25",
        "...",
        *(f"r{number}" for number in range(40, 50)),
    ]
    assert lines[10] == "  ... 15 more admitted whole"
    assert lines[12] == "  ... 14 more admitted whole"
    assert len(lines_of(*batch, everything=True)) == 51
    assert len(lines_of(*batch[:20])) == 21


def test_long_name_takes_its_own_row_and_keeps_the_table():
    cut = decision("n" * 50, "truncated", prompt_tokens=900, load_back=64)
    name = "n" * 19 + "..." + "n" * 18
    above, figures = lines_of(cut)[:2]
    assert above == f"  {name}  truncated  0..100 (100)"
    assert figures == "      tail 800  load-back 64".ljust(58) + "       640       448        447       3968"


# --- promises


def promise(request: str, kind: str, tokens: int, due: str) -> Promise:
    return Promise(request, kind, tokens, Due(due))


def promise_line(*promises: Promise, everything: bool = False, joined: Any = ()) -> str:
    lines = lines_of(*joined, promises=promises, everything=everything)
    start = next(index for index, line in enumerate(lines) if line.startswith("  promised"))
    return " ".join(line.strip() for line in lines[start:-1]).removeprefix("promised  ")


def test_promises_by_request_and_due():
    entries = [promise("a", "chunk", 64, "now"), promise("b", "tail", 128, "later"), promise("a", "page", 64, "now")]
    assert promise_line(*entries) == "a 128 now; b 128 later"


def test_tail_that_nobody_was_promised_is_told_and_never_left_out():
    entries = [promise(f"r{number}", "chunk", 64, "now") for number in range(20)]
    cut = decision("r15", "truncated", prompt_tokens=900)
    line = promise_line(*entries, joined=[cut])
    assert "r7 64 now; r15 64 now (NOT its tail of 800); 11 more 704 now" in line
    assert "more" not in promise_line(*entries, joined=[cut], everything=True)
    kept = promise_line(*entries, promise("r15", "tail", 832, "later"), joined=[cut])
    assert "r15 64 now + 832 later; 11 more" in kept


def test_target_without_promises_has_no_line_of_them():
    lines = lines_of(decision(kind="truncated", prompt_tokens=900))
    assert not [line for line in lines if "promised" in line or "NOT" in line]


# --- which rounds


def numbers(outcome: Outcome) -> list[int | str]:
    return [
        f"{each.records[0].round}-{each.records[-1].round}" if isinstance(each, Gap) else each.round
        for each in rounds_to_show(outcome)
    ]


def rounds(count: int, **decisions: Decision) -> list[RoundRecord]:
    """`r7=...` is the decision of round 7."""
    return [record(n, *filter(None, [decisions.get(f"r{n}")])) for n in range(1, count + 1)]


def test_first_and_last_rounds_are_shown():
    assert numbers(Outcome()) == []
    assert numbers(Outcome(rounds(10))) == [*range(1, 11)]
    assert numbers(Outcome(rounds(11))) == [*range(1, 12)], "a gap of one round would save nothing"
    assert numbers(Outcome(rounds(12))) == [1, 2, 3, 4, 5, "6-7", 8, 9, 10, 11, 12]


def test_rounds_with_news_are_shown():
    first, again, other = refusal("a"), refusal("a"), refusal("b")
    outcome = Outcome(rounds(40, r10=first, r11=again, r20=other), [Broken("order", 15, "a", "")])
    assert numbers(outcome) == [*range(1, 6), "6-9", 10, "11-14", 15, "16-19", 20, "21-35", *range(36, 41)]
    outcome = Outcome(rounds(40), stuck=Stuck(30, "a", 1, 0, 0, ""))
    assert 30 in numbers(outcome)
    failed = rounds(40)
    failed[19] = replace(failed[19], failure=AllocationFailure("a", 1, 0, 0, ""))
    assert 20 in numbers(Outcome(failed))


def test_two_thousand_rounds_do_not_flood():
    records = [record(n, refusal(f"r{n}")) for n in range(1, 2001)]
    outcome = Outcome(records, [Broken("order", 1500, "a", "")])
    replayed = Replayed("t.json", Trace(node_settings(), "aligned", ()), PRESETS["aligned"], outcome)
    lines = replay_lines(replayed)
    assert len(lines) < 200
    gaps = [line for line in lines if line.startswith("...")]
    assert gaps == [
        "... rounds 21 to 1499 left out (--all-rounds shows them): 1479 rounds, 0 admissions, 1479 refusals",
        "... rounds 1501 to 1995 left out (--all-rounds shows them): 495 rounds, 0 admissions, 495 refusals",
    ]
    assert sum(line.startswith("round ") for line in replay_lines(replayed, all_rounds=True)) == 2000


# --- how it ended


def ending(outcome: Outcome, **changes: Any) -> str:
    trace = Trace(node_settings(), "aligned", (), expect=changes.pop("expect", {}))
    return "\n".join(ending_lines(Replayed("t.json", trace, PRESETS["aligned"], outcome, **changes)))


def test_verdicts():
    assert ending(Outcome()) == "verdict  ok"
    stuck = Outcome([record(7)], stuck=Stuck(7, "a", 320, 64, 0, "nothing moves"))
    assert ending(stuck) == (
        "verdict  stuck in round 7: a still has 320 tokens to compute; free 64, evictable 0; nothing moves"
    )
    broken = Outcome([record(7)], [Broken("order", 3, None, "5 is below 6"), Broken("on-grid", 4, "a", "off")])
    assert ending(broken) == (
        "broken invariants, in time order\n  round 3  order: 5 is below 6\n  round 4  on-grid: off\n\n"
        "verdict  order in round 3"
    )


def test_expectations():
    assert ending(Outcome(), expect={"upstream": "oom"}) == "verdict  ok"
    assert ending(Outcome(), expect={"aligned": "ok"}).endswith("\n         as expected under aligned")
    assert ending(Outcome(), expect={"aligned": "oom"}).endswith(
        "\n         NOT as expected: the trace expects oom under aligned"
    )


def test_rejections_and_skipped_invariants():
    rejected = [(f"r{number}", "too big") for number in range(12)]
    text = ending(Outcome(rejected_at_submit=rejected), skipped=("order", "conserved"))
    assert text.startswith("rejected at submit: r0: too big\n")
    assert "rejected at submit: r9: too big\nrejected at submit: 2 more\n" in text
    assert "not asked, because this target cannot show it: order, conserved\n" in text


def test_long_name_in_a_message_is_cut_as_elsewhere():
    name = "x" * 5000
    text = ending(Outcome(broken=[Broken("order", 1, name, f"{name} took \x1b[2J what {name} had")]))
    shown = "x" * 19 + "..." + "x" * 18
    assert f"round 1  order: {shown} took \\u001b[2J what" in text
    assert len(text) < 400


def test_summary_of_several():
    good, bad = incident(), incident()
    good = replace(good, trace=replace(good.trace, expect={"aligned": "oom"}))
    assert summary_line([good, good]) == "2 traces, 0 not as they should be"
    assert summary_line([good, bad]) == "2 traces, 1 not as they should be: incident.json"
    assert summary_line([bad] * 7).endswith(": " + "incident.json, " * 5 + "and 2 more")


def test_preset_is_known_by_its_switches():
    trace = Trace(node_settings(), AccountingRules(), (), expect={"aligned": "oom"})
    replayed = Replayed("t.json", trace, trace.accounting_rules, Outcome())
    assert (replayed.preset, replayed.expected, replayed.passed) == ("aligned", "oom", False)
    other = replace(replayed, rules=AccountingRules(spend_gap=True))
    assert (other.preset, other.expected, other.passed) == (None, None, True)


# --- hostile text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("req-1", "req-1"),
        ("名前", "名前"),
        ("", '""'),
        ("a b", '"a b"'),
        ('"', '"\\""'),
        ("a;b", '"a;b"'),
        ("\n", '"\\n"'),
        ("\\n", '"\\\\n"'),
        ("\x1b[31m\x7f", '"\\u001b[31m\\u007f"'),
        ("\u202eabc\u2066", '"\\u202eabc\\u2066"'),
        ("\u200b\u2028\xa0", '"\\u200b\\u2028\\u00a0"'),
        ("e\u0301", '"e\\u0301"'),
        ("\ud800", '"\\ud800"'),
        ("x" * 40, "x" * 40),
        ("a" * 30 + "b" * 30, "a" * 19 + "..." + "b" * 18),
        ("名" * 30, "名" * 9 + "..." + "名" * 9),
        ("\n" * 9 + "z" * 60_000, '"' + "\\n" * 9 + "..." + "z" * 17 + '"'),
    ],
)
def test_named(name, shown):
    assert named(name) == shown


def test_plain_keeps_readable_text_as_it_is():
    assert plain("1keim's tail, 尾块; 50 %", 80) == "1keim's tail, 尾块; 50 %"
    assert plain("a\tb\r\n", 80) == "a\\tb\\r\\n"


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=150)


@given(ANY_TEXT, st.integers(4, 60))
@settings(REPEATABLE, max_examples=300)
def test_shown_text_is_bounded_and_cannot_steer_a_terminal(text, limit):
    for shown, columns in ((plain(text, limit), limit), (named(text), 40)):
        assert shown.isprintable()
        assert width(shown) <= columns
        assert width(padded(shown, 60)) == 60


@given(ANY_TEXT, ANY_TEXT)
@settings(REPEATABLE, max_examples=300)
def test_short_names_that_differ_look_different(one, other):
    one, other = one[:5], other[:5]
    assert (named(one) == named(other)) == (one == other)


@given(ANY_TEXT)
@settings(REPEATABLE, max_examples=100)
def test_report_of_hostile_names_keeps_to_its_lines_and_columns(name):
    cut = decision(name, "truncated", prompt_tokens=2**28, end=2**28 - 256, load_back=2**27, newly_locked_tokens=2**27)
    entries = (promise(name, "chunk", 2**28, "now"),)
    failure = AllocationFailure(name, 2**28, 2**28, 2**28, name)
    outcome = Outcome(
        [record(1, cut, refusal(name), promises=entries, failure=failure)],
        [Broken("order", 1, name, f"{name} and {name}")],
        [(name, name)],
        failure,
    )
    trace = Trace(node_settings(), "aligned", (Submit(name, prompt((name, 64))),), title=name)
    lines = replay_lines(Replayed(name, trace, PRESETS["aligned"], outcome))
    assert all(line.isprintable() for line in lines)
    assert all(len(line) <= 100 for line in lines)


def test_wrapped_lines_hang():
    assert wrapped("", 4) == []
    first, second = wrapped("word " * 22, 4)
    assert len(first) <= 100
    assert second.startswith("    word")
