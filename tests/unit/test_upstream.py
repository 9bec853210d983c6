"""`kvledger upstream`: the report, the script that needs no kvledger, and the files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import json
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvledger.cli import main
from kvledger.diagnose import diagnose
from kvledger.events import Abort, Cached, Drain, Event, Faulty, Hold, Release, Round, Submit, Transferred
from kvledger.ledger import Due, Promise
from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode
from kvledger.pool import OutOfPages
from kvledger.record import RoundRecord
from kvledger.replay import Broken, Outcome
from kvledger.report.bundle import NothingToReport, bundle_of
from kvledger.report.explained import explanation_lines
from kvledger.report.markdown import code, escaped
from kvledger.request import Output
from kvledger.targets.about import About
from kvledger.targets.counted import CountedTarget
from kvledger.targets.excerpt import excerpt
from kvledger.targets.script_runner import Runner
from kvledger.targets.script_runner import main as play
from kvledger.targets.sglang.about import about as sglang_about
from kvledger.targets.sglang.standalone import standalone as sglang_world
from kvledger.targets.standalone import LOOKED_FOR, NoScriptError, body_of, looked_for, script
from kvledger.trace import Trace, load, write
from tests.unit.builders import INCIDENT, INCIDENT_NODE, node_settings, prompt

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_scheduler"
SMALL = ROOT / "tests" / "regressions" / "promises-covered-115d8387.json"
TRACE = Trace(INCIDENT_NODE, "aligned", INCIDENT, "Post-mortem of a tail")
TARGET = "test_scheduler:Target"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[CountedTarget]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.chdir(tmp_path)
    target: type[CountedTarget] = importlib.import_module("test_scheduler").Target
    return target


def vllm_world(*, align: bool) -> str:
    """Its module needs no vllm, but the package around it does."""
    text: str = vllm_module("standalone").world_text(align=align)
    return text


def vllm_module(name: str) -> Any:
    path = ROOT / "src" / "kvledger" / "targets" / "vllm" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"vllm_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_alone(script_text: str, folder: Path, name: str = "reproduce.py") -> subprocess.CompletedProcess[str]:
    """Run it where kvledger cannot be imported, from an empty folder."""
    folder.mkdir()
    (folder / name).write_text(script_text)
    code = (
        "import runpy, sys\n"
        "sys.modules['kvledger'] = None\n"
        f"sys.path.insert(0, {str(EXAMPLE)!r})\n"
        f"runpy.run_path({name!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-I", "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


# --- the script


def test_the_script_shows_the_same_rounds_and_the_same_end(example: type[CountedTarget], tmp_path: Path) -> None:
    trace = load(SMALL)
    outcome = checked_replay(trace, target=example)
    assert outcome.verdict == "oom"
    done = run_alone(bundle_of(trace, example).files["reproduce.py"], tmp_path / "empty")
    assert done.stderr == ""
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    for record in outcome.rounds[:-1]:
        chunks = ", ".join(f"{d.request} {d.start}..{d.end}" for d in record.joined)
        assert any(line.startswith(f"round {record.round}: {chunks};") for line in lines)
    assert "round 1: A 0..5, B 0..4; free 4, evictable 0, admitted prompts still need 5: SHORT BY 1" in lines
    assert lines[-2:] == ["every chunk is the recorded one", "AS REPORTED (oom): oom in round 2"]


def test_a_mended_scheduler_does_not_fail_as_reported(example: type[CountedTarget], tmp_path: Path) -> None:
    text = bundle_of(load(SMALL), example).files["reproduce.py"]
    mended = text.replace("from scheduler import Scheduler", "import scheduler\nfrom scheduler import Scheduler")
    mended = mended.replace(
        "class Target(CountedTarget):",
        "scheduler.Scheduler._chunk_end = lambda self, job, budget: min(job.tokens, job.done + budget)\n\n\n"
        "class Target(CountedTarget):",
    )
    assert mended != text
    done = run_alone(mended, tmp_path / "empty")
    assert (done.returncode, done.stderr) == (0, "")
    assert "round 1 ran other chunks than recorded" in done.stdout
    assert "NOT AS REPORTED (oom)" in done.stdout


def test_a_promise_that_breaks_is_played_to_its_end(example: type[CountedTarget]) -> None:
    trace = load(SMALL)
    assert isinstance(trace.events[-1], Drain)
    cut = replace(trace, events=(*trace.events[:-1], Round()), expect={})
    assert checked_replay(cut, target=example).verdict == "promises-covered"
    files = bundle_of(cut, example).files
    assert "VERDICT = 'oom'" in files["reproduce.py"]
    assert json.loads(files["trace.json"])["events"][-2:] == [{"event": "round"}, {"event": "drain"}]


def test_nothing_of_kvledger_is_in_any_script(example: type[CountedTarget]) -> None:
    outcome = checked_replay(TRACE)
    upstream = replace(TRACE, rules="upstream")
    worlds = {
        "counted": example.standalone(TRACE),
        "sglang": sglang_world(upstream),
        "vllm": vllm_world(align=False),
        "vllm-align": vllm_world(align=True),
    }
    for name, world in worlds.items():
        tree = ast.parse(script(TRACE, outcome, world, {}, "reproduce.py"))
        modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert modules and not [module for module in modules if module.startswith("kvledger")], name
        # what one part takes from another is there, under the name by which it is taken
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert {"World", "Runner", "main"} <= defined, name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rules": "tail-reserved"}, "rules.reserve_tail is a variant of kvledger's"),
        ({"node": replace(INCIDENT_NODE, schedule_policy="priority")}, 'schedule_policy "priority" is not played'),
    ],
)
def test_what_sglangs_script_does_not_play_it_says(change: dict[str, Any], said: str) -> None:
    with pytest.raises(NoScriptError, match=said):
        sglang_world(replace(TRACE, **change))


def test_the_same_trace_gives_the_same_files(example: type[CountedTarget]) -> None:
    assert bundle_of(load(SMALL), example) == bundle_of(load(SMALL), example)


def test_hostile_names_stay_data(example: type[CountedTarget], tmp_path: Path) -> None:
    name = "\"\"\"'''\\\n\x1b[31m# `|{name}"
    trace = replace(load(SMALL), title=f'{name}\n"""')
    events = tuple(replace(e, request=name) if isinstance(e, Submit) and e.request == "A" else e for e in trace.events)
    files = bundle_of(replace(trace, events=events), example).files
    done = run_alone(files["reproduce.py"], tmp_path / "empty")
    assert (done.returncode, done.stderr) == (1, "")
    assert "\x1b" not in done.stdout + files["reproduce.py"] + files["report.md"]


