"""Every public report that the model can express comes out as its case says, with its fault and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.trace import TraceError, dumps
from tests.mutants.reports import REPORTS, restated
from tests.regressions import public_case, public_reports
from tests.regressions.public_case import FOLDER, Case, CaseError, all_cases, load_case, with_of, without_of

CASES = all_cases()
TOLD = [pytest.param(case, id=case.name) for case in CASES if case.trace is not None]
SWITCHED = next(case for case in CASES if case.trace is not None and case.mutant is None)


@pytest.mark.parametrize("case", TOLD)
def test_without_its_fault(case: Case) -> None:
    outcome = case.run_without()
    assert without_of(outcome) == case.without_fault, outcome.document()["broken"]
    assert outcome.verdict == "ok"


@pytest.mark.parametrize("case", TOLD)
def test_with_its_fault(case: Case) -> None:
    outcome = case.run_with()
    assert with_of(outcome) == case.with_fault, outcome.document()["broken"]


@pytest.mark.parametrize("case", [each for each in TOLD if each.values[0].mutant is not None])  # type: ignore[union-attr]
def test_it_is_the_mutant_and_not_the_rules(case: Case) -> None:
    """A mutant that restates a report says so, and breaks something that the trace's rules do not break alone."""
    assert case.mutant is not None and case.trace is not None
    assert set(case.report.split(", ")) <= set(restated(case.mutant))
    plain = Case(case.name, case.report, case.what, trace=case.trace).run_with()
    assert with_of(plain) != case.with_fault


def test_every_report_has_a_case() -> None:
    reports = [report for case in CASES for report in case.report.split(", ")]
    assert sorted(reports) == sorted(REPORTS)


def test_the_paper_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert public_reports.main([]) == 0, "python -m tests.regressions.public_reports --write"
    assert public_reports.table(CASES) in public_reports.PAPER.read_text("utf-8")


def test_the_paper_is_not_up_to_date_without_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = tmp_path / "paper.md"
    paper.write_text(public_reports.PAPER.read_text("utf-8").replace("#5081", "#5082"), "utf-8")
    monkeypatch.setattr(public_reports, "PAPER", paper)
    assert public_reports.main([]) == 1
    assert public_reports.main(["--write"]) == 0
    assert public_reports.main([]) == 0


def _document(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return document


def _written(tmp_path: Path, document: dict[str, Any]) -> Path:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document), "utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "kvledger-case/2"}, "x.json: format: "),
        ({"whatever": 1}, "x.json: "),
        ({"with": {"verdict": "oom", "broken": []}}, "x.json: with.broken: "),
        ({"with": {"mutant": "none", "verdict": "oom", "broken": ["order"]}}, "x.json: with.mutant: no mutant"),
        ({"why_not": "it can"}, "x.json: why_not: there is a trace"),
        (
            {"without": {"rules": "aligned", "verdict": "ok"}, "trace": "aligned"},
            "x.json: without.rules: the trace has",
        ),
    ],
)
def test_a_case_that_is_none(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    document = _document(SWITCHED.name)
    if "trace" in change:
        change = {**change, "trace": {**document["trace"], "rules": change["trace"]}}
    with pytest.raises(CaseError) as caught:
        load_case(_written(tmp_path, {**document, **change}))
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("place", "rules", "says"),
    [
        ("trace", "fixed", "x.json: rules: "),
        ("without", "fixed", "x.json: rules: "),
        ("without", {"x": 1}, "x.json: rules"),
    ],
)
def test_a_case_whose_trace_is_none(place: str, rules: Any, says: str, tmp_path: Path) -> None:
    document = _document(SWITCHED.name)
    document[place]["rules"] = rules
    with pytest.raises(TraceError) as caught:
        load_case(_written(tmp_path, document))
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("name", ["36344", "5081"])
def test_a_draft_is_a_case_as_it_comes_out(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = load_case(FOLDER / f"{name}.json")
    assert public_reports.main(["--trace", name]) == 0
    text = capsys.readouterr().out
    assert kept.trace is not None and text == dumps(kept.trace)
    (tmp_path / "trace.json").write_text(text, "utf-8")
    mutant = [] if kept.mutant is None else ["--mutant", kept.mutant.name]
    assert public_reports.main(["--draft", str(tmp_path / "trace.json"), *mutant]) == 0
    drafted = _document(name) | dict.fromkeys(("report", "what", "figures"), public_reports.TO_SAY)
    assert json.loads(capsys.readouterr().out) == drafted


def _drafted(trace: dict[str, Any], *options: str, tmp_path: Path) -> int:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace), "utf-8")
    return public_reports.main(["--draft", str(path), *options])


def test_a_draft_says_what_broke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = _document("16067")["trace"]
    assert _drafted(trace, "--mutant", "slot-leaks-when-refused", tmp_path=tmp_path) == 0
    assert "conserved: state_slots: of 139 slots in use 1 belong to nobody" in capsys.readouterr().err


