"""The short papers in docs: their commands end as they say, and their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvledger import cli

ROOT = Path(__file__).parents[2]
PAPERS = ("residue.md", "public-reports.md")
COMMAND = re.compile(r"^kvledger (?P<arguments>.*?)\s+# (?P<status>\d)(?::.*)?$", re.MULTILINE)


def _blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)


def _commands(paper: str) -> list[tuple[str, int]]:
    text = (ROOT / "docs" / paper).read_text("utf-8")
    lines = [line.strip() for shell in _blocks("sh", text) for line in shell.splitlines()]
    found = [match for line in lines if (match := COMMAND.match(line))]
    assert len(found) == sum(line.startswith("kvledger") for line in lines), f"{paper}: a command does not say its end"
    return [(match["arguments"], int(match["status"])) for match in found]


@pytest.mark.parametrize(
    ("paper", "arguments", "status"), [(paper, *each) for paper in PAPERS for each in _commands(paper)]
)
def test_a_command_ends_as_its_paper_says(
    paper: str,
    arguments: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the project's root, or beside the trace that the paper shows."""
    shown = _blocks("json", (ROOT / "docs" / paper).read_text("utf-8"))
    for trace in shown:
        (tmp_path / "report.json").write_text(trace, "utf-8")
    monkeypatch.chdir(tmp_path if shown else ROOT)
    assert cli.main(shlex.split(arguments)) == status
    assert capsys.readouterr().out


@pytest.mark.parametrize("paper", PAPERS)
def test_its_links_lead_somewhere(paper: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "docs" / paper).read_text("utf-8"))
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
