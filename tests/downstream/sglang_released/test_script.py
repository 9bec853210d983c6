"""Every known hole of sglang shows in its stand-alone script too: sglang's own package, and nothing of kvledger."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.replay import TargetFactory
from tests.downstream.scripts import holes, run_scripts

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
