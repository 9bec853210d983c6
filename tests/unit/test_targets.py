"""Targets by name, and those that cannot be found, built or asked: one line, exit 2, and never a traceback."""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from kvledger import cli
from kvledger.cli import main
from kvledger.node import PrefillNode
from kvledger.replay import Replay, TargetError
from kvledger.rules import PRESETS
from kvledger.targets import TARGETS, find_target
from kvledger.testing.fixtures import folder_name
from kvledger.trace import Trace, write
from tests.unit.builders import INCIDENT, INCIDENT_NODE, node_settings

ODD = """
from kvledger.node import PrefillNode
from kvledger.targets.counted import CountedTarget

class Broken(CountedTarget):
    def __init__(self, node, rules, watcher):
        raise RuntimeError("no device\\nsecond line \\x1b[31m")

class Takes(CountedTarget):
    def __init__(self, node):
        pass

class Forgot(CountedTarget):
    def __init__(self, node, rules, watcher):
        pass

class Nothing(CountedTarget):
    def __init__(self, node, rules, watcher):
        super().__init__(node, watcher)
    def free_tokens(self): return self.settings.pool_tokens
    def allocated_tokens(self): return {}
    def enqueue(self, rid, tokens): pass
    def step(self): pass

class Strange(Nothing):
    def step(self): return [("nobody", 0, 1)]

def function(node, rules, watcher):
    raise KeyError("chunk")
"""
SAID = {
    "Broken": "target odd_targets:Broken cannot be built and looked at: RuntimeError: no device",
    "Takes": "target odd_targets:Takes cannot be built and looked at: TypeError: ",
    "Forgot": "target odd_targets:Forgot cannot be built and looked at: AttributeError: ",
    "Nothing": "target odd_targets:Nothing: step returned None, not the chunks that it ran",
    "Strange": "target odd_targets:Strange: step told of request 'nobody', which is unknown",
    "function": "target odd_targets:function cannot be built and looked at: KeyError: 'chunk'",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(Trace(INCIDENT_NODE, "aligned", INCIDENT), tmp_path / "incident.json")
    (tmp_path / "odd_targets.py").write_text(ODD)
    (tmp_path / "raises.py").write_text("raise RuntimeError('no driver\\nsecond line')")
    (tmp_path / "half.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    for name in ("odd_targets", "raises", "half"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command says that must end as bad input: one line of printable ASCII, and nothing else."""
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("kvledger: ") and all(" " <= c <= "~" for c in printed.err.rstrip("\n"))
    return printed.err


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("command", ["replay", "explain", "shrink", "fixture", "report", "perfetto", "upstream"])
def test_a_target_that_cannot_be_asked_is_one_line(
    command: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["-o", "out"] if command in ("report", "perfetto", "upstream") else []
    assert SAID[name] in line(capsys, command, "incident.json", "--target", f"odd_targets:{name}", *output)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("name", SAID)
def test_a_comparison_with_it_is_one_line_too(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SAID[name] in line(capsys, "compare", "incident.json", "--targets", f"node,odd_targets:{name}")


def test_what_our_own_constructor_raises_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(PrefillNode, "__init__", fail)
    with pytest.raises(RuntimeError, match="ours"):
        Replay(node_settings(), PRESETS["upstream"])
    sub = type("Theirs", (PrefillNode,), {"__module__": "theirs"})
    with pytest.raises(TargetError, match=r"^target theirs:Theirs cannot be built and looked at: RuntimeError: ours$"):
        Replay(node_settings(), PRESETS["upstream"], target=sub)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "odd_targets:",
            "'odd_targets:' is neither one of node, sglang, vllm, vllm-align nor package",
        ),
        (":Broken", "':Broken' is neither one of"),
        (":", "':' is neither one of"),
        ("", "'' is neither one of"),
        ("raises:Target", "'raises:Target': importing it raised RuntimeError: no driver"),
        ("half:Target", "'half:Target': importing it raised SyntaxError: "),
        (".odd_targets:Broken", "'.odd_targets:Broken': importing it raised TypeError: "),
        ("odd_targets:Missing", "has no attribute 'Missing'"),
    ],
)
def test_a_name_that_is_none_is_one_line(
    name: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in line(capsys, "replay", "incident.json", "--target", name)
    with pytest.raises(ValueError, match=r"^[^\n]*$"):
        find_target(name)


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize("stub", [False, True], ids=["alone", "beside a stub of that name"])
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "node"])
def test_a_package_that_is_missing_is_named_with_how_to_install_it(
    name: str, stub: bool, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = name.partition("-")[0]
    if _installed(package):
        pytest.skip(f"{package} is installed")
    if stub:
        module = ModuleType(package)
        module.__spec__ = ModuleSpec(package, None)
        monkeypatch.setitem(sys.modules, package, module)
    said = line(capsys, "compare", "incident.json", "--targets", f"node,{name}")
    assert f"the package {package} is not installed: pip install --no-deps -r requirements/{package}-" in said


@pytest.mark.parametrize("targets", [",", "node,", ",node", "node,,node"])
def test_a_comma_too_many_is_called_that(targets: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = line(capsys, "compare", "incident.json", "--targets", targets)
    assert "names no target beside a comma" in said


def test_a_report_is_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").write_text("")
    said = line(capsys, "upstream", "incident.json", "--rules", "aligned", "-o", "file")
    assert said == "kvledger: upstream: file: Not a directory\n"


def test_folders_of_two_schedulers_of_one_name_are_two() -> None:
    def target(module: str, name: str = "Target") -> type:
        return type("Target", (), {"__module__": module, "__qualname__": name})

    assert folder_name(PrefillNode) == "node"
    assert folder_name(target("a.b")) == "a.b.Target"
    assert folder_name(target("a.c")) == "a.c.Target"
    assert folder_name(target("a", "f.<locals>.Target")) == "a.f._locals_.Target"
    assert folder_name(target("kvledger.targets.sglang.target", "SglangTarget")) == "sglang"


@pytest.mark.parametrize("shown", [True, False])
def test_figures_of_a_ledger_are_shown_where_there_is_one(
    shown: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mute(PrefillNode):
        capabilities = PrefillNode.capabilities - (set() if shown else {"offsets"})

    for command in ("replay", "explain"):
        options = cli._parser().parse_args([command, "incident.json"])
        options.target = Mute
        options.run(options)
        printed = capsys.readouterr().out
        assert ("Figures are tokens: the ledger's baseline" in printed) == shown
        assert ("Those of a ledger are not among them: this target shows none." in printed) == (not shown)
        if command == "replay":
            assert ("rem_total  rem_chunk" in printed) == shown
            row = next(line for line in printed.splitlines() if line.lstrip().startswith("v9uj"))
            assert row.split()[1:4] == ["whole", "0..13888", "(13888)"]
            assert row.split()[4:] == (["34624", "20672", "20671", "2496"] if shown else [])
