"""Every known hole of vllm shows in its stand-alone script too: vllm's own package, and nothing of kvledger."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvledger.report.bundle import bundle_of
from kvledger.trace import load
from tests.downstream.scripts import assert_committed, holes, run_scripts

try:
    VERSION = metadata.version("vllm")
except metadata.PackageNotFoundError:
    VERSION = "0.33.0"
STRICT = holes(f"vllm-strict-{VERSION}")
ALIGN = holes(f"vllm-align-{VERSION}")


@pytest.fixture(scope="module")
def results(vllm: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = [(path, vllm.VllmStrictTarget) for path in STRICT] + [(path, vllm.VllmAlignTarget) for path in ALIGN]
    return run_scripts(cases, tmp_path_factory.mktemp("scripts"))


@pytest.mark.parametrize("path", [*STRICT, *ALIGN], ids=lambda path: path.stem)
def test_the_script_fails_as_reported(path: Path, results: dict[str, Any]) -> None:
    verdict = "admitted-finishes" if path in STRICT else "stuck"
    status, printed = results[f"{path.parent.name}/{path.stem}"]
    assert "every chunk is the recorded one" in printed, printed
    assert f"AS REPORTED ({verdict}): " in printed and "NOT AS" not in printed
    assert status == 1
    assert "LOST" not in printed and "COUNTED TWICE" not in printed, "the blocks add up after every event"


def test_the_report_for_vllm_is_the_committed_one(vllm: Any) -> None:
    (path,) = (path for path in ALIGN if path.stem == "stuck-state-block")
    assert_committed("vllm-align", path, vllm.VllmAlignTarget)
    report = bundle_of(load(path), vllm.VllmAlignTarget).files["report.md"]
    for said in ("wants 12 blocks", "the pool has 11 besides", "vllm\\#52520", "--mamba-cache-mode align", "hybrid"):
        assert said in report


def test_a_preempted_prefill_is_by_design_and_recomputes_what_it_says(vllm: Any) -> None:
    (path,) = (path for path in STRICT if path.stem == "admitted-finishes-smallest")
    report = bundle_of(load(path), vllm.VllmStrictTarget).files["report.md"]
    assert "by design" in report and "nothing is computed again" in report and "begins its prefill again" not in report