# --- what a script is cut from


SOURCE = """
import math, os
from .engine import Engine
from kvledger.targets.counted import CountedTarget
from kvledger.settings import NodeSettings
from kvledger.rules import PRESETS

LIMIT = 4
UNUSED = PRESETS


def rounded(tokens: NodeSettings) -> int:
    return math.ceil(tokens / LIMIT)


def unused():
    return os.getcwd()


@final
class Mine(CountedTarget):
    # kept as it is
    def step(self, node: NodeSettings) -> NodeSettings:
        return Engine(rounded(1))


def final(cls):
    return cls
"""


def test_an_excerpt_is_what_the_class_needs_and_no_more() -> None:
    text = "\n".join(excerpt(SOURCE, "Mine", "package.sub"))
    for kept in (
        *("import math, os", "from package.sub.engine import Engine", "LIMIT = 4", "def rounded(", "def final("),
        *("@final\nclass Mine(CountedTarget):\n    # kept as it is",),
    ):
        assert kept in text
    for left in ("def unused", "UNUSED", "import CountedTarget", "import NodeSettings", "import PRESETS"):
        assert left not in text


def test_an_excerpt_that_needs_more_of_kvledger_is_refused() -> None:
    source = SOURCE.replace("return math", "print(PRESETS)\n    return math")
    with pytest.raises(NoScriptError, match=r"line 6 takes PRESETS from kvledger; a script has only CountedTarget"):
        excerpt(source, "Mine")


LEAK = Trace(
    node_settings(page_size=4, checkpoint_align=4, chunked_prefill_size=16, pool_tokens=64),
    "upstream",
    (Submit("A", prompt(("a", 20))), Round(), Abort("A"), Drain()),
)
OTHERS = """
from test_scheduler import Target


class LeakTarget(Target):
    def __init__(self, node, rules, watcher):
        super().__init__(node, rules, watcher)
        self.finish = self.give_back

    def give_back(self, rid):
        self.mine.finish(rid)
        self.mine.free_pages -= FORGOTTEN


FORGOTTEN = 1
"""


