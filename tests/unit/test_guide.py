"""docs/your-scheduler.md: its files are written, its commands are run in order, and each ends as it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "your-scheduler.md").read_text("utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?P<command>.*?)\s+# (?P<status>\d)(?::.*)?$")


class Walk:
    """Somebody follows the guide in a folder of his own. `said` is what each command printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: dict[str, str] = {}
        self.status: dict[str, tuple[int, int]] = {}
        self.text = ""

    def follow(self, language: str, block: str) -> None:
        if language == "python":
            name = block.splitlines()[0].removeprefix("# ")
            (self.folder / name).write_text(block)
        elif language == "sh" and "venv" not in block:
            for line in block.splitlines():
                self.run(line)
        elif language == "text":
            self.text += block

    def run(self, line: str) -> None:
        found = COMMAND.match(line)
        assert found, f"the guide does not say how this ends: {line}"
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-c", found["command"]],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PATH": path, "NO_COLOR": "1"},
            check=False,
        )
        self.said[found["command"]] = done.stdout + done.stderr
        self.status[found["command"]] = (done.returncode, int(found["status"]))

    def of(self, beginning: str) -> str:
        (command,) = (command for command in self.said if command.startswith(beginning))
        return self.said[command]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    walk = Walk(tmp_path_factory.mktemp("walk"))
    shutil.copy(ROOT / "examples" / "my_scheduler" / "scheduler.py", walk.folder)
    for language, block in BLOCK.findall(GUIDE):
        walk.follow(language, block)
    return walk


def test_every_command_ends_as_the_guide_says(walk: Walk) -> None:
    assert len(walk.status) == 9
    wrong = {line: walk.said[line][-2000:] for line, (got, said) in walk.status.items() if got != said}
    assert wrong == {}


def test_the_search_finds_what_the_guide_shows(walk: Walk) -> None:
    printed = walk.of("pytest -q test_my_scheduler.py")
    first, *others = (line for line in walk.text.splitlines() if line != "...")
    assert others and all(line in printed for line in others)
    # how many events and replays it took may vary
    pattern = re.sub(r"\\?[\d,]+ ", r"[\\d,]+ ", re.escape(first).replace(r"\ ", " "))
    assert re.search(pattern, printed)
    assert "not asked, for the target cannot show it" in printed


def test_the_comparison_says_what_the_guide_says(walk: Walk) -> None:
    printed = walk.of("kvledger compare")
    assert re.search(r"^round 1 +B whole 0\.\.4 +no such chunk$", printed, re.MULTILINE)
    assert "not shown" in printed


def test_every_cut_in_what_is_shown_is_marked(walk: Walk) -> None:
    """What stands side by side in the guide stands side by side in the output; `...` is what is left out."""
    printed = walk.of("pytest -q test_my_scheduler.py").splitlines()
    for part in walk.text.split("...\n"):
        first, *others = part.splitlines() or [""]
        assert not others or "\n".join(others) in "\n".join(printed), f"below {first}"
        if others:
            assert printed[printed.index(others[0]) - 1].startswith(first[:20])


def test_the_way_past_a_known_hole_is_one(walk: Walk) -> None:
    (line,) = re.findall(r"`(state_machine\(Target, without=.*?\)\.TestCase)`", GUIDE, re.DOTALL)
    source = "from my_target import Target\nfrom kvledger.testing import state_machine\n\nTestScheduler = "
    (walk.folder / "test_past_it.py").write_text(f"{source}{' '.join(line.split())}\n")
    later = Walk(walk.folder)
    later.run("pytest -q test_past_it.py --kvledger-save found2  # 0")
    assert "1 passed" in later.of("pytest -q test_past_it.py"), later.said


def test_the_known_hole_is_an_expected_failure_until_it_is_mended(walk: Walk) -> None:
    assert "1 xfailed" in walk.of("pytest -q test_known.py")
    scheduler = walk.folder / "scheduler.py"
    hole = "promised += self._new_pages(job, end)  # the hole"
    source = scheduler.read_text()
    assert hole in source
    later = Walk(walk.folder)
    try:
        scheduler.write_text(source.replace(hole, "promised += self._new_pages(job, job.tokens)  # mended"))
        later.run("pytest -q test_known.py  # 1")
    finally:
        scheduler.write_text(source)
    assert "mended? remove oom-a-cut-tail.json" in later.of("pytest -q test_known.py")


def test_the_script_repeats_it_without_kvledger(walk: Walk) -> None:
    printed = walk.of("PYTHONPATH=. python report/reproduce.py")
    assert "every chunk is the recorded one" in printed
    assert printed.endswith("AS REPORTED (oom): oom in round 2\n")


def test_the_guide_is_short() -> None:
    assert len(GUIDE.splitlines()) < 240
