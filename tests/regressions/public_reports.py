"""The table of the public reports, and a first draft of a new case.

python -m tests.regressions.public_reports                    # is docs/public-reports.md up to date?
python -m tests.regressions.public_reports --write            # make it so
python -m tests.regressions.public_reports --trace N          # a case's trace, for `kvledger replay -`
python -m tests.regressions.public_reports --draft TRACE -o CASE [--mutant NAME] [--without RULES]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvledger.rules import AccountingRules
from kvledger.saving import write_whole
from kvledger.trace import Trace, TraceError, dumps, load, parse
from tests.mutants.registry import MUTANTS
from tests.regressions.public_case import FOLDER, ROOT, Case, CaseError, all_cases, draft, load_case

PAPER = ROOT / "docs" / "public-reports.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
TO_SAY = "TO SAY"


def table(cases: Sequence[Case]) -> str:
    """Markdown: a row a report, in the order of their names, then what became of them in sum."""
    rows = [
        "| report | what happened | the fault | without it | with it | first to break |",
        "|---|---|---|---|---|---|",
    ]
    rows += [_row(case) for case in sorted(cases, key=_order)]
    told = [case for case in cases if case.trace is not None]
    return "\n".join([*rows, "", f"{len(cases)} reports, {len(told)} expressed and reproduced.", ""])


def _order(case: Case) -> tuple[bool, int, str]:
    """SGLang's by their number, then the others by name."""
    number = case.report.removeprefix("#").partition(",")[0]
    return not number.isdigit(), int(number) if number.isdigit() else 0, case.report


def _row(case: Case) -> str:
    if case.trace is None or case.with_fault is None or case.without_fault is None:
        return f"| {case.report} | {case.what} | not expressed: {case.why_not} | | | |"
    link = f"[{case.report}](../tests/regressions/public/{case.name}.json)"
    rejected = ", refused at the entry" if case.without_fault.get("rejected") else ""
    first, *others = case.with_fault["broken"]
    behind = f", then {', '.join(f'`{name}`' for name in others)}" if others else ""
    ends = case.with_fault["verdict"] if case.with_fault["verdict"] in ("oom", "stuck") else "goes on"
    return (
        f"| {link} | {case.what} | {_fault(case)} | {case.without_fault['verdict']}{rejected} | {ends} "
        f"| `{first}`{behind} |"
    )


def _fault(case: Case) -> str:
    """What the trace's rules have that the sound ones have not, and the mutant."""
    assert case.trace is not None, "a case without a trace has no fault"
    rules, sound = case.trace.accounting_rules, case.trace.with_rules(case.sound).accounting_rules
    apart = [key.name for key in fields(AccountingRules) if getattr(rules, key.name) != getattr(sound, key.name)]
    faults = [f"rules `{name}: {json.dumps(getattr(rules, name))}`" for name in apart]
    return ", ".join([*faults, *([f"mutant `{case.mutant.name}`"] if case.mutant is not None else [])])


def paper_with(table_text: str) -> str:
    """The paper with this table in its place."""
    head, _, rest = PAPER.read_text("utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table_text + END + tail


def case_text(document: dict[str, Any]) -> str:
    """The text of a case: a key a line, its trace as traces are written."""
    parts = []
    for key, value in document.items():
        text = json.dumps(value)
        if key == "trace":
            text = dumps(parse(value, "draft")).rstrip("\n").replace("\n", "\n  ")
        parts.append(f'  "{key}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _trace_of(name: str) -> Trace:
    """The trace of a case, by its file's name or by a report's as the table prints it. CaseError if there is none."""
    path = FOLDER / f"{name}.json"
    found = [load_case(path)] if path in FOLDER.glob("*.json") else []
    cases = found or all_cases()
    wanted = name.lstrip("#")
    found = found or [case for case in cases if wanted in [each.lstrip("#") for each in case.report.split(", ")]]
    if not found:
        known = {each: None for case in cases for each in (case.name, *case.report.split(", "))}
        raise CaseError(f"--trace: no case is called {name!r}{_like(name, known)}; docs/public-reports.md lists them")
    if found[0].trace is None:
        raise CaseError(f"--trace: {name!r} has no trace: {found[0].why_not}")
    return found[0].trace


def _draft(path: str, output: Path | None, mutant: str | None, without: str | None) -> int:
    """The case, in `output` or on standard output; what broke, and what it lacks, on standard error. 1: it is no case
    yet. A file that is there is never written over: what an author has said in a case is nowhere else."""
    if output is not None and output.exists():
        raise CaseError(f"-o {output}: it is there already, and is not written over")
    drafted = draft(load(path), TO_SAY, mutant, _rules_of(without))
    text = case_text(drafted.document)
    if output is None:
        print(text, end="")
    else:
        try:
            write_whole(output, [text])
        except OSError as error:
            raise CaseError(f"-o {output}: {error.strerror}") from None
    for line in [*drafted.findings, *([drafted.lacks] if drafted.lacks else [])]:
        print(line, file=sys.stderr)
    return 1 if drafted.lacks else 0


def _like(name: str, known: Iterable[str]) -> str:
    """Names that are like it, in words; nothing if there is none."""
    like = get_close_matches(name, list(known))
    return f"; like it: {', '.join(like)}" if like else ""


def _mutant(name: str) -> str:
    """A mutant's name, or the ones that are like it in an error of one line."""
    if name not in MUTANTS:
        raise argparse.ArgumentTypeError(
            f"no mutant is called {name!r}{_like(name, MUTANTS)}; grep tests/mutants for report= and more"
        )
    return name


def _rules_of(text: str | None) -> Any:
    """A preset's name, or switches as JSON."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the paper is up to date, or has been written; 1: it is not; 2: bad input."""
    parser = argparse.ArgumentParser(description="The table of the public reports, and a first draft of a new case.")
    parser.add_argument("--write", action="store_true", help="bring docs/public-reports.md up to date")
    parser.add_argument("--trace", metavar="NAME", help="print the trace of this case, by its file's name or report")
    parser.add_argument("--draft", metavar="TRACE", help="make a case of this trace, as it comes out today")
    parser.add_argument("-o", type=Path, metavar="CASE", dest="output", help="a new file for it (default: print it)")
    parser.add_argument("--mutant", type=_mutant, metavar="NAME", help="the fault, where it is no switch")
    parser.add_argument("--without", metavar="RULES", help="the rules without it, if not tail-reserved: name or JSON")
    options = parser.parse_args(arguments)
    if options.output is not None and options.draft is None:
        parser.error("-o: only a draft is written to a file")
    try:
        if options.draft is not None:
            return _draft(options.draft, options.output, options.mutant, options.without)
        if options.trace is not None:
            print(dumps(_trace_of(options.trace)), end="")
            return 0
        text = paper_with(table(all_cases()))
    except (CaseError, TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.write:
        PAPER.write_text(text, "utf-8")
    return 0 if text == PAPER.read_text("utf-8") else 1


if __name__ == "__main__":
    sys.exit(main())
