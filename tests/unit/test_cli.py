"""The command line: exit statuses, one-line errors, nothing half-printed, and JSON that is the outcome's own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvledger
from kvledger import cli
from kvledger.cli import main
from kvledger.events import (
    Cached,
    Drain,
    Event,
    Hold,
    Round,
    Submit,
)
from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode
from kvledger.replay import TargetFactory
from kvledger.rules import PRESETS
from kvledger.trace import Trace, dumps, load
from tests.unit.builders import INCIDENT, INCIDENT_NODE, node_settings, prompt

EXPECT = {"upstream": "ok", "aligned": "oom", "tail-reserved": "ok"}
EXAMPLE_NODE = node_settings(max_prefill_tokens=16384, pool_tokens=12032)
EXAMPLE_ARRIVALS: tuple[Event, ...] = (
    Submit("A", prompt(("a", 1088))),
    Submit("B", prompt(("b", 8000))),
    Submit("C", prompt(("doc", 6144), ("c", 128))),
    Drain(),
)
CASES = {
    "incident": Trace(INCIDENT_NODE, "aligned", INCIDENT, expect=EXPECT),
    "worked-example": Trace(
        EXAMPLE_NODE, "aligned", (Cached("host", prompt(("doc", 6144))), *EXAMPLE_ARRIVALS), expect=EXPECT
    ),
    "device-hit-lock": Trace(
        node_settings(max_prefill_tokens=16384, pool_tokens=12032, host_tokens=0),
        "aligned",
        (Cached("device", prompt(("doc", 6144))), *EXAMPLE_ARRIVALS),
        expect=EXPECT,
    ),
}
QUIET = Trace(node_settings(), "aligned", (Submit("a", prompt(("a", 64))), Drain()))


@pytest.fixture
def file_of(tmp_path: Path) -> Callable[..., str]:
    """Writes a trace, a document or bytes to a file of that name, and gives its path."""

    def write(content: object, name: str = "t.json") -> str:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(dumps(content) if isinstance(content, Trace) else json.dumps(content))
        return str(path)

    return write


def without_expectation(trace: Trace, rules: Any = "aligned") -> Trace:
    return Trace(trace.node, rules, trace.events)


def refused(capsys, *argv: str) -> str:
    """The one line of a command that exits with 2."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvledger: ")
    assert err.endswith("\n")
    line: str = err[:-1]
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 400
    return line.removeprefix("kvledger: ")


# --- exit statuses


@pytest.mark.parametrize("rules", PRESETS)
@pytest.mark.parametrize("case", CASES)
def test_cases_end_as_they_expect_under_each_preset(case, rules, file_of, capsys):
    path = file_of(CASES[case])
    assert main(["replay", path, "--rules", rules]) == 0
    assert f"as expected under {rules}" in capsys.readouterr().out
    bare = file_of(without_expectation(CASES[case]))
    assert main(["replay", bare, "--rules", rules]) == (0 if EXPECT[rules] == "ok" else 1)


@pytest.mark.parametrize(
    ("rules", "expect", "options", "status"),
    [
        ("aligned", {}, [], 1),
        ("aligned", {"aligned": "oom"}, [], 0),
        ("aligned", {"aligned": "ok"}, [], 1),
        ("aligned", {"aligned": "promises-covered"}, [], 1),
        # an expectation under other rules says nothing
        ("aligned", {"tail-reserved": "oom"}, [], 1),
        ("aligned", {"tail-reserved": "oom"}, ["--rules", "tail-reserved"], 1),
        ("aligned", {"aligned": "oom"}, ["--rules", "tail-reserved"], 0),
        # switches that are a preset's are that preset
        (PRESETS["aligned"], {"aligned": "oom"}, [], 0),
        (PRESETS["tail-reserved"], {"aligned": "oom"}, [], 0),
    ],
)
def test_expectation_of_the_rules_in_force_decides(rules, expect, options, status, file_of):
    path = file_of(Trace(INCIDENT_NODE, rules, INCIDENT, expect=expect))
    assert main(["replay", path, *options]) == status
    assert main(["replay", path, *options, "--json"]) == status


