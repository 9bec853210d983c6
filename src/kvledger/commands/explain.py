"""`kvledger explain`: its options, and its output as JSON or for a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, TextIO

from kvledger.commands import Shell, add_trace_options, chosen_rules, shown_path
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
from kvledger.trace import Trace


def add_explain(commands: Any, shell: Shell) -> None:
    """Add `kvledger explain`."""
    parser = commands.add_parser(
        "explain",
        allow_abbrev=False,
        help="say which promise broke, who spent it, and what avoids it",
        description="Say which promise broke, who spent it, since when it was too late, and which change avoids it.",
        epilog="Exit status: 0 it was explained, whatever the verdict; 2 bad input.",
    )
    add_trace_options(parser, shell)
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--against",
        type=shell.one_of(PRESETS),
        metavar="RULES",
        help="show the run beside one under this preset, and mark the first decision that differs",
    )
    output.add_argument("--json", action="store_true", help="print the explanation as a JSON object")
    parser.add_argument("--all-rounds", action="store_true", help="leave no round out of the pictures")

    def run(options: argparse.Namespace) -> int:
        shell.write(explain(options, shell.read(options.traces[0]), sys.stdout))
        return 0

    parser.set_defaults(run=run)


def explain(options: argparse.Namespace, trace: Trace, stream: TextIO | None) -> str:
    """What the command prints on `stream`. TraceError if an event cannot happen."""
    path = options.traces[0]
    source = "<stdin>" if path == "-" else path
    in_errors = shown_path(path)
    rules = chosen_rules(options) or trace.accounting_rules
    recording = record(trace, rules, target=options.target, source=source, source_in_errors=in_errors)
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
    outcome = checked_replay(replayed.trace, rules, target=options.target, source=in_errors)
    return Replayed(replayed.source, replayed.trace, rules, outcome, shows_figures=replayed.shows_figures)
