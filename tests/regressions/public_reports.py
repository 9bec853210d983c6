"""The table of the public reports, and a first draft of a new case.

python -m tests.regressions.public_reports                    # is docs/public-reports.md up to date?
python -m tests.regressions.public_reports --write            # make it so
python -m tests.regressions.public_reports --trace N          # a case's trace, for `kvledger replay -`
python -m tests.regressions.public_reports --draft TRACE [--mutant NAME] [--without RULES]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from kvledger.rules import AccountingRules
from kvledger.trace import TraceError, dumps, load, parse
from tests.mutants.registry import MUTANTS
from tests.regressions.public_case import FOLDER, ROOT, Case, all_cases, draft, load_case

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


def _told() -> list[str]:
    return [case.name for case in all_cases() if case.trace is not None]


def _print_draft(path: str, mutant: str | None, without: str | None) -> int:
    """The case on standard output; what broke, and what it lacks, on standard error. 1: it is no case yet."""
    try:
        drafted = draft(load(path), TO_SAY, mutant, _rules_of(without))
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    print(case_text(drafted.document), end="")
    for line in [*drafted.findings, *([drafted.lacks] if drafted.lacks else [])]:
        print(line, file=sys.stderr)
    return 1 if drafted.lacks else 0


def _mutant(name: str) -> str:
    """A mutant's name, or the ones that are like it in an error of one line."""
    if name not in MUTANTS:
        like = get_close_matches(name, MUTANTS)
        near = f"; like it: {', '.join(like)}" if like else ""
        raise argparse.ArgumentTypeError(f"no mutant is called {name!r}{near}; grep tests/mutants for report= and more")
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
    parser.add_argument("--trace", choices=_told(), metavar="NAME", help="print the trace of this case")
    parser.add_argument("--draft", metavar="TRACE", help="print a case of this trace, as it comes out today")
    parser.add_argument("--mutant", type=_mutant, metavar="NAME", help="the fault, where it is no switch")
    parser.add_argument("--without", metavar="RULES", help="the rules without it, if not tail-reserved: name or JSON")
    options = parser.parse_args(arguments)
    if options.draft is not None:
        return _print_draft(options.draft, options.mutant, options.without)
    if options.trace is not None:
        trace = load_case(FOLDER / f"{options.trace}.json").trace
        assert trace is not None, "only cases with a trace are offered"
        print(dumps(trace), end="")
        return 0
    text = paper_with(table(all_cases()))
    if options.write:
        PAPER.write_text(text, "utf-8")
    return 0 if text == PAPER.read_text("utf-8") else 1


if __name__ == "__main__":
    sys.exit(main())
