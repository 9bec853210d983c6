"""What README shows is what happens."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvledger import cli

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def _printed(example: str, folder: Path) -> list[str]:
    path = folder / "example.py"
    path.write_text(example, "utf-8")
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_library_example_runs_and_refuses_the_third(tmp_path: Path) -> None:
    (example,) = _blocks("python")
    assert len(example.strip().splitlines()) <= 20
    assert _printed(example, tmp_path) == ["A CONTINUE 10880 10879", "B CONTINUE 8000 2814", "C NO_TOKEN 8000 2814"]


def test_library_example_admits_it_under_the_rules_that_crashed(tmp_path: Path) -> None:
    (example,) = _blocks("python")
    assert _printed(example.replace("tail-reserved", "aligned"), tmp_path)[-1].startswith("C CONTINUE")


def test_replayed_incident_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    lines = [line for block in _blocks("sh") for line in block.splitlines() if "--device" not in line]
    (command,) = (line for line in lines if line.startswith("kvledger replay"))
    assert cli.main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed in README


def test_decode_example_prints_its_figures(tmp_path: Path) -> None:
    (example,) = _blocks("py")
    assert _printed(example, tmp_path) == ["228 3 61"]


def test_its_links_lead_somewhere_and_what_it_names_is_there() -> None:
    root = Path(__file__).parents[2]
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    names = [word for block in _blocks("sh") for word in re.findall(r"[\w./-]*(?:tests|requirements)/[\w./-]+", block)]
    assert len(links) > 10 and len(names) > 5
    assert [name for name in (*links, *names) if not (root / name).exists()] == []


def test_released_schedulers_are_linked() -> None:
    root = Path(__file__).parents[2]
    papers = ["docs/sglang-differences.md", "docs/vllm-target.md"]
    papers += [f"docs/findings/{path.name}" for path in sorted((root / "docs" / "findings").glob("*.md"))]
    assert [name for name in papers if f"({name})" not in README] == []
    for path in sorted((root / "requirements").glob("*.txt")):
        assert f"pip install --no-deps -r requirements/{path.name}" in README
