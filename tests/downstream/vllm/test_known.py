"""What is known of vllm's scheduler, as traces: the holes must still be there, the safe neighbours must hold."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvledger.replay import Replay
from tests.downstream.known import check_known, known_traces, load_known

try:
    VERSION = metadata.version("vllm")
except metadata.PackageNotFoundError:
    VERSION = "0.33.0"


def test_a_release_of_which_nothing_is_known_is_skipped_by_name() -> None:
    (skipped,) = known_traces("vllm-0.0.0")
    assert skipped.id == "vllm-0.0.0"
    (mark,) = skipped.marks
    assert "known/vllm-0.0.0" in str(mark)
    with pytest.raises(pytest.skip.Exception, match=r"nothing is known of vllm-0\.0\.0"):
        load_known("vllm-0.0.0", "ok")


@pytest.mark.parametrize("path", known_traces(f"vllm-{VERSION}"))
def test_known(path: Path, vllm: Any) -> None:
    check_known(path, vllm.VllmTarget)


@pytest.mark.parametrize("path", known_traces(f"vllm-strict-{VERSION}"))
def test_known_of_the_strict_property(path: Path, vllm: Any) -> None:
    check_known(path, vllm.VllmStrictTarget)


@pytest.mark.parametrize("path", known_traces(f"vllm-align-{VERSION}"))
def test_known_in_align_mode(path: Path, vllm: Any) -> None:
    check_known(path, vllm.VllmAlignTarget)


def test_a_decode_starves_a_prompt_in_align_mode(vllm: Any) -> None:
    """Rounds that B waits: until A's 198 tokens are out, and without states not at all."""
    assert _first_round("align", "ok-starved-by-a-decode", vllm.VllmAlignTarget) == 199
    assert _first_round("", "ok-not-starved-by-a-decode", vllm.VllmTarget) == 1


def _first_round(kind: str, name: str, target: Any) -> int:
    folder = f"vllm-{kind}-{VERSION}" if kind else f"vllm-{VERSION}"
    trace = load_known(folder, name)
    run = Replay(trace.node, trace.accounting_rules, target=target)
    for event in trace.events:
        run.apply(event)
    return next(record.round for record in run.outcome.rounds if "B" in [d.request for d in record.joined])
