"""The example's test fails, as it should, and its explanation names the hole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_scheduler"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    found = tmp_path_factory.mktemp("found")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--kvledger-save={found}", str(EXAMPLE)]
    return subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLE, check=False), found


def test_the_example_fails(run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    assert run[0].returncode == 1, run[0].stdout + run[0].stderr
    assert "1 failed" in run[0].stdout


def test_the_explanation_names_the_hole(run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    assert "promises-covered is broken" in run[0].stdout
    assert "tail" in run[0].stdout
    assert "Failing test case" not in run[0].stdout, "Hypothesis's own lines stay behind -v"


def test_the_fixture_is_minimal(run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    (path,) = run[1].glob("*.json")
    assert path.name.startswith("promises-covered-")
    assert len(json.loads(path.read_text())["events"]) <= 4


def test_the_target_is_put_under_test_in_fifteen_lines() -> None:
    source = (EXAMPLE / "test_scheduler.py").read_text().splitlines()
    start = source.index("class Target(CountedTarget):")
    code = [line for line in source[start:] if line.strip()]
    assert len(code) <= 15
