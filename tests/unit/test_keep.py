"""`kvledger shrink` and `kvledger fixture`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.cli import main
from kvledger.monitor import checked_replay
from kvledger.trace import load

REGRESSIONS = Path(__file__).parents[1] / "regressions"
INCIDENT = str(REGRESSIONS / "incident-2026-11-02.json")
CANONICAL = "promises-covered-115d8387.json"
"""What the incident, and whatever the search finds of its kind, shrinks to."""


def test_shrink_prints_the_canonical_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shrink", INCIDENT]) == 0
    printed = capsys.readouterr()
    small, canonical = json.loads(printed.out), json.loads((REGRESSIONS / CANONICAL).read_text())
    assert (small["node"], small["events"]) == (canonical["node"], canonical["events"])
    assert printed.err.startswith("promises-covered: 6 events to 3 in ")
    assert "drop events" in printed.err, "it says what it tried"


def test_shrink_writes_a_file_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shrink", INCIDENT, "-o", str(tmp_path / "small.json")]) == 0
    assert capsys.readouterr().out == ""
    assert checked_replay(load(tmp_path / "small.json")).broken[0].invariant == "promises-covered"
    assert main(["shrink", INCIDENT, "-o", str(tmp_path / "no" / "small.json")]) == 2
    assert capsys.readouterr().err.endswith("small.json: No such file or directory\n")
    assert [path.name for path in tmp_path.iterdir()] == ["small.json"]


@pytest.mark.parametrize("command", ["shrink", "fixture"])
def test_a_trace_that_breaks_nothing_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, INCIDENT, "--rules", "tail-reserved"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"kvledger: {command}: the trace does not break any invariant\n"


def test_fixture_keeps_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["fixture", INCIDENT, "--save", str(tmp_path)]) == 0
        assert "A's tail of 5 tokens" in capsys.readouterr().out
        (path,) = tmp_path.iterdir()
    assert path.name == CANONICAL
    assert path.read_text() == (REGRESSIONS / CANONICAL).read_text()


def test_fixture_that_cannot_be_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["fixture", INCIDENT, "--save", str(tmp_path / "file")]) == 2
    assert "fixture: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["replay", "explain", "shrink", "fixture"])
def test_a_target_may_be_anybodys(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "my_scheduler"))
    monkeypatch.chdir(tmp_path)
    expected = 1 if command == "replay" else 0
    target = "--target=test_scheduler:Target"
    assert main([command, str(REGRESSIONS / CANONICAL), target, "--rules", "tail-reserved"]) == expected


def test_a_target_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", INCIDENT, "--target", "decimal:Decimal"]) == 2
    assert "does not make a kvledger target" in capsys.readouterr().err


def test_shrink_does_not_overwrite_its_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "incident.json"
    path.write_text(Path(INCIDENT).read_text())
    assert main(["shrink", str(path), "-o", str(path)]) == 2
    assert "a file of its own is written" in capsys.readouterr().err
    assert path.read_text() == Path(INCIDENT).read_text()


PIN = {"event": "pin", "name": "p", "prompt": [["c", 4]]}


def _lost(line: str) -> list[str]:
    head, tail = "dropped as not needed: ", "; kvledger fixture --whole keeps the trace as it is"
    assert line.startswith(head) and line.endswith(tail)
    return line.removeprefix(head).removesuffix(tail).split(", ")


@pytest.mark.parametrize("command", ["shrink", "fixture"])
@pytest.mark.parametrize(
    ("node", "rules", "events", "lost"),
    [
        ({}, {}, [{"event": "fault", "kind": "skip-insert", "request": "A"}], ["fault skip-insert"]),
        ({}, {}, [PIN, {"event": "pause"}, {"event": "resume"}], ["pin", "pause"]),
        ({"state_slots": 9}, {}, [], ["state_slots"]),
        (
            {
                "window_tokens": 4,
                "window_pool_tokens": 64,
                "shared_bytes": 999,
                "page_bytes": 1,
                "window_page_bytes": 1,
            },
            {},
            [],
            ["window_tokens", "shared_bytes"],
        ),
        ({"ranks": [{}]}, {"rank_view": "own"}, [], ["ranks", 'rules rank_view: "own"']),
        ({"mode": "unified"}, {"decode_yields": False}, [], ["decode", "rules decode_yields: false"]),
        ({}, {"promise_pools": False}, [], ["rules promise_pools: false"]),
        ({}, {}, [], []),
    ],
)
def test_what_may_have_been_the_cause_and_is_gone_is_said(
    command: str,
    node: dict[str, Any],
    rules: dict[str, Any],
    events: list[dict[str, Any]],
    lost: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = json.loads((REGRESSIONS / CANONICAL).read_text())
    *submits, drain = document["events"]
    changed = {"node": document["node"] | node, "rules": {"reserve_tail": False} | rules, "expect": {}}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document | changed | {"events": [*submits, *events, drain]}))
    place = ["--save", str(tmp_path / "kept")] if command == "fixture" else []
    assert main([command, str(path), *place]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dropped")]
    assert [_lost(line) for line in lines] == ([lost] if lost else [])
    if command == "fixture":
        assert main([command, str(path), "--whole", *place]) == 0
        assert not capsys.readouterr().err
