"""Every known hole of sglang shows in its stand-alone script too: sglang's own package, and nothing of kvledger."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.replay import TargetFactory
from kvledger.report.bundle import bundle_of
from kvledger.trace import load
from tests.downstream.scripts import assert_committed, holes, run_scripts

HOLES = holes("sglang-0.5.23")


@pytest.fixture(scope="module")
def results(sglang: TargetFactory, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scripts([(path, sglang) for path in HOLES], tmp_path_factory.mktemp("scripts"))


@pytest.mark.parametrize("path", HOLES, ids=lambda path: path.stem)
def test_the_script_fails_as_reported(path: Any, results: dict[str, Any]) -> None:
    status, printed = results[f"{path.parent.name}/{path.stem}"]
    assert "every chunk is the recorded one" in printed, printed
    assert "AS REPORTED (oom): " in printed and "NOT AS" not in printed
    assert status == 1
    assert "LOST" not in printed and "COUNTED TWICE" not in printed, "the slots add up after every event"


def test_the_report_for_sglang_is_the_committed_one(sglang: TargetFactory) -> None:
    (path,) = (path for path in HOLES if path.stem == "oom-mixed-chunk-decode-pages")
    assert_committed("sglang-mixed-chunk", path, sglang)
    report = bundle_of(load(path), sglang).files["report.md"]
    for said in ("--enable-mixed-chunk", "the running batch 2 now + 4 later", "| 62 |", "Not its own: the loop"):
        assert said in report