def test_fault_of_our_own_is_no_violation(file_of, capsys, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("3 pages, not 4")

    monkeypatch.setattr(cli, "replay", fail)
    assert main(["replay", file_of(QUIET)]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert "3 pages, not 4" in err


def test_interrupted(file_of, capsys, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", interrupt)
    assert main(["replay", file_of(QUIET)]) == 130
    assert capsys.readouterr() == ("", "")


# --- what is printed


@pytest.mark.parametrize("case", CASES)
def test_json_is_the_outcomes_document(case, file_of, capsys):
    path = file_of(CASES[case])
    main(["replay", path, "--json"])
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == (checked_replay(load(path)).document(), "")
    assert list(json.loads(out)) == ["verdict", "violation", "broken", "rounds", "rejected_at_submit"]


def test_json_of_several_traces_is_the_list_of_their_outcomes(file_of, capsys):
    paths = [file_of(trace, f"{case}.json") for case, trace in CASES.items()]
    assert main(["replay", *paths, paths[0], "--json"]) == 0
    documents = [checked_replay(trace).document() for trace in CASES.values()]
    assert json.loads(capsys.readouterr().out) == [*documents, documents[0]]


def test_several_traces_are_told_in_order_and_one_failure_is_enough(file_of, capsys):
    bad, good = file_of(without_expectation(CASES["incident"]), "bad.json"), file_of(QUIET, "good.json")
    assert main(["replay", good, bad, good]) == 1
    out = capsys.readouterr().out
    headings = [line for line in out.splitlines() if line.startswith("===")]
    assert [Path(line.strip("= ")).name for line in headings] == ["good.json", "bad.json", "good.json"]
    last = out.splitlines()[-1]
    assert last.startswith("3 traces, 1 not as they should be: ")
    assert last.endswith("bad.json")


@pytest.mark.parametrize("name", ["\n\x1b[2J", "\u202egnp.exe", "名前", "\x7f", "x" * 60_000, '"', "a b", "\\n"])
def test_hostile_names(name, file_of, capsys):
    events = (Submit(name, prompt((name, 130))), Submit("b", prompt((name, 9000))), Hold(name, 64), Drain())
    path = file_of(Trace(node_settings(), "aligned", events, title=name))
    assert main(["replay", path, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out)["rounds"][0]["admitted"][0]["request"] == name
    assert main(["replay", path]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert all(line.isprintable() and len(line) <= 100 for line in lines[1:])


def test_all_rounds(file_of, capsys):
    path = file_of(Trace(node_settings(), "aligned", (Round(),) * 30))
    main(["replay", path])
    assert "rounds 6 to 25 left out" in capsys.readouterr().out
    main(["replay", path, "--all-rounds"])
    assert sum(line.startswith("round ") for line in capsys.readouterr().out.splitlines()) == 30


def test_narrow_encoding_is_no_fault(file_of, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    path = file_of(Trace(node_settings(), "aligned", (), title="题"))
    assert main(["replay", path]) == 0
    assert b"\\u9898" in raw.getvalue()


# --- bad input


def document_of(trace: Trace, **changes: Any) -> dict[str, Any]:
    return {**json.loads(dumps(trace)), **changes}


def event_of(**event: Any) -> dict[str, Any]:
    """A trace whose second event is this one."""
    submit = {"event": "submit", "request": "a", "prompt": [["a", 64]]}
    return document_of(QUIET, events=[submit, event, {"event": "drain"}])


NODE = json.loads(dumps(QUIET))["node"]
WHOLE = dumps(QUIET).encode()
MALFORMED: list[tuple[object, str]] = [
    (b"", "the file is empty"),
    (b"\x00\xff\xfe\x80" * 99, "not UTF-8 text"),
    (b"\x7fELF\x02\x01", "not JSON"),
    (WHOLE[: len(WHOLE) // 2], "not JSON"),
    (WHOLE[:-3], "not JSON"),
    (b"[" * 200_000, "nested too deeply"),
    ([], "top level: "),
    ("kvledger-trace/1", "top level: "),
    (document_of(QUIET, format="kvledger-trace/9"), 'format: "kvledger-trace/9"'),
    (document_of(QUIET, evnts=[]), 'top level: "evnts" is not a known key'),
    (document_of(QUIET, rules="alinged"), 'rules: "alinged" is none of upstream, aligned, tail-reserved'),
    (document_of(QUIET, rules={"reserve_tale": True}), 'rules: "reserve_tale"'),
    (document_of(QUIET, expect={"aligned": "crash"}), 'expect.aligned: "crash"'),
    (document_of(QUIET, node={**NODE, "page_size": 0}), "node.page_size: 0 is below"),
    (document_of(QUIET, node={**NODE, "page_size": 96}), "node.page_size: 96 does not divide"),
    (document_of(QUIET, node={**NODE, "pool_tokens": -64}), "node.pool_tokens: -64 is below"),
    (document_of(QUIET, node={**NODE, "pool_tokens": 10**30}), "node.pool_tokens: 1000"),
    (document_of(QUIET, node={**NODE, "chunked_prefill_size": "4096"}), 'node.chunked_prefill_size: "4096"'),
    (document_of(QUIET, node={**NODE, "checkpoint_align": 1.5}), "node.checkpoint_align: 1.5"),
    (document_of(QUIET, events="drain"), 'events: "drain" is not a list'),
    (event_of(event="explode"), 'events[1].event: "explode"'),
    (event_of(event="round", tokens=1), 'events[1]: "tokens"'),
    (event_of(event="submit", request="a", prompt=[["a", 1]]), 'events[1].request: "a" was submitted before'),
    (event_of(event="submit", request="b", prompt=[["a", -1]]), "events[1].prompt[0][1]: -1 is below"),
    (event_of(event="submit", request="b", prompt=[["a", 2**40]]), "events[1].prompt[0][1]: 1099511627776 is above"),
    (event_of(event="submit", request="b", prompt=[["a", 0]]), "events[1].prompt: a prompt of 0 tokens"),
    (event_of(event="submit", request="b", prompt=[]), "events[1].prompt: a list of 0"),
    (event_of(event="submit", request=7, prompt=[["a", 1]]), "events[1].request: 7 is not a string"),
    (event_of(event="submit", request="\ud800", prompt=[["a", 1]]), 'events[1].request: "\\ud800"'),
    (event_of(event="transferred", request="b"), 'events[1].request: "b" is not submitted'),
    (event_of(event="abort", request="\n\x1b[2J"), 'events[1].request: "\\n\\u001b[2J" is not submitted'),
    (event_of(event="cached", tier="disk", prompt=[["a", 1]]), 'events[1].tier: "disk"'),
    (event_of(event="hold", name="h", tokens=True), "events[1].tokens: true is not an integer"),
    (event_of(event="hold", name="h", tokens=-5), "events[1].tokens: -5 is below"),
    (event_of(event="release", name="h"), 'events[1].name: "h" holds nothing here'),
    # valid, and impossible when it happens
    (event_of(event="hold", name="h", tokens=641), "events[1].tokens: out of KV slots: 704 tokens wanted, 640 free"),
    (event_of(event="cached", tier="device", prompt=[["a", 704]]), "events[1].prompt: out of KV slots"),
]


@pytest.mark.parametrize(("content", "message"), MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_bad_file_is_one_line_that_names_it_and_the_place(content, message, options, file_of, capsys, monkeypatch):
    path = file_of(content)
    monkeypatch.chdir(Path(path).parent)
    line = refused(capsys, "replay", "t.json", *options)
    assert line.startswith("t.json: ")
    assert message in line


@pytest.mark.parametrize("content", [b"{", event_of(event="hold", name="h", tokens=9999)], ids=["malformed", "too big"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_one_bad_file_among_several_leaves_no_output(content, options, file_of, capsys):
    good, bad = file_of(QUIET, "good.json"), file_of(content, "bad.json")
    for paths in ([good, bad], [bad, good], [good, bad, bad]):
        assert "bad.json: " in refused(capsys, "replay", *paths, *options)


def test_nothing_runs_before_every_file_is_read(file_of, capsys, monkeypatch):
    monkeypatch.setattr(cli, "replay", lambda *_, **__: pytest.fail("a trace was run"))
    refused(capsys, "replay", file_of(QUIET), file_of(b"{", "bad.json"))


def test_paths_that_are_no_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "replay", "gone.json") == "gone.json: No such file or directory"
    assert refused(capsys, "replay", ".") == ".: Is a directory"
    assert refused(capsys, "replay", "") == ": No such file or directory"
    assert refused(capsys, "replay", "a\n\x1b[2J\udcff") == "a\\n\\u001b[2J\\udcff: No such file or directory"
    assert refused(capsys, "replay", "x" * 5000).endswith("xxx: File name too long")


def test_hostile_path_of_an_event_that_cannot_happen(file_of, capsys):
    path = file_of(event_of(event="hold", name="h", tokens=9999), "a\n\x1b[2J.json")
    assert "/a\\n\\u001b[2J.json: events[1].tokens: " in refused(capsys, "replay", path)


# --- standard input


def read_from(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def test_dash_reads_standard_input(file_of, capsys, monkeypatch):
    read_from(monkeypatch, dumps(CASES["incident"]).encode())
    assert main(["replay", "-", file_of(QUIET), "--json"]) == 0
    assert [outcome["verdict"] for outcome in json.loads(capsys.readouterr().out)] == ["oom", "ok"]


def test_bad_standard_input(capsys, monkeypatch):
    read_from(monkeypatch, b"")
    assert refused(capsys, "replay", "-") == "<stdin>: the file is empty"
    read_from(monkeypatch, json.dumps(event_of(event="hold", name="h", tokens=9999)).encode())
    assert refused(capsys, "replay", "-").startswith("<stdin>: events[1].tokens: ")
    assert "only once" in refused(capsys, "replay", "-", "-")
    monkeypatch.setattr(sys, "stdin", None)
    assert refused(capsys, "replay", "-") == "<stdin>: it is closed"


# --- options


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["replya"], "replya"),
        (["replay"], "TRACE"),
        (["replay", "t.json", "--rules", "fixed"], '"fixed" is none of upstream, aligned, tail-reserved'),
        (["replay", "t.json", "--rules", "\n\x1b[2J" + "x" * 9000], "is none of upstream, aligned, tail-reserved"),
        (["replay", "t.json", "--rules"], "--rules"),
        (["replay", "t.json", "--rule", "aligned"], "--rule"),
        (
            ["replay", "t.json", "--target", "nobody"],
            "'nobody' is neither one of node, sglang, vllm, vllm-align nor package.module:",
        ),
        (["replay", "t.json", "--device", "tpu"], '"tpu" is none of cpu, cuda'),
        (["replay", "t.json", "--fast\n"], "--fast\\n"),
        (["verify", "--rules", "fixed"], '"fixed" is none of upstream, aligned, tail-reserved'),
        (["verify", "--examples", "0"], "0 is not between 1 and"),
        (["verify", "--examples", "-5"], "-5 is not between 1 and"),
        (["verify", "--examples", "1e3"], '"1e3" is not an integer'),
        (["verify", "--examples", "9" * 5000], "is not an integer that can be used"),
        (["verify", "--examples", "9" * 19], "is not between"),
        (["verify", "--examples", "٣"], "is not an integer"),
        (["verify", "--seed", "-1"], "-1 is not between 0 and"),
        (["verify", "--seed", ""], '"" is not an integer'),
    ],
)
def test_bad_options_are_one_line(argv, words, capsys):
    assert words in refused(capsys, *argv)


def test_device_without_an_executor_says_so(file_of, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, cli.EXECUTOR, None)
    line = refused(capsys, "replay", file_of(QUIET), "--device", "cpu")
    assert line.startswith("replay: --device cpu: no executor to run batches on")
    monkeypatch.setitem(sys.modules, cli.EXECUTOR, ModuleType(cli.EXECUTOR))
    assert "no executor" in refused(capsys, "replay", file_of(QUIET), "--device", "cuda")


def test_device_asks_the_executor_for_its_target(file_of, monkeypatch):
    asked = []

    def target(device: str) -> TargetFactory:
        asked.append(device)
        return PrefillNode

    executor: Any = ModuleType(cli.EXECUTOR)
    executor.target = target
    monkeypatch.setitem(sys.modules, cli.EXECUTOR, executor)
    assert main(["replay", file_of(QUIET), "--device", "cpu"]) == 0
    assert asked == ["cpu"]


# --- verify


def stand_in(monkeypatch, command) -> None:
    module: Any = ModuleType("kvledger.testing.verify")
    module.command = command
    monkeypatch.setitem(sys.modules, "kvledger.testing.verify", module)


def test_verify_hands_its_options_on(monkeypatch):
    calls = []

    def command(*arguments: object) -> int:
        calls.append(arguments)
        return 1

    stand_in(monkeypatch, command)
    assert main(["verify"]) == 1
    options = ["--examples", "5", "--seed", "0", "--save", "found", "--json"]
    rules = ["--rules", "aligned", "--rules", "upstream", "--rules", "aligned"]
    assert main(["verify", *rules, *options]) == 1
    assert calls == [([], None, None, None, False), (["aligned", "upstream"], 5, 0, "found", True)]


@pytest.mark.parametrize("library", ["hypothesis", "rich"])
def test_verify_without_its_libraries_says_what_to_install(library):
    code = f"import sys; sys.modules[{library!r}] = None; from kvledger.cli import main; sys.exit(main(['verify']))"
    done = run("-c", code)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"kvledger: verify: {library} is not installed: pip install 'kvledger[verify]'\n"


def test_verify_that_lacks_a_module_of_ours_is_a_fault(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvledger.testing.verify", None)
    assert main(["verify"]) == 70
    assert "kvledger.testing.verify" in capsys.readouterr().err


def test_verify_that_cannot_save(capsys, monkeypatch):
    def command(*_: object) -> int:
        raise FileExistsError(17, "File exists", "a\n")

    stand_in(monkeypatch, command)
    assert refused(capsys, "verify") == "verify: a\\n: File exists"


def test_verify_whose_reader_is_gone(capsys, monkeypatch):
    def command(*_: object) -> int:
        raise BrokenPipeError

    stand_in(monkeypatch, command)
    monkeypatch.setattr(cli, "_discard_stdout", lambda: None)
    assert main(["verify"]) == 141
    assert capsys.readouterr() == ("", "")


# --- as a process


def run(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, *argv], text=True, timeout=60, check=False, **options)


def test_version_and_help():
    for argv in (["--version"], ["--help"], ["replay", "--help"], ["verify", "--help"]):
        done = run("-m", "kvledger", *argv)
        assert (done.returncode, done.stderr) == (0, "")
        assert "kvledger" in done.stdout
    assert run("-m", "kvledger", "--version").stdout == f"kvledger {kvledger.__version__}\n"


def test_statuses_of_a_process(file_of):
    trace = dumps(CASES["incident"])
    assert run("-m", "kvledger", "replay", "-", input=trace).returncode == 0
    violated = run("-m", "kvledger", "replay", file_of(without_expectation(CASES["incident"])))
    assert (violated.returncode, violated.stderr) == (1, "")
    bad = run("-m", "kvledger", "replay", file_of(b"\x00\xff"))
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert "Traceback" not in bad.stderr


def test_reader_who_has_gone_changes_nothing(file_of):
    path = file_of(without_expectation(CASES["incident"]))
    for argv, status in ((["replay", path], 1), (["replay", path, "--json"], 1), (["--help"], 0), (["--version"], 0)):
        reading, writing = os.pipe()
        os.close(reading)
        done = run("-m", "kvledger", *argv, stdout=writing)
        os.close(writing)
        assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_search_whose_reader_has_gone_says_so(form, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = ["verify", "--rules", "upstream", "--examples", "1", "--save", str(tmp_path), *form]
    done = run("-m", "kvledger", *command, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_output_that_cannot_be_written(file_of):
    for argv in (["replay", file_of(QUIET)], ["--help"]):
        with open("/dev/full", "w") as full:
            done = run("-m", "kvledger", *argv, stdout=full)
        assert (done.returncode, done.stderr) == (2, "kvledger: <stdout>: No space left on device\n")


def test_closed_streams(file_of, monkeypatch):
    path, bad = file_of(QUIET), file_of(b"{", "bad.json")
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["replay", path]) == 0
    assert main(["replay", bad]) == 2


def test_importing_it_loads_only_the_standard_library():
    code = "import sys; before = set(sys.modules); import kvledger.cli; print(*set(sys.modules) - before)"
    loaded = run("-c", code).stdout.split()
    assert "kvledger.cli" in loaded
    roots = {name.partition(".")[0] for name in loaded}
    assert roots <= sys.stdlib_module_names | {"kvledger"}
    assert not [name for name in loaded if name.startswith(("kvledger.kernels", "kvledger.testing"))]
