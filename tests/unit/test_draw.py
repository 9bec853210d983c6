"""`kvledger report` and `kvledger perfetto`: a file written whole or not at all, one line for what cannot be done."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvledger.cli import SHELL, CommandError
from kvledger.commands.draw import add_perfetto, add_report
from kvledger.events import Hold
from kvledger.saving import write_whole
from kvledger.trace import Trace, TraceError, dumps, load
from tests.unit.builders import node_settings
from tests.unit.report_cases import INCIDENT_TRACE


class Shell:
    """Parses one of our commands as `kvledger.cli` would, and keeps what it prints."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.parser = argparse.ArgumentParser(prog="kvledger", exit_on_error=False)
        commands = self.parser.add_subparsers(required=True)
        for add in (add_report, add_perfetto):
            add(commands, replace(SHELL, read=load, write=self.printed.append))

    def __call__(self, *argv: str) -> int:
        options = self.parser.parse_args(argv)
        status: int = options.run(options)
        return status


@pytest.fixture
def traces(tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(dumps(INCIDENT_TRACE))
    bad.write_text(dumps(Trace(node_settings(), "aligned", (Hold("h", 9999),))))
    return SimpleNamespace(good=str(good), bad=str(bad), folder=tmp_path)


@pytest.mark.parametrize("command", ["report", "perfetto"])
def test_command_writes_a_file(command, traces):
    shell, output = Shell(), traces.folder / "out"
    assert shell(command, traces.good, "-o", str(output), "--rules", "tail-reserved") == 0
    assert shell.printed == [f"{output}: ok\n"]
    assert output.read_text("utf-8").startswith("<!doctype html>" if command == "report" else "{")
    assert sorted(os.listdir(traces.folder)) == ["bad.json", "good.json", "out"]


@pytest.mark.parametrize("command", ["report", "perfetto"])
def test_what_cannot_be_done_is_one_line_and_leaves_everything_as_it_was(command, traces, monkeypatch):
    monkeypatch.chdir(traces.folder)
    shell, old = Shell(), traces.folder / "old"
    old.write_text("old")
    (traces.folder / "folder").mkdir()
    for argv, message in (
        (["good.json", "-o", "gone/x"], f"{command}: gone/x: No such file or directory"),
        (["good.json", "-o", "folder"], f"{command}: folder: Is a directory"),
        (["good.json", "-o", ""], f"{command}: : not a file name"),
        (["good.json", "-o", "a\0b"], f"{command}: a\\u0000b: not a file name"),
        (["good.json", "-o", "-"], f"{command}: -o -: "),
        (["good.json", "-o", "./good.json"], f"{command}: good.json would be overwritten"),
        (["bad.json", "-o", "old"], "bad.json: events[0].tokens: "),
        (["gone\n.json", "-o", "old"], "gone\\n.json: No such file"),
    ):
        with pytest.raises((CommandError, TraceError)) as error:
            shell(command, *argv)
        assert str(error.value).startswith(message)
        assert str(error.value).isascii()
        assert "\n" not in str(error.value)
    assert old.read_text() == "old"
    assert sorted(os.listdir()) == ["bad.json", "folder", "good.json", "old"]
    assert shell.printed == []


def test_several_traces_in_one_report(traces):
    shell, output = Shell(), traces.folder / "out"
    shell("report", *[traces.good] * 7, "-o", str(output))
    assert shell.printed == [f"{output}: oom, oom, oom, oom, oom, and 2 more\n"]
    with pytest.raises(TraceError):
        shell("report", traces.good, traces.bad, "-o", str(traces.folder / "never"))
    with pytest.raises(CommandError, match="only once"):
        shell("report", "-", "-", "-o", str(output))
    assert not (traces.folder / "never").exists()


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")

    def pieces():
        yield "new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, pieces())
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "old"
    write_whole(path, ["n", "ew"])
    assert path.read_text() == "new"


def test_a_link_is_followed_and_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", ["new"])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        write_whole(tmp_path / "pipe", ["new"])
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "real"]