@pytest.mark.parametrize("rules", ['{"reserve_tail": true, "on_shortage": "defer"}', "tail-reserved"])
def test_a_draft_names_the_rules_without_the_fault(
    rules: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _drafted(_document("vllm-45388")["trace"], "--without", rules, tmp_path=tmp_path) == 0
    without = json.loads(capsys.readouterr().out)["without"]
    assert without == {"rules": json.loads(rules) if rules.startswith("{") else rules, "verdict": "ok"}


@pytest.mark.parametrize(
    ("options", "rules", "code", "says"),
    [
        ([], "tail-reserved", 1, "where is the fault?"),
        (["--mutant", "page-forgotten-in-gate"], "tail-reserved", 1, "with the fault nothing breaks"),
        (["--without", '{"reserve_tail": false}'], {"on_shortage": "defer"}, 1, "without the fault it ends oom"),
        (["--without", "fixed"], "tail-reserved", 2, "--without: rules: "),
        (["--without", "{"], "tail-reserved", 2, "--without: rules: "),
    ],
)
def test_a_draft_that_is_no_case_yet(
    options: list[str], rules: Any, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _document("vllm-45388" if "--without" in options else "36344")["trace"]
    assert _drafted({**trace, "rules": rules}, *options, tmp_path=tmp_path) == code
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_draft_of_no_trace_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert public_reports.main(["--draft", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_a_draft_goes_to_a_new_file_and_never_over_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.json"
    trace = _document("36344")["trace"]
    assert _drafted(trace, "-o", str(kept), tmp_path=tmp_path) == 0
    assert not capsys.readouterr().out
    written = kept.read_text("utf-8")
    assert load_case(kept).report == public_reports.TO_SAY
    assert _drafted(trace, "-o", str(kept), tmp_path=tmp_path) == 2
    assert capsys.readouterr().err.splitlines() == [f"-o {kept}: it is there already, and is not written over"]
    assert kept.read_text("utf-8") == written
    assert _drafted(trace, "-o", str(tmp_path / "none" / "x.json"), tmp_path=tmp_path) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.fixture
def broken_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kept cases, and one whose file is empty, as a shell leaves it that was to write a draft there."""
    folder = tmp_path / "public"
    folder.mkdir()
    for case in FOLDER.glob("*.json"):
        (folder / case.name).write_bytes(case.read_bytes())
    (folder / "36344.json").write_bytes(b"")
    for module in (public_case, public_reports):
        monkeypatch.setattr(module, "FOLDER", folder)
    return folder


@pytest.mark.usefixtures("broken_folder")
def test_a_case_that_is_none_is_in_nobodys_way_who_does_not_ask_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _drafted(_document("5081")["trace"], "--mutant", "chunk-charged-raw-without-page", tmp_path=tmp_path) == 0
    assert public_reports.main(["--trace", "5081"]) == 0
    assert capsys.readouterr().out.count("kvledger-trace/1") == 2


@pytest.mark.parametrize(
    "options", [[], ["--write"], ["--trace", "36344"], ["--trace", "#36344"], ["--trace", "nobody"]]
)
@pytest.mark.parametrize("content", [b"", b"\xff", b"[", b"{}", b'{"format": "kvledger-case/1"}'])
def test_a_case_that_is_none_is_one_line_in_every_mode(
    options: list[str], content: bytes, broken_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (broken_folder / "36344.json").write_bytes(content)
    before = public_reports.PAPER.read_text("utf-8")
    assert public_reports.main(options) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("36344.json: ")
    assert public_reports.PAPER.read_text("utf-8") == before


@pytest.mark.parametrize("case", TOLD)
def test_a_trace_is_found_as_the_table_prints_it(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.trace is not None
    for name in (case.name, *case.report.split(", ")):
        assert public_reports.main(["--trace", name]) == 0
        assert capsys.readouterr().out == dumps(case.trace)


def test_a_trace_that_is_not_there_has_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert public_reports.main(["--trace", "vllm#45389"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("--trace: no case is called 'vllm#45389'; like it: vllm#45388") and line.count("\n") == 1


def test_a_draft_says_on_which_rank_it_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = FOLDER.parent / "ranks-smaller-rank-not-asked.json"
    assert public_reports.main(["--draft", str(kept), "-o", str(tmp_path / "x.json")]) == 0, capsys.readouterr().err
    case = load_case(tmp_path / "x.json")
    assert case.with_fault is not None and case.with_fault["rank"] == 1
    assert with_of(case.run_with()) == case.with_fault


def test_a_draft_of_no_mutant_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        public_reports.main(["--draft", "-", "--mutant", "insert-skiped"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2
    assert "no mutant is called 'insert-skiped'; like it: insert-skipped" in last and len(last) < 300


def test_a_report_that_is_not_expressed_says_why(tmp_path: Path) -> None:
    told = {key: _document("36344")[key] for key in ("format", "report", "what")}
    case = load_case(_written(tmp_path, {**told, "why_not": "a node has no clock"}))
    assert case.trace is None
    assert "not expressed: a node has no clock" in public_reports.table([case])
    assert "1 reports, 0 expressed" in public_reports.table([case])
