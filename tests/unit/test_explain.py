from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvledger.cli import main
from kvledger.diagnose import Diagnosis, diagnose
from kvledger.events import (
    Cached,
    Drain,
    Event,
    Hold,
    Round,
    Submit,
)
from kvledger.monitor import checked_replay
from kvledger.replay import Broken, Outcome, replay
from kvledger.report import Replayed
from kvledger.report.explained import explanation_lines, round_notes
from kvledger.report.painted import ASCII, BLOCKS, bars_for, painted, plain_text, short_name, wants_colour
from kvledger.report.plain import COLUMNS, width
from kvledger.report.recording import record
from kvledger.report.side_by_side import first_difference, side_by_side_lines
from kvledger.report.waterfall_text import BAR_COLUMNS, bar_columns, waterfall_lines
from kvledger.rules import PRESETS, AccountingRules
from kvledger.trace import Trace, load, write
from tests.unit.builders import INCIDENT, INCIDENT_NODE, node_settings, prompt

INCIDENT_TRACE = Trace(INCIDENT_NODE, "aligned", INCIDENT, "Post-mortem")
HOSTILE = (
    "evil\"quote'",
    "two\nlines\r\x1b[31mred\x1b[0m",
    "\u202eright to left\u2066",
    "<script>alert(1)</script>",
    "z" * 10_000,
    "漢字" * 40,
    "e\u0301\u0301 \x7f\x00",
)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def a_plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command line prints; it must have been explained."""
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture
def incident_file(tmp_path: Path) -> str:
    path = tmp_path / "incident.json"
    write(INCIDENT_TRACE, path)
    return str(path)


def hostile_trace(name: str) -> Trace:
    """The incident with one name for everything that has one."""
    events: list[Event] = [Hold(name, 64)]
    for event in INCIDENT:
        if isinstance(event, Cached):
            events.append(replace(event, prompt=prompt((name + event.prompt.segments[0][0], event.prompt.tokens))))
        elif isinstance(event, Submit):
            segment = (name + event.prompt.segments[0][0], event.prompt.tokens)
            events.append(Submit(name + event.request, prompt(segment)))
        else:
            events.append(event)
    return Trace(replace(INCIDENT_NODE, pool_tokens=INCIDENT_NODE.pool_tokens + 64), "aligned", tuple(events), name)


# --- the command


def test_json_has_exactly_the_contracts_keys(capsys: pytest.CaptureFixture[str], incident_file: str) -> None:
    document = json.loads(run(capsys, incident_file, "--json"))
    assert document == diagnose(INCIDENT_TRACE).document()
    assert list(document) == ["broken_promise", "spent_by", "point_of_no_return", "avoided_by"]
    assert list(document["broken_promise"]) == ["request", "kind", "tokens", "round"]
    assert [list(each) for each in document["spent_by"]] == [["request", "how", "tokens"]] * 2
    assert list(document["point_of_no_return"]) == ["round", "request"]
    assert json.loads(run(capsys, incident_file, "--json", "--rules", "upstream")) == {
        "broken_promise": None,
        "spent_by": [],
        "point_of_no_return": None,
        "avoided_by": None,
    }


def test_the_text_ends_in_the_explanation(capsys: pytest.CaptureFixture[str], incident_file: str) -> None:
    text = run(capsys, incident_file)
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if width(line) > COLUMNS] == []
    words = " ".join(text[text.index("verdict") :].split())
    for said in (
        "verdict oom in round 4: 1keim wanted 2056 tokens; free 0, evictable 0",
        "promise 1keim's tail of 4936 tokens, made in round 1 by the cut at 89088 of 94024; no entry",
        "spent by xpkq: load-back 15360, chunk 192",
        "too late from xpkq's admission in round 1 on: whoever else was refused, it could not be kept (",
        "broken promises-covered in round 1: after xpkq was whole",
        "avoided by reserve_tail true",
    ):
        assert said in words


def test_a_run_that_is_ok_says_so(capsys: pytest.CaptureFixture[str], incident_file: str) -> None:
    text = run(capsys, incident_file, "--rules", "tail-reserved")
    assert "verdict     ok" in text
    assert "nothing broke" in text
    assert "spent by" not in text


def test_against_and_json_exclude_each_other(capsys: pytest.CaptureFixture[str], incident_file: str) -> None:
    assert main(["explain", incident_file, "--json", "--against", "upstream"]) == 2
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_colours_and_everybody_else_the_same_words(
    capsys: pytest.CaptureFixture[str], incident_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    lines = waterfall_lines(record(INCIDENT_TRACE), BLOCKS, (), all_rounds=False)
    coloured = painted(lines, Terminal())
    assert "\x1b[" in coloured
    assert uncoloured(coloured) == plain_text(lines)
    assert painted(lines, io.StringIO()) == plain_text(lines)
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted(lines, Terminal()) == plain_text(lines)


def uncoloured(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    lines = [[("something", "bold red")]]
    assert wants_colour(Terminal())
    assert painted(lines, Terminal()) == "something\n"


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_nobody_is_coloured_against_their_will(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    assert not wants_colour(None)
    monkeypatch.setenv(variable, value)
    assert not wants_colour(Terminal())


def test_bars_are_what_the_stream_can_write() -> None:
    assert bars_for(Terminal()) == BLOCKS
    assert bars_for(io.TextIOWrapper(io.BytesIO(), "ascii")) == ASCII
    assert bars_for(None) == ASCII


# --- the waterfall


def waterfall(trace: Trace, **options: Any) -> list[str]:
    recording = record(trace)
    notes = round_notes(diagnose(trace))
    return plain_text(waterfall_lines(recording, ASCII, notes, **{"all_rounds": False, **options})).splitlines()


def test_every_figure_of_the_incidents_first_round_stands_in_its_row() -> None:
    lines = waterfall(INCIDENT_TRACE)
    first = lines[lines.index("") + 1 :]
    first = first[: first.index("")]
    figures = [(line[:46].strip(), line[46:55].strip(), line[55:64].strip()) for line in first[1:11]]
    assert figures == [
        ("free + evictable at its start", "", "34624"),
        ("xpkq: load-back 15360", "-15360", "19264"),
        ("baseline", "", "19264"),
        ("v9uj: chunk 13888 + page 64", "-13952", "5312"),
        ("1keim: chunk 2304 + page 64", "-2368", "2944"),
        ("xpkq: chunk 192 + page 64", "-256", "2688"),
        ("cur_rem_tokens", "", "2688"),
        ("v9uj: first token 1", "-1", "2687"),
        ("xpkq: first token 1", "-1", "2686"),
        ("rem_total_tokens", "", "2686"),
    ]
    assert first[11:] == [
        "  owed, and in no entry of the ledger:",
        f"{'  1keim: tail 4936 (4992 in whole pages)':46}{-4992:>9}{-2306:>9}  ---!!",
        "  <- promised here: 1keim's tail of 4936 tokens",
        "  <- point of no return: xpkq's admission",
    ]


def test_bars_share_one_scale() -> None:
    lines = waterfall(INCIDENT_TRACE)
    bar = {line[:46].strip(): line[66:] for line in lines if line.startswith("  ")}
    assert bar["free + evictable at its start"] == "#" * BAR_COLUMNS
    assert bar["xpkq: load-back 15360"] == "#" * 19 + "-" * 15
    assert any("OUT OF MEMORY: 1keim wanted 2056 tokens; free 0, evictable 0" in line for line in lines)
    assert any("forced: 1keim" in line for line in lines)


@pytest.mark.parametrize(("tokens", "columns"), [(-5, 0), (0, 0), (1, 1), (49, 5), (50, 5), (100, 10), (101, 10)])
def test_a_bar_shows_something_for_something_and_never_overflows(tokens: int, columns: int) -> None:
    assert bar_columns(tokens, 100, 10) == columns


def test_a_bar_of_nothing() -> None:
    assert bar_columns(5, 0, 10) == 0


def test_long_runs_leave_rounds_out_unless_all_are_asked_for() -> None:
    settings = node_settings(chunked_prefill_size=64, pool_tokens=64 * 64)
    trace = Trace(settings, "tail-reserved", (Submit("A", prompt(("a", 40 * 64))), Drain()))
    short, long = waterfall(trace), waterfall(trace, all_rounds=True)
    assert sum(line.startswith("round ") for line in long) == 40
    assert sum(line.startswith("round ") for line in short) < 20
    assert any("left out" in line for line in short)


def test_refusals_and_deferrals_are_told() -> None:
    lines = waterfall(INCIDENT_TRACE.with_rules(AccountingRules(on_shortage="defer")))
    assert "  deferred: 1keim, nothing remains for it" in lines
    assert "  refused: xpkq, NO_TOKEN, needs 15610" in waterfall(INCIDENT_TRACE.with_rules("tail-reserved"))


# --- side by side


def beside(trace: Trace, ours: str, theirs: str, **options: Any) -> list[str]:
    runs = [Replayed("x", trace, PRESETS[rules], replay(trace, PRESETS[rules])) for rules in (ours, theirs)]
    lines = side_by_side_lines(runs[0], runs[1], ASCII, **{"all_rounds": False, **options})
    return plain_text(lines).splitlines()


def test_the_first_decision_that_differs_is_marked() -> None:
    lines = beside(INCIDENT_TRACE, "aligned", "tail-reserved")
    assert [line for line in lines if line.startswith(">>")] == [
        ">>xpkq       whole 15360..15545 +15360      2686 |  >>xpkq       refused NO_TOKEN              13310",
        ">> the first decision that differs",
    ]
    assert "aligned: oom" in lines[0]
    assert "tail-reserved: ok" in lines[0]
    assert any("OUT OF MEMORY: wanted 2056, there 0" in line for line in lines)
    assert max(map(width, lines)) <= COLUMNS


def test_the_same_run_twice_differs_nowhere() -> None:
    lines = beside(INCIDENT_TRACE, "tail-reserved", "tail-reserved")
    assert lines[-1] == "the decisions are the same, and what came of them"
    rounds = replay(INCIDENT_TRACE).rounds
    assert first_difference(rounds, rounds) is None


def test_a_round_that_only_one_run_had_is_a_difference() -> None:
    rounds = replay(INCIDENT_TRACE).rounds
    found = first_difference(rounds, rounds[:2]), first_difference([], rounds)
    assert [each and (each.round, each.place) for each in found] == [(3, 0), (1, 0)]


def test_far_rounds_are_left_out_of_a_comparison() -> None:
    settings = node_settings(chunked_prefill_size=64, pool_tokens=64 * 64)
    trace = Trace(settings, "tail-reserved", (Submit("A", prompt(("a", 40 * 64))), Drain()))
    short = beside(trace, "upstream", "tail-reserved")
    assert any(line.startswith("... 3") and "left out" in line for line in short)
    everything = beside(trace, "upstream", "tail-reserved", all_rounds=True)
    assert sum(line.startswith("round ") for line in everything) == 40


# --- words


def test_what_is_not_known_is_said() -> None:
    nothing = diagnose(
        Trace(node_settings(), "tail-reserved", (Hold("x", 320), Submit("A", prompt(("a", 500))), Drain()))
    )
    words = "\n".join(explanation_lines(nothing))
    assert "stuck in round 1: A still has 500 tokens to compute; free 320" in words
    assert "nothing that was admitted went short" in words
    assert "avoided by  no one or two switches of the rules" in words


def test_a_point_of_no_return_that_never_came_is_said() -> None:
    deferring = diagnose(INCIDENT_TRACE.with_rules(AccountingRules(on_shortage="defer")))
    assert "at no time" in "\n".join(explanation_lines(deferring))


def test_somebody_without_a_name_is_said() -> None:
    events = (
        Submit("A", prompt(("a", 500))),
        Round(),
        Cached("device", prompt(("d", 320)), locked=True),
        Drain(),
    )
    locked = diagnose(Trace(node_settings(chunked_prefill_size=256), "aligned", events))
    assert "spent by    someone without a name: lock 320" in explanation_lines(locked)


# --- hostile names


@pytest.mark.parametrize("name", HOSTILE, ids=[f"{number}" for number in range(len(HOSTILE))])
def test_hostile_names_neither_steer_nor_flood_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "trace.json"
    trace = hostile_trace(name)
    write(trace, path)
    for options in ((), ("--against", "tail-reserved")):
        text = run(capsys, str(path), *options)
        assert all(character.isprintable() for character in text if character != "\n")
        # not columns: what wraps lines counts characters, and some of these are two columns wide
        assert [line for line in text.splitlines() if len(line) > COLUMNS] == []
        assert len(text) < 12_000
    document = json.loads(run(capsys, str(path), "--json"))
    assert document["broken_promise"]["request"] == f"{name}1keim"


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("columns", [8, 10, 40])
def test_a_short_name_keeps_to_its_columns(name: str, columns: int) -> None:
    assert width(short_name(name, columns)) <= columns
    assert short_name("1keim", columns) == "1keim"


def test_a_rank_that_ran_out_is_shown_with_its_own_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pictures are rank 0's: whatever the trace, what is said of another rank is that rank's record."""
    checked = 0
    for path in sorted((Path(__file__).parents[1] / "regressions").glob("ranks-*.json")):
        trace = load(str(path))
        for name, rules in ((None, trace.accounting_rules), *PRESETS.items()):
            chosen = ["--rules", name] if name else []
            failure = checked_replay(trace, rules).failure
            if failure is None or not failure.rank:
                continue
            main(["explain", str(path), *chosen])
            words = " ".join(capsys.readouterr().out.split())
            figures = f"the KV pool of rank {failure.rank} in round"
            assert f"ran out {figures}" in words
            assert f": free {failure.free} + evictable {failure.evictable}," in words
            main(["report", str(path), *chosen, "-o", str(tmp_path / "page.html")])
            assert f"Ran out: {figures}" in (tmp_path / "page.html").read_text(encoding="utf-8")
            checked += 1
    assert checked >= 1


@pytest.mark.parametrize(
    ("invariants", "said"),
    [
        (["same-batches"], "nothing that was admitted went short"),
        (["same-batches", "admitted-finishes"], "an admitted prompt was ended before its prefill was done"),
    ],
)
def test_an_admitted_prompt_that_was_ended_is_not_passed_over(invariants: list[str], said: str) -> None:
    outcome = Outcome(broken=[Broken(name, 1, "C", f"{name}: rank 1") for name in invariants])
    (words,) = [line for line in explanation_lines(Diagnosis(AccountingRules(), outcome)) if "promises" in line]
    assert said in words
