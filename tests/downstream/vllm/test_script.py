"""Every known hole of vllm shows in its stand-alone script too: vllm's own package, and nothing of kvledger."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.downstream.scripts import holes, run_scripts

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
