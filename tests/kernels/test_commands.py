"""What the command line says of devices: pairs it refuses, searches too short to prove anything, presets left out."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("hypothesis")

from kvledger.cli import main
from kvledger.node import PrefillNode
from kvledger.testing import verify
from kvledger.testing.moves import NODE_SPACE
from kvledger.testing.search import NOT_CONFIRMED, SearchResult

pytestmark = pytest.mark.device

CASE = str(Path(__file__).parents[1] / "regressions" / "worked-example.json")


@pytest.mark.parametrize("device", ["cpu", "interpret", "cuda"])
def test_a_device_and_another_scheduler_are_one_too_many(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", CASE, "--target", "kvledger.targets.counted:CountedTarget", "--device", device]) == 2
    done = capsys.readouterr()
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("kvledger: replay: --target and --device: ")


def searched(monkeypatch: pytest.MonkeyPatch, *results: SearchResult, **options: Any) -> int:
    """`verify` with searches that end so."""
    by_name = {result.rules: result for result in results}
    monkeypatch.setattr(verify, "search", lambda name, **_: by_name[name])
    return verify.command([*by_name], options.get("examples"), None, None, False, options.get("target"))


def result(rules: str = "tail-reserved", *missing: str) -> SearchResult:
    return SearchResult(rules, True, missing=missing)


def test_a_short_search_says_that_it_is_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert searched(monkeypatch, result("tail-reserved", "load-back", "held"), examples=8) == 1
    shown = capsys.readouterr().out
    assert re.search(r"tail-reserved .* none .* too few examples\s*\n", shown)
    assert "tail-reserved: too few examples to reach: load-back, held" in shown
    assert "NOT expected" not in shown


def test_a_short_search_that_did_not_find_the_known_hole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert searched(monkeypatch, SearchResult("aligned", False, missing=("forced",)), examples=8) == 1
    shown = capsys.readouterr().out
    assert "too few examples\n" in re.sub(r" +\n", "\n", shown)
    assert "NOT expected" not in shown


@pytest.mark.parametrize(("examples", "missing"), [(None, "held"), (NODE_SPACE.examples, "held"), (8, NOT_CONFIRMED)])
def test_a_search_that_is_long_enough_does_not(
    examples: int | None, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert searched(monkeypatch, result("tail-reserved", missing), examples=examples) == 1
    shown = capsys.readouterr().out
    assert f"tail-reserved never reached: {missing}" in shown
    assert "NOT expected" in shown
    assert "too few" not in shown


def test_a_search_that_reached_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert searched(monkeypatch, result(), examples=8) == 0
    assert "as expected" in capsys.readouterr().out


def test_presets_that_a_device_leaves_out_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(PrefillNode):
        space = NODE_SPACE

    monkeypatch.setattr(verify, "search", lambda name, **_: result(name))
    for thorough, words in ((True, None), (False, "left out: aligned: ")):
        monkeypatch.setattr(Slow, "space", replace(NODE_SPACE, thorough=thorough))
        assert verify.command([], None, None, None, False, Slow) == 0
        shown = capsys.readouterr().out
        assert words is None or words in shown
        assert ("left out" in shown) == (words is not None)


def test_what_examples_counts_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    assert "Hypothesis's examples for each preset" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(find_spec("torch") is None, reason="no torch")
def test_a_replay_says_how_many_tokens_were_compared_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", CASE, "--device", "cpu", "--rules", "tail-reserved"]) == 0
    note = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"[\d,]+ tokens computed, every one compared with float64, [\d,]+ of them bit by bit", note)
