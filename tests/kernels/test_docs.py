"""What docs/kernels.md shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text("utf-8")


EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_every_example_shows_what_it_prints() -> None:
    assert len(EXAMPLES) == PAGE.count("```python\n") == 2


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_prints_what_the_page_says(number: int, tmp_path: Path) -> None:
    example, printed = EXAMPLES[number]
    (tmp_path / "example.py").write_text(example, "utf-8")
    run = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == printed


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"\b(?:plan_\w+|canary_\w+|page_copy|NO_SLOT|StateSlots)\b", PAGE)))
)
def test_a_name_on_the_page_is_the_packages(name: str) -> None:
    import kvledger.kernels

    assert name in kvledger.kernels.__all__
