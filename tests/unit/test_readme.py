"""What README shows is what happens."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvledger import UnifiedAdder, cli
from kvledger.decode import NewTokenRatio
from kvledger.invariants import INVARIANTS
from kvledger.request import Output
from kvledger.rules import PRESETS
from kvledger.testing.search import DRIVEN_PER_EXAMPLE, EXAMPLES
from kvledger.testing.unified_moves import UNIFIED_SPACE
from kvledger.unified import UnifiedNode
from tests.mutants.registry import MUTANTS
from tests.unit.builders import node_settings, prompt

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


def test_a_retraction_makes_the_ratio_that_it_says() -> None:
    (stated,) = re.findall(r": (\d+)/(\d+) for two of 100 that have made 30 and 10", README)
    ratio = NewTokenRatio(Fraction(7, 10))
    ratio.retracted([SimpleNamespace(generated_tokens=made, max_new_tokens=100) for made in (30, 10)])
    assert ratio.current == Fraction(*map(int, stated)) == Fraction(30 + 10 + 20 * 2, 100 + 100 + 1)


def test_arguments_that_it_names_are_the_constructors() -> None:
    decode = README.partition("### Where requests also decode")[2].partition("\n## ")[0]
    (said,) = re.findall(r"SGLang's names: (.*?)\.\n", decode, flags=re.DOTALL)
    by_name, by_keyword = ([*re.findall(r"`(\w+)`", part)] for part in said.split("by keyword alone"))
    by_name.remove("reqs")
    parameters = inspect.signature(UnifiedAdder).parameters
    assert by_name == [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert {parameters[name].kind for name in by_keyword} == {inspect.Parameter.KEYWORD_ONLY}
    assert re.findall(r"constructor's `(\w+)=`", decode) == ["release"]
    assert "release" in by_keyword


def test_a_sent_back_request_is_counted_as_it_says() -> None:
    (stated,) = re.findall(
        r"12 of 30 on a prompt of 100\s+are `prompt_tokens` (\d+) .* `generated_tokens` (\d+)", README
    )
    settings = node_settings(mode="unified", page_size=1, checkpoint_align=1)
    node = UnifiedNode(settings, PRESETS["tail-reserved"])
    node.submit("A", prompt(("a", 100)), Output(30))
    for _ in range(12):
        node.run_round()
    node._send_back(node.running["A"])
    back = node.waiting["A"]
    assert (back.prompt_tokens, back.generated_tokens) == tuple(map(int, stated))


def test_verify_multiplies_as_it_says() -> None:
    (stated,) = re.findall(
        r"is\s+([\d,]+) of Hypothesis's examples and ([\d,]+) plain ones, (\d+) and (\d+) beside decode", README
    )
    drawn = (EXAMPLES, EXAMPLES * DRIVEN_PER_EXAMPLE)
    beside = (UNIFIED_SPACE.examples, UNIFIED_SPACE.examples * DRIVEN_PER_EXAMPLE)
    assert tuple(int(number.replace(",", "")) for number in stated) == (*drawn, *beside)
    assert "with `--examples N` it is N and 2 N" in README
    assert DRIVEN_PER_EXAMPLE == 2


def test_mutants_and_invariants_are_as_many_as_it_and_the_changelog_say() -> None:
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text("utf-8")
    ((faults, noticed_by),) = re.findall(
        r"^- (\d+) faults in our own accounting,.*?each of the (\d+) invariants", README, flags=re.DOTALL | re.MULTILINE
    )
    ((kinds, mutants),) = re.findall(r"^- (\d+) invariants, and (\d+) mutants of our own", changelog, re.MULTILINE)
    counted = (len(MUTANTS), len(INVARIANTS))
    assert (int(faults), int(noticed_by)) == (int(mutants), int(kinds)) == counted


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