def target_of(source: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of a module of its own, beside the example."""
    module = f"module_{abs(hash(source)) % 10**9}"
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    return getattr(importlib.import_module(module), name)


def test_a_subclass_of_ones_own_target_brings_its_base_along(
    example: type[CountedTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(LEAK, target_of(OTHERS, "LeakTarget", tmp_path, monkeypatch))
    assert bundle.no_script is None
    done = run_alone(bundle.files["reproduce.py"], tmp_path / "empty")
    assert (done.returncode, done.stderr) == (1, "")
    assert "AS REPORTED (conserved): lost after abort A" in done.stdout


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            OTHERS.replace("Target\n", "Target as Base\n", 1).replace("(Target)", "(Base)"),
            "takes Base from test_schedul",
        ),
        (OTHERS.replace("FORGOTTEN = 1", "Scheduler = FORGOTTEN = 1"), "each define Scheduler"),
        (
            OTHERS.replace("from test_scheduler import", "import test_scheduler\nTarget = test_scheduler."),
            "line 2 takes",
        ),
    ],
)
def test_a_base_that_cannot_come_along_is_named(
    source: str, said: str, example: type[CountedTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoScriptError, match=said):
        target_of(source, "LeakTarget", tmp_path, monkeypatch).standalone(LEAK)


def test_a_body_is_a_module_without_its_head() -> None:
    head = '"""Doc\nstring."""\n# ruff: noqa\nfrom __future__ import annotations\n\n'
    body = "import a\nfrom b.c import (\n    d,\n)\nx = 1\n"
    assert body_of("Head", head + body, ("b.c",)) == "# --- Head\n\nimport a\nx = 1\n"


# --- what plays the events


class NodeWorld:
    """Our own node as a script's world, so that the runner can be held against the replay."""

    def __init__(self, trace: Trace) -> None:
        self.node = PrefillNode(trace.node, trace.accounting_rules)
        self.record: RoundRecord | None = None

    def submit(self, name: str, prompt_runs: Any, output: Any) -> str | None:
        return self.node.submit(name, prompt(*map(tuple, prompt_runs)))

    def round(self) -> list[tuple[str, int, int]]:
        record = self.node.run_round()
        if record.failure is not None:
            raise MemoryError(record.failure.message)
        return [(d.request, d.start, d.end) for d in record.joined]

    def cached(self, tier: str, prompt_runs: Any, locked: bool) -> None:
        whole = prompt(*map(tuple, prompt_runs))
        if tier == "host":
            self.node.cache_on_host(whole)
        else:
            self.node.cache_on_device(whole, locked=locked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def in_flight(self) -> tuple[str, ...]:
        return self.node.in_flight()

    def has_work(self) -> bool:
        return self.node.has_work

    def moves(self) -> bool:
        return False

    def pool(self) -> tuple[int, int]:
        snapshot, page_size = self.node.snapshot(), self.node.page_size
        return snapshot.free_pages * page_size, snapshot.evictable_pages * page_size

    def needs(self) -> dict[str, int]:
        page_size = self.node.page_size
        live = [each for each in self.node.snapshot().live if not each.in_flight]
        return {
            each.rid: -(-each.prompt_tokens // page_size) * page_size - len(each.pages) * page_size for each in live
        }

    def thrown_away(self) -> list[str]:
        return []

    def lost(self) -> int | None:
        return 0


def played(trace: Trace) -> tuple[int, str, Runner]:
    from kvledger.trace import to_document

    outcome = checked_replay(trace)
    records = outcome.rounds if outcome.failure is None else outcome.rounds[:-1]
    recorded = [[[d.request, d.start, d.end] for d in record.joined] for record in records]
    events = to_document(trace)["events"]
    printed = io.StringIO()
    with redirect_stdout(printed):
        wanted = looked_for(outcome)
        status = play(NodeWorld(trace), trace.node.page_size, events, recorded, outcome.verdict, wanted)
        runner = Runner(NodeWorld(trace), trace.node.page_size, recorded)
        for event in events:
            runner.play(event)
    return status, printed.getvalue(), runner


def _played_alone(trace: Trace) -> bool:
    """A prefill node's events, without faults and pipelines: no scheduler that has a script models those."""
    faulty = any(isinstance(event, Faulty) for event in trace.events)
    return trace.node.mode == "prefill" and not trace.node.ranks and not faulty


PREFILL = [path for path in sorted((ROOT / "tests" / "regressions").glob("*.json")) if _played_alone(load(path))]


@pytest.mark.parametrize("path", PREFILL, ids=lambda path: path.stem)
@pytest.mark.parametrize("rules", ["aligned", "upstream"])
def test_the_runner_plays_what_a_replay_plays(path: Path, rules: str) -> None:
    trace = load(path).with_rules(rules)
    outcome = checked_replay(trace)
    status, printed, runner = played(trace)
    assert runner.changed is None
    assert runner.rounds == len(outcome.rounds)
    assert ("oom" in runner.found, "stuck" in runner.found) == (outcome.failure is not None, outcome.stuck is not None)
    assert ("short" in runner.found) == any(each.invariant == "promises-covered" for each in outcome.broken)
    assert status == (1 if looked_for(outcome) else 2), "what a script has no eyes for it shows neither way"
    assert ("NOT SHOWN" if status == 2 else "AS REPORTED") in printed


def test_the_runner_plays_outsiders_too() -> None:
    events: tuple[Event, ...] = (
        Hold("h", 128),
        Cached("device", prompt(("d", 128))),
        Submit("A", prompt(("a", 100))),
        Submit("B", prompt(("b", 100))),
        Submit("C", prompt(("c", 10_000))),
        Round(),
        Abort("B"),
        Transferred("A"),
        Release("h", 64),
        Release("h"),
        Hold("h", 576),
        Submit("D", prompt(("d", 200))),
        Drain(),
    )
    status, printed, runner = played(Trace(node_settings(), "upstream", events))
    assert (status, runner.changed, set(runner.found)) == (1, None, {"stuck"})
    assert "submit C: 10000 tokens, refused: " in printed
    assert "STUCK: nothing runs, and nothing is in flight" in printed


class Raising(NodeWorld):
    def round(self) -> list[tuple[str, int, int]]:
        raise KeyError("row 7")


def test_an_exception_is_shown_and_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace(node_settings(), "upstream", ())
    events = [{"event": "round"}, {"event": "round"}]
    assert play(Raising(trace), 64, events, [], "never-raises", ["raised"], "KeyError") == 1
    printed = capsys.readouterr().out
    assert printed.count("Traceback") == 1 and "KeyError: 'row 7'" in printed
    assert "AS REPORTED (never-raises): raised in round 1" in printed
    for verdict, wanted, raises in (("oom", ["oom"], None), ("never-raises", ["raised"], "IndexError")):
        assert play(Raising(trace), 64, events, [], verdict, wanted, raises) == 2, "another exception shows nothing"
        assert "COULD NOT RUN" in capsys.readouterr().out


class Unkind(NodeWorld):
    """Says what each kind of fault would show."""

    def __init__(self, trace: Trace, **says: Any) -> None:
        super().__init__(trace)
        self.says = says

    def lost(self) -> Any:
        return self.says.get("lost", 0)

    def thrown_away(self) -> Any:
        return self.says.get("thrown_away", [])

    def round(self) -> list[tuple[str, int, int]]:
        return self.says["chunks"].pop(0) if self.says.get("chunks") else super().round()

    def has_work(self) -> Any:
        return self.says.get("has_work", super().has_work())

    def pool(self) -> tuple[int, int]:
        free, evictable = super().pool()
        return free - self.says.get("kept", 0) * bool(self.node.rounds), evictable


ASKED = [
    {"event": "submit", "request": "A", "prompt": [["a", 100]]},
    {"event": "submit", "request": "B", "prompt": [["b", 100]]},
]
ROUND: list[dict[str, Any]] = [{"event": "round"}]


@pytest.mark.parametrize(
    ("verdict", "says", "events"),
    [
        ("conserved", {"lost": 64}, ROUND),
        ("conserved", {"lost": -64}, ROUND),
        ("quiescent", {"kept": 64}, [*ROUND, {"event": "drain"}]),
        ("one-half-done", {"chunks": [[("A", 0, 64), ("B", 0, 64)]]}, ROUND),
        ("everyone-served", {"has_work": False}, [{"event": "drain"}]),
        ("admitted-finishes", {"chunks": [[("A", 0, 64)], [("A", 0, 64)]]}, ROUND * 2),
        ("admitted-finishes", {"chunks": [[("A", 0, 64)]], "thrown_away": ["A"]}, ROUND),
    ],
)
def test_a_script_checks_what_it_reports(verdict: str, says: dict[str, Any], events: list[dict[str, Any]]) -> None:
    trace = Trace(node_settings(), "upstream", ())
    wanted = LOOKED_FOR[verdict]
    with redirect_stdout(io.StringIO()):
        assert play(Unkind(trace, **deepcopy(says)), 64, [*ASKED, *events], [], verdict, wanted) == 1
        assert play(Unkind(trace), 64, [*ASKED, *events], [], verdict, wanted) == 0


@pytest.mark.parametrize(
    ("wanted", "says", "events"),
    [
        ([], {}, []),
        (["lost"], {"lost": None}, ROUND),
        (["not given back"], {}, [{"event": "cached", "tier": "device", "prompt": [["a", 64]], "locked": True}]),
    ],
)
def test_what_a_script_cannot_see_is_neither_there_nor_mended(
    wanted: list[str], says: dict[str, Any], events: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    world = Unkind(Trace(node_settings(), "upstream", ()), **says)
    assert play(world, 64, [*ASKED, *events], [], "x", wanted) == 2
    assert "NOT SHOWN (x): this script cannot see that" in capsys.readouterr().out


def test_what_has_no_eyes_is_said_in_the_report() -> None:
    outcome = checked_replay(TRACE)
    assert looked_for(outcome) == ("oom",)
    for invariant in ("on-grid", "never-forced", "table-fits"):
        assert looked_for(Outcome(broken=[Broken(invariant, 1, None, "")])) == ()
    assert looked_for(Outcome(broken=[Broken("conserved", 1, None, "the host tier has 2 pages and room for 1")])) == ()


def test_a_script_that_cannot_start_ends_with_two(example: type[CountedTarget], tmp_path: Path) -> None:
    text = bundle_of(load(SMALL), example).files["reproduce.py"]
    missing = text.replace("from scheduler import", "from not_there import")
    broken = text.replace("super().__init__(node, watcher)", "super().__init__(node, watcher, 1)")
    for number, (script_text, said) in enumerate(((missing, "ModuleNotFoundError"), (broken, "TypeError"))):
        assert script_text != text
        done = run_alone(script_text, tmp_path / str(number))
        assert done.returncode == 2
        assert f"COULD NOT RUN: {said}: " in done.stderr.splitlines()[-1]


def test_a_mended_leak_is_not_as_reported(
    example: type[CountedTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(OTHERS, "LeakTarget", tmp_path, monkeypatch)
    text = bundle_of(LEAK, target).files["reproduce.py"]
    done = run_alone(text.replace("FORGOTTEN = 1", "FORGOTTEN = 0"), tmp_path / "empty")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "NOT AS REPORTED (conserved): it was looked for and not found"


# --- the report


def test_the_report_says_who_was_promised_what_and_who_spent_it() -> None:
    report = bundle_of(TRACE, PrefillNode).files["report.md"]
    for said in (
        "# Out of memory: `1keim` was admitted, and its prefill finds no slots\n",
        "`1keim` was cut in round 1 with 4936 tokens (4992 in whole pages of 64) of its prompt left to compute.",
        "The slots for it went to `xpkq`: a load-back of 15360 tokens and a chunk of 192 tokens",
        "In short: Post-mortem of a tail.",
        "| 4 | submit | `1keim`: 94024 of `keim` | 94024 |",
        "| `1keim` | truncated | 86784..89088 of 94024 | 4936 |  | 2368 now (2304 chunk + 64 one page more) | 34624 |",
        "Left: 2880 tokens free, 0 evictable (",
        "Prompts that are half done still need 4992. **2112 too few.**",
        "| `1keim` | resumed, forced | 91968..94024 of 94024 | 0 |",
        "**Out of memory**: `1keim` wanted 2056 tokens, with 0 free and 0 evictable.",
        "- Expected: an admitted prompt can always finish its prefill.",
        "- Actual: round 4: Prefill out of memory: 1keim tries to allocate 2056 tokens",
        "With kvledger: `kvledger replay trace.json`",
    ):
        assert said in report
    assert "reproduce.py" not in report
    assert "reserve_tail" not in report, "kvledger's own switches are no news to another project"


def test_a_target_without_a_ledger_has_no_figures_of_one(example: type[CountedTarget]) -> None:
    report = bundle_of(load(SMALL), example).files["report.md"]
    assert "rem_total_tokens" not in report
    assert "| `A` | truncated | 0..5 of 10 | 5 |\n" in report
    assert "`python reproduce.py` needs the scheduler itself, and nothing of kvledger" in report


def test_versions_are_those_of_the_targets_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Packaged(PrefillNode):
        packages = ("pytest", "not-there")

    report = bundle_of(TRACE, Packaged).files["report.md"]
    assert f"Seen with pytest {pytest.__version__}, not-there of unknown version." in report


def test_every_kind_of_event_has_its_row() -> None:
    events: tuple[Event, ...] = (
        Hold("h", 64),
        Cached("device", prompt(("a", 64)), locked=True),
        Submit("A", prompt(("a", 64), ("b", 64)), Output(max_new_tokens=1)),
        Round(),
        Transferred("A"),
        Abort("A"),
        Release("h"),
        *INCIDENT,
    )
    report = bundle_of(Trace(INCIDENT_NODE, "aligned", events), PrefillNode).files["report.md"]
    for row in (
        "| 1 | hold | slots are taken from outside: `h` | 64 |",
        "| 2 | cached on the device, locked | 64 of `a` | 64 |",
        "| 3 | submit | `A`: 64 of `a` + 64 of `b` | 128 |",
        "| 4 | round | one round of the scheduler |  |",
        "| 5 | transferred | `A` |  |",
        "| 6 | abort | `A` |  |",
        "| 7 | release | and given back: `h` | all |",
    ):
        assert row in report


def test_names_and_text_are_no_markup() -> None:
    assert code("a|b`c") == "`a\\|b'c`"
    assert escaped("<b> @someone *x* _y_ [z](w) `q` # | ~") == (
        "&lt;b&gt; &#64;someone \\*x\\* \\_y\\_ \\[z\\](w) \\`q\\` \\# \\| \\~"
    )


def test_a_sound_run_is_nothing_to_report() -> None:
    with pytest.raises(NothingToReport, match="does not break any invariant"):
        bundle_of(TRACE.with_rules("tail-reserved"), PrefillNode)


# --- the command


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    path = tmp_path / "incident.json"
    write(TRACE, path)
    return str(path)


def test_the_command_writes_three_files_once(
    example: type[CountedTarget], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "report"
    for _ in range(2):
        assert main(["upstream", str(SMALL), "--target", TARGET, "-o", str(folder)]) == 0
        assert capsys.readouterr().out.split() == [
            str(folder / name) for name in ("report.md", "reproduce.py", "trace.json")
        ]
    assert sorted(path.name for path in folder.iterdir()) == ["report.md", "reproduce.py", "trace.json"]
    assert load(folder / "trace.json").events == load(SMALL).events


def test_a_target_without_a_script_says_so(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["upstream", trace_file]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "kvledger-upstream/report.md",
        "kvledger-upstream/trace.json",
        "no script: this target has no standalone(trace): see kvledger.replay.Target",
    ]


def test_other_files_are_not_overwritten(trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "trace.json").write_text("mine")
    assert main(["upstream", trace_file, "-o", str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.endswith("trace.json: is there already, and is another report\n")
    assert [path.read_text() for path in folder.iterdir()] == ["mine"]


def test_a_trace_that_breaks_nothing_is_one_line(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "report"
    assert main(["upstream", trace_file, "--rules", "tail-reserved", "-o", str(folder)]) == 1
    assert capsys.readouterr().err == "kvledger: upstream: the trace does not break any invariant (verdict ok)\n"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.json"], "none.json: No such file"),
        (["TRACE", "--target", "nobody"], "is neither one of"),
        (["TRACE", "-o", "FILE"], "file: Not a directory"),
        (["TRACE", "-o", "FILE/below"], "Not a directory"),
        (["TRACE", "-o", "a\0b"], "not a folder name"),
        (["TRACE", "-o", ""], "not a folder name"),
        (["TRACE", "-o", "-"], "not a folder name"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    known = {"TRACE": trace_file, "FILE": str(tmp_path / "file"), "FILE/below": str(tmp_path / "file" / "below")}
    assert main(["upstream", *(known.get(each, each) for each in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and said in printed.err


class Decoding(PrefillNode):
    """Takes slots for tokens that others decode, which is nobody's decision."""

    def run_round(self) -> RoundRecord:
        with suppress(OutOfPages):
            self.hold("decode", self.page_size)
        return replace(super().run_round(), decoded=("X", "Y"))


def test_slots_that_decodes_took_are_not_said_to_be_nobodys() -> None:
    trace = Trace(
        node_settings(chunked_prefill_size=128, checkpoint_align=64, pool_tokens=448),
        "tail-reserved",
        (Submit("C", prompt(("c", 300))), Drain()),
    )
    report = bundle_of(trace, Decoding).files["report.md"]
    assert "The slots for it went to requests that decode: `X`, `Y`." in report
    assert "Decoded: `X`, `Y`." in report
    lines = " ".join(" ".join(explanation_lines(diagnose(trace, target=Decoding))).split())
    assert "spent by X, Y, by decoding" in lines


# --- for a reader who does not know kvledger


def prose(report: str) -> str:
    return report.replace("`trace.json` is the same trace for `kvledger replay`.", "")


OWN_WORDS = ("fair continuation", "continuations tried", "as late as they can", "ledger", "promise", "thrown away")


def test_no_word_of_our_own_is_left_unexplained(example: type[CountedTarget]) -> None:
    for report in (bundle_of(TRACE, PrefillNode), bundle_of(load(SMALL), example)):
        text = prose(report.files["report.md"]).replace("kvledger", "").lower()
        assert [word for word in OWN_WORDS if word in text] == []
    text = bundle_of(TRACE, PrefillNode).files["report.md"]
    assert "- Slots are allocated in whole pages of 64 tokens" in text
    assert "`forced`: it runs because it is half done" in text


def test_a_leak_names_the_event_that_leaks(
    example: type[CountedTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = bundle_of(LEAK, target_of(OTHERS, "LeakTarget", tmp_path, monkeypatch)).files["report.md"]
    assert report.startswith("# Leak: 4 tokens of slots belong to nobody when `A` is aborted\n")
    assert "- Actual: when `A` is aborted, after round 1: 4 tokens of slots belong to nobody.\n" in report
    after_round = report.partition("Round 1:")[2]
    assert "**When `A` is aborted, after round 1: 4 tokens of slots belong to nobody.**" in after_round


@pytest.mark.parametrize(
    ("method", "place"),
    [
        ("step", "In round 1"),
        ("enqueue", "When `A` is submitted, before the first round, the scheduler raises"),
        ("finish", "When `A` is aborted, after"),
    ],
)
def test_an_exception_has_its_place_and_its_title(
    method: str, place: str, example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"""
from test_scheduler import Target


class Raising(Target):
    def __init__(self, node, rules, watcher):
        super().__init__(node, rules, watcher)
        self.{method} = self.fails

    def fails(self, *_):
        raise KeyError("row 7")
"""
    bundle = bundle_of(LEAK, target_of(source, "Raising", tmp_path, monkeypatch))
    report = bundle.files["report.md"]
    assert report.startswith("# Exception: KeyError in fails (")
    assert "round 0:" not in report.lower()
    assert report.partition("## Round by round")[2].count(f"**{place}") == 1
    done = run_alone(bundle.files["reproduce.py"], tmp_path / "empty")
    assert done.returncode == 1 and "AS REPORTED (never-raises): raised" in done.stdout


class Preempting(PrefillNode):
    """Has told a preemption in round 2; `again` tokens of what was computed are computed again."""

    again = 0

    def run_round(self) -> RoundRecord:
        record = super().run_round()
        if record.round == 2:
            return replace(record, rolled_back=("C",), decisions=())
        moved = tuple(replace(d, start=128 - self.again) if d.start == 256 else d for d in record.decisions)
        return replace(record, decisions=moved)


class PreemptingAgain(Preempting):
    again = 64


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            Preempting,
            "goes on from there in round 3: the prefix cache still had all of it, and nothing is computed again",
        ),
        (PreemptingAgain, "it goes on from 64 in round 3: 64 tokens are computed again"),
    ],
)
def test_a_preempted_prefill_is_told_by_where_it_goes_on(target: Any, said: str) -> None:
    trace = Trace(node_settings(chunked_prefill_size=128), "tail-reserved", (Submit("C", prompt(("c", 300))), Drain()))
    report = bundle_of(trace, target).files["report.md"]
    assert report.startswith("# Preempted in its prefill: `C` was admitted, and loses its slots half-way\n")
    assert said in report and "begins its prefill again" not in report
    assert "**Preempted in the middle of its prefill: `C`.**" in report


def test_what_a_target_says_of_itself_is_in_the_report() -> None:
    class Telling(PrefillNode):
        @staticmethod
        def about(trace: Trace, verdict: str) -> About:
            return About("theirs, all of it", "--page 64", "no flag", (f"for {verdict}",), "something *else*")

    report = bundle_of(TRACE, Telling).files["report.md"]
    for said in ("Whose code ran: theirs, all of it\n", "\n    --page 64\n", "\nno flag\n", "\nfor oom\n"):
        assert said in report
    assert "- Expected: something \\*else\\*.\n" in report


def test_figures_are_shown_wherever_charges_are_told() -> None:
    class Mixed(PrefillNode):
        """Tells charges, of others too, and does not declare its offsets, as sglang's in unified mode."""

        capabilities = PrefillNode.capabilities - {"offsets"}

        def run_round(self) -> RoundRecord:
            record = super().run_round()
            running = (
                Promise("the running batch", "decode", 2, Due.NOW),
                Promise("the running batch", "x", 4, Due.LATER),
            )
            return replace(record, promises=(*running, *record.promises))

    report = bundle_of(TRACE, Mixed).files["report.md"]
    assert "Charged beside these, before the first of them: the running batch 2 now + 4 later." in report
    assert "| 34624 | 18304 | 18303 | 192 |" in report


UNIFIED = replace(INCIDENT_NODE, mode="unified", mixed_chunk=True, chunked_prefill_size=192, page_size=64)


@pytest.mark.parametrize(
    ("node", "rules", "flags"),
    [
        (
            replace(UNIFIED, pool_tokens=400, max_prefill_tokens=None, host_tokens=0),
            "upstream",
            "--page-size 64 --chunked-prefill-size 192 --max-total-tokens 384 --schedule-policy fcfs "
            "--enable-mixed-chunk --disable-overlap-schedule",
        ),
        (
            node_settings(pool_tokens=640, host_tokens=1280, chunked_prefill_size=None, max_prefill_tokens=512),
            "upstream",
            "--page-size 64 --chunked-prefill-size -1 --max-prefill-tokens 512 --max-total-tokens 640 "
            "--schedule-policy fcfs --disaggregation-mode prefill --enable-hierarchical-cache --hicache-ratio 2 "
            "--disable-overlap-schedule",
        ),
    ],
)
def test_sglangs_flags_are_the_nodes_settings(node: Any, rules: str, flags: str) -> None:
    assert sglang_about(Trace(node, rules, ()), "oom").flags == flags


def test_a_truncation_alignment_is_told_beside_the_flags() -> None:
    rules = replace(Trace(INCIDENT_NODE, "upstream", ()).accounting_rules, truncation_align=256)
    told = sglang_about(Trace(INCIDENT_NODE, rules, ()), "oom")
    assert "--enable-deterministic-inference" in str(told.flags) and "256 tokens" in str(told.beside_flags)


def test_vllms_report_has_what_decides_it() -> None:
    about = vllm_module("about").about
    node = node_settings(page_size=4, checkpoint_align=4, chunked_prefill_size=16, pool_tokens=44, host_tokens=0)
    trace = Trace(node, "upstream", (Submit("A", prompt(("a", 40))), Drain()))
    told = about(trace, "stuck", align=True, startup_blocks=12)
    assert "--block-size 4 --num-gpu-blocks-override 12" in told.flags and "--mamba-cache-mode align" in told.flags
    notes = " ".join(told.notes)
    for said in (
        "hybrid",
        "mamba_cache_mode align",
        "prefix caching",
        "vllm#52520",
        "refuses to start",
        "two from the",
    ):
        assert said in notes
    assert "so a server starts with this" in " ".join(about(trace, "stuck", align=True, startup_blocks=11).notes)
    strict = about(trace, "admitted-finishes", align=False)
    assert "by design" in " ".join(strict.notes) and "does not promise" in strict.expected
    assert "mamba" not in " ".join((strict.flags, *strict.notes))
