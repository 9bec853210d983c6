"""A public report as a case (`kvledger-case/1`, docs/case.schema.json): read, and run with its fault and without."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode
from kvledger.replay import Outcome
from kvledger.rules import AccountingRules
from kvledger.schema import Schema, show_path
from kvledger.trace import Trace, parse, to_document
from tests.mutants.mutant import Mutant
from tests.mutants.registry import MUTANTS

FORMAT = "kvledger-case/1"
ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "public"
SOUND = "tail-reserved"


class CaseError(ValueError):
    """A document is no valid case; one line: file, place, what is wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """One report. `trace` is None where the model cannot express it, and `why_not` says why.

    `trace` has the rules of the run with the fault, `sound` those of the run without. `with_fault` and `without_fault`
    say what must come out, in the keys of `outcome_of`.
    """

    name: str
    report: str
    what: str
    figures: str = ""
    trace: Trace | None = None
    sound: str | AccountingRules = SOUND
    mutant: Mutant | None = None
    without_fault: dict[str, Any] | None = None
    with_fault: dict[str, Any] | None = None
    why_not: str = ""

    def run_without(self) -> Outcome:
        """Our own node, under the sound rules."""
        assert self.trace is not None, f"{self.name} has no trace"
        return checked_replay(self.trace.with_rules(self.sound))

    def run_with(self) -> Outcome:
        """The trace as it is, on the mutant if there is one."""
        assert self.trace is not None, f"{self.name} has no trace"
        return checked_replay(self.trace, target=PrefillNode if self.mutant is None else self.mutant.build)


def load_case(path: Path) -> Case:
    """The case in a file. Raises CaseError, and TraceError for its trace."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CaseError(f"{path.name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CaseError(f"{path.name}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{path.name}: not JSON: {error}") from None
    problem = _schema().first_problem(document)
    if problem is not None:
        raise CaseError(f"{path.name}: {show_path(problem.path)}: {problem.message}")
    told = {key: document[key] for key in ("report", "what", "figures", "why_not") if key in document}
    if "why_not" in document:
        if "trace" in document:
            raise CaseError(f"{path.name}: why_not: there is a trace")
        return Case(path.stem, **told)
    trace = parse(document["trace"], path.name)
    without, with_fault = dict(document["without"]), dict(document["with"])
    sound = parse({**document["trace"], "rules": without.pop("rules", SOUND)}, path.name).rules
    name = with_fault.pop("mutant", None)
    if name is not None and name not in MUTANTS:
        raise CaseError(f"{path.name}: with.mutant: no mutant is called {name!r}")
    if name is None and trace.with_rules(sound).accounting_rules == trace.accounting_rules:
        raise CaseError(
            f"{path.name}: without.rules: the trace has the same, and no mutant is named: where is the fault?"
        )
    mutant = None if name is None else MUTANTS[name]
    return Case(
        path.stem, **told, trace=trace, sound=sound, mutant=mutant, without_fault=without, with_fault=with_fault
    )


def all_cases() -> list[Case]:
    """Every case that is kept, by file name."""
    return [load_case(path) for path in sorted(FOLDER.glob("*.json"))]


def without_of(outcome: Outcome) -> dict[str, Any]:
    """What a case says of the run without the fault."""
    rejected = [rid for rid, _ in outcome.rejected_at_submit]
    return {"verdict": outcome.verdict, **({"rejected": rejected} if rejected else {})}


def with_of(outcome: Outcome) -> dict[str, Any]:
    """What a case says of the run with it."""
    said: dict[str, Any] = {"verdict": outcome.verdict, "broken": [each.invariant for each in outcome.broken]}
    failure = outcome.failure
    if failure is None:
        return said
    place: dict[str, Any] = {} if failure.pool is None else {"pool": failure.pool}
    if failure.rank:
        place["rank"] = failure.rank
    return {**said, **place, "wanted": failure.wanted, "free": failure.free, "evictable": failure.evictable}


@dataclass(frozen=True, slots=True)
class Draft:
    """The document of a case with today's outcomes filled in, for its author to judge.

    `findings`: what broke with the fault, a line each; `lacks`: what it is no case for, if anything.
    """

    document: dict[str, Any]
    findings: list[str]
    lacks: str


def draft(trace: Trace, to_say: str, mutant: str | None, sound: str | dict[str, Any] | None) -> Draft:
    """A first draft, with `to_say` where its author has to. `sound`: the rules without the fault, if they are none of
    tail-reserved. Raises TraceError for them."""
    written = to_document(trace)
    rules = SOUND if sound is None else parse({**written, "rules": sound}, "--without").rules
    case = Case("draft", to_say, to_say, to_say, trace, rules, MUTANTS[mutant] if mutant else None)
    without, with_fault = case.run_without(), case.run_with()
    document = {
        "format": FORMAT,
        "report": to_say,
        "what": to_say,
        "figures": to_say,
        "trace": written,
        "without": ({} if sound is None else {"rules": sound}) | without_of(without),
        "with": ({"mutant": mutant} if mutant else {}) | with_of(with_fault),
    }
    lacks = ""
    if mutant is None and trace.with_rules(rules).accounting_rules == trace.accounting_rules:
        lacks = "where is the fault? The trace's rules are those of the run without it, and no --mutant is named"
    elif without.verdict != "ok":
        lacks = f"without the fault it ends {without.verdict}: the trace asks too much, or --without names other rules"
    elif not with_fault.broken:
        lacks = "with the fault nothing breaks: the trace, or the mutant, is not yet what the report saw"
    findings = [f"round {each.round}  {each.invariant}: {each.message}" for each in with_fault.broken]
    return Draft(document, findings, lacks)


@cache
def _schema() -> Schema:
    return Schema(json.loads((ROOT / "docs" / "case.schema.json").read_text("utf-8")))
