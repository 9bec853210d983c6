"""`kvledger shrink` and `kvledger fixture`."""

from __future__ import annotations

import json
from pathlib import Path

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
