"""`kvledger explain`: its options, and its output as JSON or for a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection
from typing import Any, TextIO

from kvledger.diagnose import diagnosis_of
from kvledger.monitor import checked_replay
from kvledger.report import Replayed
from kvledger.report.explained import explanation_lines, round_notes
from kvledger.report.painted import Line, bars_for, painted, unstyled
from kvledger.report.recording import record
from kvledger.report.side_by_side import side_by_side_lines
from kvledger.report.text import heading_lines
from kvledger.report.waterfall_text import waterfall_lines
from kvledger.rules import PRESETS, AccountingRules
from kvledger.schema import escaped
from kvledger.targets import TARGETS
from kvledger.trace import Trace


def add_explain(
    commands: Any,
    *,
    read: Callable[[str], Trace],
    write: Callable[[str], None],
    one_of: Callable[[Collection[str]], Callable[[str], str]],
) -> None:
    """Add the command. `read` gives the trace of a path, `write` prints, `one_of` makes a type of some names."""
    parser = commands.add_parser(
        "explain",
        allow_abbrev=False,
        help="say which promise broke, who spent it, and what avoids it",
        description="Say which promise broke, who spent it, since when it was too late, and which change avoids it.",
        epilog="Exit status: 0 it was explained, whatever the verdict; 2 bad input.",
    )
    presets = ", ".join(PRESETS)
    parser.add_argument("trace", metavar="TRACE", help="a kvledger-trace/1 file; - is standard input")
    parser.add_argument(
        "--rules",
        type=one_of(PRESETS),
        metavar="NAME",
        help=f"run under this preset instead of the trace's own rules: {presets}",
    )
    parser.add_argument(
        "--target",
        type=one_of(TARGETS),
        default="node",
        metavar="NAME",
        help=f"the scheduler under test: {', '.join(TARGETS)} (default: node)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--against",
        type=one_of(PRESETS),
        metavar="RULES",
        help="show the run beside one under this preset, and mark the first decision that differs",
    )
    output.add_argument("--json", action="store_true", help="print the explanation as a JSON object")
    parser.add_argument("--all-rounds", action="store_true", help="leave no round out of the pictures")

    def run(options: argparse.Namespace) -> int:
        write(explain(options, read(options.trace), sys.stdout))
        return 0

    parser.set_defaults(run=run)


def explain(options: argparse.Namespace, trace: Trace, stream: TextIO | None) -> str:
    """What the command prints on `stream`. TraceError if an event cannot happen."""
    source = "<stdin>" if options.trace == "-" else options.trace
    in_errors = escaped(source, 100, keep_end=True)
    rules = PRESETS[options.rules] if options.rules is not None else trace.accounting_rules
    target = TARGETS[options.target]
    recording = record(trace, rules, target=target, source=source, source_in_errors=in_errors)
    # before the diagnosis, which takes longer: the other rules may not be able to run this trace at all
    other = _other_run(recording.replayed, options, in_errors)
    diagnosis = diagnosis_of(recording.history)
    if options.json:
        return json.dumps(diagnosis.document(), indent=2) + "\n"
    bars = bars_for(stream)
    lines: list[Line] = unstyled(heading_lines(recording.replayed))
    lines.append([])
    if other is not None:
        lines += side_by_side_lines(recording.replayed, other, bars, all_rounds=options.all_rounds)
    else:
        lines += waterfall_lines(recording, bars, round_notes(diagnosis), all_rounds=options.all_rounds)
    lines.append([])
    lines += unstyled(explanation_lines(diagnosis), "" if diagnosis.verdict == "ok" else "bold")
    return painted(lines, stream)


def _other_run(replayed: Replayed, options: argparse.Namespace, in_errors: str) -> Replayed | None:
    if options.against is None:
        return None
    rules: AccountingRules = PRESETS[options.against]
    outcome = checked_replay(replayed.trace, rules, target=TARGETS[options.target], source=in_errors)
    return Replayed(replayed.source, replayed.trace, rules, outcome)
